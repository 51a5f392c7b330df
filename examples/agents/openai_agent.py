"""An agent program that uses OpenAI's package and knows nothing about slime_like.

    python train.py ... --agent-command "python $PWD/examples/agents/openai_agent.py" \
        --prompt-data "reasoning_gym:chain_sum?size=1000" --rm-type zero \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096

`OpenAI()` finds the gateway and the key in its environment; the task is in task.json, and the
reward goes into the file `reward`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arithmetic import INSTRUCTIONS, SCHEMA, add, is_right, result_of_add
from openai import OpenAI

TURNS = 5
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": add.__doc__, "parameters": SCHEMA},
}


def answer(client: OpenAI, question: str) -> str:
    """The model's final answer; empty if it only called the tool."""
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question},
    ]
    for _ in range(TURNS):
        done = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = done.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = result_of_add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    task = json.loads(Path("task.json").read_text())
    right = is_right(answer(OpenAI(), task["prompt"]), task["label"])
    Path("reward").write_text(str(float(right)))

"""An agent program that uses Anthropic's package; see `openai_agent.py`.

    python train.py ... --agent-command "python $PWD/examples/agents/anthropic_agent.py" \
        --prompt-data "reasoning_gym:chain_sum?size=1000" --rm-type zero \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from arithmetic import INSTRUCTIONS, SCHEMA, add, is_right, result_of_add

TURNS = 5
TOOL: Any = {"name": "add", "description": add.__doc__, "input_schema": SCHEMA}


def answer(client: Anthropic, question: str) -> str:
    """The model's final answer; empty if it only called the tool."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        message = client.messages.create(
            model="policy", max_tokens=500, system=INSTRUCTIONS, messages=messages, tools=[TOOL]
        )
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result_of_add(block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return ""


if __name__ == "__main__":
    task = json.loads(Path("task.json").read_text())
    right = is_right(answer(Anthropic(), task["prompt"]), task["label"])
    Path("reward").write_text(str(float(right)))

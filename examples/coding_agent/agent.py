"""A coding agent: the model works on the files of a task with a shell, in a sandbox.

    python train.py ... --agent-function-path examples/coding_agent/agent.py:play --rm-type zero \
        --prompt-data tasks.jsonl --use-dynamic-batch-size --max-tokens-per-gpu 16384

A row has, in its metadata, the files and the checks at the end:

    {"prompt": "half.py prints a third of its argument; make it print the half.",
     "metadata": {"files": {"half.py": "import sys\\nprint(int(sys.argv[1]) / 3)\\n"},
                  "checks": [{"command": "python half.py 8", "stdout": "4.0"}]}}

The reward is the fraction of checks that pass. Their expected output never enters the sandbox, so
no program can read it. Commands can use the system's programs and the Python standard library, but
no other files and no network (`slime_like/rewards/shell.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from slime_like.agents.messages import ContextExceeded
from slime_like.agents.sessions import TooManyRequests
from slime_like.agents.task import Task
from slime_like.rewards.shell import ShellLimits, ShellOutcome, Workspace

TURNS = 30
LIMITS = ShellLimits(wall_s=60)
SYSTEM = (
    "Solve the task with the tools. The files are in the working folder. Answer without a tool "
    "when you are done."
)


def tool(name: str, words: str, *arguments: str) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": words, "parameters": schema},
    }


TOOLS = [
    tool("shell", "Run a command of sh; what it starts ends with it.", "command"),
    tool("write_file", "Write a file, in place of what it holds.", "path", "text"),
]


async def play(task: Task) -> float:
    work = Workspace(LIMITS)
    await asyncio.to_thread(work.run, "true", task.metadata["files"])
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.prompt},
    ]
    for _ in range(TURNS):
        try:
            answer = await task.chat(messages, tools=TOOLS)
        except (ContextExceeded, TooManyRequests):
            break  # no room for more: what is there counts
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = await asyncio.to_thread(use, work, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    passed = [await asyncio.to_thread(passes, work, check) for check in task.metadata["checks"]]
    return sum(passed) / len(passed)


def use(work: Workspace, function: Mapping[str, Any]) -> str:
    """Run a tool call; returns its result as text for the model."""
    try:
        arguments = json.loads(function["arguments"])
        if function["name"] == "shell":
            return shown(work.run(str(arguments["command"])))
        if function["name"] == "write_file":
            work.write(str(arguments["path"]), str(arguments["text"]))
            return "written"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"error: {type(error).__name__}: {error}"
    return f"error: there is no tool {function['name']!r}"


def shown(outcome: ShellOutcome) -> str:
    if outcome.status == "files":
        return f"error: more than {LIMITS.files_mb} MB, or nested too deeply; files are as before"
    end = f"[exit status {outcome.exit_status}]" if outcome.exit_status else ""
    return outcome.output + end


def passes(work: Workspace, check: Mapping[str, str]) -> bool:
    outcome = work.run(check["command"])
    right = outcome.output.strip() == check["stdout"].strip()
    return outcome.status == "ok" and outcome.exit_status == 0 and right

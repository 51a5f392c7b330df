"""A remote agent worker that runs tasks of Harbor: instruction, environment and tests in a folder.

Harbor has dependencies that conflict with slime_like's, so this program runs in a separate Python
environment with `pip install harbor`; it does not need slime_like:

    python harbor_worker.py rows tasks/* > rows.jsonl
    python harbor_worker.py work --gateway http://127.0.0.1:5000 --key-file keys

    python train.py ... --prompt-data rows.jsonl --input-key prompt --label-key label \
        --metadata-key metadata --rm-type zero --agent-worker-keys keys --agent-port 5000 \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096

Harbor makes the environment, and its verifier gives the reward. The policy has a shell in it
(`ShellAgent`). An environment is one of Harbor's (docker, daytona, ...) or a class,
`module:Class`; `harbor_namespaces:NamespaceEnvironment` needs no containers.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from verifiers_worker import MODEL, ROW, Lost, work_all

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command of bash; returns its output and exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
COMMAND_S = 120
SHOWN = 10_000  # characters of a command's output
CUT = "context_length_exceeded"


class ShellAgent(BaseAgent):
    """Lets the policy run commands in the environment until it answers without a call, or is at the
    limit of its turns or tokens. Commands begin in the environment's working directory."""

    def __init__(self, *args: Any, url: str, key: str, **kwargs: Any) -> None:
        """url, key: of the episode, at the run's gateway."""
        super().__init__(*args, **kwargs)
        self._url = url
        self._key = key

    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
        headers = {"authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as policy:
            while True:
                body = {"model": MODEL, "messages": messages, "tools": [SHELL]}
                answer = await policy.post(f"{self._url}/v1/chat/completions", json=body)
                is_cut = answer.status_code == 400 and CUT in answer.text
                if len(messages) > 1 and (is_cut or answer.status_code == 429):
                    return
                answer.raise_for_status()
                choice = answer.json()["choices"][0]
                messages.append(choice["message"])
                calls = choice["message"].get("tool_calls") or []
                if not calls or choice["finish_reason"] == "length":
                    return
                for call in calls:
                    said = await self._output(environment, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})

    async def _output(self, environment: BaseEnvironment, call: Mapping[str, Any]) -> str:
        """What the shell says; the policy is told of its mistakes."""
        try:
            command = json.loads(call["arguments"])["command"]
        except (ValueError, TypeError, KeyError):
            return "the tool is shell, with the argument command"
        if call["name"] != "shell" or not isinstance(command, str):
            return "the tool is shell, with the argument command"
        try:
            done = await environment.exec(command, timeout_sec=COMMAND_S)
        except (TimeoutError, RuntimeError) as error:  # Docker's environment raises the latter
            if isinstance(error, RuntimeError) and "timed out" not in str(error):
                raise
            return f"stopped after {COMMAND_S} s"
        said = f"{done.stdout or ''}{done.stderr or ''}"
        if len(said) > SHOWN:
            said = f"{said[: SHOWN // 2]}\n...\n{said[-SHOWN // 2 :]}"
        return f"{said}\n(exit code {done.return_code})"


class Tasks:
    """Harbor's tasks, as an environment of a worker."""

    def __init__(self, environment: str, settings: Mapping[str, Any]) -> None:
        place = "import_path" if ":" in environment else "type"
        self._environment = EnvironmentConfig.model_validate(
            {place: environment, "kwargs": settings}
        )

    async def play(self, row: Mapping[str, Any], url: str, key: str) -> float:
        """The verifier's reward. Raises Lost if there is none, with what went wrong."""
        kwargs = {"url": url, "key": key}
        with tempfile.TemporaryDirectory(prefix="harbor_") as folder:
            config = TrialConfig(
                task=TaskConfig(path=Path(row["task"])),
                trials_dir=Path(folder),
                agent=AgentConfig(import_path="harbor_worker:ShellAgent", kwargs=kwargs),
                environment=self._environment,
            )
            result = await (await Trial.create(config)).run()
        rewards = None if result.verifier_result is None else result.verifier_result.rewards
        if not rewards:
            problem = result.exception_info
            raise Lost(
                "the verifier gave no reward"
                if problem is None
                else f"{problem.exception_type}: {problem.exception_message}"
            )
        # as Harbor's leaderboards do: the one of that name, or the only one
        if "reward" not in rewards and len(rewards) > 1:
            raise Lost(f"the verifier gave several rewards, none of them 'reward': {rewards}")
        return float(rewards.get("reward", next(iter(rewards.values()))))


def task_rows(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """Lines of --prompt-data. Raises ValueError for a folder that is no task."""
    for folder in folders:
        try:
            task = Task(folder.resolve())
        except Exception as error:  # of pydantic, of TOML, of files
            raise ValueError(f"{folder}: no task of Harbor: {error}") from None
        metadata = {ROW: {"task": str(folder.resolve())}}
        yield {"prompt": task.instruction.strip() or "-", "label": "", "metadata": metadata}


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print rows of tasks, for --prompt-data")
    rows.add_argument("tasks", type=Path, nargs="+", help="folders with a task.toml")
    worker = commands.add_parser("work", help="play the tasks of a run, until it is stopped")
    worker.add_argument("--gateway", nargs="+", required=True, help="of each rank of the run")
    worker.add_argument("--key-file", type=Path, required=True, help="the first word is the key")
    worker.add_argument("--episodes", type=int, default=8, help="at a time, for each gateway")
    worker.add_argument("--environment", default="docker", help="a type of Harbor's, or a class")
    worker.add_argument("--settings", type=json.loads, default={}, help="of the environment: JSON")
    arguments = parser.parse_args()
    if arguments.command == "rows":
        for row in task_rows(arguments.tasks):
            print(json.dumps(row))
    else:
        tasks = Tasks(arguments.environment, arguments.settings)
        asyncio.run(work_all(tasks, arguments))


if __name__ == "__main__":
    main()

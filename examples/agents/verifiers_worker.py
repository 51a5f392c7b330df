"""A remote agent worker that runs environments of the verifiers package.

verifiers (classic environments up to 0.3, tasksets from 0.4 on) has dependencies that conflict with
slime_like's, so this program runs in a separate Python environment with `pip install verifiers` and
the environment's package; it does not need slime_like:

    python verifiers_worker.py rows ENVIRONMENT > rows.jsonl
    python verifiers_worker.py work ENVIRONMENT --gateway http://127.0.0.1:5000 --key-file keys

    python train.py ... --prompt-data rows.jsonl --input-key prompt --label-key label \
        --metadata-key metadata --rm-type zero --agent-worker-keys keys --agent-port 5000 \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096

The environment calls the model through OpenAI's API at the run's gateway; the reward is the
weighted sum of its rubric. ``--settings`` is a JSON object: the arguments of `load_environment`, or
the fields of a taskset's environment, as in ``{"agent": {"runtime": {"type": "subprocess"}}}``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

ROW = "verifiers_row"  # of a row's metadata: which one it is in the environment
MODEL = "policy"
EMPTY = "EmptyModelResponseError"  # the model wrote nothing, for which it has its reward
RETRY_S, WAIT_S = 0.5, 20.0


class Lost(Exception):
    """An episode without a reward; the run drops its sample."""


class Playable(Protocol):
    async def play(self, row: Mapping[str, Any], url: str, key: str) -> float:
        """The reward of one episode. url: of the gateway. Raises Lost."""
        ...


class Environment(Playable, Protocol):
    def rows(self, *, evaluation: bool) -> Iterator[dict[str, Any]]:
        """prompt, label, metadata, as --prompt-data has them."""
        ...


def load(name: str, settings: Mapping[str, Any]) -> Environment:
    """Of the installed release's kind. Raises ValueError for what one sample alone cannot be
    given."""
    classic = hasattr(importlib.import_module("verifiers"), "load_environment")
    return Classic(name, settings) if classic else Taskset(name, settings)


class Classic:
    """An `Environment` of verifiers up to 0.3: a dataset, a rubric and a rollout of any turns."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import verifiers as vf
        from openai import AsyncOpenAI

        self._openai = AsyncOpenAI(base_url="http://the.gateway", api_key="of the episode")
        self._environment = vf.load_environment(name, **settings)
        rubric = self._environment.rubric
        if getattr(rubric, "has_group_rewards", False) or getattr(rubric, "has_advantages", False):
            raise ValueError(f"{name} rewards whole groups; a worker sees one episode at a time")

    def rows(self, *, evaluation: bool) -> Iterator[dict[str, Any]]:
        for place, row in enumerate(self._dataset(evaluation)):
            found = {"split": "eval" if evaluation else "train", "place": place}
            yield _row(row.get("prompt"), str(row.get("answer") or ""), found)

    async def play(self, row: Mapping[str, Any], url: str, key: str) -> float:
        from verifiers.clients import OpenAIChatCompletionsClient

        inputs = self._dataset(row["split"] == "eval")[row["place"]]
        openai = self._openai.with_options(base_url=f"{url}/v1", api_key=key)  # its connections
        client = OpenAIChatCompletionsClient(openai)
        done = await self._environment.run_rollout(inputs, client, MODEL, {})
        error = str(done.get("error") or "")
        if error and EMPTY not in error:
            raise Lost(error)
        return float(done["reward"])

    def _dataset(self, evaluation: bool) -> Any:
        of = self._environment
        return of.get_eval_dataset() if evaluation else of.get_dataset()


class Taskset:
    """An environment of verifiers from 0.4 on: a taskset and the agents that play its tasks."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        taskset = {**settings.get("taskset", {}), "id": name}
        self._config = vf.resolve_env_config({**settings, "taskset": taskset})
        self._tasks = list(vf.load_environment(self._config).taskset)

    def rows(self, *, evaluation: bool) -> Iterator[dict[str, Any]]:
        for place, task in enumerate(self._tasks):
            yield _row(task.data.prompt, str(getattr(task.data, "answer", "")), {"place": place})

    async def play(self, row: Mapping[str, Any], url: str, key: str) -> float:
        import verifiers.v1 as vf

        # the key is in the URL: a variable, which settings name, would be that of all episodes
        client = vf.EvalClientConfig(base_url=f"{url}/session/{key}/v1", api_key_var="NO_KEY")
        environment = vf.load_environment(self._config)  # of its own, for it keeps every client
        context = vf.ModelContext(model=MODEL, client=client)
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[row["place"]], context)
        errors = [*episode.errors, *(error for each in episode.traces for error in each.errors)]
        trained = [each for each in episode.traces if each.agent is None or each.agent.trainable]
        if not episode.ok or not trained:
            raise Lost(errors[-1].message if errors else "no agent has played")
        return sum(each.reward for each in trained) / len(trained)


def _row(prompt: Any, label: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of --prompt-data. prompt: text, or messages, of which the last is shown."""
    if not isinstance(prompt, str):
        last = prompt[-1] if prompt else {"content": ""}
        prompt = last["content"] if isinstance(last, Mapping) else last.content
    return {"prompt": str(prompt) or "-", "label": label, "metadata": {ROW: row}}


async def work(environment: Playable, gateway: str, key: str) -> None:
    """Claim tasks, one after the other, and play them."""
    async with httpx.AsyncClient(base_url=gateway, timeout=WAIT_S + 40) as client:
        while True:
            try:
                worker = {"authorization": f"Bearer {key}"}
                found = await client.post("/tasks/claim", json={"wait_s": WAIT_S}, headers=worker)
                if found.status_code == 401:
                    raise SystemExit(f"{gateway} does not know this worker's key")
                if found.status_code == 200:
                    await _play(environment, client, found.json())
                elif found.is_error:  # as while it closes: others of this worker still play
                    print(f"a claim was refused: {found.text:.200}", file=sys.stderr)
                    await asyncio.sleep(RETRY_S)
            except httpx.TransportError:  # it listens only while episodes run
                await asyncio.sleep(RETRY_S)


async def _play(environment: Playable, client: httpx.AsyncClient, task: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {task['api_key']}"}

    async def beat() -> None:
        while True:
            await asyncio.sleep(task["heartbeat_s"] / 3)
            with contextlib.suppress(httpx.TransportError):
                await client.post("/tasks/heartbeat", headers=headers, json={})

    beats = asyncio.create_task(beat())
    end: dict[str, Any]
    try:
        played = environment.play(task["metadata"][ROW], task["url"], task["api_key"])
        end = {"reward": await asyncio.wait_for(played, task["timeout_s"])}
    except Exception as error:  # of any environment
        end = {"error": f"{type(error).__name__}: {error}"}
    finally:
        beats.cancel()
    told = await client.post("/tasks/finish", headers=headers, json=end)
    if told.is_error:  # it took too long, and the run gave it to another, or has lost it
        print(f"an episode came too late: {told.text}", file=sys.stderr)


async def work_all(environment: Playable, arguments: argparse.Namespace) -> None:
    key = arguments.key_file.read_text().split()[0]
    async with asyncio.TaskGroup() as group:
        for gateway in arguments.gateway:
            for _ in range(arguments.episodes):
                group.create_task(work(environment, gateway, key))


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the environment's rows, for --prompt-data")
    rows.add_argument("--evaluation", action="store_true", help="those of its evaluation set")
    worker = commands.add_parser("work", help="play the tasks of a run, until it is stopped")
    worker.add_argument("--gateway", nargs="+", required=True, help="of each rank of the run")
    worker.add_argument("--key-file", type=Path, required=True, help="the first word is the key")
    worker.add_argument("--episodes", type=int, default=32, help="at a time, for each gateway")
    for each in (rows, worker):
        each.add_argument("environment", help="its name, as verifiers knows it")
        each.add_argument("--settings", type=json.loads, default={}, help="a JSON object")
    arguments = parser.parse_args()
    environment = load(arguments.environment, arguments.settings)
    if arguments.command == "rows":
        for row in environment.rows(evaluation=arguments.evaluation):
            print(json.dumps(row))
    else:
        asyncio.run(work_all(environment, arguments))


if __name__ == "__main__":
    main()

"""Agents elsewhere: tasks claimed over HTTP, given back, and finished once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from arguments.rules.agents import worker_keys
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.agents.tasks import TaskQueue
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.agents.test_server import END, Engine, model_of, post, user

KEY = "a key of one of the workers"
Worker = Callable[[httpx.AsyncClient, dict[str, Any]], Awaitable[None]]


def played(
    *workers: Worker, attempts: int = 3, beat_s: float = 4.0, timeout_s: float = 60.0
) -> Sample:
    """An episode whose first claim is the first worker's, and so on; each gets a client with the
    episode's key and the task."""
    tasks = TaskQueue({KEY}, timeout_s, beat_s)
    gateway = Gateway("127.0.0.1", 0, max_body=10_000, tasks=tasks)
    generate = AgentGenerate(
        "--agent-worker-keys f", tasks.play, gateway, end_ids=frozenset({END}), limits=SessionLimits(), timeout_s=timeout_s, episodes=2,
        attempts=attempts, own_timeout=True,
    )  # fmt: skip

    async def work() -> None:
        while not gateway.url:
            await asyncio.sleep(0.005)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            await post(client, "/tasks/claim", 401, wait_s=1)
            wrong = await client.post("/tasks/claim", headers={"x-api-key": "no"}, json={})
            assert wrong.status_code == 401
            for worker in workers:
                headers = {"authorization": f"Bearer {KEY}"}
                answer = await client.post("/tasks/claim", headers=headers, json={"wait_s": 10})
                assert answer.status_code == 200, answer.text
                claimed = answer.json()
                client.headers["authorization"] = f"Bearer {claimed['api_key']}"
                await worker(client, claimed)
                del client.headers["authorization"]

    async def both() -> Sample:
        empty = Sample.empty(Prompt(3, "question", (), label="l", metadata={"x": 1}), 5)
        episode = asyncio.create_task(generate.respond(empty, model_of(Engine()), evaluation=False))
        await asyncio.gather(asyncio.create_task(work()), episode)
        return episode.result()

    return asyncio.run(both())


async def ask(client: httpx.AsyncClient, text: str = "hello") -> None:
    await post(client, "/v1/chat/completions", messages=[user(text)])


async def good(client: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
    assert (claimed["prompt"], claimed["label"], claimed["metadata"]) == ("question", "l", {"x": 1})
    assert claimed["messages"] == [{"role": "user", "content": "question"}]
    assert claimed["base_url"] == f"{client.base_url}/v1".replace("//v1", "/v1")
    await ask(client)
    for _ in range(3):  # together longer than a worker may be silent
        await asyncio.sleep(1.4)
        await post(client, "/tasks/heartbeat")
    await post(client, "/v1/rewards", reward=0.25)
    await post(client, "/tasks/finish", reward=0.5)


def test_a_task_is_claimed_played_and_finished() -> None:
    sample = played(good)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.75)
    assert sample.metadata["agent"]["answers"] == 1 and sample.active_tokens > 0


def test_a_lost_worker_gives_its_task_back_and_counts_for_nothing() -> None:
    keys = []

    async def silent(client: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
        keys.append(claimed["api_key"])
        await ask(client)
        await ask(client, "more")

    async def second(client: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
        old = {"authorization": f"Bearer {keys[0]}"}
        for path in ("/v1/chat/completions", "/tasks/heartbeat", "/tasks/finish"):
            answer = await client.post(path, headers=old, json={"messages": [user("x")]})
            assert answer.status_code == 401, "the first worker's key is no longer good"
        await good(client, claimed)

    sample = played(silent, second)
    assert (
        sample.metadata["agent"]["answers"] == 1 and sample.metadata["agent"]["workers_lost"] == 1
    )
    assert sample.reward == 0.75 and not sample.branches


def test_a_task_that_no_worker_ends_is_lost() -> None:
    async def silent(client: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
        pass

    sample = played(silent, silent, attempts=2, beat_s=0.2)
    assert sample.status == SampleStatus.ABORTED
    assert "no heartbeat for 0.2 s" in sample.metadata["failure"]

    async def broken(client: httpx.AsyncClient, claimed: dict[str, Any]) -> None:
        await post(client, "/tasks/finish", error="out of luck")

    assert "the worker reported: out of luck" in played(broken).metadata["failure"]
    assert "no worker has asked for a task for 0.3 s" in played_alone().metadata["failure"]


def played_alone() -> Sample:
    tasks = TaskQueue({KEY}, 0.3, 10)
    gateway = Gateway("127.0.0.1", 0, max_body=10_000, tasks=tasks)
    generate = AgentGenerate(
        "workers", tasks.play, gateway, end_ids=frozenset({END}), limits=SessionLimits(), timeout_s=0.3, episodes=2, own_timeout=True,
    )  # fmt: skip
    empty = Sample.empty(Prompt(3, "question", ()), 5)
    return asyncio.run(generate.respond(empty, model_of(Engine()), evaluation=False))


def test_keys_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the farm\n{KEY}\n\n")
    assert worker_keys(str(path)) == {KEY}
    for text in ("", "short\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"--agent-worker-keys .*at least 16 characters"):
            worker_keys(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        worker_keys(str(tmp_path / "none"))


def test_a_function_that_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def play(task: Task) -> float:
        await task.chat([user("a")])
        time.sleep(0.8)
        return 1.0

    generate = AgentGenerate(
        "--agent-function-path f:play", play, Gateway("127.0.0.1", 0, max_body=10_000), end_ids=frozenset({END}), limits=SessionLimits(),
        timeout_s=20, episodes=2,
    )  # fmt: skip
    assert generate._watch is not None
    generate._watch.seconds = 0.2
    with caplog.at_level(logging.ERROR):
        empty = Sample.empty(Prompt(3, "question", ()), 5)
        sample = asyncio.run(generate.respond(empty, model_of(Engine()), evaluation=False))
    assert sample.reward == 1.0
    (record,) = caplog.records
    assert "--agent-function-path f:play blocks the event loop" in record.message
    assert f"{__file__}:{play.__code__.co_firstlineno + 2}" in record.message


def test_a_claim_that_waits_at_the_end_of_the_episodes_is_answered() -> None:
    """Not by an error of a server that ends."""
    tasks = TaskQueue({KEY}, 60, 60)
    gateway = Gateway("127.0.0.1", 0, max_body=10_000, tasks=tasks)
    headers = {"authorization": f"Bearer {KEY}"}

    async def work() -> int:
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            async with gateway.listening():
                claim = client.post(f"{gateway.url}/tasks/claim", json={"wait_s": 30})
                waiting = asyncio.create_task(claim)
                while not tasks._claims:
                    await asyncio.sleep(0.005)
            return (await asyncio.wait_for(waiting, 20)).status_code

    assert asyncio.run(work()) == 204

"""What an agent does wrong costs its own sample: the others' tokens, log-probs and rewards are those of
a rollout in which it does nothing wrong. And who may ask the gateway, from where."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import psutil
import pytest
import torch

from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.agents.test_server import (  # fmt: skip
    END,
    TOKENIZER,
    Engine,
    model_of,
    open_gateway,
    post,
    session_of,
    user,
)

Client = httpx.AsyncClient
Fault = Callable[[Task, Client], Awaitable[Any]]
BAD = 2  # the sample of the agent that is wrong


async def well(task: Task, client: Client) -> float:
    messages: list[Any] = [user(task.prompt)]
    for turn in range(3):
        answer = await post(client, "/v1/chat/completions", messages=messages)
        messages += [answer["choices"][0]["message"], user(f"{turn}")]
    return 0.5


async def hangs(task: Task, client: Client) -> None:
    await post(client, "/v1/chat/completions", messages=[user("a")])
    await asyncio.sleep(60)


async def crashes(task: Task, client: Client) -> None:
    await post(client, "/v1/chat/completions", messages=[user("a")])
    raise RuntimeError("crash")


async def floods(task: Task, client: Client) -> None:
    bodies = ({"messages": [user(str(i))], "n": 16} for i in range(120))
    asked = (client.post("/v1/chat/completions", json=body) for body in bodies)
    codes = [a.status_code for a in await asyncio.gather(*asked) if not isinstance(a, Exception)]
    assert set(codes) == {200, 429}


async def replays(task: Task, client: Client) -> None:
    for _ in range(40):  # more often than an episode has answers
        await client.post("/v1/chat/completions", json={"messages": [user(task.prompt)]})


async def lies(task: Task, client: Client) -> None:
    answer = await post(client, "/v1/chat/completions", messages=[user("a")])
    reported = answer["choices"][0]["message"]
    for message in (
        reported | {"content": "never said"},
        reported | {"content": reported["content"] * 2},
    ):
        claimed = [
            user("a"),
            message,
            user("b"),
            {"role": "assistant", "content": "nor this"},
            user("c"),
        ]
        await post(client, "/v1/chat/completions", messages=claimed)


async def guesses(task: Task, client: Client) -> None:
    """Keys of others: made up, near its own, and none."""
    nothing = await client.post("/v1/messages", json={}, headers={"x-api-key": ""})
    assert nothing.status_code == 401
    keys = (task.api_key[:-1] + "x", task.api_key.swapcase(), "policy", "../" + task.api_key)
    for key in keys:
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            body = {"messages": [user("a")], "max_tokens": 5}
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/rewards"):
                answer = await client.post(path, json=body, headers={"x-api-key": ""} | headers)
                assert answer.status_code == 401, (key, path, answer.text)


async def sessions(task: Task, client: Client) -> None:
    """A thousand connections, each with a request that it does not end."""
    port = int(task.url.rsplit(":", 1)[1])
    writers = []
    for _ in range(1000):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat")
        writers.append(writer)
    await asyncio.sleep(1)
    for writer in writers:
        writer.close()


def rollout(fault: Fault | None) -> list[Sample]:
    """Six samples, one of which does what is wrong, while the others play."""

    async def play(task: Task) -> Any:
        is_bad = task.sample_id == BAD and fault is not None
        if fault is not None and not is_bad:
            await asyncio.sleep(0.2)
        async with httpx.AsyncClient(
            base_url=task.url, headers={"x-api-key": task.api_key}, timeout=30
        ) as client:
            return await (fault if is_bad and fault is not None else well)(task, client)

    agent = AgentGenerate(
        "test", play, Gateway("127.0.0.1", 0, max_body=10_000, connections=128), end_ids=frozenset({END}),
        limits=SessionLimits(turns=20), timeout_s=5 if fault is hangs else 60, episodes=64,
    )  # fmt: skip
    prompt = Prompt(0, "q", tuple(TOKENIZER("q")["input_ids"]))
    samples = [Sample.empty(prompt, i) for i in range(6)]
    return agent.run(samples, model_of(Engine()), evaluation=False)


def same(a: Sample, b: Sample) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.loss_mask, b.loss_mask)
        and torch.equal(a.rollout_log_probs, b.rollout_log_probs)  # type: ignore[arg-type]
        and (a.status, a.reward, a.num_branches) == (b.status, b.reward, b.num_branches)
        and a.metadata["agent"] == b.metadata["agent"]
    )


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        (hangs, "--agent-timeout-s 5"),
        (crashes, "RuntimeError: crash"),
        (floods, None),
        (replays, None),
        (lies, None),
        (guesses, "asked for no answer"),
        (sessions, "asked for no answer"),
    ],
)
def test_a_fault_costs_its_own_sample_and_nothing_else(fault: Fault, lost: str | None) -> None:
    expected, found = rollout(None), rollout(fault)
    failures = [s.metadata.get("failure") for s in found if s.sample_id != BAD]
    assert failures == [None] * 5
    assert all(same(a, b) for a, b in zip(expected, found, strict=True) if a.sample_id != BAD)
    bad = found[BAD]
    if lost is not None:
        assert bad.status == SampleStatus.ABORTED and lost in bad.metadata["failure"]
        return
    numbers = bad.metadata["agent"]
    assert bad.status == SampleStatus.COMPLETED and numbers["answers"] <= 20
    trained = sum(s.active_tokens for s in (bad, *bad.branches))
    assert trained == numbers["written_tokens"], "what the model wrote, each token once"
    if fault is lies:
        assert numbers["foreign_messages"] == 4 and numbers["answers"] == 3
    else:
        assert numbers["refused"] > 0


def test_the_key_of_an_episode_that_has_ended_is_refused() -> None:
    session, old = session_of(Engine()), session_of(Engine())

    async def work() -> None:
        async with open_gateway({"here": session}) as (client, gateway):
            async with gateway.episode("old", old):
                await post(client, "/session/old/v1/chat/completions", messages=[user("x")])
            answer = await client.post(
                "/session/old/v1/chat/completions", json={"messages": [user("x")]}
            )
            assert answer.status_code == 401
        assert (len(session.tree.turns), len(old.tree.turns)) == (0, 1)

    asyncio.run(work())


def own_address() -> str | None:
    """Of this machine, not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nothing_listens_beyond_loopback_unless_configured(host: str) -> None:
    """--agent-host is loopback by default; the run's process has no other server."""
    address = own_address()

    async def reached(port: int) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return True
        return False

    async def work() -> None:
        gateway = Gateway(host, 0, max_body=1000)
        before = {c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"}
        async with gateway.listening():
            port = int(gateway.url.rsplit(":", 1)[1])
            listening = [
                c.laddr
                for c in psutil.Process(os.getpid()).net_connections()
                if c.status == "LISTEN" and c.laddr not in before
            ]
            assert [(each.ip, each.port) for each in listening] == [(host, port)]
            if address is not None:
                assert await reached(port) == (host == "0.0.0.0")

    asyncio.run(work())

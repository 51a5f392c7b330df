"""Bugs of other trainers that no test of a part of ours would have met. All that are known, with
their reports, are in docs/their_bugs.yaml."""

from __future__ import annotations

import asyncio
import math
import os
from itertools import product

import pytest
import torch

from slime_like.advantages import compute_advantages
from slime_like.rollout.rollouter import sample_seed
from slime_like.servers.http import Deadlines, async_client, post_once


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "rloo", "opo"])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_an_outlier_among_equal_rewards_is_bounded(estimator: str, size: int) -> None:
    """In fp32, the mean of squares less the square of the mean of 0.95 is rounding alone. A value
    less its mean, over the deviation, is at most (n - 1) / sqrt(n); without one, at most the gap."""
    rewards = torch.full((size,), 0.95)
    rewards[0] = 0.0
    advantages = compute_advantages(
        estimator,
        rewards=rewards,
        group_ids=torch.zeros(size, dtype=torch.long),
        lengths=torch.full((size,), 5),
    ).values
    bound = max(0.95, (size - 1) / math.sqrt(size))
    assert advantages[0] < 0 < advantages[1]
    assert advantages.abs().max() <= bound * (1 + 1e-5)


def test_every_sample_of_a_run_has_a_seed_of_its_own() -> None:
    """Also after the response was interrupted and in an evaluation; in the 63 bits that SGLang
    takes, and in the 32 that some of its samplers keep."""
    places = list(product((0, 1, 2**40), ("train", "eval"), range(64), (0, 7)))
    seeds = [sample_seed(seed, purpose, sample, at) for seed, purpose, sample, at in places]
    assert len(set(seeds)) == len({s & 0xFFFFFFFF for s in seeds}) == len(places)
    assert all(0 <= s < 2**63 for s in seeds)
    assert seeds == [sample_seed(*place) for place in places]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_requests_to_servers_pass_the_proxy_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}')
        await writer.drain()
        writer.close()

    async def ask() -> object:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, async_client(1) as client:
            port = server.sockets[0].getsockname()[1]
            return await post_once(client, f"http://127.0.0.1:{port}/generate", {}, Deadlines())

    for variable in [v for v in os.environ if v.lower() == "no_proxy"]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    assert asyncio.run(ask()) == b'{"a":1}'

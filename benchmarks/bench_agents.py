"""Concurrent agent sessions over HTTP against the gateway and the local engine. Some agents crash,
hang or get no response; the others must not be affected.

    python benchmarks/bench_agents.py --sessions 1000 --json agents.json
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import machine, write_json  # noqa: E402
from slime_like.agents.rollouts import AgentGenerate  # noqa: E402
from slime_like.agents.server import CONNECTIONS, Gateway  # noqa: E402
from slime_like.agents.sessions import SessionLimits  # noqa: E402
from slime_like.agents.task import Task  # noqa: E402
from slime_like.cli.tiny_model import make_model, make_tokenizer  # noqa: E402
from slime_like.engines.base import SamplingParams  # noqa: E402
from slime_like.engines.local.engine import LocalEngine  # noqa: E402
from slime_like.rollout.episode import Model  # noqa: E402
from slime_like.types import Prompt, Sample, SampleStatus  # noqa: E402

MIB = 2**20
DESCRIPTORS = 4  # file descriptors per session: a socket on either side, and some spare


@dataclass(frozen=True)
class Result:
    """What one run of sessions took."""

    sessions: int
    turns: int
    seconds: float  # from the first session to the end of the last intact one
    answer_s_median: float  # latency of a request
    answer_s_max: float  # latency of a request
    memory_mib: float  # growth of the process's peak resident memory
    lost: int  # number of lost samples, of which `broken` are expected
    broken: int
    tokens: int  # generated tokens of the other samples


def broken_way(number: int, every: int) -> int:
    """How a session is broken: 0 not at all, 1 it raises, 2 it hangs, 3 it sends no request."""
    return 0 if number % every else 1 + number // every % 3


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(sessions: int, turns: int, tokens: int, every: int, timeout_s: float) -> Result:
    """Run all sessions. every: one in so many sessions is broken."""
    seconds: list[float] = []
    ends: list[float] = []

    async def play(task: Task) -> float:
        way = broken_way(task.sample_id, every)
        if way == 3:
            return 1.0
        messages = [{"role": "user", "content": task.prompt}]
        headers = {"authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(
            base_url=task.url, headers=headers, timeout=timeout_s, verify=False
        ) as client:  # without TLS, whose setup takes longer than a session
            for turn in range(turns):
                begun = time.monotonic()
                body = {"messages": messages, "max_tokens": tokens}
                answer = await client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                seconds.append(time.monotonic() - begun)
                if way == 1:
                    raise RuntimeError("an agent that crashes")
                if way == 2:
                    await asyncio.sleep(10 * timeout_s)
                messages += [answer.json()["choices"][0]["message"]]
                messages += [{"role": "user", "content": f"more {turn}"}]
        ends.append(time.monotonic())
        return 1.0

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, hidden_size=32, num_layers=2, seed=1)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = LocalEngine(folder, tokenizer)
        engine.update_weights(iter(model.state_dict().items()), 1)
        limits = SessionLimits(positions=512)
        connections = CONNECTIONS + sessions * (limits.concurrent + limits.waiting)
        agent = AgentGenerate(
            "bench", play, Gateway("127.0.0.1", 0, max_body=MIB, connections=connections),
            limits=limits,
            end_ids=frozenset({tokenizer.eos_token_id}), timeout_s=timeout_s, episodes=sessions,
        )  # fmt: skip
        prompt = Prompt(0, "spell a word", tuple(tokenizer("spell a word")["input_ids"]))
        samples = [Sample.empty(prompt, i) for i in range(sessions)]
        peak_before = peak_memory()
        begun = time.monotonic()
        sampling = SamplingParams(max_new_tokens=200)
        policy = Model(engine, tokenizer, sampling, lambda sample, place: sample * 1000 + place)
        done = agent.run(samples, policy, evaluation=False)
    broken = {i for i in range(sessions) if broken_way(i, every)}
    lost = {s.sample_id for s in done if s.status == SampleStatus.ABORTED}
    assert lost == broken, sorted(lost ^ broken)
    ordered = sorted(seconds)
    return Result(
        sessions, turns, max(ends) - begun, ordered[len(ordered) // 2], ordered[-1],
        (peak_memory() - peak_before) / MIB,
        len(lost), len(broken), sum(s.active_tokens for s in done if s.sample_id not in lost),
    )  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="Most of an answer.")
    parser.add_argument("--broken", type=int, default=100, help="One of so many is broken.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds for an episode.")
    parser.add_argument("--json", type=Path, help="File for the numbers.")
    given = parser.parse_args(words)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, DESCRIPTORS * given.sessions + 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    found = measure(given.sessions, given.turns, given.tokens, given.broken, given.timeout)
    for name, value in asdict(found).items():
        print(f"{name:16} {value:.2f}" if isinstance(value, float) else f"{name:16} {value}")
    if given.json is not None:
        write_json(given.json, {"machine": machine(), "agents": asdict(found)})


if __name__ == "__main__":
    main()

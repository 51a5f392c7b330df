"""Samples trained per second, and the idle share of engines and trainer: synchronous, one rollout
ahead (--async-rollout), and from a pool (--fully-async).

    python benchmarks/bench_async.py                    # simulated: 64 and 512 engines, in a minute
    python benchmarks/bench_async.py run                # real runs against two servers with delays
    SGLANG_ENV=.venv-sglang python benchmarks/bench_async.py sglang    # against two of SGLang

The simulation runs the scheduler of the runs, `EpisodePool`, against engines whose slots take a
fixed time per token. A length is that of a prompt: its samples are equally long within 50%. With
skewed lengths a tenth of the prompts is 20 times longer, at the same mean; with skewed samples a
tenth of the samples, whatever their prompt. Weights stop all engines for `UPDATE_S`; a checkpoint
and grading take no time.

`run` trains a tiny model on the CPU from two servers with SGLang's interface
(`tests/fake_sglang.py`), which answer at once and then wait `TOKEN_S` per token, so that the time
of the engines does not depend on the machine. `sglang` starts two SGLang servers of the environment
that `make sglang-env` makes, each of whose steps takes `STEP_S` longer; there lengths are in
tokens, and a function of the run makes the responses as long as they are to be.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.data.group_buffer import PendingGroup
from slime_like.rollout.episode_pool import EpisodePool, PoolSettings
from slime_like.types import Prompt, Sample

if TYPE_CHECKING:
    from tests.fake_sglang import FakeServer
    from tests.sglang.conftest import Servers

ROOT = Path(__file__).resolve().parents[1]
TOKEN_MS = 20.0  # of a slot
MEAN_TOKENS = 2900
UPDATE_S = 5.0  # of the weights
SLOTS = 32  # of an engine
SAMPLES = 8  # of a group
ROLLOUTS = 24  # of which the first quarter warms up
SKEW = 20  # times longer is a tenth of the prompts


RUNNING = Sample.empty(Prompt(0, "", (1,)), 0)


@dataclass
class Setting:
    """A simulated job."""

    engines: int
    skewed: bool
    batch: int  # groups of a rollout
    train_s: float
    seed: int = 0
    workers: float = 1.5  # groups in flight, over those of a rollout
    within: bool = False  # the samples of a prompt are skewed, not prompts

    @property
    def slots(self) -> int:
        return self.engines * SLOTS


@dataclass
class Engines:
    """Slots that take requests in their order. Times in seconds."""

    slots: int
    free_at: list[float] = field(default_factory=list)  # of busy slots, a heap
    busy_s: float = 0.0

    def submit(self, now: float, seconds: float) -> float:
        """When a request that is sent now ends."""
        while self.free_at and self.free_at[0] <= now:
            heapq.heappop(self.free_at)
        start = now if len(self.free_at) < self.slots else heapq.heappop(self.free_at)
        heapq.heappush(self.free_at, start + seconds)
        self.busy_s += seconds
        return start + seconds


@dataclass(frozen=True)
class Result:
    samples_per_s: float
    engine_idle: float
    trainer_idle: float
    masked: float = 0.0  # fraction of the tokens


class Lengths:
    """Seconds of the samples of one prompt after the other."""

    def __init__(self, setting: Setting) -> None:
        self._random = random.Random(setting.seed)
        self._setting = setting
        self._base = MEAN_TOKENS / (0.9 + 0.1 * SKEW) if setting.skewed else MEAN_TOKENS

    def group(self) -> list[float]:
        mean = self._mean()
        seconds = []
        for _ in range(SAMPLES):
            mean = self._mean() if self._setting.within else mean
            seconds.append(mean * self._random.uniform(0.5, 1.5))
        return seconds

    def _mean(self) -> float:
        times = SKEW if self._setting.skewed and self._random.random() < 0.1 else 1
        return self._base * times * TOKEN_MS / 1000


def in_rounds(setting: Setting, *, ahead: bool) -> Result:
    """Whole rollouts, sampled before their training or beside that of the rollout before."""
    lengths = Lengths(setting)
    engines = Engines(setting.slots)
    ready = [0.0] * ROLLOUTS  # when a rollout is sampled
    begun = [0.0] * ROLLOUTS  # when its sampling begins
    trained = 0.0
    waits = [0.0] * ROLLOUTS
    ends = [0.0] * ROLLOUTS
    for j in range(ROLLOUTS):
        if ahead:  # sampling of j begins when that of j - 1 has ended and j - 1 is being trained on
            started_training = max(ready[j - 1], ends[j - 2]) if j else 0.0
            begun[j] = max(ready[j - 1] if j else 0.0, started_training)
        else:
            begun[j] = trained
        at = begun[j] + UPDATE_S
        engines.free_at.clear()
        ready[j] = max(
            engines.submit(at, seconds) for _ in range(setting.batch) for seconds in lengths.group()
        )
        waits[j] = max(0.0, ready[j] - trained)
        trained = max(trained, ready[j]) + setting.train_s
        ends[j] = trained
    return summary(setting, engines, waits, ends)


def from_pool(
    setting: Setting, staleness: int, *, waits: bool = True, single: bool = False
) -> Result:
    """Groups, or single samples, that have ended, as `PoolCollector` takes them."""
    lengths = Lengths(setting)
    engines = Engines(setting.slots)
    size = SAMPLES if single else 1
    batch = setting.batch * size
    workers = int(setting.workers * setting.batch) * size
    pool = EpisodePool(PoolSettings(batch, staleness, workers, 10**9, waits=waits))
    drawn: list[list[float]] = []  # seconds of the groups or samples that start next
    events: list[tuple[float, int]] = []  # (time, group) when a group ends
    next_id = 0
    now = 0.0
    clock = 0
    trained = 0.0  # when the trainer is free
    spans: dict[int, list[tuple[float, float]]] = {}  # of the samples of a group
    updates: list[float] = [0.0]  # when version i came
    taken: list[list[int]] = []
    waited: list[float] = []
    ends: list[float] = []
    while len(ends) < ROLLOUTS:
        for _ in range(pool.room(clock)):
            if not drawn:
                seconds_each = lengths.group()
                drawn = [[seconds] for seconds in seconds_each] if single else [seconds_each]
            group = PendingGroup(Prompt(next_id, "", ()), (RUNNING,), clock)
            spans[next_id] = [(now, engines.submit(now, seconds)) for seconds in drawn.pop(0)]
            pool.start([group])
            heapq.heappush(events, (max(end for _, end in spans[next_id]), next_id))
            next_id += 1
        # one rollout is taken ahead, while the one before it is trained on
        if pool.ready() and (not ends or now >= ends[-1] - setting.train_s):
            taken.append([group.group_id for group in pool.take()])
            waited.append(max(0.0, now - trained))
            clock = len(ends)
            trained = max(trained, now) + setting.train_s
            ends.append(trained)
            updates.append(trained + UPDATE_S)
            continue
        later = [events[0][0]] if events else []
        if ends and ends[-1] - setting.train_s > now:
            later.append(ends[-1] - setting.train_s)
        now = min(later)
        while events and events[0][0] <= now:
            pool.finish(pool.in_flight[heapq.heappop(events)[1], RUNNING.sample_id])
    masked = 0.0 if waits else masked_fraction(taken, spans, updates, staleness)
    return summary(setting, engines, waited, ends, masked)


def masked_fraction(
    taken: Sequence[Sequence[int]],
    spans: dict[int, list[tuple[float, float]]],
    updates: Sequence[float],
    staleness: int,
) -> float:
    """Of the tokens, those that are older than the bound when they are trained on."""
    total = old = 0.0
    for j, groups in enumerate(taken):
        oldest = updates[max(0, j - staleness)] if j > staleness else 0.0
        for group in groups:
            for start, end in spans[group]:
                total += end - start
                old += min(max(0.0, oldest - start), end - start)
    return old / total


def summary(
    setting: Setting,
    engines: Engines,
    waits: Sequence[float],
    ends: Sequence[float],
    masked: float = 0.0,
) -> Result:
    first = ROLLOUTS // 4
    seconds = ends[-1] - ends[first - 1]
    samples = (ROLLOUTS - first) * setting.batch * SAMPLES
    work = samples * MEAN_TOKENS * TOKEN_MS / 1000
    return Result(
        samples / seconds,
        max(0.0, 1 - work / (seconds * setting.slots)),
        sum(waits[first:]) / seconds,
        masked,
    )


def simulate() -> list[dict[str, Any]]:
    """Simulated runs; returns the rows that it prints."""
    found = []
    print("| engines | lengths | mode | samples/s | | engines idle | trainer idle | masked |")
    print("|---|---|---|---|---|---|---|---|")
    for engines in (64, 512):
        for lengths in ("equal", "skewed", "skewed samples"):
            batch = engines * SLOTS // SAMPLES  # a rollout fills all slots once
            work_s = MEAN_TOKENS * TOKEN_MS / 1000
            within = lengths == "skewed samples"
            setting = Setting(engines, lengths != "equal", batch, train_s=work_s, within=within)
            rows = [
                ("synchronous", in_rounds(setting, ahead=False)),
                ("one ahead", in_rounds(setting, ahead=True)),
            ]
            for staleness in (2, 4, 8, 16):
                rows.append((f"by sample, {staleness}", from_pool(setting, staleness)))
            for staleness in (4, 8):  # the stragglers get only their ends
                result = from_pool(setting, staleness, waits=False)
                rows.append((f"by sample, {staleness}, mask", result))
            for staleness in (2, 4, 8) if within else ():
                result = from_pool(setting, staleness, single=True)
                rows.append((f"single samples, {staleness}", result))
            for name, result in rows:
                found.append(
                    {"engines": engines, "lengths": lengths, "mode": name, **asdict(result)}
                )
                print(
                    f"| {engines} | {lengths} | {name} "
                    f"| {result.samples_per_s:.1f} "
                    f"| {result.samples_per_s / rows[0][1].samples_per_s:.2f} "
                    f"| {result.engine_idle:.0%} | {result.trainer_idle:.0%} "
                    f"| {result.masked:.0%} |",
                    flush=True,
                )
    return found


TOKENS = 8  # of a response
TOKEN_S = 0.04
SERVERS = 2
AT_ONCE = 16  # requests of a server
GROUPS = 8  # of a rollout
GROUP_SIZE = 4
STEPS = 14  # rollouts, of which the first 3 warm up
MODES = {
    "synchronous": (),
    "one ahead": ("--async-rollout",),
    "by sample, 8": ("--async-rollout", "--fully-async", "--max-staleness", "8"),
    "by sample, 4, mask": (
        *("--async-rollout", "--fully-async", "--max-staleness", "4", "--stale-tokens", "mask"),
    ),
}


class Pace:
    """Seconds of a token: the mean is equal, and with skew a tenth of the prompts is slower."""

    def __init__(self, *, skewed: bool) -> None:
        self._mean = TOKEN_S
        self._fast = TOKEN_S / (0.9 + 0.1 * SKEW) if skewed else TOKEN_S
        self._skewed = skewed
        self._seen: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()

    def __call__(self, body: Any) -> float:
        with self._lock:
            prompt = tuple(body["input_ids"])
            number = self._seen.setdefault(prompt, len(self._seen))
        return self._fast * (SKEW if self._skewed and number % 10 == 3 else 1)


def busy_seconds(servers: Sequence[FakeServer]) -> list[tuple[float, float]]:
    """Of every request of a rollout to these servers, from now on: when it began and ended."""
    spans: list[tuple[float, float]] = []

    def watched(post: Any) -> Any:
        def timed(handler: Any, body: Any) -> None:
            start = time.monotonic()
            post(handler, body)
            if handler.path == "/generate" and "-probe-" not in body["rid"]:
                spans.append((start, time.monotonic()))

        return timed

    for server in servers:
        server.post = watched(server.post)  # type: ignore[method-assign]
    return spans


def run_once(folder: Path, mode: str, *, skewed: bool) -> Result:
    """One run of train.py."""
    from tests.e2e.helpers import make_workspace, rows_of
    from tests.fake_sglang import FakeServer

    work = make_workspace(folder / "work")
    out = folder / "out"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(str(work.model))) for _ in range(SERVERS)]
        for server in servers:
            server.pace_s = Pace(skewed=skewed)
        spans = busy_seconds(servers)
        argv = work.flags(
            out,
            rollout_engine="sglang",
            rollout_external_engine_addrs=" ".join(server.address for server in servers),
            no_sglang_router="",
            update_weight_transport="disk",
            sglang_server_concurrency=AT_ONCE,
            rollout_batch_size=GROUPS,
            n_samples_per_prompt=GROUP_SIZE,
            rollout_max_response_len=TOKENS,
            num_steps_per_rollout=1,
            micro_batch_size=8,
            num_rollout=STEPS,
            tis_ratio_type="token",
            token_tis_ratio_clip_high=2.0,
        )
        command = [sys.executable, "train.py", *argv, *MODES[mode]]
        with (folder / "log").open("w") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    rows = rows_of(out)[3:]
    seconds = sum(row["perf/step_s"] for row in rows)
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = sum(end - start for start, end in spans)
    tokens = len(rows) * GROUPS * GROUP_SIZE * TOKENS
    return Result(
        len(rows) * GROUPS * GROUP_SIZE / seconds,
        1 - busy / (window * SERVERS * AT_ONCE),
        sum(row["perf/generate_s"] for row in rows) / seconds,
        sum(row.get("rollout/stale_masked_tokens", 0.0) for row in rows) / tokens,
    )


def run(once: Callable[..., Result]) -> list[dict[str, Any]]:
    """Real runs; returns the rows that it prints. once: `run_once` or the like."""
    found = []
    print("| lengths | mode | samples/s | | engines idle | trainer idle | masked |")
    print("|---|---|---|---|---|---|---|")
    for skewed in (False, True):
        first: Result | None = None
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                result = once(Path(folder), mode, skewed=skewed)
            first = first or result
            found.append({"skewed": skewed, "mode": mode, **asdict(result)})
            print(
                f"| {'skewed' if skewed else 'equal'} | {mode} | {result.samples_per_s:.2f} "
                f"| {result.samples_per_s / first.samples_per_s:.2f} | {result.engine_idle:.0%} "
                f"| {result.trainer_idle:.0%} | {result.masked:.0%} |",
                flush=True,
            )
    return found


STEP_S = 0.04  # in addition, of a step of a real server
SERVED_STEPS = 8  # rollouts, of which the first 2 warm up
SERVED_TOKENS = {False: (20, 20), True: (7, 7 * SKEW)}  # skewed -> (most prompts, a tenth of them)
GENERATE = '''
import json, time, zlib

async def generate(model, episode):
    """A response of a length that its prompt decides; the end of a turn does not end it."""
    short, long = {lengths}
    wanted = long if zlib.crc32(episode.prompt.encode()) % 10 == 3 else short
    started = time.monotonic()
    while len(episode.tokens) < wanted:
        await model.write(episode, max_new_tokens=wanted - len(episode.tokens))
    with open({spans!r}, "a") as file:
        file.write(json.dumps([started, time.monotonic()]) + "\\n")
'''


def busy_share(spans: Sequence[tuple[float, float]], slots: int) -> float:
    """The share of the slots that requests took, from the first request to the last."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    busy = in_flight = 0.0
    for (now, change), (then, _) in itertools.pairwise(changes):
        in_flight += change
        busy += min(in_flight, slots) * (then - now)
    return busy / (slots * (changes[-1][0] - changes[0][0]))


def run_served(folder: Path, servers: Servers, demo: Path, mode: str, *, skewed: bool) -> Result:
    """One run of train.py against real servers."""
    from tests.sglang.test_real_servers import command_line, rows

    spans = folder / "spans"
    program = folder / "lengths.py"
    lengths = SERVED_TOKENS[skewed]
    program.write_text(GENERATE.format(lengths=lengths, spans=str(spans)))
    words = (
        f"--custom-generate-function-path {program}:generate --update-weight-transport disk "
        f"--sglang-server-concurrency {AT_ONCE} --rollout-batch-size {GROUPS} "
        f"--n-samples-per-prompt {GROUP_SIZE} --rollout-max-response-len {max(lengths)} "
        f"--num-steps-per-rollout 1 --micro-batch-size 8 --num-rollout {SERVED_STEPS} "
        "--tis-ratio-type token --lr 1e-4"
    ).split()
    pool = ("--num-parallel-generation-workers", str(GROUPS * 3 // 2))
    more = (*words, *MODES[mode], *(pool if "--fully-async" in MODES[mode] else ()))
    command = [sys.executable, "train.py"]
    command += command_line(demo, servers.flags_without_router, folder / "out", *more)
    with (folder / "log").open("w") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    found = rows(folder / "out")[2:]
    seconds = sum(row["perf/step_s"] for row in found)
    times = [tuple(json.loads(line)) for line in spans.read_text().split("\n") if line]
    tokens = sum(row["rollout/response_length_mean"] for row in found) * GROUPS * GROUP_SIZE
    return Result(
        len(found) * GROUPS * GROUP_SIZE / seconds,
        1 - busy_share(times, SERVERS * AT_ONCE),
        sum(row["perf/generate_s"] for row in found) / seconds,
        sum(row.get("rollout/stale_masked_tokens", 0.0) for row in found) / tokens,
    )


def serve() -> list[dict[str, Any]]:
    """As `run`, against two SGLang servers."""
    from tests.e2e.programs import make_demo
    from tests.sglang.conftest import slowed, two_servers

    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        demo = make_demo(logs / "demo")
        servers = stack.enter_context(two_servers("SGLANG_SERVERS", demo / "model", logs))
        stack.enter_context(slowed(servers, STEP_S))

        def once(folder: Path, mode: str, *, skewed: bool) -> Result:
            return run_served(folder, servers, demo, mode, skewed=skewed)

        return run(once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "what", nargs="?", default="simulate", choices=("simulate", "run", "sglang")
    )
    sys.path.insert(0, str(ROOT))  # for tests/
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    if options.what == "simulate":
        rows = simulate()
    else:
        rows = serve() if options.what == "sglang" else run(run_once)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

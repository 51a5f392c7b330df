"""Four clients of the Tinker server, each of whom trains an adapter and samples from it: how fast
their rounds are with several ways to serve adapters, in one run.

    python benchmarks/bench_served_adapters.py [--json adapters.json] [--way "NAME=FLAGS" ...]

A round of a client is what on-policy RL does: a group of samples, a pass over as many datums, a
step, new weights for sampling. Each way is a server with its own flags; all are up at the same
time, and blocks of rounds take turns, so that other load on the machine affects all alike. The
first way is 1 in the ratios. By default two ways merge an adapter into a copy of the base for every
save: with room in memory for two of the copies, where four clients evict one another's, and for
all. In the third, adapters are not merged. Another way of serving is one more `--way`.

`--clients 1 --again 1` is a client alone, who samples once more from the same weights: what the
first sample after a save costs beyond that is the loading. Of a client alone the table also has the
server's CPU seconds of each part, which other load on the machine affects least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402
from benchmarks.bench_server import HttpClient, message_of, running_server  # noqa: E402
from slime_like.cli.tiny_model import save_model  # noqa: E402

WAYS = (
    "merged, 2 copies=--max-sampler-engines 2",
    "merged, all copies=--max-sampler-engines 32",
    "adapters beside the base=--lora-sync adapter",
)
# of a round; again: samples from weights that the engine has
PARTS = ("sample", "again", "train", "save")
PROMPT = list(range(5, 37))
PARTS_TIMEOUT_S = 600.0


@dataclass
class Rounds:
    """Seconds of the rounds of one way: of whole blocks, and of each part of a client's round."""

    blocks_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)


class Learner(HttpClient):
    """A client with an adapter and a sampling session of its newest weights."""

    def __init__(
        self, model: Path, url: str, *, rank: int, samples: int, tokens: int, again: int
    ) -> None:
        super().__init__(model, url, rank=rank)
        self._samples = samples
        self._again = again
        self._groups = 0
        self._tokens = tokens
        self._saves = 0
        self._sampler = ""
        self.save()

    def save(self) -> None:
        """New weights for sampling."""
        self.seq += 1
        self._saves += 1
        body = {
            "model_id": self.model,
            "seq_id": self.seq,
            "sampling_session_seq_id": self._saves,
        }
        saved = self.result(self.post("save_weights_for_sampler", body)["request_id"])
        self._sampler = saved["sampling_session_id"]

    def sample(self) -> None:
        """A group of samples, up to their longest length."""
        self._groups += 1
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": self._tokens, "stop": []},
            "num_samples": self._samples,
            "sampling_session_id": self._sampler,
            "seq_id": self._groups,
        }
        self.result(self.post("asample", body)["request_id"])

    def again(self) -> None:
        for _ in range(self._again):
            self.sample()

    def train(self) -> None:
        """A pass over as many datums as samples, and a step."""
        length = len(PROMPT) + self._tokens
        self.result(self.send(message_of(self._samples, length, seed=self._saves)))
        self.step()

    def round(self, cpu_s: Callable[[], float] | None) -> dict[str, float]:
        """Seconds of each part. cpu_s: of the server so far, for a client alone."""
        taken = {}
        for part in PARTS:
            if part == "again" and not self._again:
                continue
            before = cpu_s() if cpu_s else 0.0
            start = time.perf_counter()
            getattr(self, part)()
            taken[f"{part}, s"] = time.perf_counter() - start
            if cpu_s:
                taken[f"{part}, core s"] = cpu_s() - before
        return taken


def cpu_meter(folder: Path) -> Callable[[], float]:
    """Reads the CPU seconds of a server of one rank: of its worker and its API process."""
    import psutil

    pid = json.loads((folder / "server" / "link.json").read_text(encoding="utf-8"))["pid"]
    api = psutil.Process(pid)
    processes = [api, psutil.Process(api.ppid())]

    def spent() -> float:
        times = [process.cpu_times() for process in processes]
        return float(sum(each.user + each.system for each in times))

    return spent


def run_block(
    learners: Sequence[Learner], rounds: int, found: Rounds, cpu_s: Callable[[], float] | None
) -> None:
    """Rounds of all clients at once, each in a thread."""
    errors: list[BaseException] = []

    def learn(learner: Learner) -> None:
        try:
            for _ in range(rounds):
                for part, seconds in learner.round(cpu_s).items():
                    found.parts_s.setdefault(part, []).append(seconds)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=learn, args=(one,), daemon=True) for one in learners]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PARTS_TIMEOUT_S)
    if errors or any(thread.is_alive() for thread in threads):
        raise errors[0] if errors else RuntimeError(f"no answer for {PARTS_TIMEOUT_S:g} s")
    found.blocks_s.append(time.perf_counter() - start)


def measure(
    model: Path,
    folder: Path,
    ways: dict[str, list[str]],
    *,
    clients: int,
    blocks: int,
    rounds: int,
    samples: int,
    tokens: int,
    rank: int,
    again: int,
) -> dict[str, Rounds]:
    """Rounds of every way. A block before the measured ones warms up."""
    found = {name: Rounds() for name in ways}
    with contextlib.ExitStack() as stack:
        learners: dict[str, list[Learner]] = {}
        meters: dict[str, Callable[[], float] | None] = {}
        for number, (name, flags) in enumerate(ways.items()):
            place = folder / str(number)
            place.mkdir()
            url = stack.enter_context(running_server(model, place, flags))
            meters[name] = cpu_meter(place) if clients == 1 else None
            learners[name] = [
                Learner(model, url, rank=rank, samples=samples, tokens=tokens, again=again)
                for _ in range(clients)
            ]
        for group in learners.values():
            run_block(group, 1, Rounds(), None)
            for learner in group:
                stack.callback(learner.close)
        for _ in range(blocks):
            for name, group in learners.items():
                run_block(group, rounds, found[name], meters[name])
    return found


def summary(found: dict[str, Rounds], *, clients: int, rounds: int) -> dict[str, dict[str, float]]:
    """Per way: rounds a minute over all clients, their ratio to the first way's, median seconds of
    each part."""
    table: dict[str, dict[str, float]] = {}
    for name, each in found.items():
        per_minute = 60 * clients * rounds / statistics.median(each.blocks_s)
        first = next(iter(table.values()), None)
        ratio = per_minute / first["rounds a minute"] if first else 1.0
        parts = {part: statistics.median(taken) for part, taken in each.parts_s.items()}
        table[name] = {"rounds a minute": per_minute, "ratio": ratio, **parts}
    return table


def print_table(table: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(table.values())))
    print("| way | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for way, row in table.items():
        print(f"| {way} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |")


def ways_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Flags by name. Raises ValueError for a text without a name, or a name that is there twice."""
    ways = {}
    for text in texts:
        name, equals, flags = text.partition("=")
        if not equals or not name or name in ways:
            raise ValueError(f"--way {text!r} must be NAME=FLAGS, with a name of its own")
        ways[name] = shlex.split(flags)
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", action="append", help="NAME=FLAGS of a server; may be repeated")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=5, help="of each way, in turn")
    parser.add_argument("--rounds", type=int, default=2, help="of each client in a block")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--tokens", type=int, default=32, help="of a sample")
    parser.add_argument("--again", type=int, default=0, help="groups more of the same weights")
    parser.add_argument("--json", type=Path, help="write the results here")
    chosen = parser.parse_args()
    try:
        ways = ways_of([*WAYS, *(chosen.way or ())])
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="slime_like_bench_") as folder:
        model = Path(folder) / "model"
        save_model(model, hidden_size=chosen.hidden_size, num_layers=chosen.num_layers)
        found = measure(
            model,
            Path(folder),
            ways,
            clients=chosen.clients,
            blocks=chosen.blocks,
            rounds=chosen.rounds,
            samples=chosen.samples,
            tokens=chosen.tokens,
            rank=chosen.rank,
            again=chosen.again,
        )
    table = summary(found, clients=chosen.clients, rounds=chosen.rounds)
    print_table(table)
    write_json(chosen.json, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long servers pause for new weights by `broadcast`, over the time that the bytes alone take on
the link to them. Goal: below 1.2 with 1,024 ranks.

    python benchmarks/bench_update_pause.py [--part processes ranks] [--json pause.json]

Links are simulated: a bucket takes at least its bytes over --link to reach the servers, and its
bytes over --making to be gathered and converted. In one run, with the next bucket made while one is
sent, and one after the other:

- processes: gloo ranks, two servers in processes of their own (`weight_sink.py`), HTTP and all code
  of an update. Their pause is `engine/weight_update_pause_s`. What it has beyond the bytes is the
  cost of a message on this machine;
- ranks: 1,024 simulated ranks in one process (`simulated_ranks.py`) with the weights of
  Qwen3-235B-A22B on the meta device: the code of every rank, its plan and its turns; the answer of
  the servers to each message takes --answer-ms.

The exit status is 1 where a ratio with overlap is above --limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import read_hf_model
from benchmarks.bench_common import machine, write_json
from benchmarks.bench_weight_plane import CASES, MIB, meta_chunks, planned_once
from benchmarks.bench_weights import build, make_config
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity.steps import parallel
from benchmarks.simulated_ranks import SimulatedRank, run_simulated
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.servers.http import Deadlines, Retries
from slime_like.servers.requests import RequestSettings
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.transports import broadcast, broadcast_ranks
from slime_like.weight_sync.transports.broadcast import BroadcastTransport
from slime_like.weight_sync.transports.broadcast_ranks import BroadcastOrder, Membership, Turns
from slime_like.weight_sync.transports.overlap import Handover
from slime_like.weight_sync.updater import WeightUpdater
from slime_like.weights.buckets import Bucket
from slime_like.weights.export_plan import BucketPlan
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_export import HfExport

SERIAL = "one after the other"
OVERLAPPED = "overlapped"
MODES = (SERIAL, OVERLAPPED)
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200.0


class InTurn(Handover):
    """Buckets that are made when the sender asks for them, as without a second thread."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        super().__init__()
        self._buckets = buckets

    def __next__(self) -> Bucket:
        return next(self._buckets)


def send_one_by_one(
    buckets: Iterator[Bucket],
    send: Callable[[Handover], None],
    not_made: Callable[[BaseException], None] = lambda error: None,
) -> None:
    send(InTurn(buckets))
    for _ in buckets:  # the collectives after the last one that is sent from here
        pass


@contextmanager
def sent(mode: str) -> Iterator[None]:
    """`mode`: of `MODES`."""
    with ExitStack() as stack:
        if mode == SERIAL:
            for module in (broadcast, broadcast_ranks):
                stack.enter_context(mock.patch.object(module, "send_while_made", send_one_by_one))
        yield


def at_least(seconds: float, begun: float) -> None:
    time.sleep(max(0.0, begun + seconds - time.monotonic()))


@contextmanager
def simulated_making(bytes_per_s: float) -> Iterator[None]:
    collect = WeightStream._collect

    def slowed(self: WeightStream, planned: BucketPlan) -> Tensor | None:
        begun = time.monotonic()
        flat = collect(self, planned)
        if flat is not None:
            at_least(planned.nbytes / bytes_per_s, begun)
        return flat

    with mock.patch.object(WeightStream, "_collect", slowed):
        yield


# --- processes


def measure(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """On every rank. Returns the pauses by mode, in seconds; and the bytes and messages of an
    update."""
    pauses: dict[str, list[float]] = {mode: [] for mode in MODES}
    with parallel(*arguments["layout"]) as layout, simulated_making(arguments["making"]):
        chunks, hf, gpt = build(arguments["folder"], layout)
        export = HfExport(
            chunks, hf=hf, gpt=gpt, layout=layout, bucket_bytes=arguments["bucket_bytes"]
        )
        plan = export.stream().plan
        engine = engine_on(rank, arguments)
        engine.update_weights(export.stream(), 1)  # joins the groups
        version = 1
        for _ in range(arguments["repeats"]):
            for mode in MODES:
                version += 1
                with sent(mode):
                    dist.barrier()
                    engine.update_weights(export.stream(), version)
                assert engine.weight_version == version
                pause = engine.take_metrics().get("engine/weight_update_pause_s", 0.0)
                pauses[mode].append(pause)
        engine.close()
    return {
        "pauses": pauses,
        "bytes": sum(planned.nbytes for planned in plan),
        "messages": len(plan),
    }


def engine_on(rank: int, arguments: dict[str, Any]) -> SglangEngine:
    deadlines = Deadlines(30.0, TIMEOUT_S, TIMEOUT_S)
    requests = RequestSettings(deadlines, Retries(1, 0.01, 0.02), 4)
    pool: ServerPool | None = None
    updater: WeightUpdater | None = None
    if rank == 0:
        health = HealthSettings(interval_s=600.0, timeout_s=60.0, start_s=120.0, failed_probes=3)
        pool = ServerPool(arguments["urls"], [], None, health, 30.0, api=SglangApi())
        pool.start()
        settings = UpdateSettings(timeout_s=TIMEOUT_S, keep_copy=arguments["keeps_copy"])
        updater = WeightUpdater(pool, settings, arguments["folder"], torch.device("cpu"))
    return SglangEngine(pool, updater, requests, arguments["folder"], check_updates=False)


@contextmanager
def sinks(count: int, bytes_per_s: float) -> Iterator[list[str]]:
    """Addresses of servers."""
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weight_sink", str(bytes_per_s)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls


@dataclass(frozen=True, slots=True)
class Processes:
    """Ranks in processes, and who sends."""

    senders: str
    ranks: int
    layout: Sequence[int]  # tensor, pipeline, virtual, expert and expert-tensor
    keeps_copy: bool  # rank 0 sends everything


PROCESSES = (
    Processes("rank 0", 2, (2, 1, 1, 1, 2), keeps_copy=True),
    Processes("4 ranks", 4, (1, 2, 1, 2, 1), keeps_copy=False),
)


def of_processes(given: argparse.Namespace) -> list[dict[str, Any]]:
    link = given.process_link * MIB
    rows = []
    for case in PROCESSES:
        with tempfile.TemporaryDirectory(prefix="bench_pause_") as folder, sinks(2, link) as urls:
            model = Path(folder) / "model"
            make_config(model, experts=64, layers=given.layers, hidden=256)
            arguments = {
                "folder": str(model), "layout": case.layout, "urls": urls, "repeats": given.repeats,
                "keeps_copy": case.keeps_copy, "making": link * given.making / given.link,
                "bucket_bytes": 4 * MIB,
            }  # fmt: skip
            worker = "benchmarks.bench_update_pause:measure"
            ranks = run_ranks(worker, case.ranks, Path(folder) / "run", arguments, TIMEOUT_S)
        found = ranks[0]
        for mode, pauses in found["pauses"].items():
            rows.append(
                row("processes", case.ranks, case.senders, mode, found["bytes"], found["messages"],
                    found["bytes"] / link, min(pauses))
            )  # fmt: skip
    return rows


def row(
    part: str,
    ranks: int,
    senders: object,
    mode: str,
    nbytes: int,
    messages: int,
    wire_s: float,
    pause_s: float,
) -> dict[str, Any]:
    """wire_s: of the bytes alone."""
    found = {
        "part": part, "ranks": ranks, "senders": senders, "mode": mode, "bytes": nbytes,
        "messages": messages, "wire_s": wire_s, "pause_s": pause_s, "ratio": pause_s / wire_s,
        "beyond_ms": 1e3 * (pause_s - wire_s) / messages,
    }  # fmt: skip
    print(
        f"{ranks:5} ranks, senders: {senders!s:7} {mode:19} {messages:4} messages, "
        f"{nbytes / 2**30:7.2f} GiB, bytes alone {wire_s:7.2f} s, pause {pause_s:7.2f} s, ratio "
        f"{pause_s / wire_s:.3f}, beyond {found['beyond_ms']:.1f} ms a message",
        flush=True,
    )
    return found


# --- simulated ranks


class Wire:
    """The link to the servers. One bucket at a time is on it."""

    def __init__(self, plan: Sequence[BucketPlan], bytes_per_s: float) -> None:
        self.arrived = [threading.Event() for _ in plan]
        self._bytes_per_s = bytes_per_s
        self._numbers = iter(range(len(plan)))

    def send(self, nbytes: int) -> None:
        number = next(self._numbers)
        time.sleep(nbytes / self._bytes_per_s)
        self.arrived[number].set()


class SimulatedMember:
    """Instead of `Member`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def broadcast(self, flat: Tensor, wait: object) -> None:
        self._wire.send(flat.nbytes)

    def abandon(self) -> None: ...


class SimulatedServers:
    """Instead of `BroadcastGroup`: the servers, as rank 0 calls them for a bucket of any sender."""

    def __init__(self, wire: Wire, answer_s: float) -> None:
        self._wire = wire
        self._answer_s = answer_s
        self._number = -1

    def send(
        self,
        tensors: object,
        flat: Tensor | None,
        version: int,
        *,
        is_last: bool,
        stopped: Callable[[], None],
    ) -> None:
        self._number += 1
        if flat is not None:
            self._wire.send(flat.nbytes)
        while not self._wire.arrived[self._number].wait(30):
            stopped()
        time.sleep(self._answer_s)


class SimulatedUpdates:
    """Updates of simulated ranks. `run` is the work of one of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.case = CASES[given.model]
        self.folder = str(self.case.folder)
        self.sizes = self.case.sizes[given.ranks]
        self.link = given.link * 2**30
        self._bucket_bytes = int(given.bucket_mib * MIB)
        self._answer_s = given.answer_ms / 1e3
        self._hf = read_hf_model(self.folder)
        self._chunks, self._gpt = meta_chunks(self.folder, self._hf, self.sizes, given.ranks)
        self._together = threading.Barrier(given.ranks)
        self._members: dict[int, Membership] = {}  # by thread
        self._exports: dict[int, HfExport] = {}  # by rank
        self.store = dist.HashStore()
        self.wire: Wire | None = None
        self.plan: Sequence[BucketPlan] = ()

    def membership(self, order: BroadcastOrder) -> Membership:
        """Instead of `BroadcastOrder._join`."""
        return self._members[threading.get_ident()]

    def run(self, simulated: SimulatedRank) -> float:
        """Returns the seconds that an update takes from the order on."""
        layout = simulated.layout
        rank = dist.get_rank()
        if rank not in self._exports:
            self._exports[rank] = HfExport(
                self._chunks[layout.pp_rank, layout.ep_rank], hf=self._hf, gpt=self._gpt,
                layout=layout, bucket_bytes=self._bucket_bytes,
            )  # fmt: skip
        weights = self._exports[rank].stream()
        weights._layout = layout  # the groups of this world
        if rank == 0:
            self.plan = weights.plan
            self.store = dist.HashStore()
            self.wire = Wire(weights.plan, self.link)
        self._together.wait(TIMEOUT_S)
        start = time.monotonic()
        assert self.wire is not None
        if rank == 0:
            servers: Any = SimulatedServers(self.wire, self._answer_s)
            transport = BroadcastTransport.__new__(BroadcastTransport)
            transport._groups = {planned.sender: servers for planned in weights.plan}
            turns = Turns(self.store, "update")
            broadcast.send_while_made(
                weights.own().buckets(),
                lambda own: transport._take_turns(weights.plan, own, 1, turns),
            )
        else:
            member: Any = SimulatedMember(self.wire)
            self._members[threading.get_ident()] = Membership("groups", self.store, member)
            order = BroadcastOrder("groups", "", 0, 2, "gloo", TIMEOUT_S, "update")
            order.assist(weights)
        return time.monotonic() - start


def of_simulated_ranks(given: argparse.Namespace) -> list[dict[str, Any]]:
    updates = SimulatedUpdates(given)
    rows = []
    for mode in MODES:
        with (
            planned_once(),
            sent(mode),
            simulated_making(given.making * 2**30),
            mock.patch.object(BroadcastOrder, "_join", lambda order: updates.membership(order)),
        ):
            pause = run_simulated(given.ranks, updates.sizes, updates.run, 2 * TIMEOUT_S)[0]
        total = sum(planned.nbytes for planned in updates.plan)
        senders = len({planned.sender for planned in updates.plan})
        rows.append(
            row("ranks", given.ranks, senders, mode, total, len(updates.plan), total / updates.link,
                pause)
        )  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("processes", "ranks")
    parser.add_argument("--part", choices=parts, nargs="*", default=parts)
    parser.add_argument("--model", default="qwen3-235b-a22b", choices=list(CASES)[1:])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--link", type=float, default=4.0, help="GiB/s, of the simulated ranks")
    parser.add_argument("--making", type=float, default=4.0, help="GiB/s of each sender")
    parser.add_argument("--answer-ms", type=float, default=5.0, help="of the servers to a message")
    parser.add_argument("--process-link", type=float, default=16.0, help="MiB/s, of the processes")
    parser.add_argument("--layers", type=int, default=4, help="of the processes' model")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(machine(), flush=True)
    rows = []
    if "processes" in given.part:
        rows += of_processes(given)
    if "ranks" in given.part:
        rows += of_simulated_ranks(given)
    write_json(given.json, rows)
    return int(any(r["ratio"] > given.limit for r in rows if r["mode"] == OVERLAPPED))


if __name__ == "__main__":
    sys.exit(main())

"""Communication and memory of a weight update, counted for up to 1,024 ranks simulated in one
process: the real code of every rank, over counting process groups, with weights on the meta device.

    python benchmarks/bench_weight_plane.py [--only qwen3-235b] [--ranks 8 64 1024] [--json F]

Ways, as in bench_weights.py: "own" is what several senders to servers have, "rank zero" what one
has, "everywhere" what engines in the trainer's processes get. Collectives: each counted once over
its ranks. For the others the rank that has most. `tests/dist/test_weight_plane.py` holds all of
these to gloo processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from torch import Tensor

from arguments.hf.model import HfModel, read_hf_model
from arguments.schema import GPTModelConfig
from benchmarks.bench_common import write_json
from benchmarks.bench_weights import build, make_config
from benchmarks.parity.steps import parallel
from benchmarks.simulated_ranks import LayoutSizes, SimulatedRank, run_simulated
from slime_like.conversion.network import conversion_layout
from slime_like.megatron.model.meta import OnMeta
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.preflight.fake_world import world_as_rank
from slime_like.preflight.live_bytes import LiveBytes, group_key
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weights import hf_export
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_export import HfExport

T = TypeVar("T")
MIB = 2**20
GIB = 2**30
WAYS = ("own", "rank zero", "everywhere")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Counted:
    """Counts of one rank for one update, or for the work before the first one ("set-up")."""

    # calls and bytes (the larger of input and output), by "collective group"
    traffic: dict[str, list[int]] = field(default_factory=dict)
    peak: int = 0  # peak bytes of live tensors without the model
    # sent, received: bytes between ranks; None for real processes
    sent: int | None = None
    received: int | None = None
    # messages, handed: number and bytes of buckets that this rank sends to engines
    messages: int = 0
    handed: int = 0


@dataclass(frozen=True, slots=True)
class CountOrder:
    """An order that counts the buckets for engines without sending them."""

    def assist(self, weights: WeightStream) -> None:
        _handed[dist.get_rank()] = _take(weights.own().buckets())


_handed: dict[int, tuple[int, int]] = {}  # messages and bytes, by rank


def _take(buckets: Iterable[Any]) -> tuple[int, int]:
    messages = size = 0
    for bucket in buckets:
        messages += 1
        size += bucket.flat.nbytes
        del bucket
    return messages, size


def update(way: str, weights: WeightStream, bucket_bytes: int) -> tuple[int, int]:
    """Run one update on this rank with the code of the transports; returns number and bytes of
    messages to engines."""
    if way == "everywhere":
        return _take(weights.buckets())
    ranks = SendingRanks(weights, bucket_bytes)
    if dist.get_rank() != 0:
        _handed[dist.get_rank()] = 0, 0
        ranks.assist()
        return _handed.pop(dist.get_rank())
    if way == "rank zero":
        return _take(ranks.gathered().buckets())
    order = CountOrder()
    order.assist(ranks.order(order))
    return _handed.pop(0)


Counting = Callable[[LiveBytes | None], Counted]  # counts since its last call


def count_ways(
    export: HfExport,
    weights: Iterable[Tensor],
    layout: ParallelLayout,
    bucket_bytes: int,
    counting: Counting,
    ways: Iterable[str] = WAYS,
) -> dict[str, Counted]:
    """Count an update in each way, on one rank. weights: the model's."""
    found: dict[str, Counted] = {}
    for way in ways:
        live = LiveBytes(groups_of(layout))
        live.ignore(weights)
        with live:
            messages, handed = update(way, export.stream(), bucket_bytes)
        found[way] = counting(live)
        found[way].peak = live.peak
        found[way].messages = messages
        found[way].handed = handed
    return found


def count_real(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """`count_ways` on a gloo process, with weights on the CPU; see `run_ranks`."""
    sizes = LayoutSizes(**arguments["sizes"])
    bucket_bytes = arguments["bucket_bytes"]

    def counting(live: LiveBytes | None) -> Counted:
        assert live is not None
        return Counted({" ".join(key): [t.calls, t.bytes] for key, t in live.traffic.items()})

    with parallel(sizes.tp, sizes.pp, 1, sizes.ep, sizes.etp, sizes.cp) as layout:
        chunks, hf, gpt = build(arguments["folder"], layout)
        with LiveBytes(groups_of(layout)) as live:
            export = HfExport(chunks, hf=hf, gpt=gpt, layout=layout, bucket_bytes=bucket_bytes)
        found = {"set-up": counting(live)}
        found |= count_ways(export, weights_of(chunks), layout, bucket_bytes, counting)
    return {way: asdict(counted) for way, counted in found.items()}


def count_simulated(
    folder: str,
    sizes: LayoutSizes,
    world: int,
    bucket_bytes: int,
    ways: Iterable[str] = WAYS,
    timeout_s: float = 3000.0,
) -> list[dict[str, Counted]]:
    """`count_ways` on all simulated ranks, with weights on the meta device."""
    hf = read_hf_model(folder)
    chunks_at, gpt = meta_chunks(folder, hf, sizes, world)

    def work(rank: SimulatedRank) -> dict[str, Counted]:
        layout = rank.layout
        counting = counting_of(rank)
        chunks = chunks_at[layout.pp_rank, layout.ep_rank]
        export = HfExport(chunks, hf=hf, gpt=gpt, layout=layout, bucket_bytes=bucket_bytes)
        found = {"set-up": counting(None)}
        weights = weights_of(chunks)
        return found | count_ways(export, weights, layout, bucket_bytes, counting, ways)

    with planned_once():
        return run_simulated(world, sizes, work, timeout_s)


def weights_of(chunks: list[Any]) -> list[Tensor]:
    return [w for chunk in chunks for w in (*chunk.parameters(), *chunk.buffers())]


def groups_of(layout: ParallelLayout) -> dict[int, str]:
    """Names of the groups that an update uses, by `group_key`."""
    names = ("tp", "pp", "ep", "etp")
    found = {group_key(getattr(layout, f"{name}_group")): name for name in names}
    return found | {group_key(dist.group.WORLD): "world"}  # type: ignore[arg-type]


def counting_of(rank: SimulatedRank) -> Counting:
    def counting(_: LiveBytes | None) -> Counted:
        groups = rank.groups.values()
        calls = {}
        for group in groups:
            for kind, traffic in group.traffic.items():
                calls[f"{kind} {group.label}"] = [traffic.calls, traffic.bytes]
        found = Counted(
            calls,
            sent=sum(group.sent for group in groups),
            received=sum(group.received for group in groups),
        )
        for group in groups:
            group.traffic = {}
            group.sent = 0
            group.received = 0
        return found

    return counting


def meta_chunks(
    folder: str, hf: HfModel, sizes: LayoutSizes, world: int
) -> tuple[dict[tuple[int, int], list[Any]], GPTModelConfig]:
    """Model chunks by pipeline stage and expert-parallel rank: megatron-core's modules on the meta
    device. Tensor- and data-parallel ranks have equal shapes."""
    parallelism = conversion_layout(
        hf, tensor=sizes.tp, pipeline=sizes.pp, expert=sizes.ep, expert_tensor=sizes.etp
    )
    first: dict[tuple[int, int], int] = {}
    groups = sizes.groups(world)
    stages = {r: place for ranks in groups["pp"] for place, r in enumerate(ranks)}
    experts = {r: place for ranks in groups["ep"] for place, r in enumerate(ranks)}
    for rank in range(world):
        first.setdefault((stages[rank], experts[rank]), rank)
    found = {}
    for place, rank in first.items():
        with (
            world_as_rank(parallelism, virtual_stages=None, rank=rank, world_size=world) as layout,
            OnMeta(),
        ):
            assert (layout.pp_rank, layout.ep_rank) == place
            found[place], _, gpt = build(folder, layout)
    return found, gpt


@contextmanager
def planned_once() -> Iterator[None]:
    """Compute plans that are equal on all ranks only once for the simulated ranks: a thousand plans
    of a large model would take an hour and all memory. Checks that the exchanged inputs are
    equal."""
    with (
        mock.patch.object(hf_export, "family_map", _once(hf_export.family_map, key=0)),
        mock.patch.object(hf_export, "_parameters", _once(hf_export._parameters)),
        mock.patch.object(hf_export, "plan_buckets", _once(hf_export.plan_buckets)),
    ):
        yield


def _once(function: Callable[..., T], key: int | None = None) -> Callable[..., T]:
    """Cache a function over ranks. key: index of the only argument that is compared."""
    lock = threading.Lock()
    known: list[tuple[Any, T]] = []

    def call(*positional: Any, **named: Any) -> T:
        given = positional if key is None else positional[key]
        with lock:
            if not known:
                known.append((given, function(*positional, **named)))
        assert known[0][0] == given, f"{function.__name__}: ranks differ"
        return known[0][1]

    return call


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the layouts in which it is sent."""

    folder: Path | None  # folder with a config.json; None: the model of bench_weights.py
    bucket_bytes: int
    sizes: Mapping[int, LayoutSizes]  # layout sizes by number of ranks


def _wide(tp: int, pp: int, most_ep: int) -> dict[int, LayoutSizes]:
    """Layouts with as many expert-parallel ranks as possible, up to `most_ep`."""
    return {
        world: LayoutSizes(tp, pp, min(most_ep, world // pp), 1)
        for world in (8, 64, 256, 1024)
        if world >= tp * pp
    }


EXAMPLES = ROOT / "examples/preflight"
CASES = {
    "64 experts": Case(
        None, 4 * MIB, {world: LayoutSizes(2, 2, 4, 1) for world in (8, 16, 32, 64, 256, 1024)}
    ),
    "qwen3-235b-a22b": Case(EXAMPLES / "qwen3_235b_a22b", 512 * MIB, _wide(4, 2, 64)),
    "qwen3-32b": Case(
        EXAMPLES / "qwen3_32b",
        512 * MIB,
        {world: LayoutSizes(8, min(8, world // 8)) for world in (8, 64, 256, 1024)},
    ),
}


def row(way: str, of_ranks: list[dict[str, Counted]], sizes: LayoutSizes) -> dict[str, float]:
    """Table row of one way, aggregated over all ranks."""
    counted = [found[way] for found in of_ranks]
    members = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep, "world": len(of_ranks)}
    members["etp"] = sizes.tp if sizes.etp is None else sizes.etp
    calls: dict[str, int] = defaultdict(int)
    for one in counted:
        for name, (number, _) in one.traffic.items():
            calls[name] += number
    collectives = sum(
        number / (2 if name.startswith(("send", "recv")) else members[name.split()[1]])
        for name, number in calls.items()
    )
    return {
        "collectives": round(collectives),
        "sent_mib": max(one.sent or 0 for one in counted) / MIB,
        "received_mib": max(one.received or 0 for one in counted) / MIB,
        "peak_mib": max(one.peak for one in counted) / MIB,
        "senders": sum(one.handed > 0 for one in counted),
        "messages": sum(one.messages for one in counted),
        "handed_mib": max(one.handed for one in counted) / MIB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--ranks", type=int, nargs="*", help="of the cases' numbers of ranks")
    parser.add_argument("--ways", choices=WAYS, nargs="*", default=list(WAYS))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_config(Path(folder), experts=64, layers=8, hidden=256)
        for name in given.only:
            case = CASES[name]
            for world, sizes in case.sizes.items():
                if given.ranks and world not in given.ranks:
                    continue
                started = time.perf_counter()
                of_ranks = count_simulated(
                    str(case.folder or folder), sizes, world, case.bucket_bytes, given.ways
                )
                seconds = time.perf_counter() - started
                print(f"\n{name}, {world} ranks, {sizes}: counted in {seconds:.0f} s", flush=True)
                for way in ("set-up", *given.ways):
                    found = row(way, of_ranks, sizes)
                    rows.append({"case": name, "ranks": world, "way": way, **found})
                    shown = "  ".join(f"{key} {value:.4g}" for key, value in found.items())
                    print(f"{way:11} {shown}", flush=True)
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Many ranks in one process: the code of every rank runs in a separate thread, over process groups
that count what goes through them.

    ranks = run_simulated(1024, LayoutSizes(tp=4, pp=2, ep=64, etp=1), work)

`work(rank)` calls torch.distributed as in a separate process. Tensors on the meta device travel as
sizes, others with their bytes. What is not simulated is time. `tests/dist/test_weight_plane.py`
holds the counts to those of gloo processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

import megatron_patches

megatron_patches.apply()

from megatron.core.parallel_state import RankGenerator  # noqa: E402

from slime_like.megatron.parallel_layout import MegatronState, ParallelLayout  # noqa: E402
from slime_like.preflight.live_bytes import MemoryTraffic  # noqa: E402

T = TypeVar("T")
Posted = dict[int, Any]  # tensors, by rank within the group
Move = Callable[[Posted], None]
Outputs = list[list[Tensor]]
STACK_BYTES = 2**21
ORDER = "tp-cp-ep-dp-pp"  # megatron-core's order: adjacent ranks are tensor-parallel


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """Sizes of a layout; the remaining factor is data-parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None  # None: equal to `tp`
    cp: int = 1

    def groups(self, world: int) -> dict[str, list[list[int]]]:
        """Ranks of all groups by dimension name, as created by megatron-core."""
        etp = self.tp if self.etp is None else self.etp
        dense = world // (self.tp * self.cp * self.pp)
        sparse = world // (etp * self.ep * self.pp)
        if (
            dense * self.tp * self.cp * self.pp != world
            or sparse * etp * self.ep * self.pp != world
        ):
            raise ValueError(f"{self} does not divide {world} ranks")
        of_dense = RankGenerator(self.tp, 1, dense, self.pp, self.cp, ORDER)
        of_experts = RankGenerator(etp, self.ep, sparse, self.pp, 1, ORDER)
        found = {name: of_dense.get_ranks(name) for name in ("tp", "pp", "cp", "dp", "dp-cp")}
        return {
            **found,
            "ep": of_experts.get_ranks("ep"),
            "etp": of_experts.get_ranks("tp"),
            "etp-ep": of_experts.get_ranks("tp-ep"),
            "expert_dp": of_experts.get_ranks("dp"),
        }


class SimulationFailed(RuntimeError):
    """A rank has failed, ranks call different collectives, or there is a deadlock."""


@dataclass(slots=True)
class _Call:
    """One collective or message of `size` ranks."""

    kind: str
    size: int
    posted: Posted = field(default_factory=dict)  # tensors by rank within the group
    done: threading.Event = field(default_factory=threading.Event)


class SimulatedWorld:
    """State shared by the ranks of a world."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._calls: dict[tuple[Hashable, ...], _Call] = {}

    def post(
        self, key: tuple[Hashable, ...], kind: str, place: int, size: int, tensors: Any, move: Move
    ) -> _Call:
        """Post tensors for a collective; the last of `size` ranks moves the data of all."""
        with self._lock:
            if self.failure is not None:
                raise SimulationFailed("another rank has failed")
            call = self._calls.setdefault(key, _Call(kind, size))
            if call.kind != kind:
                raise SimulationFailed(f"{key}: a rank calls {kind}, another one {call.kind}")
            call.posted[place] = tensors
            is_last = len(call.posted) == size
        if is_last:
            with _disable_current_modes(), torch.no_grad():  # touches tensors of other ranks
                move(call.posted)
            call.posted = {}
            with self._lock:
                del self._calls[key]
            call.done.set()
        return call

    def wait(self, call: _Call) -> None:
        if not call.done.wait(max(0.0, self._deadline - time.monotonic())):
            here = sorted(call.posted)
            raise SimulationFailed(f"{call.kind} of {call.size} ranks: only {here[:9]} have come")
        if self.failure is not None:
            raise SimulationFailed("another rank has failed")

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = error
            for call in self._calls.values():
                call.done.set()


class _Work:
    def __init__(self, world: SimulatedWorld, call: _Call) -> None:
        self._world = world
        self._call = call

    def wait(self, timeout: Any = None) -> bool:
        self._world.wait(self._call)
        return True

    def is_completed(self) -> bool:
        return self._call.done.is_set()


class SimulatedGroup(dist.ProcessGroup):
    """One rank's process group. It implements the collectives that weight and sample exchange use;
    torch raises for others."""

    def __init__(self, world: SimulatedWorld, name: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.ranks = tuple(ranks)
        # by collective, counted as by `LiveBytes` in real processes
        self.traffic: dict[str, MemoryTraffic] = {}
        # bytes that this rank sends to and receives from others; a broadcast counts once for any
        # number of receivers
        self.sent = self.received = 0
        self.label = name
        self._world = world
        self._place = ranks.index(rank)
        self._numbers: dict[tuple[Hashable, ...], int] = {}

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return "simulated"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return f"{self.label} {self.ranks[0]}"

    def allgather(self, outputs: Outputs, inputs: list[Tensor], _: Any = None) -> _Work:  # type: ignore[override]
        def move(posted: Posted) -> None:
            for into, _ in posted.values():
                for place, tensor in enumerate(into[0]):
                    _copy(tensor, posted[place][1][0])

        received = _bytes(inputs) * (self.size() - 1)
        return self._collective("allgather", (outputs, inputs), move, _bytes(inputs), received)

    def all_gather_single(self, output: Tensor, own: Tensor, _: Any = None) -> _Work:  # type: ignore[override]
        def move(posted: Posted) -> None:
            for into, _ in posted.values():
                for place, part in enumerate(into.chunk(self.size())):
                    _copy(part, posted[place][1])

        received = own.nbytes * (self.size() - 1)
        return self._collective("allgather_base", (output, own), move, own.nbytes, received)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:  # type: ignore[override]
        """Supports only sums. Counted as sent and received once."""
        assert options.reduceOp == dist.ReduceOp.SUM

        def move(posted: Posted) -> None:
            total = torch.stack([posted[place][0][0] for place in range(self.size())]).sum(0)
            for (into,) in posted.values():
                into[0].copy_(total)

        size = _bytes(tensors)
        return self._collective("allreduce", (tensors,), move, size, size)

    def barrier(self, opts: Any = None) -> _Work:  # type: ignore[override]
        return self._post(("collective",), "barrier", self.size(), None, lambda _: None)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:  # type: ignore[override]
        root = options.rootRank
        size = _bytes(tensors)

        def move(posted: Posted) -> None:
            for place, (into,) in posted.items():
                if place != root:
                    _copy(into[0], posted[root][0][0])

        sent, received = (size, 0) if self.rank() == root else (0, size)
        return self._collective("broadcast", (tensors,), move, sent, received)

    def gather(self, outputs: Outputs, inputs: list[Tensor], options: Any) -> _Work:  # type: ignore[override]
        root = options.rootRank
        size = _bytes(inputs)

        def move(posted: Posted) -> None:
            for place, tensor in enumerate(posted[root][0][0]):
                _copy(tensor, posted[place][1][0])

        received = size * (self.size() - 1)
        sent, received = (0, received) if self.rank() == root else (size, 0)
        return self._collective("gather", (outputs, inputs), move, sent, received)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> _Work:  # type: ignore[override]
        self._count("send", _bytes(tensors), _bytes(tensors), 0)
        return self._message(self.rank(), destination, tag, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:  # type: ignore[override]
        self._count("recv", _bytes(tensors), 0, _bytes(tensors))
        return self._message(source, self.rank(), tag, tensors)

    def _message(self, source: int, destination: int, tag: int, tensors: list[Tensor]) -> _Work:
        def move(posted: Posted) -> None:
            _copy(posted[destination][0], posted[source][0])

        return self._post(("message", source, destination, tag), "message", 2, tensors, move)

    def _collective(
        self, kind: str, tensors: tuple[Any, ...], move: Move, sent: int, received: int
    ) -> _Work:
        self._count(kind, max(map(_bytes, tensors)), sent, received)
        # one sequence for all collectives, since all ranks of a group call them in the same order
        return self._post(("collective",), kind, self.size(), tensors, move)

    def _count(self, kind: str, size: int, sent: int, received: int) -> None:
        if self.size() > 1:
            traffic = self.traffic.setdefault(kind, MemoryTraffic())
            traffic.calls += 1
            traffic.bytes += size
            self.sent += sent
            self.received += received

    def _post(
        self, what: tuple[Hashable, ...], kind: str, size: int, tensors: Any, move: Move
    ) -> _Work:
        number = self._numbers[what] = self._numbers.get(what, -1) + 1
        key = (self.label, self.ranks[0], *what, number)
        return _Work(self._world, self._world.post(key, kind, self.rank(), size, tensors, move))


class _WorldOfThread(threading.local):
    """torch.distributed's registry of groups, separate for each thread."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[dist.ProcessGroup, tuple[str, None]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, None] = {}

    def add(self, group: SimulatedGroup) -> None:
        self.pg_map[group] = ("simulated", None)
        self.pg_names[group] = group.group_name
        self.pg_group_ranks[group] = {rank: place for place, rank in enumerate(group.ranks)}


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """A simulated rank."""

    layout: ParallelLayout
    groups: dict[str, SimulatedGroup]  # process groups by name, including "world"


def run_simulated(
    size: int, sizes: LayoutSizes, work: Callable[[SimulatedRank], T], timeout_s: float = 600.0
) -> list[T]:
    """Run `work` on all ranks; returns their results. Raises the first error of a rank, or
    SimulationFailed if ranks call different collectives or one takes longer than `timeout_s`."""
    world = SimulatedWorld(size, timeout_s)
    ranks_of = {**sizes.groups(size), "world": [list(range(size))]}
    own = {
        name: {rank: ranks for ranks in groups for rank in ranks}
        for name, groups in ranks_of.items()
    }
    state = MegatronState()
    of_threads = _WorldOfThread()
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            groups = {n: SimulatedGroup(world, n, own[n][rank], rank) for n in own}
            for group in groups.values():
                of_threads.add(group)
            of_threads.default_pg = groups["world"]
            results[rank] = work(SimulatedRank(_layout(size, rank, groups, state), groups))
        except BaseException as error:
            world.fail(error)

    before = threading.stack_size(STACK_BYTES)
    try:
        with mock.patch.object(dist.distributed_c10d, "_world", of_threads):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        threading.stack_size(before)
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(size)]


def _layout(
    size: int, rank: int, groups: dict[str, SimulatedGroup], state: MegatronState
) -> ParallelLayout:
    """The layout of this rank, as `read_layout` would return it."""
    fields: dict[str, Any] = {}
    for name in ("tp", "pp", "cp", "dp", "ep", "etp"):
        fields[f"{name}_size"] = groups[name].size()
        fields[f"{name}_rank"] = groups[name].rank()
        fields[f"{name}_group"] = groups[name]
    return ParallelLayout(
        world_size=size,
        rank=rank,
        vp_size=1,
        expert_dp_rank=groups["expert_dp"].rank(),
        dp_cp_group=groups["dp-cp"],
        etp_ep_group=groups["etp-ep"],
        state=state,
        **fields,
    )


def _copy(into: Tensor, source: Tensor) -> None:
    if into.nbytes != source.nbytes:
        raise SimulationFailed(f"{source.nbytes} bytes for a buffer of {into.nbytes}")
    if not into.is_meta and not source.is_meta:
        into.copy_(source)


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_iter(tensors) if isinstance(t, Tensor))

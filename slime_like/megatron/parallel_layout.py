"""The only reader of megatron-core's parallel state. All other code gets a `ParallelLayout`.

megatron-core keeps groups, sizes and ranks in module globals, which tensor-parallel layers,
optimizer factory, schedules, random states and checkpoint names read. Networks with different
layouts in one process therefore take turns: each layout has its own set of these globals, and
`ParallelLayout.activate` installs it while its network is in use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
# the globals that make up a layout, without the list of all groups
STATE_NAME = re.compile("_[A-Z][A-Z_]*$")


class MegatronState:
    """State of megatron-core and torch for one layout: the globals of `parallel_state`, and the
    random states, which differ between the ranks of a layout. Mutable: both advance while the
    layout is active."""

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        """Save the active state."""
        from slime_like.megatron.rng import RandomStates

        self.globals = parallel_globals()
        self.random = RandomStates.now()

    def activate(self) -> None:
        from megatron.core import parallel_state

        vars(parallel_state).update(self.globals)
        self.random.restore()

    @property
    def is_active(self) -> bool:
        from megatron.core import parallel_state

        return parallel_state._MODEL_PARALLEL_GROUP is self.globals["_MODEL_PARALLEL_GROUP"]


def parallel_globals() -> dict[str, object]:
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if STATE_NAME.match(name)}


_layout_switched = False  # within `activate` of a layout that was not active


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes, ranks and process groups of this process. `dp_*` excludes context parallelism,
    `dp_cp_group` includes it. A model replica spans tensor-, context- and pipeline-parallel ranks.
    Experts use a separate grid of expert-tensor-, expert- and pipeline-parallel ranks, which may
    span several data-parallel ranks."""

    world_size: int
    rank: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    vp_size: int  # model chunks on this rank; 1 without the interleaved schedule
    cp_size: int
    cp_rank: int
    dp_size: int
    dp_rank: int
    ep_size: int  # ranks that share the experts
    ep_rank: int
    etp_size: int  # ranks that share each expert's matrices
    etp_rank: int
    expert_dp_rank: int  # among the ranks that hold the same part of the same experts
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    etp_ep_group: dist.ProcessGroup  # of both, by expert-parallel rank first
    state: MegatronState = field(repr=False, compare=False)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this megatron-core's active layout within the block. Blocks may only nest with the
        same layout."""
        global _layout_switched
        if self.state.is_active:
            yield
            return
        assert not _layout_switched, "layouts do not nest: another one is active"
        previous = MegatronState()
        _layout_switched = True
        self.state.activate()
        try:
            yield
        finally:
            self.state.save()
            previous.activate()
            _layout_switched = False

    @property
    def is_first_stage(self) -> bool:
        """Whether this pipeline stage has the embedding (in its first model chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this pipeline stage has the output layer (in its last model chunk), and so
        computes losses and log-probs."""
        return self.pp_rank == self.pp_size - 1

    def describe(self) -> str:
        vp = f" VP{self.vp_size}" if self.vp_size > 1 else ""
        experts = ""
        if self.ep_size > 1 or self.etp_size != self.tp_size:
            experts = f" EP{self.ep_size} ETP{self.etp_size}"
        return f"TP{self.tp_size} PP{self.pp_size}{vp} CP{self.cp_size} DP{self.dp_size}{experts}"


class HasLayout(Protocol):
    @property
    def layout(self) -> ParallelLayout: ...


Self = TypeVar("Self", bound=HasLayout)


def with_layout_active(
    method: Callable[Concatenate[Self, P], R],
) -> Callable[Concatenate[Self, P], R]:
    """Decorator: activate the object's `layout` for the call."""

    @wraps(method)
    def call(self: Self, *positional: P.args, **named: P.kwargs) -> R:
        with self.layout.activate():
            return method(self, *positional, **named)

    return call


@contextmanager
def without_layout() -> Iterator[None]:
    """Reset megatron-core's parallel state within the block, to create another layout; the previous
    one is active again afterwards."""
    from megatron.core import parallel_state

    previous = MegatronState()
    vars(parallel_state).update(
        {name: {} if isinstance(value, dict) else None for name, value in previous.globals.items()}
    )
    try:
        yield
    finally:
        previous.activate()


def read_layout() -> ParallelLayout:
    """The layout after `initialize_model_parallel` and the seeding of random states."""
    from megatron.core import parallel_state as mpu

    return ParallelLayout(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        vp_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp_size=mpu.get_context_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        expert_dp_rank=mpu.get_expert_data_parallel_rank(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        ep_group=mpu.get_expert_model_parallel_group(),
        etp_group=mpu.get_expert_tensor_parallel_group(),
        etp_ep_group=mpu.get_expert_tensor_and_model_parallel_group(),
        state=MegatronState(),
    )

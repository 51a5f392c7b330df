"""A network as megatron-core's checkpointing sees it: names of tensors, global shapes, this rank's
part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime_like.megatron.muon import is_muon
from slime_like.megatron.optimizer import allocate_moments, plain_optimizers
from slime_like.megatron.parallel_layout import ParallelLayout, in_own_layout

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.module import MegatronModule


# the format that can be loaded into another layout; megatron-core's default breaks without
# Transformer Engine
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# A layer of megatron-core's local modules and one of Transformer Engine's, which has norms as
# parameters of the linear layer behind them, call these differently: the norm before a mixture of
# experts, and the norms of latent attention and before a dense layer beside it. (The others have
# Transformer Engine's names in checkpoints of megatron-core's local specification too.)
NAMES_OF_SPECS = (
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
EXTRA_STATE = "_extra_state"  # of fp8, which no flag asks for
# fp32 parameters of the distributed optimizer and of the plain one in half precision; a plain one
# in fp32 has the weights themselves
MAIN_PARAMS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
OWN_OPTIMIZER = "own_optimizer"
MUON = " of Muon"


@dataclass(frozen=True, slots=True)
class SavedNetwork:
    """chunks: this rank's megatron-core modules, unwrapped. optimizer: None leaves it out.
    scheduler: None for a network without one."""

    chunks: Sequence[MegatronModule]
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    layout: ParallelLayout


def layouts_of(networks: Mapping[str, SavedNetwork]) -> dict[str, ParallelLayout]:
    """Each layout once, under the name of the first network that has it."""
    layouts: dict[str, ParallelLayout] = {}
    for name, network in networks.items():
        if all(network.layout is not layout for layout in layouts.values()):
            layouts[name] = network.layout
    return layouts


@in_own_layout
def sharded_state(network: SavedNetwork, *, is_loading: bool) -> ShardedStateDict:
    """Collective while saving with a distributed optimizer, whose parts are gathered."""
    if network.optimizer is not None:
        # one that has not stepped yet has no state, and what is not saved cannot be loaded
        allocate_moments(network.optimizer)
    metadata = dict(METADATA)  # megatron-core writes its process group into it
    state: ShardedStateDict = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(network.chunks)
    }
    for chunk in state.values():
        leave_out_extra_state(chunk)
    if network.optimizer is not None:
        state["optimizer"] = network.optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=metadata
        )
    return state


def leave_out_extra_state(chunk: dict[str, object]) -> None:
    """Linear layers have an extra state, of fp8: nothing in megatron-core's local ones, and in
    Transformer Engine's a tensor of bytes that is unpickled when it is loaded. It is neither
    written nor read. In place."""
    for name in [
        name
        for name, value in chunk.items()
        if isinstance(value, ShardedObject) and value.key.endswith(EXTRA_STATE)
    ]:
        del chunk[name]


def adapt_names(wanted: dict[str, object], available: Collection[str]) -> None:
    """Ask for what a checkpoint of the other layer specification (local, or Transformer Engine's)
    calls otherwise by the name that it has there. In place."""
    for tensor in _leaves(
        wanted, lambda leaf: isinstance(leaf, ShardedTensor | ShardedTensorFactory)
    ):
        tensor.key = available_name(tensor.key, available)


def prefer_main_params(wanted: dict[str, object], saved: Mapping[str, object]) -> None:
    """fp32 weights that resume from a half-precision run are the optimizer's fp32 numbers
    there, not the rounded ones that the model had. In place. wanted: of `sharded_state`, under the
    names of `adapt_names`. saved: storage metadata by name."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    for name, part in wanted.items():
        for value in (
            _leaves(part, lambda leaf: isinstance(leaf, kinds)) if name.startswith("model") else ()
        ):
            entry = saved.get(value.key)
            # what is no tensor there is told by `shape_problems`
            rounded = (
                isinstance(entry, TensorStorageMetadata)
                and value.data.dtype == torch.float32 != entry.properties.dtype
            )
            if rounded and (
                main := next((p + value.key for p in MAIN_PARAMS if p + value.key in saved), None)
            ):
                value.key = main


def available_name(name: str, available: Collection[str]) -> str:
    """`name`, or what a checkpoint of another layer specification or kind of optimizer calls it, if
    that is `available`."""
    prefix = next((p for p in MAIN_PARAMS if name.startswith(p)), None)
    alike = (
        [name]
        if prefix is None
        else [name, *(p + name.removeprefix(prefix) for p in (*MAIN_PARAMS, ""))]
    )
    for candidate in alike:
        if candidate in available:
            return candidate
        for pair in NAMES_OF_SPECS:
            for one, other in (pair, pair[::-1]):
                if one in candidate and (renamed := candidate.replace(one, other)) in available:
                    return renamed
    return name


def optimizer_kind(network: SavedNetwork) -> list[str]:
    """What the parts of a state depend on that are not tensors: the classes of the optimizer."""
    optimizer: object = network.optimizer
    parts = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    return [type(part).__name__ + _detail(part.optimizer) for part in parts]


def _detail(plain: Any) -> str:
    if isinstance(plain, HybridDeviceOptimizer):
        return " on the CPU"
    return MUON if is_muon(plain) else ""


def optimizer_name(kinds: Sequence[str]) -> str:
    """The value of --optimizer behind `optimizer_kind`."""
    return "muon" if any(kind.endswith(MUON) for kind in kinds) else "adam"


def optimizer_step(network: SavedNetwork) -> float:
    """Steps that Adam has taken; 0 for a fresh one."""
    for part in plain_optimizers(network.optimizer):
        steps = [state["step"] for state in part.state.values() if "step" in state] + [
            g["step"] for g in part.param_groups if "step" in g
        ]
        if steps:
            return float(steps[0])
    return 0.0


def set_step(common: object, step: float, *, distributed: bool = False) -> None:
    """In the part of an optimizer's state that is not tensors, in place: what its load_state_dict
    takes the step of Adam from. A distributed optimizer has it in its groups, a plain one in an
    entry of its own, which is not there before the first step."""
    if isinstance(common, list):
        for value in common:
            set_step(value, step, distributed=distributed)
    if not isinstance(common, dict):
        return
    distributed = distributed or "param_state_sharding_type" in common
    for group in common.get("param_groups", ()):
        if "step" in group:
            group["step"] = step
    # Muon has no step
    is_adam = any("betas" in group for group in common.get("param_groups", ()))
    if is_adam and not distributed:
        common.setdefault("state", {})["common_step"] = torch.tensor(step)
    for name, value in common.items():
        if name not in ("param_groups", "state"):
            set_step(value, step, distributed=distributed)


def shape_problems(wanted: dict[str, object], saved: Mapping[str, object]) -> list[str]:
    """How this model's tensors differ from those of a checkpoint: absent, or of another global
    shape. saved: storage metadata by name."""
    problems = []
    for tensor in sharded_tensors(wanted):
        there = saved.get(tensor.key)
        if there is None or not hasattr(there, "size"):
            problems.append(f"{tensor.key} is not in it")
        elif list(there.size) != list(tensor.global_shape) and not tensor.allow_shape_mismatch:
            problems.append(
                f"{tensor.key} is {list(there.size)} there and {list(tensor.global_shape)} here"
            )
    return list(dict.fromkeys(problems))


def sharded_tensors(state: dict[str, object]) -> Iterator[ShardedTensor]:
    """Every tensor of a state, those that factories make (gate and up projection of a gated MLP)
    included."""
    yield from _leaves(load_preprocess(state)[0], lambda value: isinstance(value, ShardedTensor))


def _leaves(container: Any, holds: Callable[[Any], bool]) -> Iterator[Any]:
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, dict | list):
            yield from _leaves(value, holds)
        elif holds(value):
            yield value

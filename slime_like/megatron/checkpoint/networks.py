"""Sharded state of a network for megatron-core's checkpointing: tensor names, global shapes and
this rank's shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
from slime_like.megatron.parallel_layout import ParallelLayout, with_layout_active
from slime_like.weights.parameter_map import TOWER

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.module import MegatronModule


T = TypeVar("T")

# the format that can be loaded in another layout; megatron-core's default fails without Transformer
# Engine
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# Parameters with different names in the local and the Transformer Engine layer spec, which fuses
# norms into the following linear layer: the norm before an MoE layer, and in models with MLA the
# input norm and the norms of the latents. (Other norms have Transformer Engine's names in
# checkpoints of the local spec too.)
NAMES_OF_SPECS = (
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
EXTRA_STATE = "_extra_state"  # for fp8, which no flag enables
# prefixes of fp32 parameters: of the distributed optimizer, and of the non-distributed one in half
# precision; in fp32 the latter uses the weights themselves
MAIN_PARAMS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
# in `shape_problems`: missing state of the optimizer, of a parameter of the tower
STATE_OF_TOWER = re.compile(rf"^optimizer\..*\.{re.escape(TOWER)}.* is not in it$")
OWN_OPTIMIZER = "own_optimizer"
MUON = " of Muon"


@dataclass(frozen=True, slots=True)
class SavedNetwork:
    """A network to save or load."""

    chunks: Sequence[MegatronModule]  # this rank's megatron-core modules, unwrapped
    optimizer: MegatronOptimizer | None  # None to leave it out
    scheduler: OptimizerParamScheduler | None  # None for a network without one
    layout: ParallelLayout
    layers_differ: bool = False  # in which of their parameters are trained


def layouts_of(networks: Mapping[str, SavedNetwork]) -> dict[str, ParallelLayout]:
    """The distinct layouts, each by the name of the first network that has it."""
    layouts: dict[str, ParallelLayout] = {}
    for name, network in networks.items():
        if all(network.layout is not layout for layout in layouts.values()):
            layouts[name] = network.layout
    return layouts


@with_layout_active
def sharded_state(network: SavedNetwork, *, is_loading: bool) -> ShardedStateDict:
    """Sharded state dict of model chunks and optimizer. Collective if it gathers a distributed
    optimizer for saving."""
    if network.optimizer is not None:
        # before its first step it has no state, and missing state could not be loaded
        allocate_moments(network.optimizer)
    metadata: dict[str, object] = dict(METADATA)
    state = _model_state(network.chunks, metadata)
    if network.optimizer is not None:
        named = dict(state)
        if network.layers_differ:
            # layers that are all alike are one tensor with an axis of layers, of which the state
            # of frozen ones would be missing
            named = _model_state(network.chunks, {**metadata, "non_homogeneous_layers": True})
        state["optimizer"] = network.optimizer.sharded_state_dict(
            named, is_loading=is_loading, metadata=metadata
        )
    return state


def _model_state(chunks: Sequence[MegatronModule], metadata: dict[str, object]) -> ShardedStateDict:
    """metadata: megatron-core writes its process group into it."""
    state: ShardedStateDict = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)
    }
    for chunk in state.values():
        leave_out_extra_state(chunk)
    return state


def leave_out_extra_state(chunk: dict[str, object]) -> None:
    """Remove the fp8 extra state of linear layers, in place; it is neither saved nor loaded. It is
    empty in megatron-core's local layers, and in Transformer Engine's a byte tensor that is
    unpickled when loaded."""
    for name, value in list(chunk.items()):
        if isinstance(value, ShardedObject) and value.key.endswith(EXTRA_STATE):
            del chunk[name]


def adapt_names(state: dict[str, object], available: Collection[str]) -> None:
    """Rename tensors, in place, to the names they have in a checkpoint of the other layer spec
    (local or Transformer Engine)."""
    for tensor in _leaves(state, ShardedTensor, ShardedTensorFactory):
        tensor.key = available_name(tensor.key, available)


def prefer_main_params(state: dict[str, object], saved: Mapping[str, object]) -> None:
    """Load fp32 weights from the optimizer's fp32 parameters if the checkpoint's model weights are
    in half precision. In place.

    Args:
        state: From `sharded_state`, after `adapt_names`.
        saved: Storage metadata by name.
    """
    model = {name: part for name, part in state.items() if name.startswith("model")}
    for tensor in _leaves(model, ShardedTensor, ShardedTensorFactory):
        entry = saved.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata):  # `shape_problems` reports it
            continue
        if tensor.data.dtype == torch.float32 != entry.properties.dtype:
            names = (prefix + tensor.key for prefix in MAIN_PARAMS)
            tensor.key = next((name for name in names if name in saved), tensor.key)


def available_name(name: str, available: Collection[str]) -> str:
    """`name`, or its name with another layer spec or kind of optimizer, whichever is `available`;
    `name` if none is."""
    prefix = next((p for p in MAIN_PARAMS if name.startswith(p)), None)
    candidates = [name]
    if prefix is not None:
        candidates += [p + name.removeprefix(prefix) for p in (*MAIN_PARAMS, "")]
    for candidate in candidates:
        if candidate in available:
            return candidate
        for pair in NAMES_OF_SPECS:
            for one, other in (pair, pair[::-1]):
                if one in candidate and (renamed := candidate.replace(one, other)) in available:
                    return renamed
    return name


def optimizer_kind(network: SavedNetwork) -> list[str]:
    """Classes of the optimizers, which determine the format of their non-tensor state."""
    optimizer: object = network.optimizer
    parts = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    return [type(part).__name__ + _detail(part.optimizer) for part in parts]


def _detail(plain: torch.optim.Optimizer) -> str:
    if isinstance(plain, HybridDeviceOptimizer):
        return " on the CPU"
    return MUON if is_muon(plain) else ""


def optimizer_name(kinds: Sequence[str]) -> str:
    """The value of --optimizer that an `optimizer_kind` belongs to."""
    return "muon" if any(kind.endswith(MUON) for kind in kinds) else "adam"


def optimizer_step(network: SavedNetwork) -> float:
    """Number of steps that the optimizer has taken; 0 for a fresh one."""
    for part in plain_optimizers(network.optimizer):
        for state in (*part.state.values(), *part.param_groups):
            if "step" in state:
                return float(state["step"])
    return 0.0


def set_step(common: object, step: float, *, distributed: bool = False) -> None:
    """Set Adam's step count in the non-tensor state of an optimizer, in place, where
    load_state_dict reads it: in the parameter groups of a distributed optimizer and of Transformer
    Engine's and Apex's Adam, or in a separate entry of others, which is missing before the first
    step."""
    if isinstance(common, list):
        for value in common:
            set_step(value, step, distributed=distributed)
    if not isinstance(common, dict):
        return
    distributed = distributed or "param_state_sharding_type" in common
    groups = common.get("param_groups", ())
    fused = any("bias_correction" in group for group in groups)
    for group in groups:
        if fused:
            group["step"] = int(step)  # its kernel takes no other number
        elif "step" in group:
            group["step"] = step
    # Muon has no step
    is_adam = any("betas" in group for group in groups)
    if is_adam and not fused and not distributed:
        common.setdefault("state", {})["common_step"] = torch.tensor(step)
    for name, value in common.items():
        if name not in ("param_groups", "state"):
            set_step(value, step, distributed=distributed)


def shape_problems(state: dict[str, object], saved: Mapping[str, object]) -> list[str]:
    """Descriptions of this model's tensors that are missing in a checkpoint or have another global
    shape in it. saved: storage metadata by name."""
    problems = []
    for tensor in sharded_tensors(state):
        key = tensor.key
        shape = list(tensor.global_shape)
        entry = saved.get(tensor.key)
        if entry is None or not hasattr(entry, "size"):
            problems.append(f"{key} is not in it")
        elif list(entry.size) != shape and not tensor.allow_shape_mismatch:
            problems.append(f"{key} is {list(entry.size)} there and {shape} here")
    return list(dict.fromkeys(problems))


def tower_problem(
    chunks: Iterable[torch.nn.Module], problems: Sequence[str], saved: Mapping[str, object]
) -> str | None:
    """What to do about a checkpoint that has no vision tower, or one without the state of its
    optimizer, or one that this model would drop; None if it has what the model has.

    Args:
        chunks: Of the model.
        problems: From `shape_problems`.
        saved: Storage metadata by name.
    """
    has_tower = any(name.startswith(TOWER) for name in saved)
    if problems and not has_tower and all(TOWER in problem for problem in problems):
        return (
            "has no vision tower, which a run with --multimodal-keys loads: write the model with "
            "slime-like convert megatron-to-hf, which takes the tower of --hf-checkpoint, and "
            "start from that folder with --hf-checkpoint"
        )
    if problems and all(STATE_OF_TOWER.search(problem) for problem in problems):
        return (
            "has no state of the optimizer for the vision tower, which its run did not train: "
            "remove --train-vision-tower, or add --no-load-optim to start with a new optimizer"
        )
    sees = any(getattr(m, "vision_settings", None) for chunk in chunks for m in chunk.modules())
    if not sees and has_tower:
        return (
            "has a vision tower, which a run of text would lose: add --multimodal-keys, or write "
            "the model with slime-like convert megatron-to-hf and start from that folder with "
            "--hf-checkpoint"
        )
    return None


def sharded_tensors(state: dict[str, object]) -> Iterator[ShardedTensor]:
    """All tensors of a state, including those built by factories (gate and up projection of a gated
    MLP)."""
    yield from _leaves(load_preprocess(state)[0], ShardedTensor)


def _leaves(container: dict[str, object] | list[object], *types: type[T]) -> Iterator[T]:
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, dict | list):
            yield from _leaves(value, *types)
        elif isinstance(value, types):
            yield value

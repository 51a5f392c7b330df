"""Weights that an adapter targets: those of the full model, in network order, independent of the
layout.

A megatron-core weight may fuse several Hugging Face weights (query, key and value; gate and up
projection). As in PEFT, each of these projections has separate factors, lora_A [rank, in] and
lora_B [out, rank]. Adapters can therefore be exchanged with PEFT unchanged, and any subset of the
projections can be trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass

from arguments.hf.peft_adapter import PEFT_PREFIX
from slime_like.megatron.lora.config import LoraSpec
from slime_like.weights.families import OUTPUT_LAYER
from slime_like.weights.mappings import Mapping, Sizes, VocabParallel
from slime_like.weights.parameter_map import expert_number

HEAD = OUTPUT_LAYER


def peft_name(factor: str) -> str:
    """Name in PEFT's files of the tensor of a factor."""
    return f"{PEFT_PREFIX}{factor}.weight"


@dataclass(frozen=True, slots=True)
class Factor:
    """lora_A or lora_B of one projection."""

    name: str  # PEFT's, without the prefix
    shape: tuple[int, int]  # of the full matrix
    dim: int | None  # dimension that is sharded over tensor-parallel ranks, None if replicated
    # global index of the expert, which is sharded over expert-tensor-parallel ranks; None outside
    # of experts
    expert: int | None

    @property
    def peft_name(self) -> str:
        """Name of the tensor in PEFT's files."""
        return peft_name(self.name)

    @property
    def is_first(self) -> bool:
        """Whether this is lora_A."""
        return self.name.endswith(".lora_A")

    @property
    def fan_in(self) -> int:
        return self.shape[1]


@dataclass(frozen=True, slots=True)
class Target:
    """A megatron-core weight with an adapter."""

    parameter: str  # canonical name in the full model
    mapping: Mapping
    # the targeted ones among the Hugging Face modules that it fuses, in order
    modules: tuple[str, ...]
    factors: tuple[tuple[Factor, Factor], ...]  # (lora_A, lora_B) of each module

    @property
    def all_factors(self) -> Iterator[Factor]:
        return itertools.chain(*self.factors)


def targets_of(
    spec: LoraSpec, family: MappingOf[str, Mapping], sizes: Sizes, *, tied_head: str | None
) -> list[Target]:
    """The weights that `spec` targets.

    Args:
        family: All parameters of the model; see `family_map`.
        tied_head: Name in files of an output layer that shares the embedding weight, to which
            factors then apply alone; None: they share nothing.

    Raises:
        ValueError: The model has none of the targets; names them.
    """
    family = {**family, HEAD: VocabParallel(tied_head)} if tied_head is not None else family
    candidates = (_target(spec, name, mapping, sizes) for name, mapping in family.items())
    targets = [target for target in candidates if target is not None]
    if not targets:
        flag = f"--lora-target-modules {' '.join(sorted(spec.targets))}"
        raise ValueError(f"{flag}: the model has none of these modules")
    return targets


def _target(spec: LoraSpec, name: str, mapping: Mapping, sizes: Sizes) -> Target | None:
    if not mapping.linear and name != HEAD:
        return None
    shapes = {
        weight.removesuffix(".weight"): shape for weight, shape in mapping.hf_shapes(sizes).items()
    }
    modules = tuple(module for module in shapes if _module_name(module) in spec.targets)
    if not modules:
        return None
    # row-parallel layers are sharded along the input, others along the output
    in_dim, out_dim = (1, None) if mapping.dim == 1 else (None, 0)
    if not mapping.sharded:
        out_dim = None
    expert = expert_number(name)
    pairs = tuple(
        (
            Factor(f"{module}.lora_A", (spec.rank, shapes[module][1]), in_dim, expert),
            Factor(f"{module}.lora_B", (shapes[module][0], spec.rank), out_dim, expert),
        )
        for module in modules
    )
    return Target(name, mapping, modules, pairs)


def _module_name(module: str) -> str:
    return module.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Rows [start, stop) of a rank's shard of one module's output."""

    module: int | None  # index among the targeted modules, None if it has no adapter
    start: int
    stop: int


def output_order(
    target: Target, sizes: Sizes, tp_rank: int, tp_size: int
) -> tuple[OutputPiece, ...]:
    """Pieces that make up the output of a column-parallel layer on one rank, in order."""
    pieces = []
    for part in target.mapping.parts(sizes, tp_rank, tp_size, rows=0):
        assert part.hf is not None, "only the vocabulary is padded, which has no output pieces"
        module = part.hf.removesuffix(".weight")
        rows = target.mapping.hf_shapes(sizes)[part.hf][0]
        start = rows * tp_rank // tp_size
        index = target.modules.index(module) if module in target.modules else None
        pieces.append(OutputPiece(index, part.start - start, part.stop - start))
    return tuple(pieces)

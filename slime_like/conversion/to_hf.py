"""Convert a network of a checkpoint, saved in any layout, to a Hugging Face folder, one parameter
at a time.

The output files are distributed over the processes, and each reads what it needs directly from the
checkpoint. Everything is written next to the output folder and renamed when complete; complete
files are reused by the next attempt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.checkpoints.files import FileRecord, hash_file
from slime_like.checkpoints.folders import free_bytes
from slime_like.checkpoints.manifest import MANIFEST
from slime_like.config import ConfigError, Problem
from slime_like.conversion.meta_model import Blueprint
from slime_like.distributed.collectives import from_rank_zero, together
from slime_like.megatron.checkpoint.networks import available_name
from slime_like.megatron.checkpoint.tensors import CheckpointTensors
from slime_like.weights.gather import TensorPlan
from slime_like.weights.hf_export import gather_full_tensors, put_together
from slime_like.weights.hf_save import check_folders, finish_folder
from slime_like.weights.mappings import Mapping
from slime_like.weights.parameter_map import family_map, model_sizes, of_expert
from slime_like.weights.quantized import CodedWeight, encode_tensors, stored_plans
from slime_like.weights.safetensors_reader import WeightFiles
from slime_like.weights.safetensors_writer import (
    NOTE,
    ShardPlan,
    is_quantized,
    kept_shard,
    main_dtype,
    plan_shards,
    write_index,
    write_shard,
)
from slime_like.weights.stacked_experts import StackedExpert
from slime_like.weights.untrained import (
    read_untrained,
    repeated_tensors,
    untrained_plans,
    untrained_prefixes,
)

PARTIAL = ".partial"
UNTRAINED = ""  # used instead of a parameter's name
NOT_WEIGHTS = ("optimizer.", "chained_", "_extra_state")
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of a conversion. kept: number of complete files reused from an interrupted
    conversion."""

    bytes: int
    files: int
    kept: int


class NetworkSource:
    """The Hugging Face tensors of a network in a checkpoint. blueprint: model of the template, in a
    layout of one rank."""

    def __init__(
        self,
        blueprint: Blueprint,
        folder: Path,
        template: str,
        dtype: torch.dtype | None,
        coded: MappingOf[str, CodedWeight] | None = None,
    ) -> None:
        """dtype: None keeps the stored dtype. coded: the quantised weights, by name. Raises
        ConfigError if the template is a different model, ValueError if the checkpoint is
        damaged."""
        self.blueprint, self._template = blueprint, template
        self.stored = CheckpointTensors(folder)
        self._dtype, self._coded = dtype, coded or {}
        config = blueprint.chunks[0].config
        self.sizes = model_sizes(config, blueprint.gpt)
        tied = not blueprint.gpt.untie_embeddings_and_output_weights
        self.family = family_map(
            blueprint.hf.architecture,
            config,
            tied=tied,
            value_head=blueprint.value_head,
            predicting=blueprint.gpt.mtp_num_layers,
        )
        self._keys = {
            piece.key: available_name(piece.key, self.stored.entries)
            for name in blueprint.parameters
            for piece in blueprint.pieces(name)
        }
        if problems := self._differences():
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            words = f"is not the model of checkpoint {folder}: {'; '.join(problems[:3])}{more}; give the folder that the run was started from"
            raise ConfigError([Problem("--hf-checkpoint", template, words)])
        self.tensors = {
            stored.name: (name, stored)
            for name, mapping in self._own().items()
            for hf_name, shape in mapping.hf_shapes(self.sizes).items()
            for stored in stored_plans(TensorPlan(hf_name, shape, self.dtype_of(name)), self._coded)
        }
        predicting = blueprint.gpt.mtp_num_layers
        self._repeated = repeated_tensors(blueprint.hf, predicting)
        if self._repeated:
            with WeightFiles(template) as files:
                for copy in sorted(self._repeated.keys() & files.names):
                    name, plan = self.tensors[self._repeated[copy]]
                    self.tensors[copy] = (name, dataclasses.replace(plan, name=copy))
        if untrained_prefixes(blueprint.hf, predicting) and not blueprint.value_head:
            with WeightFiles(template) as files:
                plans = untrained_plans(
                    files, blueprint.hf, predicting, quantized=bool(self._coded)
                )
            self.tensors |= {plan.name: (UNTRAINED, plan) for plan in plans}

    def _own(self) -> dict[str, Mapping]:
        """Parameters with separate tensors: excludes a tied output layer."""
        seen: set[str] = set()
        own = {}
        for name, mapping in self.family.items():
            names = mapping.hf_shapes(self.sizes).keys()
            if not names <= seen:
                own[name] = mapping
                seen |= names
        return own

    def _differences(self) -> list[str]:
        stored, problems = self.stored, []
        for name in self.blueprint.parameters:
            for piece in self.blueprint.pieces(name):
                key = self._keys[piece.key]
                if key not in stored.entries:
                    problems.append(f"{key} is not in it")
                elif not piece.allow_shape_mismatch and stored.shape(key) != tuple(
                    piece.global_shape
                ):
                    problems.append(
                        f"{key} is {list(stored.shape(key))} there and {list(piece.global_shape)} here"
                    )
        surplus = set(stored.tensor_names()) - set(self._keys.values())
        problems += [
            f"{key} is in it and has no place here"
            for key in sorted(surplus)
            if not any(word in key for word in NOT_WEIGHTS)
        ]
        return list(dict.fromkeys(problems))

    def dtype_of(self, name: str) -> torch.dtype:
        return self._dtype or self.stored.dtype(self._keys[self.blueprint.pieces(name)[0].key])

    def parameter(self, name: str) -> Tensor:
        """A full parameter, as in a layout of one rank; its vocabulary padding, which differs
        between layouts, is zero."""
        whole = torch.zeros(self.blueprint.parameters[name].shape, dtype=self.dtype_of(name))
        for piece in self.blueprint.pieces(name, whole):
            assert piece.data is not None
            key, offset = self._keys[piece.key], tuple(piece.global_offset)
            region = piece.data.view((1,) * piece.prepend_axis_num + tuple(piece.data.shape))
            if piece.allow_shape_mismatch:
                region = region[: max(0, self.stored.shape(key)[0] - offset[0])]
            self.stored.read_into(region, key, offset)
        return whole

    def stream(self, shard: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file. A parameter is read once for all of its tensors that are adjacent
        in the file."""
        at: str | None = None
        made: dict[str, Tensor] = {}
        for planned in shard.tensors:
            name, _ = self.tensors[planned.name]
            if name == UNTRAINED:  # they come last
                made = {}
                yield from self._untrained(shard)
                return
            if name != at:
                made = {}  # freed before the next parameter is read
                full = self._whole(name)
                at, made = name, encode_tensors(full, self._coded)
                del full
            yield planned.name, made.pop(self._repeated.get(planned.name, planned.name))

    def _whole(self, name: str) -> dict[str, Tensor]:
        """The tensors of a parameter; of all experts if they are stored as one tensor."""
        full = gather_full_tensors(self.family[name], [self.parameter(name)], self.sizes)
        if isinstance(self.family[name], StackedExpert):
            for expert in range(1, self.sizes.experts):
                other = of_expert(name, expert)
                put_together(self.family[other], [self.parameter(other)], self.sizes, full)
        return full

    def _untrained(self, shard: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        with WeightFiles(self._template) as files:
            for planned in shard.tensors:
                if self.tensors[planned.name][0] == UNTRAINED:
                    yield planned.name, read_untrained(files, planned)


def convert_to_hf(
    source: NetworkSource,
    template: str,
    output: str,
    *,
    checkpoint: Path,
    max_shard_bytes: int,
    workers: int = 1,
    advance: Advance = lambda size: None,
) -> Exported:
    """Write the network as a Hugging Face folder at `output`. Collective; each of `workers` threads
    writes one file at a time and holds two copies of one parameter. Raises ValueError or OSError on
    every rank; partial output is kept next to `output` for the next attempt."""
    folder, value_head = Path(output), source.blueprint.value_head
    from_rank_zero(lambda: check_folders(folder, Path(template)))
    shards = plan_shards((planned for _, planned in source.tensors.values()), max_shard_bytes)
    identity = _identity(checkpoint, shards)
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    kept = from_rank_zero(lambda: _prepare(partial, shards, identity))
    rank, world = dist.get_rank(), dist.get_world_size()

    def write(shard: ShardPlan) -> None:
        if shard.file_name in kept:
            advance(shard.nbytes)
        else:
            write_shard(partial, shard, source.stream(shard), identity, advance)

    def write_mine() -> None:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(write, shards[rank::world]))

    together(write_mine)

    def complete() -> None:
        write_index(partial, shards)
        for shard in shards:
            (partial / (shard.file_name + NOTE)).unlink()
        finish_folder(
            partial,
            folder,
            Path(template),
            dtype=None if is_quantized(shards) else main_dtype(shards),
            value_task="ForTokenClassification" if value_head else None,
        )

    from_rank_zero(complete)
    return Exported(sum(shard.nbytes for shard in shards), len(shards), len(kept))


def _identity(checkpoint: Path, shards: list[ShardPlan]) -> str:
    """Fingerprint of everything that determines the bytes of the output."""
    plan = [
        (shard.file_name, [(t.name, t.shape, str(t.dtype)) for t in shard.tensors])
        for shard in shards
    ]
    return hashlib.sha256(
        (hash_file(checkpoint / MANIFEST).sha256 + json.dumps(plan)).encode()
    ).hexdigest()


def _prepare(partial: Path, shards: list[ShardPlan], identity: str) -> dict[str, FileRecord]:
    """Prepare the working folder: keep only complete files of the same conversion, and return
    them."""
    partial.mkdir(parents=True, exist_ok=True)
    kept = {
        shard.file_name: record
        for shard in shards
        if (record := kept_shard(partial, shard, identity)) is not None
    }
    for path in partial.iterdir():
        if path.name.removesuffix(NOTE) not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    needed = sum(shard.nbytes for shard in shards if shard.file_name not in kept)
    if (free := free_bytes(partial)) < needed + 2**20:
        raise OSError(
            f"--output: needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free; name a folder on another disk"
        )
    return kept


def model_differences(saved: dict[str, object], blueprint: Blueprint) -> list[str]:
    """Settings in which the checkpoint's model differs from the template's. saved: "model" of the
    trainer's state. Tied embeddings are not compared for a critic, which has no output layer."""
    here = blueprint.shape()
    names = [
        name
        for name in here
        if name in saved and not (blueprint.value_head and name == "untied_embeddings")
    ]
    return [
        f"{name} {saved[name]} (template: {here[name]})"
        for name in names
        if saved[name] != here[name]
    ]

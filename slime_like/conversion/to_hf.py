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
from slime_like.checkpoints.manifest import MANIFEST, describe
from slime_like.config import ConfigError, Problem
from slime_like.conversion.meta_model import MetaModel
from slime_like.distributed.collectives import from_rank_zero, together
from slime_like.megatron.checkpoint.networks import available_name
from slime_like.megatron.checkpoint.tensors import CheckpointTensors
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.hf_export import gather_full_tensors, merge_shards
from slime_like.weights.hf_save import check_folders, finish_folder
from slime_like.weights.parameter_map import expert_name, family_map, model_sizes
from slime_like.weights.quantized import QuantizedWeight, encode_tensors, stored_plans
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
    """Result of a conversion."""

    bytes: int
    files: int
    kept: int  # number of complete files reused from an interrupted conversion


class NetworkSource:
    """The Hugging Face tensors of a network in a checkpoint. meta_model: of the template, with one
    rank."""

    def __init__(
        self,
        meta_model: MetaModel,
        folder: Path,
        template: str,
        dtype: torch.dtype | None,
        quantized: MappingOf[str, QuantizedWeight] | None = None,
    ) -> None:
        """
        Args:
            dtype: None keeps the stored dtype.
            quantized: The quantised weights, by name.

        Raises:
            ConfigError: If the template is a different model.
            ValueError: If the checkpoint is damaged.
        """
        self.meta_model = meta_model
        self._template = template
        self.stored = CheckpointTensors(folder)
        self._dtype = dtype
        self._quantized = quantized or {}
        config = meta_model.chunks[0].config
        self.sizes = model_sizes(config, meta_model.gpt)
        tied = not meta_model.gpt.untie_embeddings_and_output_weights
        self.family = family_map(
            meta_model.hf.architecture,
            config,
            tied=tied,
            value_head=meta_model.value_head,
            mtp_layers=meta_model.gpt.mtp_num_layers,
        )
        self._keys = {
            piece.key: available_name(piece.key, self.stored.entries)
            for name in meta_model.parameters
            for piece in meta_model.pieces(name)
        }
        if problems := self._differences():
            reason = (
                f"is not the model of checkpoint {folder}: {describe(problems)}; give the folder "
                "that the run was started from"
            )
            raise ConfigError([Problem("--hf-checkpoint", template, reason)])
        self.tensors = self._plan_tensors()
        mtp_layers = meta_model.gpt.mtp_num_layers
        self._repeated = repeated_tensors(meta_model.hf, mtp_layers)
        if self._repeated:
            with WeightFiles(template) as files:
                for copy in sorted(self._repeated.keys() & files.names):
                    name, plan = self.tensors[self._repeated[copy]]
                    self.tensors[copy] = (name, dataclasses.replace(plan, name=copy))
        if untrained_prefixes(meta_model.hf, mtp_layers) and not meta_model.value_head:
            with WeightFiles(template) as files:
                plans = untrained_plans(
                    files, meta_model.hf, mtp_layers, quantized=bool(self._quantized)
                )
            self.tensors |= {plan.name: (UNTRAINED, plan) for plan in plans}

    def _plan_tensors(self) -> dict[str, tuple[str, TensorPlan]]:
        """Stored tensor -> (parameter, plan), without a tied output layer."""
        tensors: dict[str, tuple[str, TensorPlan]] = {}
        seen: set[str] = set()
        for name, mapping in self.family.items():
            shapes = mapping.hf_shapes(self.sizes)
            if shapes.keys() <= seen:
                continue
            seen |= shapes.keys()
            for hf_name, shape in shapes.items():
                plan = TensorPlan(hf_name, shape, self.dtype_of(name))
                for stored in stored_plans(plan, self._quantized):
                    tensors[stored.name] = (name, stored)
        return tensors

    def _differences(self) -> list[str]:
        stored = self.stored
        problems = []
        for name in self.meta_model.parameters:
            for piece in self.meta_model.pieces(name):
                key = self._keys[piece.key]
                shape = list(piece.global_shape)
                if key not in stored.entries:
                    problems.append(f"{key} is not in it")
                elif not piece.allow_shape_mismatch and list(stored.shape(key)) != shape:
                    problems.append(f"{key} is {list(stored.shape(key))} there and {shape} here")
        for key in sorted(set(stored.tensor_names()) - set(self._keys.values())):
            if not any(text in key for text in NOT_WEIGHTS):
                problems.append(f"{key} is in it and not in this model")
        return list(dict.fromkeys(problems))

    def dtype_of(self, name: str) -> torch.dtype:
        return self._dtype or self.stored.dtype(self._keys[self.meta_model.pieces(name)[0].key])

    def parameter(self, name: str) -> Tensor:
        """A full parameter, as in a layout of one rank; its vocabulary padding, which differs
        between layouts, is zero."""
        full = torch.zeros(self.meta_model.parameters[name].shape, dtype=self.dtype_of(name))
        for piece in self.meta_model.pieces(name, full):
            assert piece.data is not None
            key = self._keys[piece.key]
            offset = tuple(piece.global_offset)
            region = piece.data.view((1,) * piece.prepend_axis_num + tuple(piece.data.shape))
            if piece.allow_shape_mismatch:
                region = region[: max(0, self.stored.shape(key)[0] - offset[0])]
            self.stored.read_into(region, key, offset)
        return full

    def stream(self, shard: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file. A parameter is read once for all of its tensors that are adjacent
        in the file."""
        current: str | None = None
        tensors: dict[str, Tensor] = {}
        for planned in shard.tensors:
            name, _ = self.tensors[planned.name]
            if name == UNTRAINED:  # they come last
                tensors = {}
                yield from self._untrained(shard)
                return
            if name != current:
                tensors = {}  # freed before the next parameter is read
                full = self._full_tensors(name)
                current = name
                tensors = encode_tensors(full, self._quantized)
                del full
            yield planned.name, tensors.pop(self._repeated.get(planned.name, planned.name))

    def _full_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a parameter; of all experts if they are stored as one tensor."""
        full = gather_full_tensors(self.family[name], [self.parameter(name)], self.sizes)
        if isinstance(self.family[name], StackedExpert):
            for expert in range(1, self.sizes.experts):
                other = expert_name(name, expert)
                merge_shards(self.family[other], [self.parameter(other)], self.sizes, full)
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
    folder = Path(output)
    value_head = source.meta_model.value_head
    from_rank_zero(lambda: check_folders(folder, Path(template)))
    shards = plan_shards((planned for _, planned in source.tensors.values()), max_shard_bytes)
    identity = _identity(checkpoint, shards)
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    kept = from_rank_zero(lambda: _prepare(partial, shards, identity))
    rank = dist.get_rank()
    world = dist.get_world_size()

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
    plan = []
    for shard in shards:
        tensors = [(t.name, t.shape, str(t.dtype)) for t in shard.tensors]
        plan.append((shard.file_name, tensors))
    content = hash_file(checkpoint / MANIFEST).sha256 + json.dumps(plan)
    return hashlib.sha256(content.encode()).hexdigest()


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
            f"--output: needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free; "
            "name a folder on another disk"
        )
    return kept


def model_differences(saved: dict[str, object], meta_model: MetaModel) -> list[str]:
    """Settings in which the checkpoint's model differs from the template's. saved: "model" of the
    trainer's state. Tied embeddings are not compared for a critic, which has no output layer."""
    template = meta_model.shape()
    if meta_model.value_head:
        template.pop("untied_embeddings", None)
    return [
        f"{name} {saved[name]} (template: {value})"
        for name, value in template.items()
        if name in saved and saved[name] != value
    ]

"""Convert a network of a checkpoint, saved in any layout, to a Hugging Face folder, one parameter
at a time.

The output files are distributed over the processes, and each reads what it needs directly from the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from slime_like.checkpoints.files import hash_file
from slime_like.checkpoints.manifest import MANIFEST, describe
from slime_like.config import ConfigError, Problem
from slime_like.conversion.network import Advance, Converted, MetaNetwork
from slime_like.conversion.shards import write_shards
from slime_like.distributed.collectives import from_rank_zero
from slime_like.megatron.checkpoint.tensors import CheckpointTensors
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES, Parameter, TensorPlan
from slime_like.weights.hf_save import check_folders, complete_folder
from slime_like.weights.parameter_map import VALUE_HEAD, float32_buffers
from slime_like.weights.quantized import QuantizedWeight
from slime_like.weights.safetensors_reader import WeightFiles, weights_digest
from slime_like.weights.safetensors_writer import ShardPlan, plan_shards
from slime_like.weights.untrained import (
    read_untrained,
    repeated_tensors,
    untrained_plans,
    untrained_prefixes,
    with_tables_only,
)

NOT_WEIGHTS = ("optimizer.", "chained_", "_extra_state")


def has_value_head(folder: Path) -> bool:
    """Whether a network's folder of a checkpoint is a critic's or a reward model's. False if it
    cannot be read."""
    try:
        return not VALUE_HEAD.keys() - CheckpointTensors(folder).entries.keys()
    except ValueError:
        return False


class NetworkSource:
    """The Hugging Face tensors of a network in a checkpoint."""

    def __init__(
        self,
        network: MetaNetwork,
        folder: Path,
        template: str,
        dtype: torch.dtype | None = None,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> None:
        """Collective.

        Args:
            network: Of the template, with one rank.
            dtype: Of all weights but those that stay in float32 in half precision, such as a
                router's bias; None keeps the stored dtypes.
            quantized: The quantised weights, by name.

        Raises:
            ConfigError: If the template is a different model, or the checkpoint is an adapter's.
            ValueError: If the checkpoint is damaged.
        """
        self.network = network
        self._template = template
        self.stored = CheckpointTensors(folder)
        self._dtype = dtype
        if any(key.endswith(".lora_A") for key in self.stored.tensor_names()):
            reason = "holds the adapters of a LoRA run, not a model; " + (
                "a critic's are not exported"
                if network.value_head
                else "repeat the run's command with --save-hf (merged into the base) or "
                "--lora-save-path (the adapter): a finished run only writes them"
            )
            raise ConfigError([Problem("--load", str(folder), reason)])
        if problems := self._differences():
            reason = (
                f"is not the model of checkpoint {folder}: {describe(problems)}; give the folder "
                "that the run was started from"
            )
            raise ConfigError([Problem("--hf-checkpoint", template, reason)])
        mtp_layers = network.gpt.mtp_num_layers
        self._export = network.hf_export(network.hf, dtype, DEFAULT_BUCKET_BYTES, quantized)
        # they keep the checkpoint's dtype
        self._kept = float32_buffers(network.chunks)
        config = Path(template) / "config.json"
        self.origin = hash_file(config).sha256  # of what the output takes from the template
        # by name; no parameter holds an untrained tensor of the template
        self.tensors: dict[str, tuple[Parameter | None, TensorPlan]] = {
            plan.name: (parameter, plan)
            for parameter in self._export.parameters
            for plan in parameter.outputs
        }
        self._repeated = repeated_tensors(network.hf, mtp_layers)
        hf = network.hf
        if network.value_head:
            hf = with_tables_only(hf, self._export.fixed)
        copies_untrained = untrained_prefixes(hf, mtp_layers)
        if not (self._repeated or copies_untrained):
            return
        self.origin += weights_digest(template)
        with WeightFiles(template) as files:
            for copy in sorted(self._repeated.keys() & files.names):
                parameter, plan = self.tensors[self._repeated[copy]]
                self.tensors[copy] = (parameter, replace(plan, name=copy))
            if copies_untrained:
                plans = untrained_plans(
                    files,
                    hf,
                    mtp_layers,
                    quantized=bool(quantized),
                    dtype=dtype,
                    kept=[
                        name
                        for name, (parameter, _) in self.tensors.items()
                        if parameter is not None and parameter.name in self._kept
                    ],
                )
                self.tensors |= {plan.name: (None, plan) for plan in plans}

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for _, plan in self.tensors.values())

    def _differences(self) -> list[str]:
        problems = self.network.adapt_to(self.stored.entries)
        for key in sorted(set(self.stored.tensor_names()).difference(self.network.keys)):
            if not any(text in key for text in NOT_WEIGHTS):
                problems.append(f"{key} is in it and not in this model")
        return problems

    def parameter(self, name: str) -> Tensor:
        """A full parameter, as in a layout of one rank; its vocabulary padding, which differs
        between layouts, is zero."""
        meta = self.network.parameters[name]
        dtype = meta.dtype if name in self._kept else self._dtype or meta.dtype
        full = torch.zeros(meta.shape, dtype=dtype)
        for shard in self.network.shards(name, full):
            assert shard.data is not None
            offset = tuple(shard.global_offset)
            region = shard.data.view((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
            if shard.allow_shape_mismatch:
                region = region[: max(0, self.stored.shape(shard.key)[0] - offset[0])]
            self.stored.read_into(region, shard.key, offset)
        return full

    def stream(self, file: ShardPlan) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file. A parameter is read once for all of its tensors that are adjacent
        in the file."""
        for parameter, group in groupby(file.tensors, lambda plan: self.tensors[plan.name][0]):
            if parameter is None:
                with WeightFiles(self._template) as files:
                    yield from ((plan.name, read_untrained(files, plan)) for plan in group)
                continue
            tensors = self._export.full_tensors(parameter, self.parameter)
            for plan in group:
                yield plan.name, tensors[self._repeated.get(plan.name, plan.name)]
            del tensors  # freed before the next parameter is read


def convert_to_hf(
    source: NetworkSource,
    template: str,
    output: str,
    *,
    checkpoint: Path,
    max_shard_bytes: int,
    value_task: str = "ForTokenClassification",  # it has a bias
    workers: int = 1,
    advance: Advance = lambda size: None,
) -> Converted:
    """Write the network as a Hugging Face folder at `output`, one with a value head under the class
    of transformers that ends with `value_task`. Collective; each of `workers` threads writes one
    file at a time and holds two copies of one parameter. Raises ValueError or OSError on every
    rank; partial output is kept next to `output` for the next attempt."""
    folder = Path(output)
    from_rank_zero(lambda: check_folders(folder, Path(template)))
    shards = plan_shards((planned for _, planned in source.tensors.values()), max_shard_bytes)

    def complete(partial: Path) -> None:
        complete_folder(partial, Path(template), shards, value_task=value_task)

    kept = write_shards(
        folder,
        shards,
        hash_file(checkpoint / MANIFEST).sha256 + source.origin,
        source.stream,
        complete,
        workers=workers,
        advance=advance,
    )
    return Converted(folder, source.nbytes, len(shards), kept)

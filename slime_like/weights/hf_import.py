"""Load Hugging Face safetensors into the shards of this rank. Each rank reads only what it
needs."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import GPTModelConfig
from slime_like.checkpoints.manifest import describe
from slime_like.weights.families import LM_HEAD, head_name
from slime_like.weights.families.base import EMBEDDING, model_families
from slime_like.weights.mappings import Mapping, Sizes, TensorPart, TokenExperts
from slime_like.weights.parameter_map import (
    LAYER,
    VALUE_HEAD,
    expert_number,
    family_map,
    global_parameters,
    local_experts,
    model_sizes,
    unwrap,
)
from slime_like.weights.safetensors_reader import DTYPES, INTEGERS, MAX_NAMED, WeightFiles, listed
from slime_like.weights.untrained import repeated_tensors, untrained_prefixes

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_like.megatron.parallel_layout import ParallelLayout


def load_hf_weights(
    model_chunks: Sequence[MegatronModule],
    folder: str,
    *,
    hf: HfModel,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    value_head: bool = False,
) -> None:
    """Fill every parameter of this rank's model chunks from the safetensors files in `folder`, cast
    to its dtype.

    Vocabulary padding becomes zero. An existing optimizer must reload its copies afterwards
    (`reload_model_params`).

    Args:
        model_chunks: This rank's GPTModels, wrapped or not.
        value_head: The network is a critic: a missing head weight or bias becomes zero, and an
            output layer in the files is ignored.

    Raises:
        ValueError: Equal on every rank, before any parameter has changed: an unreadable file,
            missing or unexpected tensors, differing shapes (both are named), non-float dtypes.
    """
    local = dict(global_parameters(model_chunks))
    config = unwrap(model_chunks[0]).config
    with open_hf_weights(
        folder, local, config, hf=hf, gpt=gpt, layout=layout, value_head=value_head
    ) as weights:
        for name, parameter in local.items():
            weights.fill(name, parameter.detach())


@dataclass(frozen=True, slots=True)
class HfWeights:
    """This rank's parameters in the files of a Hugging Face folder, which were checked. A context
    manager."""

    family: MappingOf[str, Mapping]
    parts: MappingOf[str, Sequence[TensorPart]]
    absent: frozenset[str]  # parts of a critic's head that the folder does not have
    files: WeightFiles

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.close()

    def fill(self, name: str, shard: Tensor) -> None:
        """Write the parameter `name` into `shard`, this rank's shard of it."""
        if name in self.absent:
            shard.zero_()
        else:
            _fill(shard, self.family[name], self.parts[name], self.files)

    def clear_padding(self, name: str, shard: Tensor) -> None:
        """Zero the vocabulary padding of a shard, as `fill` does."""
        position = 0
        for part in self.parts[name]:
            if part.hf is None:
                shard.narrow(self.family[name].dim, position, len(part)).zero_()
            position += len(part)


def open_hf_weights(
    folder: str,
    local: MappingOf[str, Tensor],
    config: TransformerConfig,
    *,
    hf: HfModel,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    value_head: bool = False,
) -> HfWeights:
    """Open a folder and check it against this rank's parameters. Raises like `load_hf_weights`.

    Args:
        local: The parameters by canonical name; only their shapes are used.
        config: Of the model.
    """
    sizes = model_sizes(config, gpt)
    family = family_map(
        hf.architecture,
        config,
        tied=not gpt.untie_embeddings_and_output_weights,
        value_head=value_head,
        mtp_layers=gpt.mtp_num_layers,
        vision=gpt.vision,
    )
    with ExitStack() as on_error:
        files = on_error.enter_context(WeightFiles(folder, predicts=bool(gpt.mtp_num_layers)))
        _check_model(dict(local), family, hf.architecture, local_experts(sizes, layout))
        parts = {
            name: _parts(name, parameter, family[name], sizes, layout)
            for name, parameter in local.items()
        }
        absent = [
            name
            for name, mapping in VALUE_HEAD.items()
            if value_head and not mapping.hf_shapes(sizes).keys() <= files.names
        ]
        stored = {name: mapping for name, mapping in family.items() if name not in absent}
        ignored = untrained_prefixes(hf, None if value_head else gpt.mtp_num_layers)
        repeated = repeated_tensors(hf, gpt.mtp_num_layers)
        head = head_name(hf.architecture)
        _check_names(files, stored, folder, sizes, (*ignored, *repeated, head))
        _check_tensors(files, stored, folder, sizes)
        _check_constants(files, hf, folder)
        if not (value_head or gpt.untie_embeddings_and_output_weights):
            for name in {head, LM_HEAD} & files.names:
                _check_tied(files, name, family, folder, sizes)
        on_error.pop_all()
    return HfWeights(stored, parts, frozenset(absent), files)


def _fill(shard: Tensor, mapping: Mapping, parts: Sequence[TensorPart], files: WeightFiles) -> None:
    dim = mapping.dim
    position = 0
    # the last expert that was read; its tensor may have several parts, as gate and up
    stacked: tuple[object, Tensor] | None = None
    for part in parts:
        rows = shard.narrow(dim, position, len(part))
        if part.hf is None:
            rows.zero_()
        elif part.expert_slice is not None:
            expert = part.expert_slice.expert
            if stacked is None or stacked[0] != (part.hf, expert):
                stacked = (part.hf, expert), files.read(part.hf, 0, expert, expert + 1)[0]
            rows.copy_(part.expert_slice.matrix(stacked[1]).narrow(dim, part.start, len(part)))
        elif mapping.flat:
            stored = files.read(part.hf, 0, 0, files.shape(part.hf)[0])
            rows.copy_(stored.flatten()[part.start : part.stop])
        else:
            files.read_into(rows, part.hf, dim, part.start, part.stop)
        position += len(part)


def _parts(
    name: str, parameter: Tensor, mapping: Mapping, sizes: Sizes, layout: ParallelLayout
) -> list[TensorPart]:
    """The pieces of this rank's shard. Raises ValueError if they do not match the parameter's
    shape."""
    rank = layout.tp_rank
    size = layout.tp_size
    if expert_number(name) is not None:
        rank = layout.etp_rank
        size = layout.etp_size
    parts = mapping.parts(sizes, rank, size, rows=parameter.shape[mapping.dim])
    expected = mapping.shard_shape(sizes, sum(map(len, parts)))
    if tuple(parameter.shape) != expected:
        hf_name = next(iter(mapping.hf_shapes(sizes)))
        raise ValueError(
            f"the model's parameter {name} has shape {tuple(parameter.shape)}, but {hf_name} needs "
            f"{expected}"
        )
    return parts


def _check_model(
    local: dict[str, Tensor], family: dict[str, Mapping], architecture: str, experts: range
) -> None:
    """Check that the model's layers have exactly the parameters of the family, and the experts in
    `experts`."""
    layers = {match[0] for match in map(LAYER.match, local) if match}

    def is_local(name: str) -> bool:
        number = expert_number(name)
        layer = LAYER.match(name)
        return layer is not None and layer[0] in layers and (number is None or number in experts)

    missing = [name for name in family if name not in local and is_local(name)]
    for problem, names in (("missing", missing), ("unexpected", local.keys() - family.keys())):
        if names:
            raise ValueError(
                f"the model was not built as {architecture}; {problem} parameters: {listed(names)}"
            )


def _check_names(
    files: WeightFiles,
    family: dict[str, Mapping],
    folder: str,
    sizes: Sizes,
    untrained: tuple[str, ...] = (),
) -> None:
    expected = set(chain.from_iterable(mapping.hf_shapes(sizes) for mapping in family.values()))
    # Files of tied models may repeat the embedding as the output layer, under the family's name
    # (among `untrained`) or as lm_head, and old files contain rotary tables; transformers ignores
    # both.
    unexpected = {
        name
        for name in files.names - expected
        if name != LM_HEAD
        and not name.endswith(".rotary_emb.inv_freq")
        and not name.startswith(untrained)
    }
    problems = []
    for problem, names in (("missing", expected - files.names), ("unexpected", unexpected)):
        if names:
            problems.append(f"{problem} tensors: {listed(names)}")
    if problems:
        raise ValueError(f"weights in {folder}: " + "; ".join(problems))


def _check_tied(
    files: WeightFiles, head: str, family: dict[str, Mapping], folder: str, sizes: Sizes
) -> None:
    """Check that an output layer `head` in the files of a tied model repeats the embedding."""
    (embedding,) = family[EMBEDDING].hf_shapes(sizes)
    if not files.is_copy(head, embedding):
        raise ValueError(
            f"weights in {folder}: config.json has tie_word_embeddings true, and {head} is "
            f"another matrix than {embedding}, so that transformers unties them; set "
            f"tie_word_embeddings to false, or remove {head}"
        )


def _check_constants(files: WeightFiles, hf: HfModel, folder: str) -> None:
    """Check that tensors of integers in the files are those that follow from config.json."""
    family = model_families.get(hf.architecture)
    for name, numbers in family.constants(hf.transformer).items():
        if name in files.names and files.read_stored(name).tolist() != list(numbers):
            raise ValueError(
                f"weights in {folder}: {name} is not what follows from config.json, which has to "
                "have the settings that the model was trained with"
            )


def _check_tensors(
    files: WeightFiles, family: dict[str, Mapping], folder: str, sizes: Sizes
) -> None:
    problems = []
    for mapping in family.values():
        for name, shape in mapping.hf_shapes(sizes).items():
            if files.shape(name) != shape:
                problems.append(
                    f"{name} has shape {files.shape(name)} in the file, the model needs {shape}"
                )
            legal = INTEGERS if mapping.fixed else DTYPES
            if files.dtype(name) not in legal:
                problems.append(
                    f"{name} has dtype {files.dtype(name)}; legal values: {', '.join(legal)}"
                )
            elif isinstance(mapping, TokenExperts) and files.shape(name) == shape:
                problems += mapping.problems(files.read_stored(name), sizes)
    if problems:
        problems = list(dict.fromkeys(problems))
        raise ValueError(f"weights in {folder}: {describe(problems, MAX_NAMED)}")

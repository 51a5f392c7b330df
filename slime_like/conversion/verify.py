"""Verify a conversion: compare every parameter bit by bit, or the logits of transformers' model
with those of megatron-core's.

Both compare a network in a checkpoint with a Hugging Face folder, in either direction of
conversion, in a layout of one rank.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.conversion.network import Advance
from slime_like.conversion.to_hf import NetworkSource
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.hf_class import class_for_text
from slime_like.megatron.checkpoint.fingerprint import bit_sums
from slime_like.megatron.model.policy import logits_of
from slime_like.megatron.network import Network
from slime_like.megatron.ops.attention import packed_rows
from slime_like.weights.parameter_map import global_parameters
from slime_like.weights.safetensors_reader import WeightFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENS = 64  # length of the sequence for comparing logits
# largest difference, relative to the standard deviation of all logits; for two different networks
# it is near 1
TOLERANCE = 1e-3


def compare_bits(source: NetworkSource, folder: str, advance: Advance = lambda size: None) -> int:
    """Load the folder as a run would, and compare every parameter with the checkpoint's, bit by bit
    in the dtype of `NetworkSource.parameter`. Collective; parameters are distributed over ranks.
    Returns their number. Raises ValueError naming those that differ."""
    names = list(source.network.parameters)

    def compare_local() -> list[str]:
        different = []
        with source.network.open_hf(folder) as weights:
            for name in names[dist.get_rank() :: dist.get_world_size()]:
                saved = source.parameter(name)
                loaded = torch.empty_like(saved)
                weights.fill(name, loaded)
                weights.clear_padding(name, saved)  # a trained one has other values than 0
                if bit_sums(saved) != bit_sums(loaded):
                    different.append(name)
                advance(saved.nbytes)
        return different

    if different := list(itertools.chain(*gather(together(compare_local)))):
        raise ValueError(
            f"--verify checksums: {folder} and checkpoint {source.stored.folder} differ in "
            f"{', '.join(different[:3])} ({len(different)} parameters in all)"
        )
    return len(names)


def compare_logits(source: NetworkSource, folder: str) -> float:
    """The largest difference between the logits (values of a critic) of both models on `TOKENS`
    fixed tokens, divided by their standard deviation; in float32 for any dtype of the weights.
    Collective; rank 0 computes, and holds one full model at a time. Raises ValueError above
    `TOLERANCE`."""

    def compare() -> float:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            0, source.network.gpt.vocab_size or 0, (TOKENS,), generator=generator
        )
        expected = transformers_logits(folder, tokens, value_head=source.network.value_head)
        deviation = float(expected.std())
        difference = float((megatron_logits(source, tokens) - expected).abs().max())
        if not difference <= TOLERANCE * deviation:
            raise ValueError(
                f"--verify logits: those of {folder} in transformers and of checkpoint "
                f"{source.stored.folder} differ by {difference:.3g}, with a standard deviation of "
                f"{deviation:.3g}"
            )
        return difference / deviation if deviation else 0.0

    return from_rank_zero(compare)


@torch.no_grad()
def megatron_logits(source: NetworkSource, tokens: Tensor) -> Tensor:
    """Logits [T, vocabulary] float32 of the sequence `tokens` [T]; values [T, 1] for a critic."""
    meta = source.network
    network = Network(meta.config, meta.gpt, "local", meta.layout, value_head=meta.value_head)
    (chunk,) = network.chunks
    chunk.eval()
    for name, parameter in global_parameters([chunk]):
        parameter.copy_(source.parameter(name))
    rows = packed_rows(torch.tensor([0, tokens.numel()], dtype=torch.int32))
    out: Tensor = chunk(
        tokens[None], torch.arange(tokens.numel())[None], None, packed_seq_params=rows
    )[0]
    return out if meta.value_head else logits_of(chunk, out)[:, : meta.gpt.vocab_size]


def dequantized_model(
    auto_class: Any, config: PretrainedConfig, files: WeightFiles, **settings: object
) -> Any:
    """transformers' model of a quantised folder, with dequantised weights. settings: of
    from_pretrained."""
    config = copy.copy(config)
    del config.quantization_config
    with torch.device("meta"):
        architecture = type(auto_class.from_config(config))
    weights = {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names}
    return architecture.from_pretrained(None, config=config, state_dict=weights, **settings)


@torch.no_grad()
def transformers_logits(folder: str, tokens: Tensor, *, value_head: bool) -> Tensor:
    """Like `megatron_logits`. A critic's head or bias that the folder does not have is zero, as
    when a run loads it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    auto_class = class_for_text(
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    )
    labels = {}
    if value_head:
        auto_class = transformers.AutoModelForTokenClassification
        labels = {"num_labels": 1}
    settings: dict[str, object] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with WeightFiles(folder) as files:
        if files.quantized:  # transformers dequantises differently, and only on some GPUs
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, **labels
            )
            model = dequantized_model(auto_class, config, files, **settings)
        else:
            model = auto_class.from_pretrained(
                folder, trust_remote_code=False, **settings, **labels
            )
    model.eval()
    if value_head:
        with WeightFiles(folder) as files:
            for name, parameter in model.score.named_parameters():
                if f"score.{name}" not in files.names:
                    parameter.zero_()
    logits: Tensor = model(tokens[None]).logits[0]
    return logits

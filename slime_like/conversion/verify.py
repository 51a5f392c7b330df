"""Verify a conversion: compare every parameter bit by bit, or the logits of transformers' model
with those of megatron-core's.

Both compare a network in a checkpoint with a Hugging Face folder, in either direction of
conversion, in a layout of one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.conversion.to_hf import NetworkSource
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.megatron.checkpoint.fingerprint import bit_sums
from slime_like.megatron.model.gpt import build_chunks
from slime_like.megatron.model.policy import head_weight
from slime_like.megatron.ops.attention import packed_rows
from slime_like.weights.hf_import import plan_loading
from slime_like.weights.parameter_map import named_weights
from slime_like.weights.safetensors_reader import WeightFiles

TOKENS = 64  # length of the sequence for comparing logits
# largest difference, relative to the standard deviation of all logits; for two different networks
# it is near 1
TOLERANCE = 1e-3


def compare_bits(
    source: NetworkSource, folder: str, advance: Callable[[int], None] = lambda size: None
) -> int:
    """Load the folder as a run would, and compare every parameter with the checkpoint's, bit by bit
    in the source's dtype. Collective; parameters are distributed over ranks. Returns their number.
    Raises ValueError naming those that differ."""
    blueprint, rank, world = source.blueprint, dist.get_rank(), dist.get_world_size()
    names = [name for name in source.family if name in blueprint.parameters]

    def compare_mine() -> list[str]:
        different = []
        with WeightFiles(folder) as files:
            plan = plan_loading(
                blueprint.parameters, files, folder, blueprint.chunks[0], hf=blueprint.hf, gpt=blueprint.gpt, layout=blueprint.layout,
                value_head=blueprint.value_head,
            )  # fmt: skip
            for name in names[rank::world]:
                saved = source.parameter(name)
                _without_padding(saved, source, name)
                written = torch.empty_like(saved)
                plan.fill(name, written, files)
                if bit_sums(saved) != bit_sums(written):
                    different.append(name)
                advance(saved.nbytes)
        return different

    if different := [name for part in gather(together(compare_mine)) for name in part]:
        raise ValueError(
            f"--verify checksums: {folder} and checkpoint {source.stored.folder} differ in {', '.join(different[:3])} "
            f"({len(different)} parameters in all)"
        )
    return len(names)


def _without_padding(parameter: Tensor, source: NetworkSource, name: str) -> None:
    """Zero the vocabulary padding in place, as loading does; trained checkpoints may have other
    values."""
    mapping = source.family[name]
    position = 0
    for part in mapping.parts(source.sizes, 0, 1, rows=parameter.shape[mapping.dim]):
        if part.hf is None:
            parameter.narrow(mapping.dim, position, len(part)).zero_()
        position += len(part)


def compare_logits(source: NetworkSource, folder: str) -> float:
    """The largest difference between the logits (values of a critic) of both models on `TOKENS`
    fixed tokens, divided by their standard deviation; in float32 for any dtype of the weights.
    Collective; rank 0 computes, and holds one full model at a time. Raises ValueError above
    `TOLERANCE`."""

    def compare() -> float:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, source.sizes.vocab, (TOKENS,), generator=generator)
        theirs, ours = (
            transformers_logits(folder, tokens, value_head=source.blueprint.value_head),
            megatron_logits(source, tokens),
        )
        spread = float(theirs.std())
        difference = float((ours - theirs).abs().max())
        if not difference <= TOLERANCE * spread:
            raise ValueError(
                f"--verify logits: those of {folder} in transformers and of checkpoint {source.stored.folder} differ by {difference:.3g}, with "
                f"a standard deviation of {spread:.3g}"
            )
        return difference / spread if spread else 0.0

    return from_rank_zero(compare)


@torch.no_grad()
def megatron_logits(source: NetworkSource, tokens: Tensor) -> Tensor:
    """Logits [T, vocabulary] float32 of the sequence `tokens` [T]; values [T, 1] for a critic."""
    blueprint = source.blueprint
    (chunk,) = build_chunks(
        blueprint.chunks[0].config,
        blueprint.gpt,
        "local",
        blueprint.layout,
        value_head=blueprint.value_head,
    )
    chunk = chunk.to(torch.float32).eval()
    for (_, parameter), name in zip(named_weights(chunk), blueprint.parameters, strict=True):
        parameter.copy_(source.parameter(name))
    rows = packed_rows(torch.tensor([0, tokens.numel()], dtype=torch.int32))
    out: Tensor = chunk(
        tokens[None], torch.arange(tokens.numel())[None], None, packed_seq_params=rows
    )[0]
    return out if blueprint.value_head else (out @ head_weight(chunk).t())[:, : source.sizes.vocab]


@torch.no_grad()
def transformers_logits(folder: str, tokens: Tensor, *, value_head: bool) -> Tensor:
    """Like `megatron_logits`. A critic's head or bias that the folder does not have is zero, as
    when a run loads it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = (
        transformers.AutoModelForTokenClassification
        if value_head
        else transformers.AutoModelForCausalLM
    )
    more: dict[str, object] = {"num_labels": 1} if value_head else {}
    settings: dict[str, object] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with WeightFiles(folder) as files:
        if files.coded:  # transformers dequantises differently, and only on some GPUs
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, **more
            )
            del config.quantization_config
            with torch.device("meta"):
                architecture = type(kind.from_config(config))
            weights = {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names}
            model = architecture.from_pretrained(
                None, config=config, state_dict=weights, **settings
            )
        else:
            model = kind.from_pretrained(folder, trust_remote_code=False, **settings, **more)
    model.eval()
    if value_head:
        with WeightFiles(folder) as files:
            for name, parameter in model.score.named_parameters():
                if f"score.{name}" not in files.names:
                    parameter.zero_()
    logits: Tensor = model(tokens[None]).logits[0]
    return logits

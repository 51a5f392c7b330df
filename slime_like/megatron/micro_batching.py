"""How a rank's samples are cut into micro-batches, by their number or by tokens, and packed. Every
data-parallel rank gets as many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.schema import AlgorithmConfig
from slime_like.distributed.seqlen_balancing import (
    even_rows,
    linear_cost,
    members,
    pack_by_budget,
    unit_sums,
)
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.moe import agreed_lengths
from slime_like.megatron.packing import pack_all, padded_lengths, with_active_rows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric
from slime_like.types import MicroBatch, TrainSample

T = TypeVar("T")


def work_per_token(config: TransformerConfig, vocab_size: int) -> float:
    """The model's `a` of `balance.linear_cost`. Of a mixture of experts the layers count as if all
    had experts."""
    ffn = config.ffn_hidden_size
    if config.num_moe_experts:
        ffn = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk + (
            config.moe_shared_expert_intermediate_size or 0
        )
    return linear_cost(
        hidden_size=config.hidden_size,
        ffn_hidden_size=ffn,
        attention_size=config.num_attention_heads * config.kv_channels,
        key_value_size=(config.num_query_groups or config.num_attention_heads) * config.kv_channels,
        gated=config.gated_linear_unit,
        num_layers=config.num_layers,
        vocab_size=vocab_size,
    )


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """samples: of every micro-batch, used where tokens is None. tokens: most of a micro-batch, over
    all context-parallel ranks. equal_sequences: pad the sequences of each to its longest. together:
    neighbours that one micro-batch gets, next to each other; it divides samples."""

    samples: int
    tokens: int | None
    equal_sequences: bool = False
    together: int = 1


def micro_batch_size(
    algorithm: AlgorithmConfig, cp_size: int, *, forward_only: bool
) -> MicroBatchSize:
    samples, tokens = algorithm.micro_batch_size, algorithm.max_tokens_per_gpu
    if forward_only:
        samples, tokens = (
            algorithm.log_probs_micro_batch_size or samples,
            algorithm.log_probs_max_tokens_per_gpu or tokens,
        )
    return MicroBatchSize(
        samples,
        tokens * cp_size if algorithm.use_dynamic_batch_size and tokens is not None else None,
        equal_sequences=algorithm.qkv_format == "bshd",
        together=algorithm.samples_together,
    )


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """rows: places of each micro-batch's samples. groups: these samples; that of an empty row is a
    sample without tokens."""

    rows: list[list[int]]
    groups: list[list[TrainSample]]

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Values of the samples of all groups, one after another, in the order in which the samples
        were given."""
        places = [
            place for row in self.rows for place in row
        ]  # empty rows come last, so their values do too
        return [value for _, value in sorted(zip(places, values), key=lambda pair: pair[0])]


def make_micro_batches(
    samples: Sequence[TrainSample], size: MicroBatchSize, layout: ParallelLayout
) -> MicroBatches:
    """The micro-batches of one pass over this rank's samples; at least one sample. Data-parallel
    ranks call it together.

    By tokens, ranks agree on the number that the fullest of them needs, up to a multiple of the
    pipeline's size under the interleaved schedule, and each spreads its tokens evenly over as many.
    A rank with fewer samples ends with micro-batches that hold padding only.
    """
    if size.tokens is None:
        rows = _consecutive(len(samples), size.samples)
    else:
        lengths = unit_sums(padded_lengths(samples, layout.cp_size), size.together)
        needed = _most_of_any_rank(len(pack_by_budget(lengths, size.tokens)), layout)
        # The interleaved schedule runs micro-batches in groups of pp_size through one model chunk
        # before the next chunk, so their number must be a multiple of it; the ones that are added
        # take tokens from the others, or hold padding only.
        if layout.vp_size > 1:
            needed += -needed % layout.pp_size
        units = even_rows(lengths, needed, size.tokens)
        rows = [members(row, size.together).tolist() for row in units]
    nothing = without_tokens(samples[0])
    return MicroBatches(rows, [[samples[i] for i in row] or [nothing] for row in rows])


def _consecutive(count: int, size: int) -> list[list[int]]:
    assert count % size == 0, "checked on the command line"
    return [list(range(start, start + size)) for start in range(0, count, size)]


def _most_of_any_rank(number: int, layout: ParallelLayout) -> int:
    if layout.dp_size == 1:
        return number
    most = torch.tensor(number, device=device_of_this_process())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=layout.dp_group)
    return int(most)


def without_tokens(like: TrainSample) -> TrainSample:
    """A sample of no tokens, with the fields that `like` has: it becomes a micro-batch of padding,
    which weighs nothing."""
    empty = {
        f.name: value[:0]
        for f in fields(like)
        if isinstance(value := getattr(like, f.name), Tensor)
    }
    return replace(like, response_length=0, **empty)


def pack_groups(
    groups: Sequence[Sequence[TrainSample]],
    *,
    transformer: TransformerConfig,
    layout: ParallelLayout,
    device: torch.device,
    equal_sequences: bool = False,
) -> list[MicroBatch]:
    """This rank's micro-batches of one pass, as its layout needs them.

    megatron-core 0.16 exchanges the shapes of an interleaved schedule in an order that two stages
    confuse (each is the other's neighbour on both sides), so there all micro-batches get one shape.
    """
    has_experts = transformer.num_moe_experts is not None
    agree = agreed_lengths(transformer, layout, device) if has_experts else None
    packed = pack_all(
        groups,
        multiple=layout.tp_size if transformer.sequence_parallel else 1,
        equal_lengths=layout.vp_size > 1,
        device=device,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
        agree=agree,
        equal_sequences=equal_sequences,
    )
    return with_active_rows(packed)


def packing_metrics(
    parts: MicroBatches, batches: Sequence[MicroBatch], size: MicroBatchSize
) -> dict[str, Metric]:
    """How one optimizer step was packed: micro-batches of each rank, the share of computed rows
    that hold no token, and the share of the token budget that is used."""
    device = batches[0].tokens.device

    def mean(value: float, count: float) -> Metric:
        return Metric(
            "mean", *(torch.tensor(x, dtype=torch.float64, device=device) for x in (value, count))
        )

    tokens = sum(int(sample.tokens.numel()) for group in parts.groups for sample in group)
    rows = sum(int(batch.cu_seqlens[-1]) for batch in batches)  # over all context-parallel ranks
    metrics = {
        "perf/micro_batches": mean(len(batches), 1),
        "perf/padding_frac": mean(rows - tokens, rows),
    }
    if size.tokens is not None:
        metrics["perf/token_budget_used"] = mean(tokens, len(batches) * size.tokens)
    return metrics

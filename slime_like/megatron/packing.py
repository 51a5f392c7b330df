"""Split samples into micro-batches, by number or by tokens, pack them, and unpack per-token
results. The only place where labels are shifted. All data-parallel ranks get the same number of
micro-batches.

Under context parallelism the full micro-batch is packed first, with every sequence padded to a
multiple of 2 * cp, and each rank takes its rows; results are gathered before unpacking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.hf.indexers import tokens_of_entry
from slime_like.distributed.seqlen_balancing import even_rows, members, pack_by_budget, unit_sums
from slime_like.images.rows import packed_images
from slime_like.losses.turns import turns_of
from slime_like.megatron.indexer_replay import replayed_keys
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.moe import make_length_sync
from slime_like.megatron.ops.ahead import ahead_rows
from slime_like.megatron.ops.attention import packed_rows
from slime_like.megatron.ops.tables import prepare_rows
from slime_like.megatron.packed_batches import images_of_sequence_rank, rows_of_context_rank
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.transfer import to_device
from slime_like.token_columns import TokenColumns
from slime_like.types import MicroBatch, TrainSample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of samples."""

    rows: list[list[int]]  # sample indices of each micro-batch
    # these samples; an empty micro-batch has one sample without tokens
    groups: list[list[TrainSample]]

    def restore_order(self, values: Sequence[T]) -> list[T]:
        """Reorder values, which are in the order of the groups, to the original sample order."""
        # empty rows are last, so zip drops their values
        indices = itertools.chain(*self.rows)
        return [value for _, value in sorted(zip(indices, values), key=lambda pair: pair[0])]


def make_micro_batches(
    samples: Sequence[TrainSample], size: MicroBatchSize, layout: ParallelLayout
) -> MicroBatches:
    """Split this rank's samples (at least one) into micro-batches. Collective over data-parallel
    ranks.

    By tokens, all ranks use the number of micro-batches that the rank with most tokens needs,
    rounded up to a multiple of the pipeline size under the interleaved schedule, and spread their
    tokens evenly. A rank with fewer samples gets micro-batches of padding.
    """
    if size.tokens is None:
        rows = _consecutive(len(samples), size.samples)
    else:
        lengths = unit_sums(padded_lengths(samples, layout.cp_size), size.together)
        needed = _max_over_ranks(len(pack_by_budget(lengths, size.tokens)), layout)
        # The interleaved schedule runs micro-batches in groups of pp_size through one model chunk
        # before the next chunk, so their number must be a multiple of it; the ones that are added
        # take tokens from the others, or hold padding only.
        if layout.vp_size > 1:
            needed += -needed % layout.pp_size
        units = even_rows(lengths, needed, size.tokens)
        rows = [members(row, size.together).tolist() for row in units]
    groups = [[samples[i] for i in row] for row in rows]
    padding = empty_sample(samples[0])
    return MicroBatches(rows, [group or [padding] for group in groups])


def _consecutive(count: int, size: int) -> list[list[int]]:
    assert count % size == 0, "checked on the command line"
    return [list(range(start, start + size)) for start in range(0, count, size)]


def _max_over_ranks(number: int, layout: ParallelLayout) -> int:
    if layout.dp_size == 1:
        return number
    maximum = torch.tensor(number)  # on the host, so over gloo: nothing waits for the device
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=layout.dp_group)
    return int(maximum)


def empty_sample(like: TrainSample) -> TrainSample:
    """A sample without tokens, with the fields of `like`: a micro-batch of padding, zero weight."""
    values = {f.name: getattr(like, f.name) for f in fields(like)}
    empty = {name: value[:0] for name, value in values.items() if isinstance(value, Tensor)}
    return replace(like, response_length=0, images=None, **empty)


def pack_groups(
    groups: Sequence[Sequence[TrainSample]],
    *,
    transformer: TransformerConfig,
    layout: ParallelLayout,
    device: torch.device,
    equal_sequences: bool = False,
    prediction_layers: int = 0,
) -> list[MicroBatch]:
    """Pack this rank's micro-batches for its layout: on the host, with all that follows from their
    lengths, and then to the device. prediction_layers: number of multi-token prediction layers that
    the pass runs.

    megatron-core 0.16 exchanges the shapes of an interleaved schedule in an order that two stages
    confuse (each is the other's neighbour on both sides), so there all micro-batches get one shape.
    """
    has_experts = transformer.num_moe_experts is not None
    sync_lengths = make_length_sync(transformer, layout) if has_experts else None
    batches = pack_all(
        groups,
        multiple=layout.tp_size if transformer.sequence_parallel else 1,
        equal_lengths=layout.vp_size > 1,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
        sync_lengths=sync_lengths,
        equal_sequences=equal_sequences,
        prediction_layers=prediction_layers,
    )
    if transformer.sequence_parallel:
        batches = [images_of_sequence_rank(b, layout.tp_size, layout.tp_rank) for b in batches]
    for batch, group in zip(batches, groups, strict=True):
        assert batch.packed is not None
        prepare_rows(
            batch.packed,
            transformer,
            last_visible=None if batch.images is None else batch.images.last_visible,
        )
        batch.packed.replayed_keys = replayed_keys(
            batch.packed,
            batch.seq_ids,
            group,
            pinned=device.type == "cuda",
            tokens=tokens_of_entry(transformer),
        )
    return [to_device(batch, device) for batch in batches]


def pack_all(
    groups: Sequence[Sequence[TrainSample]],
    *,
    multiple: int,
    equal_lengths: bool,
    cp_size: int = 1,
    cp_rank: int = 0,
    sync_lengths: Callable[[list[int]], list[int]] | None = None,
    equal_sequences: bool = False,
    prediction_layers: int = 0,
) -> list[MicroBatch]:
    """One micro-batch per group, on the host: this context-parallel rank's rows, a multiple of
    `multiple`.

    Args:
        equal_lengths: Pad all micro-batches to the longest, as the interleaved schedule needs.
        sync_lengths: Maps lengths on this rank to the lengths that all ranks pad to.
        equal_sequences: Pad the sequences of a micro-batch to its longest.
        prediction_layers: Number of multi-token prediction layers that the pass runs.
    """
    totals = [sum(padded_lengths(group, cp_size, equal=equal_sequences)) for group in groups]
    if equal_lengths:
        totals = [max(totals)] * len(totals)
    if sync_lengths is not None:
        totals = sync_lengths(totals)
    packed = [
        pack(
            group,
            multiple=multiple,
            at_least=total,
            cp_size=cp_size,
            equal_sequences=equal_sequences,
        )
        for group, total in zip(groups, totals, strict=True)
    ]
    if prediction_layers:  # while each sequence is whole
        packed = [replace(b, mask_ahead=mask_ahead(b, prediction_layers)) for b in packed]
    if cp_size > 1:
        packed = [rows_of_context_rank(batch, cp_size, cp_rank) for batch in packed]
    batches = []
    for batch in packed:
        rows = packed_rows(batch.cu_seqlens, cp_size, cp_rank)
        rows.ahead = tuple(
            ahead_rows(batch.cu_seqlens, number + 1, cp_size, cp_rank)
            for number in range(prediction_layers)
        )
        batches.append(with_rows_of_head(replace(batch, packed=rows)))
    return batches


def padded_lengths(
    samples: Sequence[TrainSample], cp_size: int, *, equal: bool = False
) -> list[int]:
    """Rows of each sample: its length, or with `equal` that of the longest, rounded up to a
    multiple of 2 * cp under context parallelism. Samples without tokens are omitted."""
    lengths = [int(s.tokens.numel()) for s in samples if s.tokens.numel()]
    if equal and lengths:
        lengths = [max(lengths)] * len(lengths)
    return lengths if cp_size == 1 else [n + -n % (2 * cp_size) for n in lengths]


# dtypes of the per-token fields that a sample and a micro-batch share, placed at `rows_of`
PER_TOKEN = {
    "loss_mask": torch.bool,
    "loss_weights": torch.float32,
    **{f.name: getattr(torch, f.metadata.get("dtype", "float32")) for f in fields(TokenColumns)},
}
TOKEN_SETS = {
    "sampling_mask": -1,
    "label_sets": 0,
    "label_weights": 0,
}  # [R, K] fields -> fill value


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Placement of samples in T rows; padding at the end is one more sequence."""

    samples: Sequence[TrainSample]
    lengths: Sequence[int]  # S
    starts: Sequence[int]  # S
    cu_seqlens: Tensor  # [S + 1]
    seq_ids: Tensor  # [T]
    positions: Tensor  # [T], within the sequence
    real_lengths: Tensor  # [S], without padding
    scored: Tensor  # [N], concatenated `rows_of` of all samples

    @property
    def total(self) -> int:
        return int(self.seq_ids.numel())

    def tokens_and_labels(self) -> tuple[Tensor, Tensor]:
        """[T] each. The label of a token is the next token, or the sample's explicit label."""
        tokens = torch.zeros(self.total, dtype=torch.int64)
        labels = torch.zeros(self.total, dtype=torch.int64)
        for start, sample in zip(self.starts, self.samples):
            end = start + sample.tokens.numel()
            tokens[start:end] = sample.tokens
            labels[start : max(start, end - 1)] = sample.tokens[1:]
            if sample.labels is not None:
                labels[rows_of(sample, start)] = sample.labels
        return tokens, labels

    def per_token(self, name: str) -> Tensor | None:
        """[T]: each sample's response values at its `rows_of`; None if a sample has none."""
        values = [column for s in self.samples if (column := getattr(s, name)) is not None]
        if len(values) < len(self.samples):
            return None
        out = torch.zeros(self.total, dtype=PER_TOKEN[name])
        if values:
            out[self.scored] = torch.cat(values).to(out.dtype)
        return out

    def sets(self, name: str) -> Tensor | None:
        """[T, K] for the largest set; None if no sample has any. (Samples that are not trained on
        may lack them.)"""
        per_sample = [getattr(sample, name) for sample in self.samples]
        present = [sets for sets in per_sample if sets is not None]
        if not present:
            return None
        size = (self.total, max(sets.size(1) for sets in present))
        out = torch.full(size, TOKEN_SETS[name], dtype=present[0].dtype)
        for start, sample, sets in zip(self.starts, self.samples, per_sample):
            if sets is not None:
                out[rows_of(sample, start), : sets.size(1)] = sets
        return out

    def routed_experts(self) -> Tensor | None:
        """[T, layers, topk] routed experts, -1 at padding; None if a sample has none."""
        per_sample = [s.routed_experts for s in self.samples if s.routed_experts is not None]
        if len(per_sample) < len(self.samples):
            return None
        out = torch.full((self.total, *per_sample[0].shape[1:]), -1, dtype=torch.int16)
        for start, routed_experts in zip(self.starts, per_sample):
            out[start : start + routed_experts.size(0)] = routed_experts
        return out

    def places(self) -> Tensor:
        """[T]: the row of each token in a packing without padding; arbitrary at padding rows, where
        it is never used."""
        starts = torch.tensor([0, *(int(s.tokens.numel()) for s in self.samples)]).cumsum(0)
        return starts[self.seq_ids] + self.positions


def place_samples(
    samples: Sequence[TrainSample],
    *,
    multiple: int,
    at_least: int,
    cp_size: int,
    equal_sequences: bool,
) -> PackedLayout:
    """The rows of `pack`."""
    lengths = padded_lengths(samples, cp_size, equal=equal_sequences)
    num_rows = max(sum(lengths), at_least, 1)
    unit = multiple if cp_size == 1 else math.lcm(2, multiple) * cp_size
    padding = num_rows + -num_rows % unit - sum(lengths)
    if padding:
        lengths.append(padding)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = cu_seqlens[:-1].tolist()
    return PackedLayout(
        samples,
        lengths,
        starts,
        cu_seqlens,
        seq_ids,
        torch.arange(sum(lengths)) - cu_seqlens[:-1].long()[seq_ids],
        torch.tensor([*(int(s.tokens.numel()) for s in samples), 0]),
        joined_ranges([rows_of(sample, start) for start, sample in zip(starts, samples)]),
    )


def joined_ranges(ranges: Sequence[slice]) -> Tensor:
    """[N]: concatenation of all ranges."""
    first = torch.tensor([r.start for r in ranges], dtype=torch.int64)
    counts = torch.tensor([r.stop - r.start for r in ranges], dtype=torch.int64)
    shifts = first - (counts.cumsum(0) - counts)  # of each range, from its place among all
    return torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)


def pack(
    samples: Sequence[TrainSample],
    *,
    multiple: int,
    at_least: int = 0,
    cp_size: int = 1,
    equal_sequences: bool = False,
) -> MicroBatch:
    """Concatenate samples into one row of T >= `at_least` tokens, of which each of `cp_size` ranks
    can take an equal share that is a multiple of `multiple` (the tensor-parallel size under
    sequence parallelism). Padding at the end is one more sequence with an all-False mask; padding
    of a sequence, to the length of the longest with `equal_sequences`, is at its own end, where no
    token can see it."""
    rows = place_samples(
        samples,
        multiple=multiple,
        at_least=at_least,
        cp_size=cp_size,
        equal_sequences=equal_sequences,
    )
    tokens, labels = rows.tokens_and_labels()
    real = rows.positions < rows.real_lengths[rows.seq_ids]
    # padding gets position 0, because it may be longer than max_position_embeddings
    positions = torch.where(real, rows.positions, 0)
    needs_places = cp_size > 1 or equal_sequences
    per_token = {name: rows.per_token(name) for name in PER_TOKEN}
    assert per_token["loss_mask"] is not None and per_token["loss_weights"] is not None
    turn_ids = turns_of(per_token["loss_mask"], rows.seq_ids)
    columns: dict[str, Any] = {
        "tokens": tokens.unsqueeze(0),
        "labels": labels.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "seq_ids": rows.seq_ids,
        "cu_seqlens": rows.cu_seqlens,
        "is_padding": ~real,
        "places": rows.places() if needs_places else None,
        "turn_ids": turn_ids,
        "routed_experts": rows.routed_experts(),
        "images": packed_images([s.images for s in samples], rows.starts, positions),
        **per_token,
        **{name: rows.sets(name) for name in TOKEN_SETS},
    }
    return MicroBatch(
        **columns,
        max_seqlen=max(rows.lengths),
        lengths=tuple(rows.lengths),
        num_turns=int(turn_ids[-1]) + 1,
    )


def with_selection_seeds(
    batches: Sequence[MicroBatch], seed: int, step: int, dp_rank: int
) -> list[MicroBatch]:
    """Give each micro-batch of an optimizer step its own seed, of 32 bits, because torch's CPU
    generator uses no more.

    All data-parallel ranks have the same number of micro-batches, so their index in the step does
    not depend on the layout.
    """
    first = dp_rank * len(batches)
    seeds = [
        int(np.random.SeedSequence((seed, step, first + i)).generate_state(1)[0])
        for i in range(len(batches))
    ]
    return [replace(batch, selection_seed=s) for batch, s in zip(batches, seeds)]


def mask_ahead(batch: MicroBatch, layers: int) -> Tensor:
    """[T, layers] bool: `loss_mask` of the row that is 1, 2, ... `layers` later in the same
    sequence; False where there is none."""
    columns = []
    for number in range(layers):
        ahead = ahead_rows(batch.cu_seqlens, number + 1, cp_size=1, cp_rank=0)
        columns.append(batch.loss_mask[ahead.source] & ahead.within)
    return torch.stack(columns, dim=1)


def with_rows_of_head(batch: MicroBatch) -> MicroBatch:
    """Look up the rows that the head computes while the masks are on the host, because counting
    them on the device makes the host wait."""
    active, observed, ahead = batch.loss_mask, batch.observation_weights, batch.mask_ahead
    return replace(
        batch,
        active_rows=_true_rows(active),
        observed_rows=None if observed is None else _true_rows(active | (observed != 0)),
        predicted_rows=() if ahead is None else tuple(map(_true_rows, ahead.unbind(1))),
    )


def _true_rows(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def unpack(values: Tensor, samples: Sequence[TrainSample], lengths: Sequence[int]) -> list[Tensor]:
    """The response values [R] of each sample from packed values [T]; the inverse of `pack`, which
    produced `lengths`."""
    starts = itertools.accumulate(lengths, initial=0)
    return [values[rows_of(sample, start)] for start, sample in zip(starts, samples)]


def rows_of(sample: TrainSample, start: int) -> slice:
    """Rows of a packed micro-batch that a sample's response values belong to. start: row of its
    first token."""
    rows = sample.scored_rows
    return slice(start + rows.start, start + rows.stop)

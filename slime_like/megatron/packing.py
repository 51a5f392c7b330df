"""Samples -> packed micro-batches, and per-token results back to samples. The label shift happens
here and nowhere else.

Under context parallelism the micro-batch is packed whole, with every sequence padded to a multiple
of 2 * cp, and each rank then takes its rows of it; values of the ranks' rows are joined before they
go back to samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.losses.inputs import turns_of
from slime_like.megatron.ops.context_parallel import places_over_ranks, rows_of_rank
from slime_like.types import MicroBatch, TrainSample


def pack_all(
    groups: Sequence[Sequence[TrainSample]],
    *,
    multiple: int,
    equal_lengths: bool,
    device: torch.device,
    cp_size: int = 1,
    cp_rank: int = 0,
    agree: Callable[[list[int]], list[int]] | None = None,
    equal_sequences: bool = False,
) -> list[MicroBatch]:
    """A micro-batch for each group: this context-parallel rank's rows of it, a multiple of
    `multiple` of them. equal_lengths: pad all to the longest, as the interleaved pipeline schedule
    needs. agree: from the lengths on this rank, those that all ranks pad theirs to.
    equal_sequences: pad the sequences of each to its longest."""
    totals = [sum(padded_lengths(group, cp_size, equal=equal_sequences)) for group in groups]
    if equal_lengths:
        totals = [max(totals)] * len(totals)
    if agree is not None:
        totals = agree(totals)
    packed = [
        pack(
            group,
            multiple=multiple,
            at_least=total,
            device=device,
            cp_size=cp_size,
            equal_sequences=equal_sequences,
        )
        for group, total in zip(groups, totals, strict=True)
    ]
    return (
        packed
        if cp_size == 1
        else [rows_of_context_rank(batch, cp_size, cp_rank) for batch in packed]
    )


def padded_lengths(
    samples: Sequence[TrainSample], cp_size: int, *, equal: bool = False
) -> list[int]:
    """Rows that each sample takes: its length, or with `equal` that of the longest, up to a
    multiple of 2 * cp where context-parallel ranks share them. A sample without tokens takes none,
    and no place in the list."""
    lengths = [int(s.tokens.numel()) for s in samples if s.tokens.numel()]
    if equal and lengths:
        lengths = [max(lengths)] * len(lengths)
    return lengths if cp_size == 1 else [n + -n % (2 * cp_size) for n in lengths]


# Fields of a sample, over its response; `rows_of` are their rows.
PER_TOKEN = {
    "loss_mask": torch.bool,
    "loss_weights": torch.float32,
    "policy_weights": torch.float32,
    "advantages": torch.float32,
    "old_log_probs": torch.float32,
    "rollout_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "keep_mask": torch.bool,
    "importance_weights": torch.float32,
    "rewards": torch.float32,
    "nll_weights": torch.float32,
    "observation_weights": torch.float32,
    "values": torch.float32,
    "returns": torch.float32,
}
SETS = {"token_sets": -1, "label_sets": 0, "label_weights": 0}  # [R, K] by sample: what fills rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Where samples lie in a row of T tokens. lengths: of the sequences, padding at the end as one
    more; starts: of the sequences; seq_ids, positions: [T], the sequence of each token and its
    place there; real_lengths: [S], tokens of each sequence that are no padding; scored: [N], the
    `rows_of` all samples, one after another."""

    samples: Sequence[TrainSample]
    lengths: Sequence[int]
    starts: Sequence[int]
    cu_seqlens: Tensor
    seq_ids: Tensor
    positions: Tensor
    real_lengths: Tensor
    scored: Tensor

    @property
    def total(self) -> int:
        return int(self.seq_ids.numel())

    def tokens_and_labels(self) -> tuple[Tensor, Tensor]:
        """[T] each. The label of a token is the next one, or what the sample says itself."""
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
        """[T]: each sample's response values on its `rows_of`; None when a sample has
        none."""
        given = [values for s in self.samples if (values := getattr(s, name)) is not None]
        if len(given) < len(self.samples):
            return None
        out = torch.zeros(self.total, dtype=PER_TOKEN[name])
        if given:
            out[self.scored] = torch.cat(given).to(out.dtype)
        return out

    def sets(self, name: str) -> Tensor | None:
        """[T, K] for the largest set; None when no sample has any, as one that trains nothing may
        not."""
        every = [getattr(sample, name) for sample in self.samples]
        given = [sets for sets in every if sets is not None]
        if not given:
            return None
        size = (self.total, max(sets.size(1) for sets in given))
        out = torch.full(size, SETS[name], dtype=given[0].dtype)
        for start, sample, sets in zip(self.starts, self.samples, every):
            if sets is not None:
                out[rows_of(sample, start), : sets.size(1)] = sets
        return out

    def routes(self) -> Tensor | None:
        """[T, layers, topk] of all tokens, -1 at padding; None when a sample has no routes."""
        given = [s.routes for s in self.samples if s.routes is not None]
        if len(given) < len(self.samples):
            return None
        out = torch.full((self.total, *given[0].shape[1:]), -1, dtype=torch.int16)
        for start, routes in zip(self.starts, given):
            out[start : start + routes.size(0)] = routes
        return out

    def places(self) -> Tensor:
        """[T]: the row of each token where nothing is padded. Padding inside the row has those of
        others, and is never asked for its own."""
        starts = torch.tensor([0, *(int(s.tokens.numel()) for s in self.samples)]).cumsum(0)
        return starts[self.seq_ids] + self.positions


def lay_out(
    samples: Sequence[TrainSample],
    *,
    multiple: int,
    at_least: int,
    cp_size: int,
    equal_sequences: bool,
) -> Rows:
    """The rows of `pack`."""
    lengths = padded_lengths(samples, cp_size, equal=equal_sequences)
    wanted = max(sum(lengths), at_least, 1)
    unit = multiple if cp_size == 1 else math.lcm(2, multiple) * cp_size
    padding = wanted + -wanted % unit - sum(lengths)
    if padding:
        lengths.append(padding)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = cu_seqlens[:-1].tolist()
    return Rows(
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
    """[N]: the numbers of all ranges, one range after another."""
    first = torch.tensor([r.start for r in ranges], dtype=torch.int64)
    counts = torch.tensor([r.stop - r.start for r in ranges], dtype=torch.int64)
    shifts = first - (counts.cumsum(0) - counts)  # of each range, from its place among all
    return torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)


def pack(
    samples: Sequence[TrainSample],
    *,
    multiple: int,
    device: torch.device,
    at_least: int = 0,
    cp_size: int = 1,
    equal_sequences: bool = False,
) -> MicroBatch:
    """Concatenate samples into one row of T >= `at_least` tokens, of which each of `cp_size` ranks
    can take an equal share that is a multiple of `multiple` (the tensor-parallel size under
    sequence parallelism). Padding at the end is one more sequence with an all-False mask; padding
    of a sequence, to the length of the longest with `equal_sequences`, is at its own end, where no
    token can see it."""
    rows = lay_out(
        samples,
        multiple=multiple,
        at_least=at_least,
        cp_size=cp_size,
        equal_sequences=equal_sequences,
    )
    tokens, labels = rows.tokens_and_labels()
    real = rows.positions < rows.real_lengths[rows.seq_ids]
    needs_places = cp_size > 1 or equal_sequences
    of_tokens = {name: rows.per_token(name) for name in PER_TOKEN}
    assert of_tokens["loss_mask"] is not None
    turn_ids = turns_of(of_tokens["loss_mask"], rows.seq_ids)
    columns: dict[str, Tensor | None] = {
        "tokens": tokens.unsqueeze(0),
        "labels": labels.unsqueeze(0),
        # padding stands at position 0: it may be longer than the network has learned positions
        "position_ids": torch.where(real, rows.positions, 0).unsqueeze(0),
        "seq_ids": rows.seq_ids,
        "cu_seqlens": rows.cu_seqlens,
        "is_padding": ~real,
        "places": rows.places() if needs_places else None,
        "turn_ids": turn_ids,
        "routes": rows.routes(),
        **of_tokens,
        **{name: rows.sets(name) for name in SETS},
    }
    moved: dict[str, Any] = {
        name: None if column is None else column.to(device) for name, column in columns.items()
    }
    assert moved["loss_mask"] is not None and moved["loss_weights"] is not None
    return MicroBatch(**moved, max_seqlen=max(rows.lengths), num_turns=int(turn_ids[-1]) + 1)


def rows_of_context_rank(batch: MicroBatch, cp_size: int, cp_rank: int) -> MicroBatch:
    """What a context-parallel rank holds of a whole micro-batch."""
    rows = rows_of_rank(batch.cu_seqlens, cp_size, cp_rank)
    held: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor) and f.name != "cu_seqlens":
            by_row = value[0] if value.size(0) == 1 else value
            assert by_row.size(0) == batch.seq_ids.numel(), f"{f.name} is not by row"
            held[f.name] = by_row[rows] if by_row is value else by_row[rows].unsqueeze(0)
    return replace(batch, **held)


def join_context_ranks(values: Tensor, batches: Sequence[MicroBatch], cp_size: int) -> Tensor:
    """Values of all ranks' rows in the order of the whole micro-batches, [n, T] for T rows in all.

    values: [cp_size, n, T / cp_size], each rank's rows of `batches` one micro-batch after another.
    """
    parts = values.split([batch.tokens.numel() for batch in batches], dim=2)
    whole = [
        part.transpose(0, 1).flatten(1)[:, places_over_ranks(b.cu_seqlens, cp_size)]
        for part, b in zip(parts, batches)
    ]
    return torch.cat(whole, dim=1)


def with_selection_seeds(
    batches: Sequence[MicroBatch], seed: int, step: int, dp_rank: int
) -> list[MicroBatch]:
    """Give each micro-batch of an optimizer step its own seed, of 32 bits, which is all that
    torch's generator on the host reads.

    All data-parallel ranks have as many micro-batches, so that their place in the step does not
    depend on the layout.
    """
    first = dp_rank * len(batches)
    seeds = [
        int(np.random.SeedSequence((seed, step, first + i)).generate_state(1)[0])
        for i in range(len(batches))
    ]
    return [replace(batch, selection_seed=s) for batch, s in zip(batches, seeds)]


def with_active_rows(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Look up the rows that the head computes before a forward pass is queued: the host waits for
    the device to count them."""
    return [replace(batch, active_rows=batch.loss_mask.nonzero().squeeze(1)) for batch in batches]


def unpack(values: Tensor, samples: Sequence[TrainSample], cu_seqlens: Tensor) -> list[Tensor]:
    """The response values [R] of each sample from a whole packed row of values [T]; inverse of the
    placement in `pack`, whose
    `cu_seqlens` these are."""
    return [values[rows_of(s, start)] for start, s in zip(cu_seqlens.tolist(), samples)]


def rows_of(sample: TrainSample, start: int) -> slice:
    """Rows of a packed micro-batch that the response values of a sample speak about, whose tokens
    begin at row `start`."""
    rows = sample.scored_rows
    return slice(start + rows.start, start + rows.stop)

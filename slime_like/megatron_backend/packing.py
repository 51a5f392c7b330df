"""Samples -> packed micro-batches, and per-token results back to samples. The label shift happens here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slime_like.types import MicroBatch, TrainBatch, TrainSample


def split_micro_batches(batch: TrainBatch, micro_batch_size: int) -> list[tuple[TrainSample, ...]]:
    """Consecutive samples, `micro_batch_size` to each micro-batch. The command line guarantees that they divide."""
    samples = batch.samples
    assert len(samples) % micro_batch_size == 0, (len(samples), micro_batch_size)
    return [samples[i : i + micro_batch_size] for i in range(0, len(samples), micro_batch_size)]


def pack_all(groups: Sequence[Sequence[TrainSample]], *, multiple: int, equal_lengths: bool, device: torch.device) -> list[MicroBatch]:
    """A micro-batch for each group. equal_lengths: pad all to the longest, as the interleaved pipeline schedule needs."""
    totals = [sum(int(s.tokens.numel()) for s in group) for group in groups]
    return [pack(group, multiple=multiple, at_least=max(totals) if equal_lengths else 0, device=device) for group in groups]


def pack(samples: Sequence[TrainSample], *, multiple: int, device: torch.device, at_least: int = 0) -> MicroBatch:
    """Concatenate samples into one row of T >= `at_least` tokens, T a multiple of `multiple` (the tensor-parallel size under sequence
    parallelism). Padding is one more sequence with an all-False mask."""
    lengths = [int(s.tokens.numel()) for s in samples]
    wanted = max(sum(lengths), at_least)
    padding = wanted + -wanted % multiple - sum(lengths)
    if padding:
        lengths.append(padding)
    total = sum(lengths)
    tokens = torch.zeros(total, dtype=torch.int64)
    labels = torch.zeros(total, dtype=torch.int64)
    start = 0
    for sample in samples:
        end = start + sample.tokens.numel()
        tokens[start:end] = sample.tokens
        labels[start : end - 1] = sample.tokens[1:]
        start = end
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.arange(total) - cu_seqlens[:-1].long()[seq_ids]

    def per_token(get: Callable[[TrainSample], Tensor | None], dtype: torch.dtype) -> Tensor | None:
        """Place each sample's response values on the rows whose labels they speak about."""
        out = torch.zeros(total, dtype=dtype)
        start = 0
        for sample in samples:
            end = start + int(sample.tokens.numel())
            values = get(sample)
            if values is None:
                return None
            out[end - 1 - sample.response_length : end - 1] = values.to(dtype)
            start = end
        return out.to(device)

    def required(get: Callable[[TrainSample], Tensor | None], dtype: torch.dtype) -> Tensor:
        values = per_token(get, dtype)
        assert values is not None
        return values

    return MicroBatch(
        tokens=tokens.unsqueeze(0).to(device),
        labels=labels.unsqueeze(0).to(device),
        position_ids=positions.unsqueeze(0).to(device),
        seq_ids=seq_ids.to(device),
        cu_seqlens=cu_seqlens.to(device),
        max_seqlen=max(lengths),
        loss_mask=required(lambda s: s.loss_mask, torch.bool),
        loss_weights=required(lambda s: s.loss_weights, torch.float32),
        policy_weights=per_token(lambda s: s.policy_weights, torch.float32),
        advantages=per_token(lambda s: s.advantages, torch.float32),
        old_log_probs=per_token(lambda s: s.old_log_probs, torch.float32),
        rollout_log_probs=per_token(lambda s: s.rollout_log_probs, torch.float32),
        ref_log_probs=per_token(lambda s: s.ref_log_probs, torch.float32),
        keep_mask=per_token(lambda s: s.keep_mask, torch.bool),
        importance_weights=per_token(lambda s: s.importance_weights, torch.float32),
        rewards=per_token(lambda s: s.rewards, torch.float32),
        nll_weights=per_token(lambda s: s.nll_weights, torch.float32),
    )


def with_selection_seeds(batches: Sequence[MicroBatch], seed: int, step: int, dp_rank: int) -> list[MicroBatch]:
    """Give each micro-batch of an optimizer step a seed of its own, of 32 bits, which is all that torch's generator on the host reads.

    All data-parallel ranks have as many micro-batches, so that their place in the step does not depend on the layout.
    """
    first = dp_rank * len(batches)
    seeds = [int(np.random.SeedSequence((seed, step, first + i)).generate_state(1)[0]) for i in range(len(batches))]
    return [replace(batch, selection_seed=s) for batch, s in zip(batches, seeds)]


def unpack(values: Tensor, samples: Sequence[TrainSample]) -> list[Tensor]:
    """The response values [R] of each sample from a packed row of values [T]; inverse of the placement in `pack`."""
    out, start = [], 0
    for sample in samples:
        end = start + int(sample.tokens.numel())
        out.append(values[end - 1 - sample.response_length : end - 1])
        start = end
    return out

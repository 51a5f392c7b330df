"""Sampling masks: the tokens that top-k and top-p left to sample each token from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def split_sampling_mask(sampling_mask: Tensor | None) -> list[Tensor]:
    """The sets in the result of `pad_sampling_mask`, without padding."""
    return [] if sampling_mask is None else [row[row >= 0] for row in sampling_mask]


def pad_sampling_mask(sets: Sequence[Tensor]) -> Tensor:
    """Pad R sets of at most K tokens with -1 to [R, K] int32."""
    return (
        pad_sequence(list(sets), batch_first=True, padding_value=-1)
        if sets
        else torch.empty((0, 0), dtype=torch.int32)
    )


def empty_sampling_mask(count: int) -> list[Tensor]:
    """Empty sets, for `count` tokens that the model did not generate."""
    return [torch.empty(0, dtype=torch.int32)] * count

"""Index tables of compressed attention (ops/compressed_attention.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EntryRows:
    """The P entries of all sequences, one after the other. Each is made of `rate` consecutive
    tokens of its sequence, the last of which is incomplete and makes none."""

    rate: int
    tokens: Tensor  # [P, rate] int64, natural rows
    places: Tensor  # [P] int64, position of the first token within its sequence
    follows: Tensor  # [P] bool: the entry before is of the same sequence

    def on(self, device: torch.device) -> EntryRows:
        """A copy there."""
        tensors = (x.to(device) for x in (self.tokens, self.places, self.follows))
        return EntryRows(self.rate, *tensors)


@dataclass(frozen=True, slots=True)
class EntryTables:
    """What all layers with compressed attention share."""

    places: Tensor  # [T / cp] int64, position of each row of this rank within its sequence
    by_rate: tuple[EntryRows, ...]
    # how far each position turns the pairs of a head [positions, pairs], float32: in layers with a
    # window alone, and in those with entries
    angles: tuple[Tensor, ...] = ()

    def of_rate(self, rate: int) -> EntryRows:
        """The entries of so many tokens each."""
        return next(entries for entries in self.by_rate if entries.rate == rate)

    def on(self, device: torch.device) -> EntryTables:
        """A copy there."""
        return EntryTables(
            self.places.to(device),
            tuple(entries.on(device) for entries in self.by_rate),
            tuple(angles.to(device) for angles in self.angles),
        )

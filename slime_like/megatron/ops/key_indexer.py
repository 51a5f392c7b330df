"""What all indexers of sparse attention share: the replay of an engine's choice."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.sparse_attention import replay_keys


class KeyIndexer(torch.nn.Module):
    """Selects keys, or compressed entries, for the queries of one layer."""

    # [2] float64, of a pass: replayed keys that the indexer would not have selected, and all
    # replayed keys; on the device, so that nothing waits for it
    disagreement: Tensor | None = None
    _slot: int | None = None  # in `PackedRows.replayed_keys`; None: it always selects itself

    def begin(self, slot: int) -> None:
        """Start a pass over micro-batches."""
        self._slot = slot
        self.disagreement = None

    def chosen(self, selected: Tensor, rows: PackedRows) -> Tensor:
        """What to attend to: the choice of the engine where it is known, else the own one,
        `selected`, [F, K] int32 (`select_keys`, `select_entries`). Counts where they differ, once
        per micro-batch: a recomputation has the same rows."""
        slot = self._slot
        if slot is None or (given := rows.replayed_keys.get(slot)) is None:
            return selected
        given = given.to(selected.device, non_blocking=True)
        chosen, counts = replay_keys(selected, given)
        if slot not in rows.compared_keys:
            rows.compared_keys.add(slot)
            before = self.disagreement
            self.disagreement = counts if before is None else before + counts
        return chosen

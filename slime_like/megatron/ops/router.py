"""The router of an expert layer for packed rows: what megatron-core's TopKRouter lacks, in its
place in the layer spec.

- Padding is routed (somebody has to compute it) and stays out of every statistic: auxiliary losses,
  z-loss, expert bias, loads.
- The sequence-wise auxiliary loss is that of the packed sequences; megatron-core would take the
  whole row for one.
- The choice of experts can be recorded, and replayed in a later pass. Replay changes who is chosen;
  weights and gradients still come from the current router's scores of those experts (routing
  replay: 2507.18071; as in slime).

A router is called with hidden states alone. Which micro-batch they are of follows from the order of
calls: forward passes and recomputations each go through the micro-batches in order, and under
activation checkpointing a layer's first call has no gradient and its second has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The rows of one micro-batch that this rank routes: t of its T rows, 1 / tp of them under
    sequence parallelism."""

    seq_ids: Tensor  # [t] int64
    num_seqs: int
    padding: Tensor  # [t] bool, True at rows of no sample
    # [t, expert layers of this rank, topk]: experts to choose, negative where the router's own
    # choice counts
    routes: Tensor | None = None


@dataclass(slots=True)
class _Pass:
    """One pass over micro-batches, as one router sees it."""

    rows: Sequence[RoutedRows]
    slot: int  # of this router among the rank's
    record: bool
    started: int = 0  # micro-batches whose forward has begun
    to_recompute: deque[int] = field(default_factory=deque)
    recorded: list[Tensor] = field(default_factory=list)  # [t, topk] for each micro-batch
    # tokens whose own choice of experts would have been another than the replayed one
    differing: int = 0
    compared: int = 0


class PackedRouter(TopKRouter):
    """See the module. Without `begin` it routes as TopKRouter does."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._pass: _Pass | None = None
        self._rows: RoutedRows | None = None  # of the call that is going on
        self._first_call = True  # not a recomputation
        self.router_replay = _Choice(self)  # what TopKRouter asks for the top k
        self.register_buffer(
            "load", torch.zeros(self.num_experts, device=self.weight.device), persistent=False
        )

    def begin(self, rows: Sequence[RoutedRows], *, slot: int, record: bool) -> None:
        """Start a pass over micro-batches, which lasts until the next `begin`. slot: this router's
        index in `RoutedRows.routes`."""
        self._pass = _Pass(rows, slot, record)
        self.load.zero_()

    @property
    def recorded(self) -> list[Tensor]:
        """The chosen experts [t, topk] int64 of each micro-batch of the pass."""
        assert self._pass is not None and self._pass.record
        return self._pass.recorded

    @property
    def disagreement(self) -> tuple[int, int]:
        """(tokens whose own choice would have been another than the replayed one, tokens with a
        replayed choice) of the pass."""
        return (0, 0) if self._pass is None else (self._pass.differing, self._pass.compared)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._pass is None:
            return super().forward(input, padding_mask)
        self._rows = self._rows_of_this_call(self._pass)
        assert self._rows.padding.numel() == input.size(0) * input.size(1), (
            "a router was called out of turn"
        )
        return super().forward(input, padding_mask=self._rows.padding)

    def _rows_of_this_call(self, current: _Pass) -> RoutedRows:
        recomputed = self.training and torch.is_grad_enabled() and bool(current.to_recompute)
        self._first_call = not recomputed
        if recomputed:
            return current.rows[current.to_recompute.popleft()]
        index = current.started
        current.started += 1
        if self.training and not torch.is_grad_enabled():
            current.to_recompute.append(index)
        return current.rows[index]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        if self._first_call and padding_mask is not None:
            self.load += (routing_map & ~padding_mask.view(-1, 1)).sum(dim=0)
        return probs, routing_map

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Switch Transformer's balance loss (2101.03961) over the micro-batch; 0 where that is
        padding only, which megatron-core divides by."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        together = torch.zeros(routing_map.size(0), dtype=torch.int64, device=routing_map.device)
        loss = coefficient * self._imbalance(scores_for_aux_loss, routing_map, together, 1)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "load_balancing_loss", self.tp_cp_group
        )

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """DeepSeek-V2's sequence-wise balance loss (2405.04434, section 2.2.3), averaged over the
        micro-batch's sequences."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        if self._rows is None:
            return super()._apply_seq_aux_loss(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            )
        loss = coefficient * self._imbalance(
            scores_for_aux_loss, routing_map, self._rows.seq_ids, self._rows.num_seqs
        )
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "seq_load_balancing_loss", self.tp_cp_group
        )

    def _imbalance(self, scores: Tensor, routing_map: Tensor, ids: Tensor, num: int) -> Tensor:
        """E * sum of f_e * P_e over experts, averaged over the parts of the micro-batch that have
        tokens.

        scores, routing_map: [t, E], zero at padding. ids: [t], which of the `num` parts a row
        belongs to. A part may lie on several tensor- and context-parallel ranks: counts are those
        of the whole, each rank adds its own scores' share.
        """
        empty = scores.new_zeros(num, self.num_experts)
        counts = reduce_from_tensor_model_parallel_region(
            empty.index_add(0, ids, routing_map.to(empty.dtype)), self.tp_cp_group
        )
        sums = empty.index_add(0, ids, scores)
        lengths = counts.sum(dim=1) / self.topk
        of_part = (
            (sums * counts).sum(dim=1) * self.num_experts / (self.topk * lengths.clamp(min=1) ** 2)
        )
        return of_part.sum() / (lengths > 0).sum().clamp(min=1)

    def _apply_global_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """megatron-core's, where any rank has tokens: it would divide by their number."""
        if self.get_aux_loss_coeff("global_aux_loss") == 0:
            return probs
        tokens = reduce_from_tensor_model_parallel_region(routing_map.sum(), self.tp_dp_cp_group)
        return (
            super()._apply_global_aux_loss(
                probs, scores_for_aux_loss, routing_map, with_padding_mask
            )
            if tokens
            else probs
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert for the update of its bias: once for each token that is
        trained on."""
        if not (self.enable_expert_bias and self.training and torch.is_grad_enabled()):
            return
        with torch.no_grad():
            counted = (
                routing_map if padding_mask is None else routing_map & ~padding_mask.view(-1, 1)
            )
            self.local_tokens_per_expert += counted.sum(dim=0)

    def choose(
        self, scores: Tensor, default: Callable[..., tuple[Tensor, Tensor]], *arguments: object
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) [t, topk] of the chosen experts. default: megatron-core's choice."""
        current, rows = self._pass, self._rows
        values, own = default(scores, *arguments)
        if current is None or rows is None:
            return values, own
        if current.record:
            current.recorded.append(own.detach())
        if rows.routes is None:
            return values, own
        replayed = rows.routes[:, current.slot].long()  # (t, topk)
        known = (replayed >= 0).all(dim=1)
        chosen = torch.where(known.unsqueeze(1), replayed, own)
        if self._first_call:
            other = (chosen.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            current.differing += int((other & known).sum())
            current.compared += int(known.sum())
        return scores.gather(1, chosen), chosen


class _Choice:
    """What megatron-core calls for the top k, under the name of its own replay."""

    def __init__(self, router: PackedRouter) -> None:
        self._router = [router]  # in a list: a module would become a submodule of itself

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        return self._router[0].choose(scores, default_compute_topk, topk, num_groups, group_topk)

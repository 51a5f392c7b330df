"""MoE router for packed sequences, which replaces megatron-core's TopKRouter in the layer spec.

- Padding is routed like other rows, but excluded from all statistics: auxiliary losses, z-loss,
  expert bias, loads.
- The sequence-wise auxiliary loss is computed per packed sequence; megatron-core would treat all
  rows as one sequence.
- A router may select experts by a table with a row for each token of the vocabulary (DeepSeek-V4's
  first layers); weights are those of its scores.
- The selected experts can be recorded and replayed in a later pass. Replay changes only the
  selection; weights and gradients still come from the current router's scores of those experts
  (routing replay: arXiv 2507.18071; as in slime).

A router is called with hidden states only, so it derives the micro-batch from the order of calls:
forward passes and recomputations each go through the micro-batches in order, and under activation
checkpointing a layer's first call runs without gradients and the second with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

SQRT_SOFTPLUS = "sqrtsoftplus"


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The rows of one micro-batch that this rank routes: t = T, or T / tp under sequence
    parallelism."""

    seq_ids: Tensor  # [t] int64
    num_seqs: int
    padding: Tensor  # [t] bool
    tokens: Tensor  # [t] int64
    # [t, MoE layers of this rank, topk]: experts to replay, negative where the router selects
    routed_experts: Tensor | None = None


@dataclass(slots=True)
class _Pass:
    """State of one router during one pass over micro-batches."""

    rows: Sequence[RoutedRows]
    slot: int  # index of this router among the rank's routers
    record: bool
    # [2] float64: replayed tokens for which the router would have selected other experts, and all
    # replayed tokens; on the device, so that nothing waits for it
    disagreement: Tensor
    started: int = 0  # number of micro-batches with a forward call so far
    to_recompute: deque[int] = field(default_factory=deque)
    recorded: list[Tensor] = field(default_factory=list)  # [t, topk] per micro-batch


class PackedRouter(TopKRouter):
    """TopKRouter for packed sequences, with recording and replay; see the module docstring. Before
    the first `begin` it behaves like TopKRouter."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._pass: _Pass | None = None
        self._rows: RoutedRows | None = None  # rows of the current call
        self._first_call = True  # False in a recomputation
        self.router_replay = _Choice(self)  # TopKRouter calls it for the top k
        self.token_experts: Tensor | None = None  # [vocabulary, topk] int64
        self._tokens: Tensor | None = None  # [t] of the current call
        # score of a logit, where it is not one of megatron-core's
        self._scores = getattr(self.config, "router_scores", None)
        assert self._scores in (None, SQRT_SOFTPLUS)
        # Gemma 4: the input is normalised, and multiplied by channel; weights are, by expert
        self.input_scale: torch.nn.Parameter | None = None
        self.expert_scale: torch.nn.Parameter | None = None
        if getattr(self.config, "experts_beside_mlp", False):
            self.input_scale = self._scales(self.weight.size(1))
            self.expert_scale = self._scales(self.num_experts)
        self.register_buffer(
            "load", torch.zeros(self.num_experts, device=self.weight.device), persistent=False
        )

    @property
    def float32_buffers(self) -> list[str]:
        """Buffers that stay in float32 in a model in half precision: all, the bias of the experts
        and counts."""
        return [name for name, _ in self.named_buffers(recurse=False)]

    def _scales(self, count: int) -> torch.nn.Parameter:
        scales = torch.nn.Parameter(self.weight.new_ones(count))
        scales.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return scales

    def set_layer_number(self, layer_number: int) -> None:
        """As in megatron-core; a layer that selects experts by token gets its table."""
        super().set_layer_number(layer_number)
        if self.token_experts is None and layer_number <= getattr(self.config, "hashed_layers", 0):
            del self.token_experts
            shape = (self.config.hashed_tokens, self.topk)
            table = torch.zeros(shape, dtype=torch.int64, device=self.weight.device)
            self.register_buffer("token_experts", table)
            # what these experts are does not change: there is nothing to balance
            self.enable_expert_bias = False
            del self.expert_bias, self.local_tokens_per_expert

    def begin(self, rows: Sequence[RoutedRows], *, slot: int, record: bool) -> None:
        """Start a pass over micro-batches; it lasts until the next `begin`.

        Args:
            slot: Index of this router in `RoutedRows.routed_experts`.
            record: Keep the selected experts.
        """
        self._pass = _Pass(rows, slot, record, self._no_disagreement())
        self.load.zero_()

    @property
    def recorded(self) -> list[Tensor]:
        """Experts selected in this pass, [t, topk] int64 per micro-batch."""
        assert self._pass is not None and self._pass.record
        return self._pass.recorded

    @property
    def disagreement(self) -> Tensor:
        """[2] float64, of the pass: replayed tokens for which the router would have selected other
        experts, and all replayed tokens."""
        return self._no_disagreement() if self._pass is None else self._pass.disagreement

    def _no_disagreement(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.load.device)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._pass is None:
            return super().forward(input, padding_mask)
        self._rows = self._rows_of_this_call(self._pass)
        self._tokens = self._rows.tokens
        assert self._rows.padding.numel() == input.size(0) * input.size(1), (
            "a router was called out of order"
        )
        return super().forward(input, padding_mask=self._rows.padding)

    def gating(self, input: Tensor) -> Tensor:
        """As in megatron-core, of the scaled input."""
        if self.input_scale is not None:
            wide = input.to(torch.promote_types(input.dtype, torch.float32))
            normed = F.rms_norm(wide, wide.shape[-1:], eps=self.config.layernorm_epsilon)
            input = normed.to(input.dtype) * self.input_scale * input.size(-1) ** -0.5
        logits: Tensor = super().gating(input)
        return logits

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
        if self._scores == SQRT_SOFTPLUS:
            probs, routing_map = self._routing_by_softplus(logits, padding_mask)
        else:
            probs, routing_map = super().routing(logits, padding_mask)
        if epsilon := getattr(self.config, "router_epsilon", 0.0):
            # LFM2 divides sigmoids by their sum and this, megatron-core by their sum and 1e-20
            scores = logits.view(-1, self.num_experts).to(probs.dtype).sigmoid()
            total = (scores * routing_map).sum(dim=1, keepdim=True)
            probs = probs * (total / (total + epsilon))
        if self.expert_scale is not None:
            probs = probs * self.expert_scale.to(probs.dtype)
        if self._first_call and padding_mask is not None:
            self.load += (routing_map & ~padding_mask.view(-1, 1)).sum(dim=0)
        return probs, routing_map

    def _routing_by_softplus(
        self, logits: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`TopKRouter.routing` with DeepSeek-V4's scores."""
        length, batch = logits.shape[:2]
        logits = logits.view(-1, self.num_experts)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scores = F.softplus(logits.to(dtype)).sqrt()
        ranked = scores.detach()
        if self.token_experts is None and self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        _, experts = self.choose(ranked, self._select, self.topk)
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        probs = torch.zeros_like(scores).scatter(1, experts, weights).to(logits.dtype)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            shares = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            # of the scores alone, as in megatron-core
            largest = torch.zeros_like(routing_map).scatter(1, scores.topk(self.topk).indices, True)
            if padding is not None:
                shares = shares * ~padding.unsqueeze(1)
                largest = largest & ~padding.unsqueeze(1)
            masked = padding is not None
            probs = self._apply_aux_loss(probs, shares, largest, masked)
            probs = self._apply_seq_aux_loss(probs, shares, largest, length, batch, masked)
            probs = self._apply_global_aux_loss(probs, shares, largest, masked)
        self._apply_expert_bias(routing_map, padding)
        return probs, routing_map

    def _select(self, scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """The experts of each token by the table, or those with the largest scores. Returns
        (scores, experts), [t, topk] each."""
        if self.token_experts is None:
            values, experts = scores.topk(topk, dim=1)
            return values, experts
        assert self._tokens is not None, "`tell_routers_tokens` was called with the chunk"
        experts = self.token_experts[self._tokens]
        return scores.gather(1, experts), experts

    def tell_tokens(self, tokens: Tensor) -> None:
        """Tokens [t] of the next calls, if there is no `begin`."""
        self._tokens = tokens

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Load-balancing loss of Switch Transformer (arXiv 2101.03961) over the micro-batch. It is
        0 if all rows are padding, where megatron-core would divide by zero."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        ids = torch.zeros(routing_map.size(0), dtype=torch.int64, device=routing_map.device)
        loss = coefficient * self._imbalance(scores_for_aux_loss, routing_map, ids, 1)
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
        """Sequence-wise load-balancing loss of DeepSeek-V2 (arXiv 2405.04434, section 2.2.3),
        averaged over the sequences of the micro-batch."""
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
        """Compute E * sum_e f_e * P_e per segment, averaged over the non-empty segments.

        A segment may span several tensor- and context-parallel ranks: token counts are reduced over
        them, and each rank contributes its own scores.

        Args:
            scores, routing_map: [t, E], zero at padding.
            ids: [t], segment of each row.
            num: Number of segments.
        """
        empty = scores.new_zeros(num, self.num_experts)
        counts = reduce_from_tensor_model_parallel_region(
            empty.index_add(0, ids, routing_map.to(empty.dtype)), self.tp_cp_group
        )
        sums = empty.index_add(0, ids, scores)
        lengths = counts.sum(dim=1) / self.topk
        products = (sums * counts).sum(dim=1)
        imbalance = products * self.num_experts / (self.topk * lengths.clamp(min=1) ** 2)
        return imbalance.sum() / (lengths > 0).sum().clamp(min=1)

    def _apply_global_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """megatron-core's loss, skipped if no rank has tokens, where it would divide by zero."""
        if self.get_aux_loss_coeff("global_aux_loss") == 0:
            return probs
        tokens = reduce_from_tensor_model_parallel_region(routing_map.sum(), self.tp_dp_cp_group)
        if not tokens:
            return probs
        return super()._apply_global_aux_loss(
            probs, scores_for_aux_loss, routing_map, with_padding_mask
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The z-loss of ST-MoE (arXiv 2202.08906, equation 5): the mean over the tokens of the
        micro-batch on all tensor- and context-parallel ranks. megatron-core takes the mean of the
        ranks' own means, and ranks with more padding have fewer tokens.

        Args:
            logits: [t, E].
            padding_mask: [t] bool, true for padding.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return logits
        squares = logits.logsumexp(dim=-1).square()
        valid = torch.ones_like(squares)
        if padding_mask is not None:
            valid = (~padding_mask.view(-1)).to(squares.dtype)
        tokens = reduce_from_tensor_model_parallel_region(valid.sum(), self.tp_cp_group)
        loss = coefficient * (squares * valid).sum() / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(
            logits, coefficient, loss, "z_loss", self.tp_cp_group
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert for the update of the expert bias, once per token of a
        training pass; recomputation does not count twice."""
        if not (self.enable_expert_bias and self.training and torch.is_grad_enabled()):
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.view(-1, 1)
        with torch.no_grad():
            self.local_tokens_per_expert += routing_map.sum(dim=0)

    def choose(
        self, scores: Tensor, default: Callable[..., tuple[Tensor, Tensor]], *arguments: object
    ) -> tuple[Tensor, Tensor]:
        """Select experts: replayed ones where given, otherwise those of `default`, megatron-core's
        top-k. Returns (scores, experts), [t, topk] each."""
        current = self._pass
        rows = self._rows
        values, selected = default(scores, *arguments)
        if current is None or rows is None:
            return values, selected
        if current.record:
            current.recorded.append(selected.detach())
        if rows.routed_experts is None:
            return values, selected
        routed_experts = rows.routed_experts[:, current.slot].long()  # [t, topk]
        replayed = (routed_experts >= 0).all(dim=1)
        experts = torch.where(replayed.unsqueeze(1), routed_experts, selected)
        if self._first_call:
            differs = (experts.sort(dim=1).values != selected.sort(dim=1).values).any(dim=1)
            counts = torch.stack([(differs & replayed).sum(), replayed.sum()])
            current.disagreement += counts.double()
        return scores.gather(1, experts), experts


def tell_routers_tokens(chunk: LanguageModule) -> None:
    """Give routers that select by token the tokens of each pass through a chunk, on every pipeline
    stage."""
    chunk.register_forward_pre_hook(_tell_tokens, with_kwargs=True)


def _tell_tokens(
    module: LanguageModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    tokens = (inputs[0] if inputs else settings["input_ids"])[0]
    if module.config.sequence_parallel:
        group = module.pg_collection.tp
        tokens = tokens.chunk(group.size())[group.rank()]
    for router in module.modules():
        if isinstance(router, PackedRouter):
            router.tell_tokens(tokens)


class _Choice:
    """Adapter for megatron-core's `router_replay` hook, through which it selects the top k."""

    def __init__(self, router: PackedRouter) -> None:
        self._router = [router]  # in a list, so that it is not registered as a submodule

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

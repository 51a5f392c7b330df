"""Loss of the multi-token prediction layers (model/prediction.py). It is added to the policy loss
and has no gradient for the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime_like.megatron.model.policy import LogProbHead, PolicyModel, head_weight
from slime_like.megatron.model.prediction import RowsAhead
from slime_like.megatron.ops.fused_linear_logprob import rows_to_score
from slime_like.megatron.packed_batches import rows_of_pass
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.types import MicroBatch


@dataclass(frozen=True, slots=True)
class PredictionLoss:
    """The loss of each layer is the cross-entropy of the tokens that the policy is trained on, with
    the same token weights and temperature."""

    head: LogProbHead
    factor: float  # weight of the mean over layers
    soft: bool = False  # use the policy's distribution as target instead of the token

    def __call__(
        self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        """Loss (0-d) and metrics of a micro-batch. hidden: output of the last stage."""
        policy = unwrap_model(model)
        layout = self.head.layout
        assert isinstance(policy, PolicyModel)
        weight = head_weight(model).detach()
        packed = rows_of_pass(batch)
        predicted = policy.mtp(
            hidden, policy.rotary_embedding(hidden, packed), packed, batch, layout
        )
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        sums: list[Metric] = []
        assert batch.mask_ahead is not None, "packed for the prediction layers"
        targets_hidden = self._gather_detached(hidden) if self.soft else None
        for number, states in enumerate(predicted):
            ahead = RowsAhead(packed, number + 1, layout)
            targets = replace(
                batch,
                labels=ahead(batch.labels[0]).unsqueeze(0),
                loss_mask=batch.mask_ahead[:, number],
                active_rows=batch.predicted_rows[number],
                sampling_mask=None,
            )
            if targets_hidden is None:
                losses = -self.head.log_probs_and_entropy(states, weight, targets)[0]
            else:
                shifted = ahead(targets_hidden)
                losses = self.head.soft_cross_entropy(states, weight, shifted, targets)
            total = total + (ahead(batch.loss_weights) * losses).sum()
            sums.append(masked_mean(losses.detach(), targets.loss_mask))
        return self.factor / len(predicted) * total, {"mtp_loss": reduce(Metric.merge, sums)}

    def _gather_detached(self, hidden: Tensor) -> Tensor:
        """Detach and gather over sequence-parallel ranks: [T, H]."""
        head = self.head
        return rows_to_score(
            hidden.detach()[0],
            None,
            head.layout.tp_group,
            sequence_parallel=head.sequence_parallel,
        )

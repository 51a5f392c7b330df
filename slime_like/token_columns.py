"""Per-token inputs of a loss, declared once.

A `TrainSample` has them per response token, [R]; a `MicroBatch` and the `LossInputs` of a loss have
them per packed row, [T], where row t belongs to the token that follows `tokens[t]`. Packing, the
exchange between context-parallel ranks, and `loss_inputs` copy every field of `TokenColumns`, so
that a new input is one line here, and the line that fills it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_like.lazy import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """The optional columns, float32 unless their metadata has another dtype. All are constants of
    the loss; values at tokens where the loss mask is False are never used and may be NaN."""

    # w: weight of the policy term; None: equal to the loss weights u
    policy_weights: Tensor | None = None
    advantages: Tensor | None = None
    # log-probs of the token: of the trainer before the update, of the rollout engine, and of the
    # reference model
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    # from the off-policy correction: tokens that it keeps (None: all), and their weights (None: 1)
    keep_mask: Tensor | None = field(default=None, metadata={"dtype": "bool"})
    importance_weights: Tensor | None = None
    # the sample's raw reward on every token
    rewards: Tensor | None = None
    # 1 / (tokens in the optimizer step of samples with a positive reward) on those tokens, 0
    # elsewhere
    nll_weights: Tensor | None = None
    # 1 / (observation tokens of the optimizer step) on observation tokens, where the loss mask is
    # False; 0 elsewhere
    observation_weights: Tensor | None = None
    # index of the token's datum in its call, for losses of whole datums (tinker/objectives.py)
    datums: Tensor | None = field(default=None, metadata={"dtype": "int64"})
    # KTO's reference point z on every token (losses/kto.py)
    reference_points: Tensor | None = None
    # critic values before the update
    values: Tensor | None = None
    # targets of the critic; NaN where there is no target
    returns: Tensor | None = None

"""Inputs and outputs of a loss. Tensors are packed: T tokens of S sequences; row t of every tensor
belongs to the same predicted token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.ranks import sum_over_ranks
from slime_like.losses.turns import turns_of
from slime_like.metrics.typed import Metric, masked_max, masked_mean, masked_min, zero
from slime_like.token_columns import TokenColumns
from slime_like.validation import require_choice

LOG_RATIO_CLAMP = 20.0
SEQUENCE_LOG_RATIO_CAP = 10.0
IMPORTANCE_LEVELS = ("token", "sequence")
_REMEDIES = {"rollout_log_probs": "; let the sampler return log-probs"}


def upcast(x: Tensor) -> Tensor:
    """x in fp32; fp64 is kept."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, slots=True)
class LossInputs(TokenColumns):
    """Per-token tensors of one micro-batch. All except log_probs and entropy are constants. Values
    at rows where `loss_mask` is False are never used (they may be NaN), except log_probs where
    `observation_weights` is not 0.

    Under context parallelism each rank of cp_group holds T rows of the same S sequences, and a loss
    returns the contribution of its rows. Compute per-sequence quantities with `seq_sum` and
    `seq_mean`, and other micro-batch quantities with `ranks.py`; both sum over the ranks with exact
    gradients."""

    log_probs: Tensor  # [T] current policy, with grad
    loss_mask: Tensor  # [T] bool, the original mask
    loss_weights: Tensor  # [T] u: 1 / denominator of the reduction, over the whole optimizer step
    seq_ids: Tensor  # [T] int64 in [0, S)
    num_seqs: int
    entropy: Tensor | None = None  # [T], with grad if the entropy bonus is on
    # "sequence": importance_weights has the weight of the full sequence on each of its tokens
    importance_level: str = "token"
    # seed of losses that select tokens at random, derived from (seed, step, micro-batch)
    selection_seed: int = 0
    # [T] int64: index of the row without context parallelism; None: the row itself
    places: Tensor | None = None
    # [T, K] log-probs of the teacher's K tokens under the current policy, with grad
    label_log_probs: Tensor | None = None
    # [T, K] the teacher's probabilities of these tokens, all 0 without a teacher
    label_weights: Tensor | None = None
    # [T] int64 in [0, num_turns): the turn of each active token, see `turns_of`; None: not computed
    # yet
    turn_ids: Tensor | None = None
    num_turns: int = 0
    # context-parallel group; None: this rank holds all rows
    cp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        require_choice("importance_level", self.importance_level, IMPORTANCE_LEVELS)

    def masked(self, x: Tensor) -> Tensor:
        """x in fp32 (fp64 is kept), 0 at inactive rows. Masked before any product, because NaN * 0
        is NaN; inactive rows get a gradient of exactly 0."""
        x = upcast(x)
        return torch.where(self.loss_mask, x, zero(x.device, x.dtype))

    def required(self, name: str) -> Tensor:
        """The field `name`, masked and detached. Raises ValueError if the batch has none."""
        value = getattr(self, name)
        if value is None:
            remedy = _REMEDIES.get(name, "")
            raise ValueError(f"the loss needs {name}, and the batch has none{remedy}")
        return self.masked(value.detach())

    @property
    def kept(self) -> Tensor:
        """[T] bool: active tokens kept by the off-policy correction."""
        return self.loss_mask if self.keep_mask is None else self.loss_mask & self.keep_mask

    def policy_gradient(self, weight: Tensor) -> Tensor:
        """-weight * log_prob [T] with a detached weight [T]; its gradient with respect to the
        log-prob is -weight. Weights at rejected tokens, which may be non-finite, are not used."""
        return -torch.where(self.kept, weight.detach(), 0.0) * self.masked(self.log_probs)

    def log_ratio(self, anchor: str = "old_log_probs") -> Tensor:
        """d = clamp(log_probs - anchor, +-20) [T], 0 at inactive rows; the clamp also stops the
        gradient."""
        difference = self.masked(self.log_probs) - self.required(anchor)
        return difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)

    def sequence_log_ratio(self, level: str = "sequence") -> Tensor:
        """log s_t of GSPO-token (arXiv 2507.18071, equation 14) [T], at most 10: the value is the
        sequence's mean log-ratio over the original mask, the gradient is the token's own. level:
        "sequence", or "turn" for the mean over the turn."""
        log_probs = self.masked(self.log_probs)
        mean_of = self.turn_mean if level == "turn" else self.seq_mean
        mean = mean_of(self.log_ratio().detach())
        return (log_probs - log_probs.detach() + mean).clamp(max=SEQUENCE_LOG_RATIO_CAP)

    def seq_sum(self, x: Tensor) -> Tensor:
        """Sum of x over the active tokens of each sequence, on every row of it: [T] -> [T],
        differentiable."""
        local = self._local_sums(x, self.seq_ids, self.num_seqs)
        return sum_over_ranks(local, self.cp_group).index_select(0, self.seq_ids)

    def seq_mean(self, x: Tensor) -> Tensor:
        """Mean of x over the active tokens of each sequence, on every row of it: [T] -> [T]; 0 in a
        sequence without any."""
        return self._mean_of(x, self.seq_ids, self.num_seqs)

    def turn_mean(self, x: Tensor) -> Tensor:
        """As `seq_mean`, over the active tokens of each turn; undefined at inactive rows."""
        if self.turn_ids is not None:
            return self._mean_of(x, self.turn_ids, self.num_turns)
        assert self.cp_group is None, "turn_ids are needed under context parallelism"
        # one slot per row: counting the turns would synchronise with the device
        return self._mean_of(x, turns_of(self.loss_mask, self.seq_ids), self.loss_mask.numel())

    def _mean_of(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
        local_sums = self._local_sums(x, ids, count)
        local_counts = self._local_sums(torch.ones_like(x), ids, count)
        sums, counts = sum_over_ranks(torch.stack([local_sums, local_counts]), self.cp_group)
        return (sums / counts.clamp(min=1)).index_select(0, ids)

    def _local_sums(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
        """Sums over this rank's active rows by id [T] in [0, count): [T] -> [count]."""
        x = self.masked(x)
        return torch.zeros(count, dtype=x.dtype, device=x.device).index_add(0, ids, x)


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of a policy loss."""

    token_losses: Tensor  # [T], to be minimised, neither masked nor weighted
    metrics: Mapping[str, Metric]  # typed, over the active tokens of the original mask


def ratio_metrics(
    inputs: LossInputs, ratio: Tensor, anchor: str = "old_log_probs"
) -> dict[str, Metric]:
    """Metrics that every loss with a ratio reports. ratio: [T]."""
    mask = inputs.loss_mask
    log_ratio = inputs.masked(inputs.log_probs.detach()) - inputs.required(anchor)
    return {
        "ppo_kl": masked_mean(-log_ratio, mask),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_min": masked_min(ratio, mask),
        "ratio_max": masked_max(ratio, mask),
        "ratio_clamp_frac": masked_mean(log_ratio.abs() > LOG_RATIO_CLAMP, mask),
    }


def sequence_mean_metric(inputs: LossInputs, x: Tensor) -> Metric:
    """Mean over sequences with active tokens of the mean of x [T] over these tokens."""
    lengths = inputs.seq_sum(torch.ones_like(inputs.loss_mask, dtype=torch.float32))
    share = torch.where(inputs.loss_mask, 1.0 / lengths.clamp(min=1), 0.0)
    return Metric("mean", (share * inputs.masked(x.detach()).float()).sum(), share.sum())

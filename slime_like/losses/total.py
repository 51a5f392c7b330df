"""The loss that one optimizer step minimises, and its only assembly:

    L = sum_t mask_t (w_t k_t c_t policy_t
                      + u_t (kl_loss_coef kl_t - entropy_coef H_t + distillation_coef D_t)
                      - v_t positive_nll_coef log_prob_t)
        - sum_t o_t observation_loss_coef log_prob_t

over all tokens of all micro-batches on all ranks.

    u     weight of the reduction
    w     equal to u, unless the caller brings advantages that are already normalised
    k, c  keep mask (also from OPSM) and importance weight of the off-policy correction
    v     1 / (tokens of the step in samples with a positive reward) on those tokens: VAPO's
          imitation of correct samples, arXiv 2504.05118, section 4.3
    o     1 / (observation tokens of the step) on those, which an environment wrote between an
          agent's answers and no mask includes: ECHO, arXiv 2605.24517
    D     divergence to a teacher (distillation.py)

KL, entropy and D have their own weight, so neither gradient accumulation nor pre-scaled advantages
amplify them. `total_loss` returns the partial sum over its tokens; nothing is divided.

A reduction is a token weight: every active token of a sample gets the same `u`, which contains the
full denominator, over the whole optimizer step and the original mask, so the loss does not depend
on how the step is split. With N active tokens in the step, B sequences (fully masked ones count),
L_i active tokens of sequence i, P prompts with N_p active tokens, R rollouts with S_r:

    rollout_mean 1/(R S_r)      sequence_mean 1/(B L_i)      token_mean 1/N
    prompt_mean 1/(P N_p)       seq_mean_token_sum_norm 1/(B loss_norm_length)
    token_mean_legacy 1/(K N_k)

token_mean_legacy is the exception: the mean over K micro-batches of the mean over the N_k tokens of
each, as in frameworks that divide within a micro-batch. It depends on how the step is split, and
exists to reproduce their runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime_like.config import NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.distillation import set_divergence
from slime_like.losses.inputs import LossInputs, require_choice, require_ids, require_tensor
from slime_like.losses.kl import KL_ESTIMATORS, kl_estimate
from slime_like.losses.opsm import opsm_keep
from slime_like.losses.registry import PolicyLoss
from slime_like.metrics.typed import Metric, masked_mean

if TYPE_CHECKING:
    from slime_like.checkpoints.state import EntropyState


LOSS_REDUCTIONS: tuple[str, ...] = (
    "rollout_mean",
    "sequence_mean",
    "token_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_mean_legacy",
)


def reduction_weights(
    kind: str,
    *,
    active_tokens: Tensor,
    rollout_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
) -> Tensor:
    """The token weight u of each sample.

    Args:
        kind: One of `LOSS_REDUCTIONS`.
        active_tokens: [B] integers >= 0, L_i; B may be 0.
        rollout_ids: [B] integers, needed by rollout_mean.
        prompt_ids: [B] integers, needed by prompt_mean.
        loss_norm_length: >= 1, needed by seq_mean_token_sum_norm.
        micro_batch_size: Consecutive samples in a micro-batch, needed by token_mean_legacy.

    Returns:
        [B] float64.

    Raises:
        ValueError: An unknown reduction, a missing or illegal input, or a wrong shape.
    """
    require_choice("loss reduction", kind, LOSS_REDUCTIONS)
    count = require_tensor("active_tokens", active_tokens).numel()
    require_ids("active_tokens", active_tokens, count)
    if count and int(active_tokens.min()) < 0:
        raise ValueError(f"active_tokens holds {int(active_tokens.min())}; it must be >= 0")
    lengths = active_tokens.double()
    if kind == "token_mean":
        return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    if kind == "sequence_mean":
        return 1.0 / (count * lengths.clamp(min=1))
    if kind == "seq_mean_token_sum_norm":
        if not isinstance(loss_norm_length, int) or loss_norm_length < 1:
            raise ValueError(
                "--loss-reduction seq_mean_token_sum_norm needs --loss-norm-length >= 1 "
                f"(given: {loss_norm_length})"
            )
        return torch.full_like(lengths, 1.0) / (count * loss_norm_length)
    if kind == "token_mean_legacy":
        return _token_mean_legacy(lengths, micro_batch_size)
    name, ids = "prompt_ids", prompt_ids
    if kind == "rollout_mean":
        name, ids = "rollout_ids", rollout_ids
    if ids is None:
        raise ValueError(f"--loss-reduction {kind} needs {name}")
    require_ids(name, ids, count)
    if count == 0:
        return lengths
    unique, index = ids.unique(return_inverse=True)
    totals = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device)
    totals = totals.index_add(0, index, lengths)
    return 1.0 / (unique.numel() * totals.clamp(min=1)[index])


def _token_mean_legacy(lengths: Tensor, micro_batch_size: int | None) -> Tensor:
    """The mean over the tokens of each micro-batch, then over micro-batches. lengths: [B]."""
    count = lengths.numel()
    if micro_batch_size is None or micro_batch_size < 1 or count % micro_batch_size:
        raise ValueError(
            "--loss-reduction token_mean_legacy needs a micro-batch size that divides the "
            f"{count} samples of a step (given: {micro_batch_size}); use token_mean"
        )
    if count == 0:
        return lengths
    per_batch = lengths.view(-1, micro_batch_size).sum(1)
    weights = 1.0 / (per_batch.numel() * per_batch.clamp(min=1))
    return weights.repeat_interleave(micro_batch_size)


@dataclass(frozen=True, slots=True)
class LossTerms(CheckedSettings):
    """Coefficients of the terms other than the policy loss. A term with coefficient 0 is not part
    of the loss, but still reported."""

    kl_loss_coef: float = arg(0.0, "Weight of the KL in the loss.", legal=NON_NEGATIVE)
    kl_loss_type: str = arg("low_var_kl", "KL estimator.", choices=KL_ESTIMATORS)
    use_unbiased_kl: bool = arg(False, "Weight the KL by the ratio of current to old policy.")
    entropy_coef: float = arg(0.0, "Weight of the entropy bonus.", legal=NON_NEGATIVE)
    positive_nll_coef: float = arg(0.0, "Weight of the positive NLL.", legal=NON_NEGATIVE)
    observation_loss_coef: float = arg(0.0, "Weight of the observation NLL.", legal=NON_NEGATIVE)
    distillation_coef: float = arg(0.0, "Weight of the teacher divergence.", legal=NON_NEGATIVE)
    distillation_alpha: float = arg(1.0, "Kind of divergence; 1: reverse KL.", legal=UNIT)
    opsm_delta: float | None = arg(None, "Delta of opsm.py; None: off.", legal=NON_NEGATIVE)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Partial loss of some tokens, and its metrics."""

    loss: Tensor  # 0-d, with grad
    metrics: Mapping[str, Metric]  # losses are sums: their total over micro-batches and ranks is L


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """coefficient * sum_t weights_t values_t."""

    name: str  # of the metric, the sum without its coefficient
    coefficient: float
    weights: Tensor  # [T], 0 at inactive tokens
    values: Tensor  # [T], 0 at inactive tokens


def total_loss(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> LossOutput:
    """The partial loss of these tokens, and its metrics.

    In addition to the policy loss's own metrics, loss and each term without its coefficient
    (policy_loss, kl_loss, entropy_loss, ...) are weighted sums; kl and entropy are means over
    active tokens; clip_ratio is another name of pg_clipfrac. Without an active token the loss is 0
    with a zero gradient, and has the same metrics.

    Raises:
        ValueError: A tensor is missing that the loss or a term with a coefficient needs, or the
            loss does not support an off-policy correction.
    """
    weighted, metrics = weighted_terms(inputs, policy_loss, policy_config, terms)
    sums = [(term.weights * term.values).sum() for term in weighted]
    loss = sums[0]  # the policy term, with coefficient 1
    for term, total in zip(weighted, sums, strict=True):
        metrics[term.name] = Metric("sum", total.detach().clone())
        if term.coefficient and term is not weighted[0]:
            loss = loss + term.coefficient * total
    metrics["loss"] = Metric("sum", loss.detach().clone())
    if "pg_clipfrac" in metrics:
        metrics["clip_ratio"] = metrics["pg_clipfrac"]
    return LossOutput(loss, metrics)


def token_losses(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss of `total_loss` per token [T], and means over tokens, for callers that report every
    token. All terms must have the same weight: no pre-scaled advantages, no positive NLL."""
    weighted, metrics = weighted_terms(inputs, policy_loss, policy_config, terms)
    weights, losses = weighted[0].weights, weighted[0].values
    for term in weighted[1:]:
        if term.coefficient:
            assert term.weights is weights, term.name
            losses = losses + term.coefficient * term.values
    return apply_weights(losses, weights), metrics


def apply_weights(losses: Tensor, weights: Tensor) -> Tensor:
    """weights * losses; 0 at weight 0, even where the loss is not finite."""
    return torch.where(weights != 0, weights * losses, 0.0)


def weighted_terms(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> tuple[list[WeightedTerm], dict[str, Metric]]:
    """The terms of the loss that these tokens have tensors for, the policy's first, and the metrics
    that are means over tokens."""
    if policy_loss.by_config is not None:
        policy_loss = policy_loss.with_config(policy_config)
    _check(inputs, policy_loss, terms)
    weights = inputs.masked(inputs.loss_weights)
    opsm_metrics: dict[str, Metric] = {}
    if terms.opsm_delta is not None:
        keep, opsm_metrics["opsm_clipfrac"] = opsm_keep(inputs, terms.opsm_delta)
        inputs = replace(inputs, keep_mask=inputs.kept & keep)
    output = policy_loss.fn(inputs, policy_config)
    losses = output.token_losses
    if policy_loss.correction in ("outer", "masks"):
        losses = _apply_correction(inputs, losses)
    policy_weights = weights
    if inputs.policy_weights is not None:
        policy_weights = inputs.masked(inputs.policy_weights)
    result = [WeightedTerm("policy_loss", 1.0, policy_weights, inputs.masked(losses))]
    metrics = {**output.metrics, **opsm_metrics}
    if inputs.ref_log_probs is not None:
        ratio = inputs.log_ratio() if terms.use_unbiased_kl else None
        kl = kl_estimate(
            terms.kl_loss_type,
            inputs.masked(inputs.log_probs),
            inputs.required("ref_log_probs"),
            log_ratio=ratio,
        )
        metrics["kl"] = masked_mean(kl, inputs.loss_mask)
        result.append(WeightedTerm("kl_loss", terms.kl_loss_coef, weights, inputs.masked(kl)))
    if inputs.entropy is not None:
        metrics["entropy"] = masked_mean(inputs.entropy, inputs.loss_mask)
        entropy = inputs.masked(inputs.entropy)
        result.append(WeightedTerm("entropy_loss", -terms.entropy_coef, weights, entropy))
    if inputs.nll_weights is not None:
        nll_weights = inputs.required("nll_weights")
        nll = -inputs.masked(inputs.log_probs)
        result.append(WeightedTerm("positive_nll", terms.positive_nll_coef, nll_weights, nll))
    if inputs.observation_weights is not None:
        observed = replace(inputs, loss_mask=inputs.observation_weights != 0)
        nll, coef = -observed.masked(inputs.log_probs), terms.observation_loss_coef
        nll_weights = observed.required("observation_weights")
        result.append(WeightedTerm("observation_loss", coef, nll_weights, nll))
    if inputs.label_log_probs is not None and inputs.label_weights is not None:
        alpha = terms.distillation_alpha
        gap = set_divergence(inputs.label_log_probs, inputs.label_weights, alpha)
        gap = inputs.masked(gap)
        metrics["opd_divergence"] = masked_mean(gap, inputs.loss_mask)
        result.append(WeightedTerm("distillation_loss", terms.distillation_coef, weights, gap))
    return result, metrics


def _apply_correction(inputs: LossInputs, losses: Tensor) -> Tensor:
    """k c losses: a rejected token has no policy term, but keeps KL and entropy. Its weight may not
    be finite, so it is replaced before the product; backward would multiply it by 0."""
    kept = inputs.kept
    losses = torch.where(kept, losses, 0.0)
    if inputs.importance_weights is None:
        return losses
    return losses * torch.where(kept, inputs.required("importance_weights"), 0.0)


# coefficient of `LossTerms` -> the field of `LossInputs` that its term needs
_TERM_INPUTS = {
    "kl_loss_coef": "ref_log_probs",
    "positive_nll_coef": "nll_weights",
    "observation_loss_coef": "observation_weights",
    "distillation_coef": "label_log_probs",
    "entropy_coef": "entropy",
}


def _check(inputs: LossInputs, policy_loss: PolicyLoss, terms: LossTerms) -> None:
    name, correction = policy_loss.name, policy_loss.correction
    corrected = inputs.keep_mask is not None or inputs.importance_weights is not None
    if corrected and correction == "forbidden":
        raise ValueError(f"policy loss {name} takes no off-policy correction: it has no old policy")
    if inputs.importance_weights is not None and correction == "masks":
        raise ValueError(
            f"policy loss {name} takes no importance weights: its ratio is to the rollout engine"
        )
    if terms.opsm_delta is not None and correction == "forbidden":
        raise ValueError(
            f"policy loss {name} takes no off-policy sequence mask: it has no old policy"
        )
    if inputs.policy_weights is not None and not policy_loss.homogeneous:
        warnings.warn(
            f"policy loss {name} with advantages that are already normalised: "
            "its thresholds and coefficients apply to the scaled values",
            stacklevel=3,
        )
    for coef, tensor in _TERM_INPUTS.items():
        if (value := getattr(terms, coef)) and getattr(inputs, tensor) is None:
            raise ValueError(f"{coef} {value:g} needs {tensor}, and the batch has none")


@dataclass(slots=True)
class EntropyController(CheckedSettings):
    """The coefficient of the entropy bonus; constant without a target.

    With a target the bonus acts only while entropy is too low: adaptive entropy control of
    Skywork-OR1, arXiv 2505.22312. With the mean entropy e_k over the active tokens of optimizer
    step k on all ranks, and a coefficient c_k:

        c_{k+1} = clip(c_k + delta, low, high)  where e_k < target
                  clip(c_k - delta, low, high)  where e_k > target
        bonus of step k + 1 = c_{k+1}           where e_k <= target, else 0

    The paper uses the entropy of the rollout that a step trains on; we use that of the previous
    forward pass, which every run has, so the bonus reacts one optimizer step later.
    """

    value: float = arg(0.0, "c, before the indicator.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "Target entropy per token, in nats.", legal=POSITIVE)
    delta: float = arg(1e-4, "Change per step.", legal=POSITIVE)
    low: float = arg(0.0, "Minimum of c.", legal=NON_NEGATIVE)
    high: float = arg(0.005, "Maximum of c.", legal=POSITIVE)
    active: bool = arg(True, "Whether the last entropy was at most the target.")

    @property
    def adaptive(self) -> bool:
        return self.target is not None

    @property
    def coef(self) -> float:
        """The weight of the entropy bonus in the next optimizer step."""
        return self.value if self.active else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapt to the mean entropy per token of an optimizer step's forward pass; None and
        non-finite values are ignored."""
        if self.target is None or entropy is None or not math.isfinite(entropy):
            return
        sign = (entropy < self.target) - (entropy > self.target)
        self.value = min(max(self.value + sign * self.delta, self.low), self.high)
        self.active = entropy <= self.target

    def state_dict(self) -> dict[str, object]:
        """State for checkpoints, as plain JSON."""
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: EntropyState) -> None:
        """Restore an adaptive coefficient; a fixed one comes from the command line."""
        if self.adaptive and state:
            self.value, self.active = float(state["value"]), bool(state["active"])

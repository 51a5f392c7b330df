"""The loss that one optimizer step minimises, and its only assembly:

    L = sum_t mask_t (w_t k_t c_t policy_t
                      + u_t (kl_loss_coef kl_t - entropy_coef H_t + distillation_coef D_t)
                      - v_t positive_nll_coef log_prob_t)
        - sum_t o_t observation_loss_coef log_prob_t

over all tokens of all micro-batches on all ranks.

    u     weight of the reduction
    w     equal to u, unless the caller brings advantages that are already normalised
    k, c  keep mask (also from OPSM and ESTR) and importance weight of the off-policy correction
    v     1 / (tokens of the step in samples with a positive reward) on those tokens: VAPO's
          imitation of correct samples, arXiv 2504.05118, section 4.3
    o     1 / (observation tokens of the step) on those, which an environment wrote between an
          agent's answers and no mask includes: ECHO, arXiv 2605.24517
    D     divergence to a teacher (distillation.py)

KL, entropy and D have their own weight, so neither gradient accumulation nor pre-scaled advantages
amplify them. `total_loss` returns the partial sum over its tokens; nothing is divided.

Reductions, which are token weights, are in reductions.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slime_like.config import NON_NEGATIVE, POSITIVE, UNIT, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.distillation import set_divergence
from slime_like.losses.estr import estr_keep
from slime_like.losses.inputs import LossInputs
from slime_like.losses.kl import KL_ESTIMATORS, kl_estimate
from slime_like.losses.opsm import opsm_keep
from slime_like.losses.registry import PolicyLoss
from slime_like.metrics.typed import Metric, masked_mean


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
    estr_threshold: float | None = arg(None, "Tau of estr.py; None: off.", legal=POSITIVE)
    estr_entropy_floor: float = arg(0.01, "Epsilon of estr.py.", legal=POSITIVE)


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
    weights = weighted[0].weights
    losses = weighted[0].values
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
    metrics: dict[str, Metric] = {}
    if terms.opsm_delta is not None:
        keep, clipped = opsm_keep(inputs, terms.opsm_delta)
        inputs = replace(inputs, keep_mask=inputs.kept & keep)
        metrics["opsm_clipfrac"] = clipped
    if terms.estr_threshold is not None:
        keep, dropped = estr_keep(inputs, terms.estr_threshold, terms.estr_entropy_floor)
        inputs = replace(inputs, keep_mask=inputs.kept & keep)
        metrics["estr_mask_ratio"] = dropped
    output = policy_loss.fn(inputs, policy_config)
    metrics = {**output.metrics, **metrics}
    losses = output.token_losses
    if policy_loss.correction in ("outer", "masks"):
        losses = _apply_correction(inputs, losses)
    policy_weights = weights
    if inputs.policy_weights is not None:
        policy_weights = inputs.masked(inputs.policy_weights)
    result = [WeightedTerm("policy_loss", 1.0, policy_weights, inputs.masked(losses))]
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
        nll = -observed.masked(inputs.log_probs)
        coef = terms.observation_loss_coef
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
    name = policy_loss.name
    correction = policy_loss.correction
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
    if terms.estr_threshold is not None and correction == "forbidden":
        raise ValueError(
            f"policy loss {name} takes no entropy-scaled trust region: it has no old policy"
        )
    if inputs.policy_weights is not None and not policy_loss.homogeneous:
        warnings.warn(
            f"policy loss {name} with advantages that are already normalised: "
            "its thresholds and coefficients apply to the scaled values",
            stacklevel=3,
        )
    for coef, tensor in _TERM_INPUTS.items():
        value = getattr(terms, coef)
        if value and getattr(inputs, tensor) is None:
            raise ValueError(f"{coef} {value:g} needs {tensor}, and the batch has none")

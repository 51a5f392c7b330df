"""The loss that one optimizer step minimises, and its only assembly:

    L = sum_t mask_t (w_t k_t c_t policy_t + u_t (kl_loss_coef kl_t - entropy_coef H_t) - v_t
    positive_nll_coef log_prob_t) - o_t observation_loss_coef log_prob_t
    + u_t distillation_coef D_t

over all tokens of all micro-batches on all ranks. `u` is the weight of the reduction, `w` equals it
unless the caller brings advantages that are already normalised; k and c come from the off-policy
correction, k from OPSM too. v is 1 / (tokens of the step in samples with a positive reward) on
those tokens: VAPO's imitation of correct samples, arXiv 2504.05118, section 4.3. o is 1 /
(observation tokens of the step) on these, which an environment wrote between an agent's answers
and no mask has: ECHO, arXiv 2605.24517. D is the divergence to a teacher (distillation.py).
KL, entropy and D have their own weight, so neither accumulation nor pre-scaled advantages can
amplify them. This function returns the partial sum over the tokens it is given, and nothing is divided.

A reduction is a token weight: every active token of a sample gets the same `u`, which holds the
whole denominator, of the whole optimizer step and from the original mask. So the loss does not
depend on how the step is cut. With N active tokens in the step, B sequences (fully masked ones
count), L_i active tokens of sequence i, P prompts with N_p active tokens, R rollouts with S_r
active tokens (algorithms.md, section 3):

    rollout_mean 1/(R S_r)   sequence_mean 1/(B L_i)   token_mean 1/N   seq_mean_token_sum_norm 1/(B loss_norm_length)
    prompt_mean 1/(P N_p)   token_mean_legacy 1/(K N_k)

token_mean_legacy is the exception: the mean over K micro-batches of the mean over the N_k tokens of
each, as frameworks compute it that divide within a micro-batch. It depends on how the step is cut,
and is here to reproduce their runs.
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
    """u of each sample.

    Args:
        kind: one of `LOSS_REDUCTIONS`.
        active_tokens: [B] integers >= 0, L_i; B may be 0.
        rollout_ids: [B] integers, needed by rollout_mean.
        prompt_ids: [B] integers, needed by prompt_mean.
        loss_norm_length: >= 1, needed by seq_mean_token_sum_norm.
        micro_batch_size: consecutive samples in a micro-batch, needed by token_mean_legacy.

    Returns:
        [B] float64.

    Raises:
        ValueError: for an unknown reduction, a missing or illegal input, and a wrong shape.
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
                f"--loss-reduction seq_mean_token_sum_norm needs --loss-norm-length >= 1 (given: {loss_norm_length})"
            )
        return torch.full_like(lengths, 1.0) / (count * loss_norm_length)
    if kind == "token_mean_legacy":
        return _token_mean_legacy(lengths, micro_batch_size)
    ids, name = (
        (rollout_ids, "rollout_ids") if kind == "rollout_mean" else (prompt_ids, "prompt_ids")
    )
    if ids is None:
        raise ValueError(f"--loss-reduction {kind} needs {name}")
    require_ids(name, ids, count)
    if count == 0:
        return lengths
    unique, place = ids.unique(return_inverse=True)
    totals = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device).index_add(
        0, place, lengths
    )
    return 1.0 / (unique.numel() * totals.clamp(min=1)[place])


def _token_mean_legacy(lengths: Tensor, micro_batch_size: int | None) -> Tensor:
    """The mean over the tokens of each micro-batch, then over micro-batches. lengths: [B]."""
    count = lengths.numel()
    if micro_batch_size is None or micro_batch_size < 1 or count % micro_batch_size:
        raise ValueError(
            f"--loss-reduction token_mean_legacy needs a fixed micro-batch size that divides the {count} samples of a step (given: "
            f"{micro_batch_size}); use token_mean"
        )
    if count == 0:
        return lengths
    per_batch = lengths.view(-1, micro_batch_size).sum(1)
    weights = 1.0 / (per_batch.numel() * per_batch.clamp(min=1))
    return weights.repeat_interleave(micro_batch_size)


@dataclass(frozen=True, slots=True)
class LossTerms(CheckedSettings):
    """Weights of the terms with the policy loss. A coefficient of 0 leaves the term out of the
    loss; it is still reported."""

    kl_loss_coef: float = arg(0.0, "Weight of the KL in the loss.", legal=NON_NEGATIVE)
    kl_loss_type: str = arg("low_var_kl", "KL estimator.", choices=KL_ESTIMATORS)
    use_unbiased_kl: bool = arg(False, "Weight the KL by the ratio of current to old policy.")
    entropy_coef: float = arg(0.0, "Weight of the entropy bonus.", legal=NON_NEGATIVE)
    positive_nll_coef: float = arg(
        0.0, "Weight of the imitation of good samples.", legal=NON_NEGATIVE
    )
    observation_loss_coef: float = arg(
        0.0, "Weight of the prediction of observations.", legal=NON_NEGATIVE
    )
    distillation_coef: float = arg(
        0.0, "Weight of the divergence to a teacher.", legal=NON_NEGATIVE
    )
    distillation_alpha: float = arg(1.0, "Which divergence; 1: reverse KL.", legal=UNIT)
    opsm_delta: float | None = arg(None, "Of the mask in opsm.py; None: off.", legal=NON_NEGATIVE)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: 0-d partial sum, with grad. metrics: typed; the losses are sums, so that their total
    over micro-batches and ranks is L."""

    loss: Tensor
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """coefficient * sum_t weights_t values_t. name: of the metric of the sum without its
    coefficient. values, weights: [T], 0 at inactive tokens."""

    name: str
    coefficient: float
    weights: Tensor
    values: Tensor


def total_loss(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> LossOutput:
    """The partial loss of these tokens, and its metrics.

    Metrics in addition to the policy loss's own: loss, policy_loss, kl_loss, entropy_loss,
    positive_nll
    and observation_loss (without their coefficients) are sums under the token weights; kl and entropy are means over
    active tokens; clip_ratio is pg_clipfrac under another name. Without an active token the loss is
    0 with a zero gradient, and the names are the same. Raises ValueError when a tensor is missing
    that the loss or a term with a coefficient needs, and for a correction of a loss that takes
    none.
    """
    parts, metrics = weighted_terms(inputs, policy_loss, policy_config, terms)
    sums = [(part.weights * part.values).sum() for part in parts]
    loss = sums[0]  # the policy term, of coefficient 1
    for part, total in zip(parts[1:], sums[1:], strict=True):
        if part.coefficient:
            loss = loss + part.coefficient * total
    for name, total in (*zip((part.name for part in parts), sums, strict=True), ("loss", loss)):
        metrics[name] = Metric("sum", total.detach().clone())
    if "pg_clipfrac" in metrics:
        metrics["clip_ratio"] = metrics["pg_clipfrac"]
    return LossOutput(loss, metrics)


def token_losses(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> tuple[Tensor, dict[str, Metric]]:
    """The terms of `total_loss` token by token, under their weight [T], and the means over tokens;
    for callers that report every token. A token of weight 0 has no loss, whatever its log-prob is.
    All terms must have one weight: no pre-scaled advantages, no imitation of good samples."""
    parts, metrics = weighted_terms(inputs, policy_loss, policy_config, terms)
    weights, losses = parts[0].weights, parts[0].values
    for part in parts[1:]:
        if part.coefficient:
            assert part.weights is weights, part.name
            losses = losses + part.coefficient * part.values
    return weigh(losses, weights), metrics


def weigh(losses: Tensor, weights: Tensor) -> Tensor:
    """A token of weight 0 has no loss, whatever its log-prob is."""
    return torch.where(weights != 0, weights * losses, 0.0)


def weighted_terms(
    inputs: LossInputs, policy_loss: PolicyLoss, policy_config: object, terms: LossTerms
) -> tuple[list[WeightedTerm], dict[str, Metric]]:
    """The terms of the loss that these tokens have tensors for, the policy's first; and the metrics
    that are means over tokens."""
    if policy_loss.by_config is not None:
        policy_loss = policy_loss.with_config(policy_config)
    _check(inputs, policy_loss, terms)
    weights = inputs.masked(inputs.loss_weights)
    orthogonal: dict[str, Metric] = {}
    if terms.opsm_delta is not None:
        keep, orthogonal["opsm_clipfrac"] = opsm_keep(inputs, terms.opsm_delta)
        inputs = replace(inputs, keep_mask=inputs.kept & keep)
    output = policy_loss.fn(inputs, policy_config)
    losses = output.token_losses
    if policy_loss.correction in ("outer", "masks"):
        losses = _corrected(inputs, losses)
    policy_weights = (
        weights if inputs.policy_weights is None else inputs.masked(inputs.policy_weights)
    )
    found = [WeightedTerm("policy_loss", 1.0, policy_weights, inputs.masked(losses))]
    metrics = {**output.metrics, **orthogonal}
    if inputs.ref_log_probs is not None:
        ratio = inputs.log_ratio() if terms.use_unbiased_kl else None
        kl = kl_estimate(
            terms.kl_loss_type,
            inputs.masked(inputs.log_probs),
            inputs.required("ref_log_probs"),
            log_ratio=ratio,
        )
        metrics["kl"] = masked_mean(kl, inputs.loss_mask)
        found.append(WeightedTerm("kl_loss", terms.kl_loss_coef, weights, inputs.masked(kl)))
    if inputs.entropy is not None:
        metrics["entropy"] = masked_mean(inputs.entropy, inputs.loss_mask)
        entropy = inputs.masked(inputs.entropy)
        found.append(WeightedTerm("entropy_loss", -terms.entropy_coef, weights, entropy))
    if inputs.nll_weights is not None:
        nll_weights = inputs.required("nll_weights")
        nll = -inputs.masked(inputs.log_probs)
        found.append(WeightedTerm("positive_nll", terms.positive_nll_coef, nll_weights, nll))
    if inputs.observation_weights is not None:
        seen = replace(inputs, loss_mask=inputs.observation_weights != 0)
        found.append(
            WeightedTerm(
                "observation_loss",
                terms.observation_loss_coef,
                seen.required("observation_weights"),
                -seen.masked(inputs.log_probs),
            )
        )
    if inputs.label_log_probs is not None and inputs.label_weights is not None:
        gap = inputs.masked(
            set_divergence(inputs.label_log_probs, inputs.label_weights, terms.distillation_alpha)
        )
        metrics["opd_divergence"] = masked_mean(gap, inputs.loss_mask)
        found.append(WeightedTerm("distillation_loss", terms.distillation_coef, weights, gap))
    return found, metrics


def _corrected(inputs: LossInputs, losses: Tensor) -> Tensor:
    """k c losses: a rejected token has no policy term, and keeps KL and entropy. A weight that is
    not finite, which may be why its token was rejected, is selected away before the product, or
    backward would multiply it by 0."""
    kept = inputs.kept
    losses = torch.where(kept, losses, 0.0)
    if inputs.importance_weights is None:
        return losses
    return losses * torch.where(kept, inputs.required("importance_weights"), 0.0)


def _check(inputs: LossInputs, policy_loss: PolicyLoss, terms: LossTerms) -> None:
    corrected = inputs.keep_mask is not None or inputs.importance_weights is not None
    if corrected and policy_loss.correction == "forbidden":
        raise ValueError(
            f"policy loss {policy_loss.name} takes no off-policy correction: it has no old policy"
        )
    if inputs.importance_weights is not None and policy_loss.correction == "masks":
        raise ValueError(
            f"policy loss {policy_loss.name} takes no importance weights: its ratio is against the sampler already"
        )
    if terms.opsm_delta is not None and policy_loss.correction == "forbidden":
        raise ValueError(
            f"policy loss {policy_loss.name} takes no off-policy sequence mask: it has no old policy"
        )
    if inputs.policy_weights is not None and not policy_loss.homogeneous:
        warnings.warn(
            f"policy loss {policy_loss.name} with advantages that are already normalised: its thresholds and coefficients act on the "
            "scaled values",
            stacklevel=3,
        )
    if terms.kl_loss_coef and inputs.ref_log_probs is None:
        raise ValueError(
            f"kl_loss_coef {terms.kl_loss_coef:g} needs ref_log_probs, and the batch has none"
        )
    if terms.positive_nll_coef and inputs.nll_weights is None:
        raise ValueError(
            f"positive_nll_coef {terms.positive_nll_coef:g} needs nll_weights, and the batch has none"
        )
    if terms.observation_loss_coef and inputs.observation_weights is None:
        raise ValueError(
            f"observation_loss_coef {terms.observation_loss_coef:g} needs observation_weights, and "
            "the batch has none"
        )
    if terms.distillation_coef and inputs.label_log_probs is None:
        raise ValueError(
            f"distillation_coef {terms.distillation_coef:g} needs label_log_probs and "
            "label_weights, and the batch has none"
        )
    if terms.entropy_coef and inputs.entropy is None:
        raise ValueError(
            f"entropy_coef {terms.entropy_coef:g} needs entropy, and the batch has none"
        )


@dataclass(slots=True)
class EntropyController(CheckedSettings):
    """The coefficient of the entropy bonus. target None: it is `value` for good.

    Else the bonus acts only while entropy is too low: Skywork-OR1, arXiv 2505.22312, its adaptive
    entropy control. With the entropy e_k by token of optimizer step k, averaged over its active
    tokens on all ranks, and a coefficient c_k:

        c_{k+1} = clip(c_k + delta, low, high)  where e_k < target
                  clip(c_k - delta, low, high)  where e_k > target
        bonus of step k + 1 = c_{k+1}           where e_k <= target, else 0

    The paper reads the entropy of the rollout that a step trains on; here it is that of the forward
    pass before, which every run has, so the bonus answers one optimizer step later.
    """

    value: float = arg(0.0, "c, before the indicator.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "Entropy by token, in nats, that is kept.", legal=POSITIVE)
    delta: float = arg(1e-4, "Change in a step.", legal=POSITIVE)
    low: float = arg(0.0, "Least c.", legal=NON_NEGATIVE)
    high: float = arg(0.005, "Largest c.", legal=POSITIVE)
    active: bool = arg(
        True, "Whether the last entropy was at most the target; before the first step it counts so."
    )

    @property
    def adaptive(self) -> bool:
        return self.target is not None

    @property
    def coef(self) -> float:
        """The weight of the entropy bonus in the next optimizer step."""
        return self.value if self.active else 0.0

    def update(self, entropy: float | None) -> None:
        """After the forward pass of an optimizer step with this mean entropy by token; None or not
        finite changes nothing."""
        if self.target is None or entropy is None or not math.isfinite(entropy):
            return
        sign = (entropy < self.target) - (entropy > self.target)
        self.value = min(max(self.value + sign * self.delta, self.low), self.high)
        self.active = entropy <= self.target

    def state_dict(self) -> dict[str, object]:
        """What a resumed run needs, as plain JSON."""
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: EntropyState) -> None:
        """A fixed coefficient is what the command line says; so is the start of a run without a
        state."""
        if self.adaptive and state:
            self.value, self.active = float(state["value"]), bool(state["active"])

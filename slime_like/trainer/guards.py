"""Numeric guards, active in every run: they stop the run instead of training on wrong numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.quantization import folder_quantization
from arguments.run_config import RunConfig
from slime_like.distributed.collectives import any_rank, gather
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.losses.mismatch import train_rollout_difference
from slime_like.sample_index import AnySample
from slime_like.types import NOT_SAMPLED, Sample, TrainSample, complete

if TYPE_CHECKING:
    from slime_like.checkpoints.state import GateState


logger = logging.getLogger(__name__)

# Largest mean log-prob difference (nats) of tokens sampled by older weights. A policy that moved
# this far within the staleness bound trains on noise; one that did not has a broken engine.
STALE_LIMIT = 1.0
_DIFFERENCE = "rollout/train_rollout_log_prob_diff"
RATIO_ERROR = 1.05  # mean of exp |log-prob difference|; NeMo-RL documents the same bound
_LOSSES = (
    "loss",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "positive_nll",
    "observation_loss",
    "value_loss",
    "kl",
    "entropy",
)


class GuardError(RunError):
    """A numeric guard failed."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first NaN or infinite number on a rank. sample: name of the sample. token: index within
    its response."""

    what: str
    sample: str
    token: int
    value: float
    rank: int

    def __str__(self) -> str:
        return (
            f"{self.what} of sample {self.sample} is {self.value:g} at token {self.token} of its "
            f"response (rank {self.rank})"
        )


def first_non_finite(
    columns: Mapping[str, Sequence[Tensor | None] | None],
    masks: Sequence[Tensor],
    samples: Sequence[str],
) -> NonFinite | None:
    """Find the first NaN or infinite number at an active token of this rank's samples.

    Args:
        columns: Description of the number -> [R] per sample; None for absent tensors.
        masks: [R] bool per sample, active tokens.
        samples: Name of each sample.

    Returns:
        None if all are finite.
    """
    for what, values in columns.items():
        rows = [row for row in zip(samples, masks, values or ()) if row[2] is not None]
        if not rows:
            continue
        # one test of all samples; the samples are tested one by one only if it fails
        all_masks = torch.cat([mask for _, mask, _ in rows])
        all_values = torch.cat([value for _, _, value in rows if value is not None])
        if bool((torch.isfinite(all_values) | ~all_masks).all()):
            continue
        for sample, mask, value in rows:
            assert value is not None
            broken = mask & ~torch.isfinite(value)
            if broken.any():
                token = int(broken.nonzero()[0])
                rank = dist.get_rank() if dist.is_initialized() else 0
                return NonFinite(what, sample, token, float(value[token]), rank)
    return None


def check_finite(
    columns: Mapping[str, Sequence[Tensor | None] | None],
    masks: Sequence[Tensor],
    samples: Sequence[str],
    *,
    when: str,
) -> None:
    """Refuse to train on NaN or infinity. Collective: all ranks raise the same error.

    Args:
        columns, masks, samples: See `first_non_finite`.
        when: Stage of training for the message, e.g. "before the first optimizer step".

    Raises:
        GuardError: Names the first non-finite number of the lowest rank that has one.
    """
    by_rank = gather(first_non_finite(columns, masks, samples))
    non_finite = [number for number in by_rank if number is not None]
    if non_finite:
        others = f"; {len(non_finite)} ranks have such numbers" if len(non_finite) > 1 else ""
        raise GuardError(f"{when}: the {non_finite[0]}{others}")


def non_finite_losses(metrics: Mapping[str, float]) -> list[str]:
    """Losses and entropies of a step that are NaN or infinite, as "name value". metrics: equal on
    all ranks."""
    return [
        f"{name} {metrics[name]:g}"
        for name in _LOSSES
        if name in metrics and not math.isfinite(metrics[name])
    ]


def _forward_tolerance(*, same_packing: bool, half_precision: bool) -> float:
    """How far two forward passes of the same weights may differ."""
    if same_packing:
        return 1e-8
    return 1e-3 if half_precision else 1e-5


def check_old_log_probs(log_ratio_abs: float, *, same_packing: bool, half_precision: bool) -> None:
    """Check that mean |log ratio| vanishes before the first optimizer step on a rollout, where the
    current policy is still the old one.

    The limit is 1e-8 if both forward passes packed the samples identically, otherwise 1e-5 in fp32
    and 1e-3 in half precision. Raises GuardError.
    """
    limit = _forward_tolerance(same_packing=same_packing, half_precision=half_precision)
    if not log_ratio_abs <= limit:
        raise GuardError(
            "before the first optimizer step the log-probs of the update differ from the "
            f"recomputed old ones by {log_ratio_abs:.3g} on average (limit {limit:g}): the "
            "training forward pass and the log-prob pass do not compute the same model"
        )


def check_old_values(
    diff_abs: float, *, values_abs: float, same_packing: bool, half_precision: bool
) -> None:
    """Check that mean |V - V_old| vanishes before the critic's first optimizer step on a rollout.

    The limits are those of `check_old_log_probs`, relative to mean |V_old| if that is above 1.
    Raises GuardError.
    """
    limit = _forward_tolerance(same_packing=same_packing, half_precision=half_precision)
    limit *= max(1.0, values_abs)
    if not diff_abs <= limit:
        raise GuardError(
            "before the critic's first optimizer step its values differ from those of the rollout "
            f"by {diff_abs:.3g} on average (limit {limit:g}): the training forward pass and the "
            "value pass do not compute the same model"
        )


def check_initial_kl(kl: float, *, half_precision: bool) -> None:
    """Check that the KL vanishes (1e-8 in fp32, 1e-3 in half precision) in the first step of a
    fresh run if the reference model is the initial policy."""
    limit = 1e-3 if half_precision else 1e-8
    if not abs(kl) <= limit:
        raise GuardError(
            f"the KL to the reference is {kl:.3g} in the first step (limit {limit:g}), although "
            "--ref-load and --hf-checkpoint are the same folder: reference and policy were loaded "
            "differently"
        )


@dataclass(slots=True)
class LogProbGuard:
    """Guard on the log-prob difference between trainer and rollout engine: mean and 99th percentile
    of its absolute value, once per rollout. Warns on a breach and stops the run after `patience`
    consecutive breaches. A probability-ratio error above `RATIO_ERROR` only warns."""

    limit: float
    patience: int
    breaches: int = 0
    prefix: str = ""  # of the message: which tokens

    def check(self, mean: float, p99: float, ratio_error: float, weight_version: int) -> str | None:
        """Returns a warning or None. mean, p99: of the absolute difference, in nats. ratio_error:
        mean of exp |difference|, 1 if both agree. Raises GuardError."""
        if mean <= self.limit and p99 <= self.limit:
            self.breaches = 0
            if ratio_error <= RATIO_ERROR:
                return None
            return (
                f"the probability-ratio error between trainer and sampler is {ratio_error:.4g} "
                f"(limit {RATIO_ERROR:g})"
            )
        self.breaches += 1
        text = (
            f"{self.prefix}trainer and sampler disagree in log-prob by {mean:.3g} per token on "
            f"average, {p99:.3g} at the 99th percentile (limit {self.limit:g}, weight version "
            f"{weight_version}, breach {self.breaches} of {self.patience})"
        )
        if self.breaches >= self.patience:
            raise GuardError(
                text + "; see --max-train-rollout-diff and --train-rollout-diff-patience"
            )
        return text


@dataclass(slots=True)
class SkippedStepGuard:
    """Counts optimizer steps that were skipped for a non-finite gradient; stops the run after
    `patience` consecutive ones."""

    patience: int
    in_a_row: int = 0
    total: int = 0
    owner: str = ""  # "critic's "

    def check(self, skipped: bool, grad_norm: float) -> str | None:
        """A warning, or None. Raises GuardError."""
        if not skipped:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        self.total += 1
        what = "NaN" if math.isnan(grad_norm) else "infinite"
        text = (
            f"{self.owner}optimizer step skipped: the gradient norm is {what} ({self.in_a_row} in "
            f"a row, {self.total} in total)"
        )
        if self.in_a_row >= self.patience:
            raise GuardError(text + "; see --max-consecutive-skipped-steps")
        return text


class RolloutGuards:
    """Guards on the log-prob difference between trainer and rollout engine, separately for tokens
    sampled by the current weights and by older ones. Collective over the data-parallel ranks."""

    def __init__(self, limit: float, patience: int, *, recorded: bool) -> None:
        """limit: see `train_rollout_limit`. patience: consecutive breaches that stop the run.
        recorded: the rollouts are another run's, possibly from other weights, so the difference is
        reported but not checked."""
        self.recorded = recorded
        self.fresh = LogProbGuard(limit, patience)
        self.stale = LogProbGuard(max(STALE_LIMIT, limit), patience, prefix="stale tokens: ")

    def state_dict(self) -> dict[str, int]:
        return {
            "rollout_gate_breaches": self.fresh.breaches,
            "stale_gate_breaches": self.stale.breaches,
        }

    def load_state_dict(self, state: GateState) -> None:
        self.fresh.breaches = int(state["rollout_gate_breaches"])
        self.stale.breaches = int(state.get("stale_gate_breaches", 0))

    def check_rollout(
        self,
        old: Sequence[Tensor],
        local: Sequence[TrainSample],
        samples: Sequence[AnySample],
        local_indices: Sequence[int],
        weight_version: int,
        group: dist.ProcessGroup,
    ) -> dict[str, float]:
        """Compare the trainer's log-probs with those that the rollout engine reported.

        Args:
            old: [R] per sample of this rank, the trainer's log-probs.
            local: This rank's samples.
            samples: All samples of the rollout.
            local_indices: Indices of this rank's samples in `samples`.
            weight_version: Version of the policy before the update.
            group: Data-parallel ranks.

        Returns:
            Metrics of the difference.

        Raises:
            GuardError: `patience` consecutive breaches.
        """
        metrics: dict[str, float] = {}
        sources = complete(samples[i] for i in local_indices)
        if all(s.rollout_log_probs is not None for s in local):
            masks = [s.loss_mask for s in local]
            if not self.recorded:
                masks = [m & fresh_tokens(s, weight_version) for m, s in zip(masks, sources)]
            metrics = _difference(old, local, masks, group)
            if not self.recorded:
                if metrics:
                    metrics["rollout/log_prob_gate_limit"] = self.fresh.limit
                mean = metrics.get(f"{_DIFFERENCE}_mean", 0.0)
                p99 = metrics.get(f"{_DIFFERENCE}_p99", 0.0)
                ratio_error = metrics.get("rollout/token_ratio_error", 1.0)
                if warning := self.fresh.check(mean, p99, ratio_error, weight_version):
                    warn_rank_0(logger, warning)
        if self.recorded or not all(s.has("rollout_log_probs") for s in samples):
            return metrics
        if all(s.version_counts.keys() <= {weight_version} for s in samples):
            return metrics
        masks = [s.loss_mask & stale_tokens(d, weight_version) for s, d in zip(local, sources)]
        if not any_rank([any(bool(mask.any()) for mask in masks)])[0]:
            return metrics
        # Stale tokens have a wider limit rather than none: otherwise an engine could disable the
        # check by reporting an old version.
        mean = _difference(old, local, masks, group).get(f"{_DIFFERENCE}_mean", 0.0)
        warn_rank_0(logger, self.stale.check(mean, mean, 1.0, weight_version))
        return metrics | {"rollout/stale_log_prob_diff_mean": mean}

    def check_update(self, gap: float, weight_version: int, *, on_policy: bool) -> None:
        """Check the first forward pass of an update that uses the engine's log-probs as the old
        ones. gap: mean absolute difference. on_policy: the current weights sampled all tokens."""
        if not self.recorded:
            guard = self.fresh if on_policy else self.stale
            warn_rank_0(logger, guard.check(gap, gap, 1.0, weight_version))


def _difference(
    old: Sequence[Tensor],
    local: Sequence[TrainSample],
    masks: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> dict[str, float]:
    rollout_log_probs = [require_rollout_log_probs(sample) for sample in local]
    return train_rollout_difference(old, rollout_log_probs, masks, group)


def train_rollout_limit(run: RunConfig) -> float:
    """Largest legal mean log-prob difference between trainer and rollout engine, in nats."""
    if run.gates.max_train_rollout_diff is not None:
        return run.gates.max_train_rollout_diff
    exact = (
        run.megatron.transformer.params_dtype == torch.float32
        and not torch.cuda.is_available()
        and not serves_quantized(run)
    )
    return 1e-3 if exact else 0.1


def serves_quantized(run: RunConfig) -> bool:
    """Whether servers hold quantised weights, in the format of --hf-checkpoint."""
    folder = run.model.hf_checkpoint
    return run.rollout.rollout_engine == "sglang" and bool(folder and folder_quantization(folder))


def require_rollout_log_probs(sample: TrainSample) -> Tensor:
    """The sample's rollout log-probs. Raises ValueError if it has none."""
    if sample.rollout_log_probs is None:
        raise ValueError(
            "a sample has no log-probs from the rollout engine, which --use-rollout-logprobs and "
            "the train/rollout comparison need"
        )
    return sample.rollout_log_probs


def fresh_tokens(sample: Sample, weight_version: int) -> Tensor:
    """[R] bool: tokens sampled by `weight_version`; all True if the versions are unknown."""
    if not sample.weight_versions:
        return torch.ones(sample.response_length, dtype=torch.bool)
    return torch.tensor(sample.weight_versions) == weight_version


def stale_tokens(sample: Sample, weight_version: int) -> Tensor:
    """[R] bool: tokens sampled by other weight versions of this run. NOT_SAMPLED tokens, e.g. from
    a user's rollout function, are excluded: there is nothing to compare them with."""
    if not sample.weight_versions:
        return torch.zeros(sample.response_length, dtype=torch.bool)
    versions = torch.tensor(sample.weight_versions)
    return (versions != weight_version) & (versions != NOT_SAMPLED)

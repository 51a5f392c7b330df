"""Guards on the log-probs of a rollout: the trainer's against those of the rollout engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import any_rank, gather
from slime_like.guards.finite import GuardError
from slime_like.logs import warn_rank_0
from slime_like.losses.mismatch import (
    CONTEXT_BOUNDS,
    RESPONSE_BOUNDS,
    difference_by_place,
    place_names,
    train_rollout_difference,
)
from slime_like.samples.episodes import complete
from slime_like.samples.index import AnySample
from slime_like.types import NOT_SAMPLED, Sample, TrainSample

if TYPE_CHECKING:
    from slime_like.checkpoints.state import GuardState


logger = logging.getLogger(__name__)

# Largest mean log-prob difference (nats) of tokens sampled by older weights. A policy that moved
# this far within the staleness bound trains on noise; one that did not has a broken engine.
STALE_LIMIT = 1.0
_DIFFERENCE = "rollout/train_rollout_log_prob_diff"
# A difference grows with depth if the deepest part's mean is this many times the first part's, and
# above this share of the limit, below which it is rounding.
GROWTH = 4.0
GROWTH_SHARE = 0.1
RATIO_ERROR = 1.05  # mean of exp |log-prob difference|; NeMo-RL documents the same bound


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
        """Returns a warning or None. Raises GuardError.

        Args:
            mean, p99: Of the absolute difference, in nats.
            ratio_error: Mean of exp |difference|, 1 if both agree.
        """
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


class RolloutGuards:
    """Guards on the log-prob difference between trainer and rollout engine, separately for tokens
    sampled by the current weights and by older ones. Collective over the data-parallel ranks."""

    def __init__(self, limit: float, patience: int, *, recorded: bool, exact: bool = False) -> None:
        """
        Args:
            limit: See `train_rollout_limit`.
            patience: Consecutive breaches that stop the run.
            recorded: The rollouts are another run's, possibly from other weights, so the difference
                is reported but not checked.
            exact: With --true-on-policy-mode: every difference must be exactly 0.
        """
        self.recorded = recorded
        self.exact = exact
        self.fresh = LogProbGuard(limit, patience)
        self.stale = LogProbGuard(max(STALE_LIMIT, limit), patience, prefix="stale tokens: ")

    def state_dict(self) -> dict[str, int]:
        return {
            "rollout_gate_breaches": self.fresh.breaches,
            "stale_gate_breaches": self.stale.breaches,
        }

    def load_state_dict(self, state: GuardState) -> None:
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
            GuardError: `patience` consecutive breaches; with `exact` any difference.
        """
        metrics: dict[str, float] = {}
        sources = complete(samples[i] for i in local_indices)
        if self.exact:
            check_exact(old, local, [str(sample.sample_id) for sample in sources], weight_version)
        if all(s.rollout_log_probs is not None for s in local):
            masks = [s.loss_mask for s in local]
            if not self.recorded:
                masks = [m & fresh_tokens(s, weight_version) for m, s in zip(masks, sources)]
            metrics = _difference(old, local, masks, group)
            by_place = _by_place(old, local, masks, group)
            metrics |= by_place
            if not self.recorded:
                warn_rank_0(logger, growth_warning(by_place, self.fresh.limit))
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
        ones.

        Args:
            gap: Mean absolute difference.
            on_policy: The current weights sampled all tokens.
        """
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


def _by_place(
    old: Sequence[Tensor],
    local: Sequence[TrainSample],
    masks: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> dict[str, float]:
    rollout_log_probs = [require_rollout_log_probs(sample) for sample in local]
    prompt_lengths = [len(sample.tokens) - sample.response_length for sample in local]
    return difference_by_place(old, rollout_log_probs, masks, prompt_lengths, group)


def growth_warning(by_place: Mapping[str, float], limit: float) -> str | None:
    """A warning if the log-prob difference grows with the depth of the context or along the
    response: an engine that rounds, rotates or caches otherwise than the trainer drifts before its
    mean is above the limit. limit: of the mean, in nats."""
    for what, kind, bounds in (
        ("the depth of the context", "context", CONTEXT_BOUNDS),
        ("the position in the response", "response", RESPONSE_BOUNDS),
    ):
        names = [name for name in place_names(kind, bounds) if name in by_place]
        if len(names) < 2:
            continue
        first = by_place[names[0]]
        last = by_place[names[-1]]
        if last > GROWTH * first and last > GROWTH_SHARE * limit:
            return (
                f"the log-prob difference between trainer and sampler grows with {what}: "
                f"{first:.3g} in {names[0]}, {last:.3g} in {names[-1]}"
            )
    return None


def check_exact(
    old: Sequence[Tensor], local: Sequence[TrainSample], names: Sequence[str], weight_version: int
) -> None:
    """Require equal log-probs of trainer and rollout engine, bit for bit. Collective: all ranks
    raise the same error.

    Args:
        old, local: See `RolloutGuards.check_rollout`.
        names: Of the samples.
        weight_version: Version of the policy before the update.

    Raises:
        GuardError: Names the first token of the lowest rank that has a difference.
    """
    by_rank = [first for first in gather(_first_difference(old, local, names)) if first is not None]
    if by_rank:
        # the ranks of one replica of the model have the same samples
        total = sum(first.tokens for first in {first.sample: first for first in by_rank}.values())
        raise GuardError(
            f"--true-on-policy-mode: {by_rank[0]}, with weight version {weight_version}; log-probs "
            f"that differ: {total}"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a rank at which trainer and rollout engine differ."""

    sample: str
    token: int  # index within its response
    trainer: float
    engine: float | None  # None: it reported no log-probs
    tokens: int  # of this rank, that differ
    masked: int  # of this response, tokens that are not trained on

    def __str__(self) -> str:
        engine = "none" if self.engine is None else f"{self.engine:.9g}"
        text = (
            f"the log-prob of token {self.token} of the response of sample {self.sample} is "
            f"{self.trainer:.9g} in the trainer and {engine} in the rollout engine"
        )
        if self.masked:
            # the output layer then has fewer rows, on which the bits of its product depend
            text += (
                f" (the loss mask leaves out {self.masked} of its tokens, which alone may change "
                "the last bits: mask whole responses only)"
            )
        return text


def _first_difference(
    old: Sequence[Tensor], local: Sequence[TrainSample], names: Sequence[str]
) -> Difference | None:
    first = None
    total = 0
    for trainer, sample, name in zip(old, local, names, strict=True):
        engine = sample.rollout_log_probs
        differs = sample.loss_mask.clone()
        if engine is not None:
            differs &= trainer != engine  # NaN differs from everything
        total += int(differs.sum())
        if first is None and differs.any():
            at = int(differs.nonzero()[0])
            masked = int((~sample.loss_mask).sum())
            reported = None if engine is None else float(engine[at])
            first = Difference(name, at, float(trainer[at]), reported, 0, masked)
    return None if first is None else replace(first, tokens=total)


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

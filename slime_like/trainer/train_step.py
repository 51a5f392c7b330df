"""Optimizer steps of a rollout for policy and critic, with their numeric guards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from arguments.schema import AlgorithmConfig
from slime_like.batching.builder import Batches
from slime_like.batching.user_hooks import TrainHooks
from slime_like.guards.finite import GuardError, check_finite, non_finite_losses
from slime_like.guards.rollout import RolloutGuards
from slime_like.guards.update import (
    SkippedStepGuard,
    check_initial_kl,
    check_old_log_probs,
    check_old_values,
)
from slime_like.logs import warn_rank_0
from slime_like.losses.entropy_control import EntropyController
from slime_like.megatron.backend import MegatronBackend, PendingStep
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.progress import Progress
from slime_like.types import StepResult, TrainBatch

if TYPE_CHECKING:
    from slime_like.checkpoints.state import TrainerState


logger = logging.getLogger(__name__)

_LOSS_INPUTS = {
    "advantages": "advantage",
    "old_log_probs": "old log-prob",
    "ref_log_probs": "log-prob of the reference",
    "rollout_log_probs": "log-prob of the rollout engine",
    "importance_weights": "importance weight",
    "loss_weights": "weight of the reduction",
}  # field of a TrainSample -> its name in a message
_NETWORKS = {"": "policy", "critic_": "critic"}  # key prefix in a checkpoint -> network


class TrainStep:
    """Runs the optimizer steps of a rollout. Collective over all ranks."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        backend: MegatronBackend,
        progress: Progress,
        guards: RolloutGuards,
        hooks: TrainHooks,
        *,
        patience: int,
        kl_vanishes_at: int | None,
    ) -> None:
        """
        Args:
            guards: For updates that use the log-probs of the rollout engine as the old ones.
            patience: Consecutive skipped optimizer steps that stop the run.
            kl_vanishes_at: The rollout at which the policy equals the reference model, or None.
        """
        self.algorithm = algorithm
        self.backend = backend
        self.progress = progress
        self.guards = guards
        self.hooks = hooks
        self.kl_vanishes_at = kl_vanishes_at
        self.entropy = entropy_controller(algorithm)
        self.skip_guards = {
            "policy": SkippedStepGuard(patience),
            "critic": SkippedStepGuard(patience, owner="critic's "),
        }

    def state_dict(self) -> dict[str, object]:
        """Counts of skipped steps and the entropy coefficient, as plain JSON."""
        state: dict[str, object] = {"entropy_controller": self.entropy.state_dict()}
        for prefix, network in _NETWORKS.items():
            state[f"{prefix}skipped_steps"] = self.skip_guards[network].total
            state[f"{prefix}skipped_in_a_row"] = self.skip_guards[network].in_a_row
        return state

    def load_state_dict(self, state: TrainerState) -> None:
        """Restore `state_dict`. Older checkpoints have no entropy state."""
        self.entropy.load_state_dict(state.get("entropy_controller", {}))
        policy = self.skip_guards["policy"]
        critic = self.skip_guards["critic"]
        policy.total = int(state["skipped_steps"])
        policy.in_a_row = int(state["skipped_in_a_row"])
        critic.total = int(state["critic_skipped_steps"])
        critic.in_a_row = int(state["critic_skipped_in_a_row"])

    def train_policy(
        self, step: int, batches: Batches, *, weight_version: int, on_policy: bool
    ) -> dict[str, float]:
        """Train the policy on the batches of a rollout.

        Args:
            step: The rollout, from 0.
            weight_version: Version of the policy before the update.
            on_policy: The current weights sampled all tokens.

        Returns:
            Metrics, averaged over the optimizer steps.
        """
        guard = self.skip_guards["policy"]
        results = []
        checked: dict[str, float] = {}
        with self.progress.phase("train"):
            for index, batch in enumerate(batches.policy):
                if self.entropy.adaptive:
                    self.backend.set_entropy_coef(self.entropy.coef)
                self.hooks.before_train_step(index, self.backend.trained)
                pending = self.backend.forward_backward(batch)
                if batches.check is not None:
                    checked = batches.check.run(pending.log_probs)
                self._check_loss(batch, pending, index)
                if self.entropy.adaptive:
                    pending.metrics["entropy_coef"] = self.entropy.coef
                    self.entropy.update(pending.metrics.get("entropy"))
                if index == 0:
                    self._check_first_update(
                        step, pending.metrics, weight_version=weight_version, on_policy=on_policy
                    )
                results.append(self._optim_step(pending, guard))
        return averages(results, guard) | checked

    def train_critic(self, batches: Sequence[TrainBatch], *, values_abs: float) -> dict[str, float]:
        """As `train_policy`, for the critic. values_abs: mean |V| of the rollout."""
        guard = self.skip_guards["critic"]
        results = []
        with self.progress.phase("train_critic"):
            for index, batch in enumerate(batches):
                pending = self.backend.forward_backward_critic(batch)
                self._check_loss(batch, pending, index, critic=True)
                if index == 0 and not self._has_dropout:
                    check_old_values(
                        pending.metrics.get("value_diff_abs", 0.0),
                        values_abs=values_abs,
                        same_packing=self._same_packing(pending.network.layout),
                        half_precision=self._half_precision,
                    )
                results.append(self._optim_step(pending, guard))
        return averages(results, guard, prefix="critic_")

    def _optim_step(self, pending: PendingStep, guard: SkippedStepGuard) -> StepResult:
        result = self.backend.optim_step(pending)
        if warning := guard.check(result.skipped, result.grad_norm, result.loss_scale):
            warn_rank_0(logger, warning)
        return result

    def _check_loss(
        self, batch: TrainBatch, pending: PendingStep, index: int, *, critic: bool = False
    ) -> None:
        """Raise GuardError before the optimizer step if the loss is not finite, naming the first
        non-finite input.

        The gradient may still be finite: a clamp can drop the NaN, and the step would silently miss
        a term. Communicates only when raising, because all ranks have the same metrics.
        """
        broken = non_finite_losses(pending.metrics)
        if not broken:
            return
        samples = batch.samples
        which = "the critic's optimizer step" if critic else "optimizer step"
        when = f"{which} {index + 1} of this rollout has {', '.join(broken)}"
        columns: dict[str, Sequence[Tensor | None]]
        if critic:
            columns = {
                "old value": [s.values for s in samples],
                "return": [None if s.returns is None else s.returns.nan_to_num() for s in samples],
                "value": self.backend.forward_critic(samples),
            }
        else:
            current = self.backend.forward(samples)
            columns = {
                "log-prob under the current weights": [o.log_probs for o in current],
                "entropy under the current weights": [o.entropy for o in current],
            }
            for field, name in _LOSS_INPUTS.items():
                columns[name] = [getattr(sample, field) for sample in samples]
        masks = [s.loss_mask for s in samples]
        names = [f"{i + 1} of {len(samples)} of this rank" for i in range(len(samples))]
        check_finite(columns, masks, names, when=when)
        raise GuardError(
            f"{when}, although all of its inputs are finite: check the loss and its coefficients"
        )

    def _check_first_update(
        self, step: int, metrics: Mapping[str, float], *, weight_version: int, on_policy: bool
    ) -> None:
        """Guards on the first forward pass of a rollout's update, before the weights change."""
        if self._has_dropout:
            return
        gap = metrics.get("log_ratio_abs", 0.0)  # supervised samples have no old log-probs
        if self.algorithm.use_rollout_logprobs:
            self.guards.check_update(gap, weight_version, on_policy=on_policy)
            return
        check_old_log_probs(
            gap,
            same_packing=self._same_packing(self.backend.layout),
            half_precision=self._half_precision,
        )
        if step == self.kl_vanishes_at and "kl_k3" in metrics:
            check_initial_kl(metrics["kl_k3"], half_precision=self._half_precision)

    @property
    def _half_precision(self) -> bool:
        return self.backend.transformer.params_dtype.itemsize == 2

    @property
    def _has_dropout(self) -> bool:
        transformer = self.backend.transformer
        return bool(transformer.hidden_dropout or transformer.attention_dropout)

    def _same_packing(self, layout: ParallelLayout) -> bool:
        """Whether forward-only passes and updates pack samples identically in this layout."""
        algorithm = self.algorithm
        if algorithm.use_dynamic_batch_size:
            return False  # micro-batches of a full rollout differ from those of one step
        if layout.vp_size > 1:
            return False  # interleaved stages pad to the longest sequence of the step or rollout
        return algorithm.log_probs_micro_batch_size in (None, algorithm.micro_batch_size)


def entropy_controller(algorithm: AlgorithmConfig) -> EntropyController:
    if algorithm.entropy_ctrl_type != "adaptive":
        return EntropyController(algorithm.entropy_coef)
    return EntropyController(
        algorithm.entropy_coef,
        target=algorithm.entropy_target,
        delta=algorithm.entropy_coef_delta,
        low=algorithm.entropy_coef_min,
        high=algorithm.entropy_coef_max,
    )


def averages(
    results: Sequence[StepResult], guard: SkippedStepGuard, prefix: str = ""
) -> dict[str, float]:
    """Average the metrics of a rollout's optimizer steps; of maxima and minima, those over all
    steps. prefix: for names that policy and critic share."""
    metrics = {}
    for name in sorted(set[str]().union(*(result.metrics for result in results))):
        values = [result.metrics[name] for result in results if name in result.metrics]
        combine = max if name.endswith("_max") else min if name.endswith("_min") else mean
        metrics[name if name.startswith("perf/") else f"train/{name}"] = combine(values)
    metrics[f"train/{prefix}grad_norm"] = mean([r.grad_norm for r in results])
    metrics[f"train/{prefix}lr"] = results[-1].learning_rate
    metrics[f"train/{prefix}skipped_steps"] = float(guard.total)
    if results[-1].loss_scale is not None:
        metrics[f"train/{prefix}loss_scale"] = results[-1].loss_scale
    return metrics


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

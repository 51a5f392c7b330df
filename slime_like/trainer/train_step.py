"""The optimizer steps of a rollout, of the policy and of the critic, and the gates on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from arguments.schema import AlgorithmConfig
from slime_like.logs import warn_rank_0
from slime_like.losses.total import EntropyController
from slime_like.megatron.backend import MegatronBackend, PendingStep
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.progress import Progress
from slime_like.trainer.batch_builder import Batches
from slime_like.trainer.guards import (
    GateError,
    SamplerGates,
    SkippedStepGate,
    check_finite,
    check_initial_kl,
    check_old_log_probs,
    check_old_values,
    non_finite_losses,
)
from slime_like.trainer.user_hooks import UserHooks
from slime_like.types import StepResult, TrainBatch

logger = logging.getLogger(__name__)

_LOSS_INPUTS = {
    "advantages": "advantage",
    "old_log_probs": "old log-prob",
    "ref_log_probs": "log-prob of the reference",
    "rollout_log_probs": "log-prob of the rollout engine",
    "importance_weights": "importance weight",
    "loss_weights": "weight of the reduction",
}  # field of a TrainSample -> in a message
_GATES = {"": "policy", "critic_": "critic"}  # prefix of the names in a checkpoint


class TrainStep:
    """Collective over all ranks."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        backend: MegatronBackend,
        progress: Progress,
        gates: SamplerGates,
        hooks: UserHooks | None,
        *,
        patience: int,
        kl_vanishes_at: int | None,
    ) -> None:
        """gates: on the difference to the sampler, for updates with its log-probs as the old ones.
        patience: optimizer steps in a row that may be skipped. kl_vanishes_at: the rollout that
        starts with the reference model as its policy; None where there is none."""
        self.algorithm = algorithm
        self.backend = backend
        self.progress = progress
        self.gates = gates
        self.hooks = hooks
        self.kl_vanishes_at = kl_vanishes_at
        self.entropy = entropy_controller(algorithm)
        self.skip_gates = {
            "policy": SkippedStepGate(patience),
            "critic": SkippedStepGate(patience, owner="critic's "),
        }

    def state_dict(self) -> dict[str, object]:
        """Steps that were skipped, and the entropy bonus, as plain JSON."""
        state: dict[str, object] = {"entropy_controller": self.entropy.state_dict()}
        for prefix, network in _GATES.items():
            state[f"{prefix}skipped_steps"] = self.skip_gates[network].total
            state[f"{prefix}skipped_in_a_row"] = self.skip_gates[network].in_a_row
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checkpoints before the adaptive entropy bonus have no state of it."""
        self.entropy.load_state_dict(state.get("entropy_controller", {}))
        for prefix, network in _GATES.items():
            self.skip_gates[network].total = int(state[f"{prefix}skipped_steps"])
            self.skip_gates[network].in_a_row = int(state[f"{prefix}skipped_in_a_row"])

    def train_policy(
        self, step: int, batches: Batches, *, weight_version: int, on_policy: bool
    ) -> dict[str, float]:
        """Metrics are averaged over the optimizer steps. on_policy: all tokens are of the current
        weights, of this version."""
        gate = self.skip_gates["policy"]
        results = []
        checked: dict[str, float] = {}
        with self.progress.phase("train"):
            for index, batch in enumerate(batches.policy):
                if self.entropy.adaptive:
                    self.backend.set_entropy_coef(self.entropy.coef)
                if self.hooks is not None:
                    self.hooks.before_train_step(index, self.backend.trained)
                pending = self.backend.forward_backward(batch)
                if batches.check is not None:
                    checked = batches.check(pending.log_probs)
                self._check_loss(batch, pending, index)
                if self.entropy.adaptive:
                    pending.metrics["entropy_coef"] = self.entropy.coef
                    self.entropy.update(pending.metrics.get("entropy"))
                if index == 0:
                    self._check_first_update(
                        step, pending.metrics, weight_version=weight_version, on_policy=on_policy
                    )
                result = self.backend.optim_step(pending)
                if warning := gate.check(result.skipped, result.grad_norm):
                    warn_rank_0(logger, warning)
                results.append(result)
        return averages(results, gate) | checked

    def train_critic(self, batches: Sequence[TrainBatch], *, values_abs: float) -> dict[str, float]:
        """As `train_policy`, for the critic. values_abs: mean absolute value of the rollout's
        values."""
        gate = self.skip_gates["critic"]
        results = []
        with self.progress.phase("train_critic"):
            for index, batch in enumerate(batches):
                pending = self.backend.forward_backward_critic(batch)
                self._check_loss(batch, pending, index, critic=True)
                if index == 0 and not self._has_dropout:
                    difference = pending.metrics.get("value_diff_abs", 0.0)
                    same_packing = self._same_packing(pending.network.layout)
                    check_old_values(
                        difference,
                        values_abs=values_abs,
                        same_packing=same_packing,
                        half_precision=self._half_precision,
                    )
                result = self.backend.optim_step(pending)
                if warning := gate.check(result.skipped, result.grad_norm):
                    warn_rank_0(logger, warning)
                results.append(result)
        return averages(results, gate, prefix="critic_")

    def _check_loss(
        self, batch: TrainBatch, pending: PendingStep, index: int, *, critic: bool = False
    ) -> None:
        """A loss that is not finite changes no weight: a clamp may keep its NaN out of the
        gradient, and a step without one of its terms would be taken. Collective only where it
        raises, for all ranks have the same metrics. Raises GateError naming the first culprit."""
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
            now = self.backend.forward(samples)
            columns = {
                "log-prob under the current weights": [o.log_probs for o in now],
                "entropy under the current weights": [o.entropy for o in now],
                **{words: [getattr(s, f) for s in samples] for f, words in _LOSS_INPUTS.items()},
            }
        masks = [s.loss_mask for s in samples]
        names = [f"{i + 1} of {len(samples)} of this rank" for i in range(len(samples))]
        check_finite(columns, masks, names, when=when)
        raise GateError(
            f"{when}, and all that it was computed from is finite: see the loss and its coefficients"
        )

    def _check_first_update(
        self, step: int, metrics: Mapping[str, float], *, weight_version: int, on_policy: bool
    ) -> None:
        """Gates on the forward pass of a rollout's first optimizer step, before the weights change."""
        if self._has_dropout:
            return
        gap = metrics.get("log_ratio_abs", 0.0)  # there are no old log-probs of given answers
        if self.algorithm.use_rollout_logprobs:
            self.gates.check_update(gap, weight_version, on_policy=on_policy)
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
        return bool(self.backend.transformer.bf16)

    @property
    def _has_dropout(self) -> bool:
        transformer = self.backend.transformer
        return bool(transformer.hidden_dropout or transformer.attention_dropout)

    def _same_packing(self, layout: ParallelLayout) -> bool:
        """Whether forward-only passes and updates of a network in this layout pack samples alike."""
        algorithm = self.algorithm
        same_size = algorithm.log_probs_micro_batch_size in (None, algorithm.micro_batch_size)
        same_size = (
            same_size and not algorithm.use_dynamic_batch_size
        )  # a pass over a whole rollout is filled otherwise than a step
        return (
            same_size and layout.vp_size == 1
        )  # interleaved stages pad to the longest of the step, or of the rollout


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
    results: Sequence[StepResult], gate: SkippedStepGate, prefix: str = ""
) -> dict[str, float]:
    """Metrics of the optimizer steps of one rollout, averaged over them. prefix: of the names that
    every network has."""
    names = sorted({name for r in results for name in r.metrics})
    metrics = {
        n if n.startswith("perf/") else f"train/{n}": mean(
            [r.metrics[n] for r in results if n in r.metrics]
        )
        for n in names
    }
    metrics[f"train/{prefix}grad_norm"] = mean([r.grad_norm for r in results])
    metrics[f"train/{prefix}lr"] = results[-1].learning_rate
    metrics[f"train/{prefix}skipped_steps"] = float(gate.total)
    return metrics


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

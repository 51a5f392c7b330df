"""The log-probs before an update, of the policy that is about to be trained, the reference and the
teacher: where they come from, how the policy's compare with the sampler's, and what is made of the
difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.rollout.step_plan import (
    SampleCorrection,
    check_rollout_log_probs,
    correct_steps,
    has_rollout_log_probs,
)
from slime_like.trainer.guards import SamplerGates, require_rollout_log_probs
from slime_like.trainer.rollout_batch import BatchSettings, Rollout
from slime_like.trainer.teacher_scores import TeacherScores, teacher_scores
from slime_like.types import TrainSample

_WHEN = "before the update"


@dataclass(frozen=True, slots=True)
class Scores:
    """What forward passes gave for this rank's samples, [R] by sample; None without the network, and
    for old log-probs that the training pass will give."""

    old: list[LogProbOutput] | None
    ref: list[Tensor] | None
    teacher: TeacherScores | None
    values: list[Tensor] | None

    @property
    def old_log_probs(self) -> list[Tensor]:
        assert self.old is not None, "see RunConfig.old_is_current"
        return [o.log_probs for o in self.old]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Of this data-parallel rank's samples. Collective over all ranks."""

    settings: BatchSettings
    layout: ParallelLayout
    backend: MegatronBackend
    gates: SamplerGates

    def old(self, rollout: Rollout, *, squared_probs: bool, top_k: int = 0) -> list[LogProbOutput]:
        """Of the policy before its update: by a forward pass of their own, or as the engine
        reported them. squared_probs, top_k: see `MegatronBackend.forward`."""
        local = rollout.local
        if not self.settings.algorithm.use_rollout_logprobs:
            self.settings.hooks.before_log_prob(self.backend.policy.chunks)
            return self.backend.forward(local, squared_probs=squared_probs, top_k=top_k)
        of_engine = [require_rollout_log_probs(s) for s in local]
        rollout.check_finite({"log-prob of the rollout engine": of_engine}, _WHEN)
        return [LogProbOutput(o, s.loss_weights * 0) for o, s in zip(of_engine, local)]

    def reference(self, local: Sequence[TrainSample]) -> list[Tensor] | None:
        """[R] by sample of this rank; None without a reference model."""
        network = self.backend.reference
        if network is None:
            return None
        self.settings.hooks.before_log_prob(network.chunks, "ref_")
        return [r.log_probs for r in self.backend.forward(local, network)]

    def teacher(
        self, rollout: Rollout, old: Sequence[LogProbOutput] | None
    ) -> TeacherScores | None:
        """From the teacher on Megatron, or from the served one; None without either. old: of the
        policy."""
        if not self.settings.distillation.use_opd:
            return None
        return teacher_scores(self.settings, self.backend, rollout, old)

    def check(
        self, rollout: Rollout, old: Sequence[LogProbOutput], weight_version: int
    ) -> dict[str, float]:
        """Metrics of the trainer's log-probs against the sampler's, where it reported them.
        weight_version: of the policy that is about to be trained. Raises GateError."""
        if self.settings.algorithm.use_rollout_logprobs:
            return {}
        log_probs = [o.log_probs for o in old]
        columns = {"old log-prob": log_probs, "entropy": [o.entropy for o in old]}
        rollout.check_finite(columns, _WHEN)
        metrics = {}
        if self.settings.replays_rollout:
            metrics["rollout/moe_routing_disagreement"] = self.backend.replay_disagreement()
        return metrics | self.gates.check_rollout(
            log_probs,
            rollout.local,
            rollout.samples,
            rollout.shares.local_indices,
            weight_version,
            self.layout.dp_group,
        )

    def correct(
        self, rollout: Rollout, old: Sequence[LogProbOutput]
    ) -> tuple[list[SampleCorrection], dict[str, float]]:
        """The off-policy correction of the samples, and how far trainer and sampler are apart where
        the sampler reported its log-probs."""
        config = self.settings.off_policy
        check_rollout_log_probs(config, rollout.samples)
        if self.settings.algorithm.use_rollout_logprobs or not has_rollout_log_probs(
            rollout.samples
        ):
            return [SampleCorrection()] * len(rollout.local), {}
        log_probs: list[Tensor] = [o.log_probs for o in old]
        corrections, metrics = correct_steps(config, rollout.steps, log_probs, self.layout.dp_group)
        return corrections, {f"train/{name}": value for name, value in metrics.items()}

    def check_update(
        self, rollout: Rollout, log_probs: Sequence[LogProbOutput], weight_version: int
    ) -> dict[str, float]:
        """`check` and the metrics of `correct`, of log-probs that the training pass gave: its
        gradients are there, and the weights are still the old ones."""
        metrics = self.check(rollout, log_probs, weight_version)
        return metrics | self.correct(rollout, log_probs)[1]

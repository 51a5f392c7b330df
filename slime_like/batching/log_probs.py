"""Log-probs before the update: of the policy, the reference model and the teacher, and their
comparison with those of the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slime_like.batching.off_policy_step import (
    SampleCorrection,
    check_rollout_log_probs,
    correct_steps,
    has_rollout_log_probs,
)
from slime_like.batching.rollout_batch import Rollout
from slime_like.batching.settings import BatchSettings
from slime_like.batching.teacher_scores import TeacherScores, teacher_scores
from slime_like.guards.rollout import RolloutGuards, require_rollout_log_probs
from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import TrainSample

BEFORE_UPDATE = "before the update"


@dataclass(frozen=True, slots=True)
class Scores:
    """Forward-pass results for the local samples, [R] per sample. None if there is no such network,
    or if the training forward pass will provide the old log-probs."""

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
    """Computes log-probs of the local samples. Collective over all ranks."""

    settings: BatchSettings
    layout: ParallelLayout
    backend: MegatronBackend
    guards: RolloutGuards

    def old(self, rollout: Rollout, *, squared_probs: bool, top_k: int = 0) -> list[LogProbOutput]:
        """Log-probs of the policy before its update: from a forward pass, or as reported by the
        engine. squared_probs, top_k: see `MegatronBackend.forward`."""
        local = rollout.local
        if not self.settings.algorithm.use_rollout_logprobs:
            self.settings.hooks.before_log_prob(self.backend.policy.chunks)
            return self.backend.forward(local, squared_probs=squared_probs, top_k=top_k)
        reported = [require_rollout_log_probs(sample) for sample in local]
        rollout.check_finite({"log-prob of the rollout engine": reported}, BEFORE_UPDATE)
        return [LogProbOutput(r, sample.loss_weights * 0) for r, sample in zip(reported, local)]

    def reference(self, local: Sequence[TrainSample]) -> list[Tensor] | None:
        """Reference log-probs, [R] per local sample; None without a reference model."""
        network = self.backend.reference
        if network is None:
            return None
        self.settings.hooks.before_log_prob(network.chunks, "ref_")
        return [output.log_probs for output in self.backend.forward(local, network)]

    def teacher(
        self, rollout: Rollout, old: Sequence[LogProbOutput] | None
    ) -> TeacherScores | None:
        """Scores of the teacher, of Megatron or served; None without a teacher. old: the policy's
        log-probs."""
        if not self.settings.distillation.use_opd:
            return None
        return teacher_scores(self.settings, self.backend, rollout, old)

    def check(
        self, rollout: Rollout, old: Sequence[LogProbOutput], weight_version: int
    ) -> dict[str, float]:
        """Compare the trainer's log-probs with those that the rollout engine reported; returns
        metrics. weight_version: version of the policy before the update. Raises GuardError."""
        if self.settings.algorithm.use_rollout_logprobs:
            return {}
        log_probs = [o.log_probs for o in old]
        columns = {"old log-prob": log_probs, "entropy": [o.entropy for o in old]}
        rollout.check_finite(columns, BEFORE_UPDATE)
        metrics = {}
        if "routed_experts" in self.settings.replayed:
            metrics["rollout/moe_routing_disagreement"] = self.backend.replay_disagreement()
        if "indexer_topk" in self.settings.replayed:
            metrics["rollout/indexer_disagreement"] = self.backend.indexer_disagreement()
        return metrics | self.guards.check_rollout(
            log_probs,
            rollout.local,
            rollout.samples,
            rollout.assignment.local_indices,
            weight_version,
            self.layout.dp_group,
        )

    def correct(
        self, rollout: Rollout, old: Sequence[LogProbOutput]
    ) -> tuple[list[SampleCorrection], dict[str, float]]:
        """The off-policy correction of each sample, and metrics of the mismatch between trainer and
        rollout engine, if the engine reported log-probs."""
        config = self.settings.off_policy
        samples = rollout.samples
        check_rollout_log_probs(config, samples)
        if self.settings.algorithm.use_rollout_logprobs or not has_rollout_log_probs(samples):
            return [SampleCorrection()] * len(rollout.local), {}
        log_probs = [o.log_probs for o in old]
        corrections, metrics = correct_steps(config, rollout.steps, log_probs, self.layout.dp_group)
        return corrections, {f"train/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True, slots=True)
class UpdateCheck:
    """What `LogProbs` does before an update, for a rollout whose old log-probs come from the
    training forward pass."""

    log_probs: LogProbs
    rollout: Rollout
    weight_version: int  # version of the policy before the update

    def run(self, old: Sequence[LogProbOutput]) -> dict[str, float]:
        """Check the log-probs of the training forward pass, after backward and before the optimizer
        step; returns metrics. Raises GuardError."""
        metrics = self.log_probs.check(self.rollout, old, self.weight_version)
        return metrics | self.log_probs.correct(self.rollout, old)[1]

"""Stages between rollout and train batch: assign samples to data-parallel ranks (of policy and
critic), deliver them, and compute the log-probs before the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.moe import moe_layers
from arguments.schema import AlgorithmConfig, DistillationConfig
from slime_like.advantages import AdvantageSettings
from slime_like.distributed.collectives import gather, together
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.megatron.micro_batching import work_per_token
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.rollout.reward_parts import OutcomeReader
from slime_like.rollout.sample_plane import deliver_samples, make_sharing
from slime_like.rollout.step_plan import (
    DataParallelAssignment,
    SampleCorrection,
    StepPlan,
    check_rollout_log_probs,
    correct_steps,
    has_rollout_log_probs,
)
from slime_like.sample_index import AnySample, RemoteSample
from slime_like.trainer.guards import RolloutGuards, check_finite, require_rollout_log_probs
from slime_like.trainer.user_hooks import UserHooks
from slime_like.types import Sample, SampleStatus, TrainSample, complete, episodes_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_like.trainer.teacher_scores import TeacherScores


Columns = Mapping[str, Sequence[Tensor | None] | None]  # description -> [R] per sample
BEFORE_UPDATE = "before the update"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of batch building. off_policy: None without correction. transformer: the policy's.
    replays_rollout: replay the engine's routed experts. old_is_current: see `TrainBatch`.
    outcome_readers: see `reward_parts.outcome_readers`."""

    algorithm: AlgorithmConfig
    off_policy: OffPolicyConfig | None
    transformer: TransformerConfig
    vocab_size: int
    replays_rollout: bool
    distillation: DistillationConfig
    advantages: AdvantageSettings
    sample_buffer_size: int
    old_is_current: bool
    outcome_readers: Sequence[OutcomeReader]
    hooks: UserHooks | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout during batch building. "Local" samples are those that this rank trains on.

    sampled: all samples, with tokens on the rank that generated them. samples: the same, with
    tokens on the ranks that train on them. steps: the local samples of each optimizer step.
    """

    sampled: Sequence[AnySample]
    samples: Sequence[AnySample]
    assignment: DataParallelAssignment
    steps: list[list[TrainSample]]

    @property
    def local(self) -> list[TrainSample]:
        """The local samples of all steps."""
        return list(chain.from_iterable(self.steps))

    @property
    def local_samples(self) -> list[Sample]:
        """The samples from which `local` was made."""
        return complete(self.samples[i] for i in self.assignment.local_indices)

    @property
    def local_keys(self) -> list[str]:
        """Names of the local samples in recordings: the id; for branches of an episode, the id and
        an index from 0."""
        counts = Counter[int]()
        keys = []
        for sample in self.samples:
            count = counts[sample.sample_id]
            counts[sample.sample_id] += 1
            keys.append(f"{sample.sample_id}.{count - 1}" if count else str(sample.sample_id))
        return [keys[i] for i in self.assignment.local_indices]

    @property
    def local_episodes(self) -> list[int]:
        """Index of the episode of each local sample."""
        of = episodes_of(self.samples).of
        return [of[i] for i in self.assignment.local_indices]

    @property
    def local_sequences(self) -> list[int]:
        """Index of each local sample within its episode."""
        episodes = episodes_of(self.samples)
        return [i - episodes.first[episodes.of[i]] for i in self.assignment.local_indices]

    @property
    def sampled_episodes(self) -> list[AnySample]:
        """The first sequence of each episode, held by the rank that generated it."""
        return [self.sampled[i] for i in episodes_of(self.sampled).first]

    @property
    def masks(self) -> list[Tensor]:
        return [sample.loss_mask for sample in self.local]

    def check_finite(self, columns: Columns, when: str) -> None:
        """See `guards.check_finite`."""
        names = [str(sample.sample_id) for sample in self.local_samples]
        check_finite(columns, self.masks, names, when=when)


class SampleDelivery:
    """Moves samples to the ranks that train on them. Collective over all ranks.

    Args:
        transformer: The policy's.
        plan: The policy's step plan.
        critic_plan: None without a critic.
        replays_rollout: Send routed experts too.
        buffer_size: Bytes in flight per rank.
    """

    def __init__(
        self,
        transformer: TransformerConfig,
        plan: StepPlan,
        critic_plan: StepPlan | None,
        *,
        replays_rollout: bool,
        buffer_size: int,
    ) -> None:
        self._transformer = transformer
        self._policy_plan = plan
        plans = [plan] if critic_plan is None else [plan, critic_plan]
        # each with the data-parallel rank of every rank
        self._plans = [(plan, gather(plan.dp_rank)) for plan in plans]
        self._replays_rollout = replays_rollout
        self._buffer_size = buffer_size
        # keyed by id() of the first sample: a rollout's samples, and the delivered ones
        self._early: dict[int, tuple[Sequence[AnySample], list[AnySample]]] = {}

    def deliver_early(self, samples: Sequence[AnySample], group: dist.ProcessGroup | None) -> None:
        """Deliver a prefetched rollout; a later `deliver` of the same samples returns the result.

        Args:
            group: Process group of all ranks, if the default group is in use by another thread.
        """
        delivered = self._exchange(samples, self._policy_plan.assign(samples), group)
        self._early[id(samples[0])] = (samples, delivered)

    def deliver(
        self, samples: Sequence[AnySample], assignment: DataParallelAssignment
    ) -> list[AnySample]:
        """Exchange samples so that each rank holds those that it trains on.

        Args:
            samples: All samples of the rollout.
            assignment: The policy's.

        Raises:
            ValueError: On all ranks; see `with_routes`.
        """
        early, delivered = self._early.pop(id(samples[0]), ((), []))
        if len(early) == len(samples) and all(map(is_, early, samples)):
            return delivered
        return self._exchange(samples, assignment, None)

    def _exchange(
        self,
        samples: Sequence[AnySample],
        assignment: DataParallelAssignment,
        group: dist.ProcessGroup | None,
    ) -> list[AnySample]:
        if not self._replays_rollout:
            samples = without_routes(samples)
        delivered = list(samples)
        if dist.get_world_size() > 1:
            sharings = []
            for plan, dp_ranks in self._plans:
                assigned = assignment if plan is self._policy_plan else plan.assign(samples)
                parts = [assigned.indices_of(rank) for rank in range(plan.dp_size)]
                sharings.append(make_sharing(dp_ranks, parts))
            own = deliver_samples(samples, sharings, buffer_size=self._buffer_size, group=group)
            delivered = [own.samples.get(i, sample) for i, sample in enumerate(samples)]
        if not self._replays_rollout:
            return delivered
        config = self._transformer
        layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
        topk, experts = config.moe_router_topk, config.num_moe_experts
        return together(
            lambda: with_routes(delivered, layers=layers, topk=topk, experts=experts), group
        )


def without_routes(samples: Sequence[AnySample]) -> list[AnySample]:
    """Drop routed experts that are not replayed, so that they are not sent."""
    return [
        s.without("routes") if isinstance(s, RemoteSample) else replace(s, routes=None)
        for s in samples
    ]


def with_routes(
    samples: Sequence[AnySample], *, layers: int, topk: int, experts: int
) -> list[AnySample]:
    """Check the routed experts of this rank's samples; those without any that train nothing get -1.

    Args:
        layers: Number of MoE layers.

    Raises:
        ValueError: Names a sample without routed experts, or with those of another network.
    """
    return [
        replace(s, routes=_checked_routes(s, layers, topk, experts)) if isinstance(s, Sample) else s
        for s in samples
    ]


def _checked_routes(sample: Sample, layers: int, topk: int, experts: int) -> Tensor:
    """[L, layers, topk] int16."""
    shape = (sample.total_length, layers, topk)
    if sample.routes is None:
        if sample.status == SampleStatus.ABORTED or not sample.active_tokens:
            return torch.full(shape, -1, dtype=torch.int16)
        raise ValueError(
            f"--use-rollout-routing-replay: sample {sample.sample_id} has no routed experts: it "
            "was recorded without this flag, or its engine does not report them"
        )
    routes = sample.routes
    if routes.shape != shape or not bool(((routes >= -1) & (routes < experts)).all()):
        raise ValueError(
            f"--use-rollout-routing-replay: the routed experts of sample {sample.sample_id} are "
            f"{tuple(routes.shape)} with numbers from {int(routes.min()) if routes.numel() else 0} "
            f"to {int(routes.max()) if routes.numel() else 0}; expected (tokens, expert layers, "
            f"experts per token) = {shape} with numbers from -1 to {experts - 1}"
        )
    return routes


def step_plan(
    algorithm: AlgorithmConfig,
    transformer: TransformerConfig,
    vocab_size: int,
    layout: ParallelLayout,
) -> StepPlan:
    """The policy's step plan: how samples are split into optimizer steps and over data-parallel
    ranks, balanced by the model's cost if configured."""
    assert algorithm.global_batch_size is not None, "completed when the command line is parsed"
    cost = None
    if algorithm.balance_data:
        cost = work_per_token(transformer, vocab_size)
    return StepPlan(
        algorithm.global_batch_size,
        layout.dp_size,
        layout.dp_rank,
        linear_cost=cost,
        equal_counts=not algorithm.use_dynamic_batch_size,
        samples_together=algorithm.samples_together,
    )


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
            if self.settings.hooks is not None:
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
        if self.settings.hooks is not None:
            self.settings.hooks.before_log_prob(network.chunks, "ref_")
        return [output.log_probs for output in self.backend.forward(local, network)]

    def teacher(
        self, rollout: Rollout, old: Sequence[LogProbOutput] | None
    ) -> TeacherScores | None:
        """Scores of the teacher, of Megatron or served; None without a teacher. old: the policy's
        log-probs."""
        if not self.settings.distillation.use_opd:
            return None
        from slime_like.trainer.teacher_scores import teacher_scores

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
        if self.settings.replays_rollout:
            metrics["rollout/moe_routing_disagreement"] = self.backend.replay_disagreement()
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
        config, samples = self.settings.off_policy, rollout.samples
        check_rollout_log_probs(config, samples)
        if self.settings.algorithm.use_rollout_logprobs or not has_rollout_log_probs(samples):
            return [SampleCorrection()] * len(rollout.local), {}
        log_probs = [o.log_probs for o in old]
        corrections, metrics = correct_steps(config, rollout.steps, log_probs, self.layout.dp_group)
        return corrections, {f"train/{name}": value for name, value in metrics.items()}

    def check_update(
        self, rollout: Rollout, log_probs: Sequence[LogProbOutput], weight_version: int
    ) -> dict[str, float]:
        """`check`, and the metrics of `correct`, for log-probs from the training forward pass,
        after backward and before the optimizer step."""
        metrics = self.check(rollout, log_probs, weight_version)
        return metrics | self.correct(rollout, log_probs)[1]

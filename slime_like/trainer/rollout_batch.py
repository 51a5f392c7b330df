"""Stages between rollout and train batch: assign samples to data-parallel ranks (of policy and
critic), deliver them, and compute the log-probs before the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arguments.hf.moe import moe_layers
from arguments.schema import AlgorithmConfig, DistillationConfig
from slime_like.advantages import (
    AdvantageSettings,
)
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
from slime_like.trainer.guards import SamplerGates, check_finite, require_rollout_log_probs
from slime_like.trainer.user_hooks import UserHooks
from slime_like.types import Sample, SampleStatus, TrainSample, complete, episodes_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_like.trainer.teacher_scores import TeacherScores


Columns = Mapping[str, Sequence[Tensor | None] | None]  # description -> [R] per sample


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of batch building. transformer: the policy's megatron-core TransformerConfig.
    replays_rollout: replay the engine's routed experts. off_policy: None without correction.
    old_is_current: see `TrainBatch`. outcome_readers: see `reward_parts.outcome_readers`."""

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
    """A rollout during batch building. sampled: all samples, held by the rank that generated them.
    samples: the same, held by the rank that trains on them. local: this rank's, over all steps."""

    sampled: Sequence[AnySample]
    samples: Sequence[AnySample]
    shares: DataParallelAssignment
    steps: list[list[TrainSample]]

    @property
    def local(self) -> list[TrainSample]:
        return [sample for step in self.steps for sample in step]

    @property
    def drawn(self) -> list[Sample]:
        """The samples that this rank generated."""
        return complete(self.samples[i] for i in self.shares.local_indices)

    @property
    def local_keys(self) -> list[str]:
        """Names of this rank's samples in recordings: the id; for branches of an episode, the id
        and an index from 0."""
        seen: Counter[int] = Counter()
        keys = []
        for sample in self.samples:
            count, seen[sample.sample_id] = seen[sample.sample_id], seen[sample.sample_id] + 1
            keys.append(f"{sample.sample_id}.{count - 1}" if count else str(sample.sample_id))
        return [keys[i] for i in self.shares.local_indices]

    @property
    def local_episodes(self) -> list[int]:
        """Index of the episode of each local sample."""
        of = episodes_of(self.samples).of
        return [of[i] for i in self.shares.local_indices]

    @property
    def local_sequences(self) -> list[int]:
        """Index of each local sample within its episode."""
        episodes = episodes_of(self.samples)
        return [i - episodes.first[episodes.of[i]] for i in self.shares.local_indices]

    @property
    def sampled_episodes(self) -> list[AnySample]:
        """The first sequence of each episode, held by the rank that generated it."""
        return [self.sampled[i] for i in episodes_of(self.sampled).first]

    @property
    def masks(self) -> list[Tensor]:
        return [sample.loss_mask for sample in self.local]

    def check_finite(self, columns: Columns, when: str) -> None:
        """See `guards.check_finite`."""
        names = [str(sample.sample_id) for sample in self.drawn]
        check_finite(columns, self.masks, names, when=when)


class SampleDelivery:
    """Moves samples to the ranks that train on them. Collective over all ranks.

    transformer: the policy's megatron-core TransformerConfig. plan: the policy's step plan.
    critic_plan: None without a critic. replays_rollout: routed experts are sent too. buffer_size:
    bytes in flight per rank.
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
        self._policy = plan
        plans = [plan] if critic_plan is None else [plan, critic_plan]
        self._plans = [
            (each, gather(each.dp_rank)) for each in plans
        ]  # with the dp rank of every rank
        self._replays_rollout = replays_rollout
        self._buffer_size = buffer_size
        # keyed by id() of the first sample: a rollout's samples, and the delivered ones
        self._ahead: dict[int, tuple[Sequence[AnySample], list[AnySample]]] = {}

    def deliver_ahead(self, samples: Sequence[AnySample], group: dist.ProcessGroup | None) -> None:
        """Deliver a rollout early; a later `deliver` of the same samples returns the result.

        Args:
            group: Process group of all ranks, if the default group is in use by another thread.
        """
        made = self._delivered(samples, self._policy.assign(samples), group)
        self._ahead[id(samples[0])] = (samples, made)

    def deliver(
        self, samples: Sequence[AnySample], shares: DataParallelAssignment
    ) -> list[AnySample]:
        """Exchange samples so that each rank holds those that it trains on.

        Args:
            samples: All samples of the rollout.
            shares: The policy's data-parallel assignment.

        Raises:
            ValueError: On all ranks; see `with_routes`.
        """
        before, made = self._ahead.pop(id(samples[0]), ((), []))
        if len(before) == len(samples) and all(map(is_, before, samples)):
            return made
        return self._delivered(samples, shares, None)

    def _delivered(
        self,
        samples: Sequence[AnySample],
        shares: DataParallelAssignment,
        group: dist.ProcessGroup | None,
    ) -> list[AnySample]:
        if not self._replays_rollout:
            samples = without_routes(samples)
        here = list(samples)
        if dist.get_world_size() > 1:
            sharings = [
                make_sharing(dp_ranks, [assigned.indices_of(rank) for rank in range(plan.dp_size)])
                for plan, dp_ranks in self._plans
                for assigned in [shares if plan is self._policy else plan.assign(samples)]
            ]
            own = deliver_samples(samples, sharings, buffer_size=self._buffer_size, group=group)
            here = [own.samples.get(place, sample) for place, sample in enumerate(samples)]
        if not self._replays_rollout:
            return here
        config = self._transformer
        layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
        topk, experts = config.moe_router_topk, config.num_moe_experts
        return together(lambda: with_routes(here, layers=layers, topk=topk, experts=experts), group)


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
    shape = (sample.total_length, layers, topk)
    if sample.routes is None:
        if sample.status == SampleStatus.ABORTED or not sample.active_tokens:
            return torch.full(shape, -1, dtype=torch.int16)
        raise ValueError(
            f"--use-rollout-routing-replay: sample {sample.sample_id} has no routed experts: it "
            "was recorded without this flag, or its engine "
            "does not report them"
        )
    routes = sample.routes
    if routes.shape != shape or not bool(((routes >= -1) & (routes < experts)).all()):
        raise ValueError(
            f"--use-rollout-routing-replay: the routed experts of sample {sample.sample_id} are "
            f"{tuple(routes.shape)} with numbers from "
            f"{int(routes.min()) if routes.numel() else 0} to {int(routes.max()) if routes.numel() else 0}; expected (tokens, expert layers, "
            f"experts per token) = {shape} with numbers from -1 to {experts - 1}"
        )
    return routes


def step_plan(
    algorithm: AlgorithmConfig,
    transformer: TransformerConfig,
    vocab_size: int,
    layout: ParallelLayout,
) -> StepPlan:
    """The step plan: how samples are split into optimizer steps and over data-parallel ranks,
    balanced by the model's cost if configured.

    Args:
        transformer: The policy's megatron-core TransformerConfig.
    """
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


_WHEN = "before the update"


@dataclass(frozen=True, slots=True)
class Scores:
    """Forward-pass results for this rank's samples, [R] per sample. None if there is no such
    network, or if the training forward pass will provide the old log-probs."""

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
    """Computes log-probs of this data-parallel rank's samples. Collective over all ranks."""

    settings: BatchSettings
    layout: ParallelLayout
    backend: MegatronBackend
    gates: SamplerGates

    def old(self, rollout: Rollout, *, squared_probs: bool, top_k: int = 0) -> list[LogProbOutput]:
        """Log-probs of the policy before its update: from a forward pass, or as reported by the
        engine. squared_probs, top_k: see `MegatronBackend.forward`."""
        local = rollout.local
        if not self.settings.algorithm.use_rollout_logprobs:
            if self.settings.hooks is not None:
                self.settings.hooks.before_log_prob(self.backend.policy.chunks)
            return self.backend.forward(local, squared_probs=squared_probs, top_k=top_k)
        of_engine = [require_rollout_log_probs(s) for s in local]
        rollout.check_finite({"log-prob of the rollout engine": of_engine}, _WHEN)
        return [LogProbOutput(o, s.loss_weights * 0) for o, s in zip(of_engine, local)]

    def reference(self, local: Sequence[TrainSample]) -> list[Tensor] | None:
        """Reference log-probs, [R] per sample of this rank; None without a reference model."""
        network = self.backend.reference
        if network is None:
            return None
        if self.settings.hooks is not None:
            self.settings.hooks.before_log_prob(network.chunks, "ref_")
        return [r.log_probs for r in self.backend.forward(local, network)]

    def teacher(
        self, rollout: Rollout, old: Sequence[LogProbOutput] | None
    ) -> TeacherScores | None:
        """Scores from the Megatron teacher or the served teacher; None without a teacher. old: the
        policy's log-probs."""
        if not self.settings.distillation.use_opd:
            return None
        from slime_like.trainer.teacher_scores import teacher_scores

        return teacher_scores(self.settings, self.backend, rollout, old)

    def check(
        self, rollout: Rollout, old: Sequence[LogProbOutput], weight_version: int
    ) -> dict[str, float]:
        """Compare the trainer's log-probs with those that the rollout engine reported; returns
        metrics. weight_version: version of the policy before the update. Raises GateError."""
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
        """The off-policy correction of each sample, and metrics of the mismatch between trainer and
        rollout engine, if the engine reported log-probs."""
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
        """`check`, and the metrics of `correct`, for log-probs from the training forward pass,
        after backward and before the optimizer step."""
        metrics = self.check(rollout, log_probs, weight_version)
        return metrics | self.correct(rollout, log_probs)[1]

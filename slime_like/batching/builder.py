"""Build train batches from a rollout: old and reference log-probs, off-policy correction,
advantages and token weights, and the critic's batches if there is one (value_exchange.py)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.advantages import (
    KLController,
    Outcomes,
    TokenAdvantages,
    advantage_estimators,
    estimate_advantages,
    needs_energies,
    teacher_gaps,
    token_energies,
    token_kl,
)
from slime_like.advantages.values import value_metrics
from slime_like.advantages.whitening import all_reduce
from slime_like.batching.delivery import SampleDelivery
from slime_like.batching.log_probs import LogProbs, Scores, UpdateCheck
from slime_like.batching.observations import with_observation_weights
from slime_like.batching.off_policy_step import SampleCorrection
from slime_like.batching.outcomes import outcomes_of
from slime_like.batching.rollout_batch import Columns, Rollout
from slime_like.batching.settings import BatchSettings
from slime_like.batching.step_plan import DataParallelAssignment, StepPlan, step_plan
from slime_like.batching.train_samples import map_steps, train_samples
from slime_like.batching.turn_credit import check_trees, tree_reasons
from slime_like.batching.user_hooks import RankData, group_rewards
from slime_like.batching.value_exchange import ValueExchange, plan_of_critic
from slime_like.guards.finite import check_finite
from slime_like.guards.rollout import RolloutGuards
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.health import ACTIVE_TOKENS
from slime_like.metrics.progress import Progress
from slime_like.samples.index import AnySample
from slime_like.types import TrainBatch, TrainSample

if TYPE_CHECKING:
    from slime_like.checkpoints.state import BatchState


logger = logging.getLogger(__name__)
_BEFORE_STEPS = "before the optimizer steps of a rollout"


@dataclass(frozen=True, slots=True)
class Batches:
    """The optimizer steps of a rollout: this rank's samples of each step."""

    policy: list[TrainBatch]
    # empty without a critic; its data-parallel ranks may hold other samples than the policy's
    critic: list[TrainBatch]
    # with `TrainBatch.old_is_current`, the check of the training forward pass
    check: UpdateCheck | None = None
    # sample_keys, entropies: of the policy's samples, for recordings; entropies ([R] each) are
    # empty without a separate log-prob pass
    sample_keys: Sequence[str] = ()
    entropies: Sequence[Tensor] = ()


class BatchBuilder:
    """Builds the train batches of this data-parallel rank.

    Collective: every rank passes the metadata of all samples of a rollout and receives the samples
    that it trains on.
    """

    def __init__(
        self,
        settings: BatchSettings,
        layout: ParallelLayout,
        backend: MegatronBackend,
        guards: RolloutGuards,
        progress: Progress,
    ) -> None:
        self.settings = settings
        self.algorithm = settings.algorithm
        self.layout = layout
        self.backend = backend
        self.guards = guards
        self.log_probs = LogProbs(settings, layout, backend, guards)
        self.progress = progress
        self.plan = step_plan(settings.algorithm, settings.transformer, settings.vocab_size, layout)
        critic = backend.critic
        self._critic_plan = None if critic is None else plan_of_critic(self.plan, critic.layout)
        self._delivery = SampleDelivery(
            settings.transformer,
            self.plan,
            self._critic_plan,
            replayed=settings.replayed,
            buffer_size=settings.sample_buffer_size,
        )
        algorithm = settings.algorithm
        self.kl_controller = KLController(algorithm.kl_coef)
        if algorithm.kl_ctrl_type == "adaptive":
            self.kl_controller = KLController(
                algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon
            )
        self._warned_of_long_sequences = False
        estimator = advantage_estimators.get(algorithm.advantage_estimator)
        self._needs_energies = needs_energies(estimator)
        self._needs_trees = bool(tree_reasons(algorithm))

    def state_dict(self) -> dict[str, object]:
        """State for resuming, as plain JSON."""
        return {"kl_controller": self.kl_controller.state_dict(), **self.guards.state_dict()}

    def load_state_dict(self, state: BatchState) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.guards.load_state_dict(state)

    def deliver_early(
        self, rollout_id: int, samples: Sequence[AnySample], group: dist.ProcessGroup | None
    ) -> None:
        """Send a prefetched rollout's samples to the ranks that will train on them, over `group`;
        called in the sampling thread. A rollout with branched samples is delivered later, because
        the trainer splits those first."""
        if not any(sample.num_branches for sample in samples):
            self._delivery.deliver_early(rollout_id, samples, group)

    def build_supervised(self, samples: Sequence[AnySample]) -> tuple[Batches, dict[str, float]]:
        """Batches for supervised samples, with reference log-probs if the loss needs them."""
        rollout = self._deliver(samples)
        ref = None
        if self.backend.reference is not None:
            with self.progress.phase("log_probs"):
                ref = self.log_probs.reference(rollout.local)
            rollout.check_finite({"log-prob of the reference": ref}, _BEFORE_STEPS)

        mismatched = self.algorithm.scores_mismatches
        point = self._reference_point(rollout, ref) if mismatched and ref is not None else None

        def with_inputs(i: int, sample: TrainSample) -> TrainSample:
            labels = None
            if self.algorithm.trains_reward_model:
                # a scalar score belongs to the token's own row, not to the row that predicts it
                labels = sample.tokens[-sample.response_length :]
            if ref is None:
                return dataclasses.replace(sample, labels=labels)
            sample = dataclasses.replace(sample, ref_log_probs=ref[i], labels=labels)
            if point is None:
                return sample
            # doubled: the reduction has counted the mismatched samples, too
            weights = 2 * sample.loss_weights
            points = torch.full_like(ref[i], point)
            return dataclasses.replace(sample, loss_weights=weights, reference_points=points)

        metrics = dict(rollout.assignment.metrics)
        batches = map_steps(rollout.steps, with_inputs)
        if mismatched:
            batches = [dataclasses.replace(b, samples=b.samples[::2]) for b in batches]
        return Batches(batches, []), metrics

    def _reference_point(self, rollout: Rollout, ref: Sequence[Tensor]) -> float:
        """KTO's z (losses/kto.py), of the mismatched samples of all ranks, every second one."""
        mismatched = rollout.local[1::2]
        with self.progress.phase("log_probs"):
            policy = [output.log_probs for output in self.backend.forward(mismatched)]
        names = [str(sample.sample_id) for sample in rollout.local_samples[1::2]]
        columns: Columns = {"log-prob of a mismatched answer": policy}
        check_finite(columns, rollout.masks[1::2], names, when=_BEFORE_STEPS)
        ratios = [
            float((log_probs.double() - of_reference.double())[sample.loss_mask].sum())
            for sample, log_probs, of_reference in zip(mismatched, policy, ref[1::2], strict=True)
        ]
        sums = torch.tensor([sum(ratios), len(ratios)], dtype=torch.float64)
        log_ratio, count = all_reduce(sums, self.layout.dp_group).tolist()
        return float(max(0.0, log_ratio / count))

    def build(
        self, samples: Sequence[AnySample], weight_version: int, *, rollout_id: int | None = None
    ) -> tuple[Batches, dict[str, float]]:
        """Batches and metrics of a rollout.

        Args:
            weight_version: Version of the policy before the update.
            rollout_id: Of `deliver_early`.
        """
        rollout = self._deliver(samples, rollout_id)
        if self.settings.replayed:
            steps = [self.backend.with_choices_of_stage(step) for step in rollout.steps]
            rollout = dataclasses.replace(rollout, steps=steps)
        metrics = dict(rollout.assignment.metrics)
        metrics[ACTIVE_TOKENS] = float(sum(sample.active_tokens for sample in samples))
        critic = self._value_exchange(rollout)
        scores = self._scores(rollout, weight_version, critic, metrics)
        corrections = [SampleCorrection()] * len(rollout.local)
        if scores.old is not None:
            corrections, correction_metrics = self.log_probs.correct(rollout, scores.old)
            metrics |= correction_metrics
        outcomes = self._outcomes(rollout)
        advantages = self._advantages(rollout, scores, outcomes)
        metrics |= advantages.metrics
        weights = [c.importance_weights for c in corrections]
        columns: Columns = {"advantage": advantages.values, "importance weight": weights}
        rollout.check_finite(columns, _BEFORE_STEPS)
        critic_batches: list[TrainBatch] = []
        if critic is not None:
            values = scores.values
            returns = advantages.returns
            assert values is not None and returns is not None, "with a critic there are both"
            metrics |= value_metrics(values, returns, rollout.masks, self.layout.dp_group)
            critic_batches = critic.batches(returns)

        batches = map_steps(rollout.steps, _loss_inputs(scores, advantages, corrections))
        batches = self.settings.hooks.finish(
            batches, lambda: self._rank_data(rollout, scores, outcomes, advantages)
        )
        keys = rollout.local_keys
        if scores.old is not None:
            entropies = [output.entropy for output in scores.old]
            if self.algorithm.use_rollout_logprobs:
                entropies = []  # the engine reports none
            return Batches(batches, critic_batches, None, keys, entropies), metrics
        batches = [dataclasses.replace(batch, old_is_current=True) for batch in batches]
        check = UpdateCheck(self.log_probs, rollout, weight_version)
        return Batches(batches, critic_batches, check, keys), metrics

    def _outcomes(self, rollout: Rollout) -> Outcomes:
        """Inputs of the advantage estimator, over all ranks."""
        outcomes = outcomes_of(rollout.samples)
        for read in self.settings.outcome_readers:
            outcomes = dataclasses.replace(outcomes, **read(rollout.sampled_episodes))
        if self._needs_trees:
            check_trees(self.algorithm, outcomes.turns, rollout.samples)
        return outcomes

    def _rank_data(
        self,
        rollout: Rollout,
        scores: Scores,
        outcomes: Outcomes,
        advantages: TokenAdvantages | None = None,
    ) -> RankData:
        """The arguments of user hooks: this rank's samples, rewards and token columns."""
        local = rollout.local
        reported = [s.rollout_log_probs for s in local if s.rollout_log_probs is not None]
        kl = self._kl(scores, rollout.masks)
        columns = {
            "log_probs": scores.old_log_probs,
            "ref_log_probs": scores.ref,
            "teacher_log_probs": None if scores.teacher is None else scores.teacher.log_probs,
            "values": scores.values,
            "rollout_log_probs": reported if len(reported) == len(local) else None,
            "kl": kl or [torch.zeros_like(value) for value in scores.old_log_probs],
            "advantages": None if advantages is None else advantages.values,
            "returns": None if advantages is None else advantages.returns,
        }
        rewards = group_rewards(self.settings.advantages, outcomes, rollout.local_episodes)
        return RankData(rollout.local_samples, local, rewards, columns)

    def _kl(self, scores: Scores, masks: Sequence[Tensor]) -> list[Tensor] | None:
        """Per-token KL of the reward, [R] by sample; None without --kl-coef."""
        algorithm = self.algorithm
        if not algorithm.kl_coef or scores.ref is None:
            return None
        return token_kl(algorithm.kl_loss_type or "k1", scores.old_log_probs, scores.ref, masks)

    def _deliver(self, samples: Sequence[AnySample], rollout_id: int | None = None) -> Rollout:
        """Assign samples to data-parallel ranks and deliver them."""
        self._warn_of_long_sequences(samples)
        with self.progress.phase("balance") if self.plan.linear_cost is not None else nullcontext():
            assignment = self.plan.assign(samples)
        delivered = self._delivery.deliver(samples, assignment, rollout_id)
        steps = self._steps(self.plan, delivered, assignment)
        return Rollout(samples, delivered, assignment, steps)

    def _steps(
        self, plan: StepPlan, samples: Sequence[AnySample], assignment: DataParallelAssignment
    ) -> list[list[TrainSample]]:
        """This rank's samples of each optimizer step, with their token weights."""
        algorithm = self.algorithm
        steps = train_samples(
            plan,
            samples,
            reduction=algorithm.loss_reduction,
            loss_norm_length=algorithm.loss_norm_length,
            micro_batch_size=algorithm.micro_batch_size,
            positive_nll=algorithm.positive_nll_coef > 0,
            assignment=assignment,
            image_processor=self.settings.image_processor,
        )
        if not algorithm.observation_loss_coef:
            return steps
        return with_observation_weights(plan, samples, assignment, steps)

    def _warn_of_long_sequences(self, samples: Sequence[AnySample]) -> None:
        """Warn once per run about sequences over the token budget."""
        algorithm = self.algorithm
        if algorithm.max_tokens_per_gpu is None or self._warned_of_long_sequences:
            return
        critic = self.backend.critic
        layouts = [self.layout] if critic is None else [self.layout, critic.layout]
        budget = algorithm.max_tokens_per_gpu * min(layout.cp_size for layout in layouts)
        longest = max(sample.total_length for sample in samples)
        if longest > budget:
            self._warned_of_long_sequences = True
            warn_rank_0(
                logger,
                f"a sequence of {longest} tokens is longer than --max-tokens-per-gpu times "
                f"--context-parallel-size, {budget}: such a sequence gets its own micro-batch",
            )

    def _scores(
        self,
        rollout: Rollout,
        weight_version: int,
        critic: ValueExchange | None,
        metrics: dict[str, float],
    ) -> Scores:
        """Run and check the forward passes before the update. metrics: extended in place."""
        old = None
        with self.progress.phase("log_probs"):
            if not self.settings.old_is_current:
                top_k = self.settings.distillation.opd_topk or 0
                old = self.log_probs.old(rollout, squared_probs=self._needs_energies, top_k=top_k)
                metrics |= self.log_probs.check(rollout, old, weight_version)
            ref = self.log_probs.reference(rollout.local)
            teacher = self.log_probs.teacher(rollout, old)
        values = None
        if critic is not None:
            with self.progress.phase("values"):
                values = critic.compute_values()
        columns: Columns = {
            "log-prob of the reference": ref,
            "log-prob of the teacher": None if teacher is None else teacher.log_probs,
            "value of the critic": values,
        }
        rollout.check_finite(columns, "before the advantages of a rollout")
        return Scores(old, ref, teacher, values)

    def _value_exchange(self, rollout: Rollout) -> ValueExchange | None:
        plan = self._critic_plan
        if plan is None:
            return None
        assignment = plan.assign(rollout.samples)
        steps = self._steps(plan, rollout.samples, assignment)
        return ValueExchange(self.backend, rollout.samples, steps, assignment, rollout.assignment)

    def _advantages(self, rollout: Rollout, scores: Scores, outcomes: Outcomes) -> TokenAdvantages:
        """Per-token advantages of this rank's samples. Group statistics are over all ranks; the
        reward's KL is subtracted first, the teacher's term is added last."""
        masks = rollout.masks
        kl = self._kl(scores, masks)
        gap = None
        if scores.teacher is not None:
            gap = teacher_gaps(scores.old_log_probs, scores.teacher.log_probs, masks)
        energies = None
        if self._needs_energies:
            assert scores.old is not None, "see RunConfig.old_is_current"
            squared = [o.squared_probs for o in scores.old if o.squared_probs is not None]
            energies = token_energies(scores.old_log_probs, squared, masks)
        precomputed = self.settings.hooks.advantages(
            lambda: self._rank_data(rollout, scores, outcomes)
        )
        settings = self.settings.advantages
        if settings.kl_coef != self.kl_controller.value:  # adaptive: the coefficient has moved
            settings = dataclasses.replace(settings, kl_coef=self.kl_controller.value)
        output = estimate_advantages(
            settings,
            outcomes,
            local_indices=rollout.local_episodes,
            sequences=rollout.local_sequences,
            masks=masks,
            kl=kl,
            teacher_gap=gap,
            critic_values=scores.values,
            energies=energies,
            precomputed=precomputed,
            group=self.layout.dp_group,
        )
        if kl is None:
            return output
        metrics = {**output.metrics, "rollout/kl_coef": self.kl_controller.value}
        self.kl_controller.update(metrics["rollout/kl_in_reward"], len(outcomes.rewards))
        return dataclasses.replace(output, metrics=metrics)


def _loss_inputs(
    scores: Scores, advantages: TokenAdvantages, corrections: Sequence[SampleCorrection]
) -> Callable[[int, TrainSample], TrainSample]:
    """Function that adds the inputs of the loss to the i-th local sample."""

    def with_inputs(i: int, sample: TrainSample) -> TrainSample:
        old = None if scores.old is None else scores.old[i]
        return dataclasses.replace(
            sample if scores.teacher is None else scores.teacher.with_scores(i, sample),
            advantages=advantages.values[i],
            old_log_probs=None if old is None else old.log_probs,
            routed_experts=sample.routed_experts
            if old is None or old.routed_experts is None
            else old.routed_experts,
            ref_log_probs=None if scores.ref is None else scores.ref[i],
            keep_mask=corrections[i].keep_mask,
            importance_weights=corrections[i].importance_weights,
        )

    return with_inputs

"""A rollout becomes what the backend trains on: old and reference log-probs, the off-policy
correction, advantages and token weights; and, where there is a critic, what that is trained on
(critic_batches.py)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arguments.hf.moe import moe_layers
from arguments.run_config import RunConfig
from slime_like.advantages import (
    AdvantageSettings,
    KLController,
    TokenAdvantages,
    estimate_advantages,
    teacher_gaps,
    token_kl,
)
from slime_like.advantages.values import value_metrics
from slime_like.compat.slime.samples import slime_args
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.megatron.guards import TrainRolloutGate, check_finite
from slime_like.megatron.micro_batching import work_per_token
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.progress import Progress
from slime_like.rollout.correction import (
    SampleCorrection,
    correct_steps,
    require_sampler_log_probs,
    sampler_told,
)
from slime_like.rollout.metrics import fresh_tokens, stale_tokens, train_rollout_difference
from slime_like.rollout.reward_post_process import processed_rewards
from slime_like.rollout.step_plan import (
    DataParallelAssignment,
    StepPlan,
    map_steps,
    outcomes_of,
    train_samples,
    with_routes,
)
from slime_like.trainer.value_exchange import ValueExchange, plan_of_critic
from slime_like.types import Sample, TrainBatch, TrainSample

logger = logging.getLogger(__name__)

# Mean log-prob difference of tokens that older weights sampled, in nats: a policy that has moved
# this far within the bounds of staleness trains on noise, and one that has not points to a broken
# engine.
STALE_LIMIT = 1.0


@dataclass(frozen=True, slots=True)
class Batches:
    """The optimizer steps of a rollout: this rank's samples of each. critic: empty without one; it
    may share the samples otherwise."""

    policy: list[TrainBatch]
    critic: list[TrainBatch]


class BatchMaker:
    """Makes the train batches of this data-parallel rank. All ranks hold all samples of a rollout
    and call it together."""

    def __init__(
        self,
        run: RunConfig,
        layout: ParallelLayout,
        backend: MegatronBackend,
        progress: Progress,
    ) -> None:
        self.run = run
        self.layout = layout
        self.backend = backend
        self.progress = progress
        self.is_sft = run.algorithm.loss_type == "sft_loss"
        self.plan = step_plan(run, layout)
        self.rollout_gate = TrainRolloutGate(
            train_rollout_limit(run), run.gates.train_rollout_diff_patience
        )
        patience = run.gates.train_rollout_diff_patience
        self.stale_gate = TrainRolloutGate(
            max(STALE_LIMIT, train_rollout_limit(run)), patience, of="stale tokens: "
        )
        self.kl_controller = kl_controller(run)
        self._warned_of_long_sequences = False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain JSON."""
        return {
            "kl_controller": self.kl_controller.state_dict(),
            "rollout_gate_breaches": self.rollout_gate.breaches,
            "stale_gate_breaches": self.stale_gate.breaches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.rollout_gate.breaches = int(state["rollout_gate_breaches"])
        self.stale_gate.breaches = int(state.get("stale_gate_breaches", 0))

    def make(
        self, samples: Sequence[Sample], weight_version: int
    ) -> tuple[Batches, dict[str, float]]:
        """What a rollout is trained on, and metrics. weight_version: of the policy that is about to
        be trained."""
        self._warn_of_long_sequences(samples)
        samples = self._with_routes(samples)
        with self.progress.phase("balance") if self.plan.linear_cost is not None else nullcontext():
            shares = self.plan.share(samples)
        steps = self._steps(self.plan, samples, shares)
        metrics = dict(shares.metrics)
        if self.is_sft:
            return Batches(map_steps(steps, lambda i, sample: sample), []), metrics
        if self.run.rollout.use_rollout_routing_replay:
            steps = [self.backend.with_routes_of_stage(step) for step in steps]
        local = [sample for step in steps for sample in step]
        with self.progress.phase("log_probs"):
            recorded = (
                self.run.debug.load_debug_rollout_data is not None
            )  # their versions are of another run
            fresh = [
                s.loss_mask if recorded else fresh_tokens(samples[i], weight_version)
                for i, s in zip(shares.local_indices, local)
            ]
            names = [str(samples[i].sample_id) for i in shares.local_indices]
            masks = [s.loss_mask for s in local]
            old = self._old_log_probs(local, fresh, metrics, weight_version, names)
            if not recorded:
                stale = [stale_tokens(samples[i], weight_version) for i in shares.local_indices]
                metrics |= self._check_stale(samples, local, old, stale, weight_version)
            reference = self.backend.reference
            ref = None if reference is None else self.backend.forward(local, reference)
            teacher = self._teacher_log_probs([samples[i] for i in shares.local_indices], local)
        critic = self._critic_part(samples, shares)
        values = self._values(critic)
        columns: dict[str, Sequence[Tensor | None] | None] = {
            "log-prob of the reference": None if ref is None else [r.log_probs for r in ref],
            "log-prob of the teacher": teacher,
            "value of the critic": values,
        }
        check_finite(columns, masks, names, when="before the advantages of a rollout")
        corrections, more = self._corrections(samples, steps, old)
        metrics |= more
        advantages = self._advantages(
            samples, shares.local_indices, local, old, ref, teacher, values
        )
        metrics |= advantages.metrics
        weights = [c.importance_weights for c in corrections]
        columns = {"advantage": advantages.values, "importance weight": weights}
        check_finite(columns, masks, names, when="before the optimizer steps of a rollout")
        of_critic: list[TrainBatch] = []
        if critic is not None:
            assert values is not None and advantages.returns is not None, (
                "an estimator with a critic tells what it is to learn"
            )
            metrics |= value_metrics(values, advantages.returns, masks, self.layout.dp_group)
            of_critic = critic.batches(advantages.returns)

        def complete(i: int, sample: TrainSample) -> TrainSample:
            return dataclasses.replace(
                sample,
                advantages=advantages.values[i],
                old_log_probs=old[i].log_probs,
                routes=sample.routes if old[i].routes is None else old[i].routes,
                ref_log_probs=None if ref is None else ref[i].log_probs,
                keep_mask=corrections[i].keep_mask,
                importance_weights=corrections[i].importance_weights,
            )

        return Batches(map_steps(steps, complete), of_critic), metrics

    def _steps(
        self, plan: StepPlan, samples: Sequence[Sample], shares: DataParallelAssignment
    ) -> list[list[TrainSample]]:
        algorithm = self.run.algorithm
        return train_samples(
            plan,
            samples,
            reduction=algorithm.loss_reduction,
            loss_norm_length=algorithm.loss_norm_length,
            micro_batch_size=algorithm.micro_batch_size,
            positive_nll=algorithm.positive_nll_coef > 0,
            shares=shares,
        )

    def _with_routes(self, samples: Sequence[Sample]) -> list[Sample]:
        """With the sampler's routes where they are replayed, else with none."""
        if not self.run.rollout.use_rollout_routing_replay:
            return [dataclasses.replace(sample, routes=None) for sample in samples]
        config = self.run.megatron.transformer
        layers = sum(moe_layers(config.moe_layer_freq, config.num_layers))
        return with_routes(
            samples, layers=layers, topk=config.moe_router_topk, experts=config.num_moe_experts
        )

    def _warn_of_long_sequences(self, samples: Sequence[Sample]) -> None:
        """Once in a run."""
        algorithm = self.run.algorithm
        if algorithm.max_tokens_per_gpu is None or self._warned_of_long_sequences:
            return
        layouts = (
            [self.layout]
            if self.backend.critic is None
            else [self.layout, self.backend.critic.layout]
        )
        budget = algorithm.max_tokens_per_gpu * min(layout.cp_size for layout in layouts)
        longest = max(sample.total_length for sample in samples)
        if longest > budget:
            self._warned_of_long_sequences = True
            warn_rank_0(
                logger,
                f"a sequence of {longest} tokens is longer than --max-tokens-per-gpu times --context-parallel-size, {budget}: such a "
                "sequence gets a micro-batch of its own",
            )

    def _old_log_probs(
        self,
        local: Sequence[TrainSample],
        fresh: Sequence[Tensor],
        metrics: dict[str, float],
        weight_version: int,
        names: Sequence[str],
    ) -> list[LogProbOutput]:
        """Old log-probs of this rank's samples, compared with the sampler's where it reported them
        and had the same weights (`fresh`). names: of the samples."""
        run = self.run
        masks = [s.loss_mask for s in local]
        when = "before the update"
        if run.algorithm.use_rollout_logprobs:
            of_engine = [require_rollout_log_probs(s) for s in local]
            check_finite({"log-prob of the rollout engine": of_engine}, masks, names, when=when)
            return [LogProbOutput(o, s.loss_weights * 0) for o, s in zip(of_engine, local)]
        old = self.backend.forward(local)
        columns = {
            "old log-prob": [o.log_probs for o in old],
            "entropy": [o.entropy for o in old],
        }
        check_finite(columns, masks, names, when=when)
        if run.rollout.use_rollout_routing_replay:
            metrics["rollout/moe_routing_disagreement"] = self.backend.replay_disagreement()
        if all(s.rollout_log_probs is not None for s in local):
            metrics |= train_rollout_difference(
                [s.log_probs for s in old],
                [require_rollout_log_probs(s) for s in local],
                [s.loss_mask & same for s, same in zip(local, fresh)],
                self.layout.dp_group,
            )
            average, p99 = (
                metrics.get(f"rollout/train_rollout_log_prob_diff_{name}", 0.0)
                for name in ("mean", "p99")
            )
            if (
                not run.debug.load_debug_rollout_data
            ):  # recorded rollouts may come from other weights
                ratio_error = metrics.get("rollout/token_ratio_error", 1.0)
                warn_rank_0(
                    logger, self.rollout_gate.check(average, p99, ratio_error, weight_version)
                )
        return old

    def _check_stale(
        self,
        samples: Sequence[Sample],
        local: Sequence[TrainSample],
        old: Sequence[LogProbOutput],
        stale: Sequence[Tensor],
        weight_version: int,
    ) -> dict[str, float]:
        """The gate on tokens of older weights: how far the policy may have moved since, at most.
        Without it an engine could switch the check off by calling its tokens old."""
        told = all(s.rollout_log_probs is not None for s in samples)
        if self.run.algorithm.use_rollout_logprobs or not told:
            return {}
        if not any((s.loss_mask & stale_tokens(s, weight_version)).any() for s in samples):
            return {}
        difference = train_rollout_difference(
            [s.log_probs for s in old],
            [require_rollout_log_probs(s) for s in local],
            [s.loss_mask & older for s, older in zip(local, stale)],
            self.layout.dp_group,
        )
        average = difference.get("rollout/train_rollout_log_prob_diff_mean", 0.0)
        warn_rank_0(logger, self.stale_gate.check(average, average, 1.0, weight_version))
        return {"rollout/stale_log_prob_diff_mean": average}

    def _teacher_log_probs(
        self, samples: Sequence[Sample], local: Sequence[TrainSample]
    ) -> list[Tensor] | None:
        """[R] by sample of this rank, from the teacher on Megatron or from the served one; None
        without a teacher. samples: those of `local`."""
        if self.backend.teacher is not None:
            return [t.log_probs for t in self.backend.forward(local, self.backend.teacher)]
        if not self.run.distillation.served:
            return None
        # one that has none is not trained on
        return [
            torch.zeros(s.response_length) if s.teacher_log_probs is None else s.teacher_log_probs
            for s in samples
        ]

    def _critic_part(
        self, samples: Sequence[Sample], shares: DataParallelAssignment
    ) -> ValueExchange | None:
        """shares: the policy's."""
        if self.backend.critic is None:
            return None
        plan = plan_of_critic(self.plan, self.backend.critic.layout)
        own = plan.share(samples)
        return ValueExchange(self.backend, samples, self._steps(plan, samples, own), own, shares)

    def _values(self, critic: ValueExchange | None) -> list[Tensor] | None:
        """The critic's values of this rank's samples, before its update."""
        if critic is None:
            return None
        with self.progress.phase("values"):
            return critic.compute_values()

    def _corrections(
        self,
        samples: Sequence[Sample],
        steps: Sequence[Sequence[TrainSample]],
        old: Sequence[LogProbOutput],
    ) -> tuple[list[SampleCorrection], dict[str, float]]:
        """The off-policy correction of this rank's samples, and how far trainer and sampler are
        apart where the sampler told."""
        config = self.run.off_policy
        require_sampler_log_probs(config, samples)
        if self.run.algorithm.use_rollout_logprobs or not sampler_told(samples):
            return [SampleCorrection()] * len(old), {}
        corrections, metrics = correct_steps(
            config, steps, [o.log_probs for o in old], self.layout.dp_group
        )
        return corrections, {f"train/{name}": value for name, value in metrics.items()}

    def _advantages(
        self,
        samples: Sequence[Sample],
        mine: Sequence[int],
        local: Sequence[TrainSample],
        old: Sequence[LogProbOutput],
        ref: Sequence[LogProbOutput] | None,
        teacher: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None,
    ) -> TokenAdvantages:
        """Per-token advantages of this rank's samples, `mine` among all. Groups are over all
        samples; the KL in the reward comes off first, the teacher's part last."""
        algorithm = self.run.algorithm
        masks = [s.loss_mask for s in local]
        kl = None
        if algorithm.kl_coef and ref is not None:
            kl = token_kl(
                algorithm.kl_loss_type or "k1",
                [o.log_probs for o in old],
                [f.log_probs for f in ref],
                masks,
            )
        gap = None
        if teacher is not None:
            gap = teacher_gaps([o.log_probs for o in old], teacher, masks)
        settings = AdvantageSettings(
            algorithm.advantage_estimator,
            normalize_std=not algorithm.disable_grpo_std_normalization,
            singleton="reward" if algorithm.singleton_advantage == "reward" else "zero",
            normalize=algorithm.normalize_advantages,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            kl_coef=self.kl_controller.value,
            distillation_coef=self.run.distillation.opd_kl_coef,
        )
        path = algorithm.custom_reward_post_process_path
        processed = None if path is None else processed_rewards(path, slime_args(self.run), samples)
        outcomes = dataclasses.replace(outcomes_of(samples), processed=processed)
        output = estimate_advantages(
            settings,
            outcomes,
            mine=mine,
            masks=masks,
            kl=kl,
            teacher_gap=gap,
            critic_values=values,
            group=self.layout.dp_group,
        )
        if kl is None:
            return output
        metrics = {**output.metrics, "rollout/kl_coef": self.kl_controller.value}
        self.kl_controller.update(metrics["rollout/kl_in_reward"], len(samples))
        return dataclasses.replace(output, metrics=metrics)


def step_plan(run: RunConfig, layout: ParallelLayout) -> StepPlan:
    """Balanced by the model's own cost, where that was asked for."""
    algorithm = run.algorithm
    cost = (
        work_per_token(run.megatron.transformer, run.gpt.vocab_size or 0)
        if algorithm.balance_data
        else None
    )
    equal_counts = not algorithm.use_dynamic_batch_size
    return StepPlan(
        global_batch_size(run),
        layout.dp_size,
        layout.dp_rank,
        linear_cost=cost,
        equal_counts=equal_counts,
    )


def kl_controller(run: RunConfig) -> KLController:
    algorithm = run.algorithm
    adaptive = algorithm.kl_ctrl_type == "adaptive"
    return KLController(
        algorithm.kl_coef,
        algorithm.kl_target if adaptive else None,
        algorithm.kl_horizon if adaptive else None,
    )


def global_batch_size(run: RunConfig) -> int:
    assert run.algorithm.global_batch_size is not None, "completed when the command line is parsed"
    return run.algorithm.global_batch_size


def train_rollout_limit(run: RunConfig) -> float:
    """Largest mean log-prob difference between trainer and sampler that is not a breach."""
    if run.gates.max_train_rollout_diff is not None:
        return run.gates.max_train_rollout_diff
    exact = run.megatron.transformer.params_dtype == torch.float32 and not torch.cuda.is_available()
    return 1e-3 if exact else 0.1


def require_rollout_log_probs(sample: TrainSample) -> Tensor:
    if sample.rollout_log_probs is None:
        raise ValueError(
            "a sample has no log-probs of the sampler, which --use-rollout-logprobs and the comparison need"
        )
    return sample.rollout_log_probs

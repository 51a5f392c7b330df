"""Provides the sample groups of each rollout: sampled now or ahead of training, recorded, or
supervised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.data.tokenizer import special_token_ids
from slime_like.rollout.answer_metrics import answer_metrics
from slime_like.rollout.async_rollout import AsyncRolloutQueue
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.generated import GeneratedRollout
from slime_like.rollout.group_rows import waiting_from_rows
from slime_like.rollout.hooks import UserSource
from slime_like.rollout.offline_groups import recorded_groups, supervised_groups
from slime_like.rollout.prompt_source import check_source
from slime_like.rollout.remax_baseline import with_greedy_rewards
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.self_teacher import TeacherPrompts
from slime_like.rollout.shared_groups import RankZeroJson, SamplingPosition, share_from_rank_zero
from slime_like.rollout.teacher_client import ServedTeacher
from slime_like.samples.groups import SampleGroup
from slime_like.trainer.sampling_factory import make_collector, needs_greedy, staleness_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.checkpoints.state import AheadRow, SamplingState, TrainerState


class RolloutManager:
    """Provides the sample groups of each rollout. Every method is collective: every rank gets the
    metadata of all samples."""

    def __init__(
        self,
        config: RunConfig,
        source: PromptSource | UserSource | None,
        rollouter: Rollouter | None,
        evaluator: Evaluator | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_rollouts: int,
        teacher: ServedTeacher | TeacherPrompts | None = None,
    ) -> None:
        """source, rollouter, evaluator, teacher: None if the run needs none."""
        self.config = config
        self.num_rollouts = num_rollouts
        self._source = source
        self._rollout_id = -1  # the latest rollout that was returned
        self._rollouter = rollouter
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        self._teacher = teacher
        self._has_agents = config.agents.given
        self._needs_greedy = needs_greedy(config)
        self._is_sft = config.algorithm.loss_type == "sft_loss"
        # buffer: next prompts to sample
        self._collector, self.buffer = make_collector(config, rollouter, source, evaluator)
        self.queue = self._make_queue()

    def generate(self, step: int) -> GeneratedRollout:
        """A graded rollout. step: from 0."""
        config = self.config
        self._rollout_id = step
        if config.debug.load_debug_rollout_data:
            recorded = share_from_rank_zero(lambda: recorded_groups(config, step))
            return self._add_teacher(recorded, {}, None)
        if self._is_sft:
            assert isinstance(self._source, PromptSource)
            prompts = self._source.next_prompts(config.rollout.rollout_batch_size)
            return GeneratedRollout.of(*supervised_groups(config, prompts, self._tokenizer))
        if not config.scheduling.async_rollout:
            return self._sample(step)
        assert self.queue is not None
        self.queue.allow(min(step + self.queue.max_staleness, self.num_rollouts - 1))
        return self.queue.take(step)

    def drain(self) -> None:
        """Wait until no request is in flight. Afterwards the caller has exclusive use of the engine
        until the next `generate`."""
        if self.queue is not None:
            self.queue.drain()

    def state_dict(self) -> SamplingState:
        """State for resuming, as plain JSON, including prefetched rollouts. Collective."""
        if self._source is not None and not isinstance(self._source, PromptSource):
            self.drain()
            self._source.save(self._rollout_id)
        if self.queue is not None:
            return self.queue.state()
        return {
            "data": None if self._source is None else self._source.state_dict(),
            "waiting_groups": None,
        }

    def load_state_dict(self, state: TrainerState) -> str | None:
        """Resume from `state`. Returns a message if prefetched rollouts must be sampled again
        because this run may not train on them."""
        prefetched = state.get("sampled_ahead")
        problem = None
        position: SamplingState = state
        if prefetched is not None:
            problem = self._prefetch_problem(prefetched["rollouts"])
            if problem is None or self.user_source is not None:
                position = prefetched["behind"]  # a user's source saves only this position
        if self._source is not None:
            if position["data"] is None:
                raise ValueError(
                    "the checkpoint has no data position; --finetune starts at the first prompt"
                )
            check_source(self._source, position["data"])
            self._source.load_state_dict(position["data"])
        if self.buffer is not None:
            self.buffer.waiting = waiting_from_rows(
                position.get("waiting_groups") or [],
                rank=self.buffer.rank,
                num_holders=self.buffer.num_holders,
            )
        if prefetched is not None and problem is None:
            assert self.queue is not None
            self.queue.load_ahead(prefetched)
        return problem

    def _prefetch_problem(self, rollouts: Sequence[AheadRow]) -> str | None:
        """Why this run cannot train on the checkpoint's prefetched rollouts; None if it can."""
        count = len(rollouts)
        config = self.config.rollout
        outcome = "sampled again" if self.user_source is None else "lost"
        text = f"{count} rollouts that the checkpoint's run had sampled ahead are {outcome}: "
        if self.queue is None or self.queue.max_staleness < count:
            return text + "this run's --async-rollout and --max-staleness do not allow them"
        for row in rollouts:
            sizes = {len(group["samples"]) for group in row["groups"]}
            has_all_groups = len(row["groups"]) == config.rollout_batch_size
            if not has_all_groups or sizes != {config.n_samples_per_prompt}:
                return text + "--rollout-batch-size or --n-samples-per-prompt has changed"
        return None

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        if self.queue is not None:
            self.queue.close()
        if self._rollouter is not None and self._rollouter.custom_generate is not None:
            self._rollouter.custom_generate.close()

    def _sample(self, step: int) -> GeneratedRollout:
        """Sample and grade one rollout; runs in the sampling thread."""
        assert self._rollouter is not None and self._collector is not None
        self._rollouter.rollout_id = step
        collected = self._collector.collect(step)
        groups = collected.groups
        if self._needs_greedy:
            sampling = training_sampling(self.config.rollout)
            groups = with_greedy_rewards(self._rollouter, collected.prompts, groups, sampling)
        return self._add_teacher(groups, collected.metrics, self._rollouter.group)

    def _add_teacher(
        self, groups: list[SampleGroup], metrics: dict[str, float], group: dist.ProcessGroup | None
    ) -> GeneratedRollout:
        """Add log-probs of a served teacher or self-distillation prompts to the groups, and agent
        metrics to the metrics."""
        metrics = metrics | answer_metrics(groups, self._special_ids, group)
        if self._has_agents:
            from slime_like.agents.episode_samples import agent_metrics

            metrics = metrics | agent_metrics(groups, group)
        if self._teacher is None or self.config.debug.debug_rollout_only:
            return GeneratedRollout.of(groups, metrics)
        groups, teacher_metrics = self._teacher.grade(groups, group)
        return GeneratedRollout.of(groups, metrics | teacher_metrics)

    def _make_queue(self) -> AsyncRolloutQueue | None:
        """The queue that samples rollouts ahead of training with --async-rollout; without it, only
        the queue's state is used."""
        if self._collector is None or self._rollouter is None:
            return None
        max_staleness = 0
        if self.config.scheduling.async_rollout:
            # its own group: the training thread uses the default group concurrently
            self._rollouter.group = dist.new_group(backend="gloo")
            bound = staleness_bound(self.config)
            assert bound is not None
            max_staleness = bound
        return AsyncRolloutQueue(
            self._sample,
            self._position,
            max_staleness=max_staleness,
            json=RankZeroJson(self._rollouter),
        )

    def _position(self) -> SamplingPosition:
        """The current sampling position."""
        assert self._source is not None
        waiting = () if self.buffer is None else tuple(self.buffer.waiting)
        return SamplingPosition(self._source.state_dict(), waiting)

    @property
    def user_source(self) -> UserSource | None:
        """The source of --data-source-path, if any."""
        return None if isinstance(self._source, PromptSource) else self._source

"""Provides the sample groups of each rollout: sampled now or ahead of training, recorded, or
supervised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from arguments.schema import AlgorithmConfig, RolloutConfig
from slime_like.data.group_buffer import GroupBuffer, PendingGroup
from slime_like.data.prompts import PromptStream
from slime_like.data.tokenizer import special_token_ids
from slime_like.images.processor import ImageProcessor
from slime_like.rollout.answer_metrics import answer_metrics
from slime_like.rollout.async_rollout import AsyncRolloutQueue
from slime_like.rollout.collector import Collector
from slime_like.rollout.generated import GeneratedRollout
from slime_like.rollout.group_rows import groups_from_rows, waiting_from_rows
from slime_like.rollout.hooks import UserRollout, UserSource
from slime_like.rollout.offline_groups import recorded_groups, supervised_groups
from slime_like.rollout.pool_collector import PoolCollector
from slime_like.rollout.remax_baseline import with_greedy_rewards
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.self_teacher import TeacherPrompts
from slime_like.rollout.shared_groups import RankZeroJson, SamplingPosition, share_from_rank_zero
from slime_like.rollout.source_metrics import source_metrics, source_of_groups
from slime_like.rollout.teacher_client import ServedTeacher
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.samples.masking import oldest_trained
from slime_like.types import PROMPT_SOURCE, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.checkpoints.state import AheadRow, SamplingState, TrainerState


_ENDS_S = 5.0  # for a rollout in flight when sampling stops


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What a rollout is made of."""

    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    recording: str | None  # --load-debug-rollout-data
    vocab_size: int | None
    trains: bool  # not --debug-rollout-only
    has_agents: bool
    needs_greedy: bool
    max_ahead: int | None  # rollouts sampled ahead with --async-rollout; None without it
    max_staleness: int | None  # of a token that is trained on; None: unbounded
    takes_single_samples: bool = False  # --fully-async-single-samples
    # by source of a mix, the reward from which on a sample passes; empty without a mix
    pass_rewards: Mapping[str, float] = field(default_factory=dict)


class RolloutManager:
    """Provides the sample groups of each rollout. Every method is collective: every rank gets the
    metadata of all samples."""

    def __init__(
        self,
        settings: RolloutSettings,
        source: PromptStream | UserSource | None,
        rollouter: Rollouter | None,
        collector: Collector | UserRollout | None,
        buffer: GroupBuffer | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_rollouts: int,
        teacher: ServedTeacher | TeacherPrompts | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """source, rollouter, collector, teacher: None if the run needs none. buffer: next prompts
        to sample; None if the user brings a source."""
        self.settings = settings
        self.num_rollouts = num_rollouts
        self._source = source
        self._rollout_id = -1  # the latest rollout that was returned
        self._rollouter = rollouter
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        self._teacher = teacher
        self._image_processor = image_processor
        self._collector = collector
        self.buffer = buffer
        self.pool = collector if isinstance(collector, PoolCollector) else None
        self.queue = self._make_queue()
        self._closed = False

    def generate(self, step: int) -> GeneratedRollout:
        """A graded rollout. step: from 0."""
        settings = self.settings
        rollout = settings.rollout
        self._rollout_id = step
        if template := settings.recording:
            expected = rollout.rollout_batch_size * rollout.n_samples_per_prompt
            recorded = share_from_rank_zero(
                lambda: recorded_groups(
                    template, step, expected=expected, vocab_size=settings.vocab_size
                )
            )
            return self._add_teacher(recorded, {}, None)
        if settings.algorithm.loss_type == "sft_loss":
            assert isinstance(self._source, PromptStream)
            prompts = self._source.next_prompts(rollout.rollout_batch_size)
            groups, metrics = supervised_groups(
                settings.algorithm,
                prompts,
                self._tokenizer,
                max_response_len=rollout.rollout_max_response_len,
                processor=self._image_processor,
            )
            return self._rollout_of(groups, metrics | self._supervised_metrics(groups, prompts))
        if settings.max_ahead is None:
            return self._sample(step)
        assert self.queue is not None and self._rollouter is not None
        if self.pool is not None:
            self.pool.advance(step, self._rollouter.engine.weight_version)
        self.queue.allow(min(step + self.queue.max_ahead, self.num_rollouts - 1))
        return self.queue.take(step)

    def before_new_weights(self) -> None:
        """Call before the engine gets the weights of the next rollout. Waits for rollouts in
        progress on an engine in this process, so that timing does not decide which weights sample
        which token. Episodes of agents take their time, and new weights, in any case."""
        if self._rollouter is None or self._rollouter.engine.is_remote:
            return
        if self.pool is not None or not self.settings.has_agents:
            self.drain()

    def drain(self) -> None:
        """Wait until no request is in flight. Afterwards the caller has exclusive use of the engine
        until the next `generate`."""
        if self.queue is not None:
            self.queue.drain()
        if self.pool is not None:
            self.pool.pause()

    def state_dict(self) -> SamplingState:
        """State for resuming, as plain JSON, including prefetched rollouts. Collective."""
        if self._source is not None and not isinstance(self._source, PromptStream):
            self.drain()
            self._source.save(self._rollout_id)
        if self.queue is not None:
            self.drain()
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
        restarted = None
        position: SamplingState = state
        if prefetched is not None:
            problem = self._prefetch_problem(prefetched["rollouts"], int(state["weight_version"]))
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
            if self.pool is None:
                restarted = self._restart_episodes(self.buffer)
        if prefetched is not None and problem is None:
            assert self.queue is not None
            self.queue.load_ahead(prefetched, self._rollout_of)
        return "; ".join(filter(None, (problem, restarted))) or None

    def _prefetch_problem(self, rollouts: Sequence[AheadRow], weight_version: int) -> str | None:
        """Why this run cannot train on the checkpoint's prefetched rollouts; None if it can.
        weight_version: of the policy."""
        count = len(rollouts)
        rollout = self.settings.rollout
        outcome = "sampled again" if self.user_source is None else "lost"
        text = f"{count} rollouts that the checkpoint's run had sampled ahead are {outcome}: "
        if self.queue is None or self.queue.max_ahead < count:
            return text + "this run's --async-rollout and --max-staleness do not allow them"
        for row in rollouts:
            sizes = [len(group["samples"]) for group in row["groups"]]
            whole = [rollout.n_samples_per_prompt] * rollout.rollout_batch_size
            takes_parts = self.settings.takes_single_samples and sum(sizes) == sum(whole)
            if sizes != whole and not takes_parts:
                return text + (
                    "--rollout-batch-size, --n-samples-per-prompt or "
                    "--fully-async-single-samples has changed"
                )
            # the rollouts are trained on one after the other, each by the next version
            limit = self.settings.max_staleness
            version = weight_version + int(row["step"]) - int(rollouts[0]["step"])
            samples = complete(flatten(groups_from_rows(row["groups"])))
            oldest = min(oldest_trained(sample, version) for sample in samples)
            if limit is not None and version - oldest > limit:
                return text + "their tokens are too old for this run's --max-staleness"
        return None

    def _restart_episodes(self, buffer: GroupBuffer) -> str | None:
        """Sample groups again that a run with --fully-async has begun: this run would not know how
        old they are; and those of another size. Returns a message if there are any."""
        begun = {
            group.group_id
            for group in buffer.waiting
            if group.started is not None or not buffer.fits(group.group_id, group.samples)
        }
        if not begun:
            return None
        waiting = dict[int, PendingGroup]()  # parts of a group once
        for group in buffer.waiting:
            is_begun = group.group_id in begun
            waiting[group.group_id] = buffer.empty_group(group.prompt) if is_begun else group
        buffer.waiting = list(waiting.values())
        return (
            f"{len(begun)} groups that the checkpoint's run had begun are sampled again: its run "
            "had --fully-async, or another --n-samples-per-prompt"
        )

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        if self.queue is not None:
            self.queue.close()
        if self.pool is not None:
            self.pool.close()
        if self._rollouter is not None and self._rollouter.custom_generate is not None:
            self._rollouter.custom_generate.close()
        if self.queue is not None and not self._closed:
            self.queue.wait(_ENDS_S)
        self._closed = True

    def _sample(self, step: int) -> GeneratedRollout:
        """Sample and grade one rollout; runs in the sampling thread."""
        assert self._rollouter is not None and self._collector is not None
        self._rollouter.rollout_id = step
        collected = self._collector.collect(step)
        groups = collected.groups
        if self.settings.needs_greedy:
            sampling = training_sampling(self.settings.rollout)
            groups = with_greedy_rewards(self._rollouter, collected.prompts, groups, sampling)
        return self._add_teacher(groups, collected.metrics, self._rollouter.group)

    def _add_teacher(
        self, groups: list[SampleGroup], metrics: dict[str, float], group: dist.ProcessGroup | None
    ) -> GeneratedRollout:
        """Add log-probs of a served teacher or self-distillation prompts to the groups, and agent
        metrics to the metrics."""
        metrics = metrics | answer_metrics(groups, self._special_ids, group)
        if self.settings.pass_rewards:
            names = source_of_groups(groups, group)
            metrics |= source_metrics(groups, names, self.settings.pass_rewards, group=group)
        if self.settings.has_agents:
            from slime_like.agents.episode_samples import agent_metrics

            metrics = metrics | agent_metrics(groups, group)
        if self._teacher is None or not self.settings.trains:
            return self._rollout_of(groups, metrics)
        groups, teacher_metrics = self._teacher.grade(groups, group)
        return self._rollout_of(groups, metrics | teacher_metrics)

    def _supervised_metrics(
        self, groups: Sequence[SampleGroup], prompts: Sequence[Prompt]
    ) -> dict[str, float]:
        """Metrics of given answers by the source of a mix; none without one."""
        if not self.settings.pass_rewards:
            return {}
        assert isinstance(self._source, PromptStream)
        names = {prompt.group_id: prompt.metadata[PROMPT_SOURCE]["name"] for prompt in prompts}
        metrics = source_metrics(groups, names, self.settings.pass_rewards, graded=False)
        return metrics | self._source.metrics()

    def _rollout_of(
        self, groups: Sequence[SampleGroup], metrics: Mapping[str, float]
    ) -> GeneratedRollout:
        """The rollout of these groups, with what is not trained on masked out: sampled, recorded,
        supervised, or sampled ahead by the run that this one resumes."""
        return GeneratedRollout.of(groups, metrics)

    def _make_queue(self) -> AsyncRolloutQueue | None:
        """The queue that samples rollouts ahead of training with --async-rollout; without it, only
        the queue's state is used."""
        if self._collector is None or self._rollouter is None:
            return None
        max_ahead = self.settings.max_ahead
        if max_ahead is not None:
            # its own group: the training thread uses the default group concurrently
            self._rollouter.group = dist.new_group(backend="gloo")
        return AsyncRolloutQueue(
            self._sample,
            self._position,
            max_ahead=max_ahead or 0,
            json=RankZeroJson(self._rollouter),
        )

    def _position(self) -> SamplingPosition:
        """The current sampling position."""
        assert self._source is not None
        if self.pool is not None:
            return SamplingPosition(*self.pool.position())
        waiting = () if self.buffer is None else tuple(self.buffer.waiting)
        return SamplingPosition(self._source.state_dict(), waiting)

    @property
    def user_source(self) -> UserSource | None:
        """The source of --data-source-path, if any."""
        return None if isinstance(self._source, PromptStream) else self._source


def check_source(source: PromptStream | UserSource, position: Mapping[str, object]) -> None:
    """Raise ValueError if the checkpoint's position belongs to another kind of source."""
    saved = position.get("data_source")
    if (saved is None) == isinstance(source, PromptStream):
        return
    raise ValueError(
        f"the checkpoint's run drew its prompts from {saved or '--prompt-data'}, so its position "
        "cannot be resumed here; give the same source, or --finetune"
    )

"""Source of sample groups: live rollouts (sync or async), recorded rollouts, or supervised data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from arguments.rules.data import server_url
from arguments.rules.scheduling import OWN_ROLLOUT
from arguments.run_config import RunConfig
from slime_like.advantages import TokenEstimator, advantage_estimators
from slime_like.data.pairs import pair_samples
from slime_like.data.prompt_format import PromptFormat, RowKeys
from slime_like.data.prompts import PromptSource
from slime_like.data.sft import sft_samples
from slime_like.distributed.collectives import together
from slime_like.megatron.backend import MegatronBackend
from slime_like.rewards import confinement
from slime_like.rewards.grader import Grader
from slime_like.rollout.async_rollout import AsyncRolloutQueue
from slime_like.rollout.collector import Collector
from slime_like.rollout.engines.base import asking_ranks
from slime_like.rollout.engines.engine_registry import EngineContext, rollout_engines
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.group_buffer import GroupBuffer
from slime_like.rollout.hooks import (
    UserRollout,
    UserSource,
    custom_generate,
    group_filters,
    rollout_function,
    sample_hook,
    source_rollout,
)
from slime_like.rollout.rank_zero import RankZeroJson, SamplingPosition, from_one_rank
from slime_like.rollout.recording import check_values as check_recorded
from slime_like.rollout.recording import load_rollout
from slime_like.rollout.rollouter import Rollouter, training_sampling, with_greedy_rewards
from slime_like.rollout.sample_plane import share_index
from slime_like.rollout.self_teacher import TeacherPrompts
from slime_like.rollout.teacher_client import ServedTeacher, TeacherSettings
from slime_like.sample_index import TRUNCATED_FRACTION, AnySample, truncated_fraction
from slime_like.trainer.prompt_source import check_source
from slime_like.types import Prompt, SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class RolloutManager:
    """Provides the sample groups of each rollout. Collective: every rank gets the metadata of all
    samples. source, rollouter, evaluator, teacher: None if the run needs none."""

    def __init__(
        self,
        run: RunConfig,
        source: PromptSource | UserSource | None,
        rollouter: Rollouter | None,
        evaluator: Evaluator | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_rollouts: int,
        teacher: ServedTeacher | TeacherPrompts | None = None,
    ) -> None:
        self.run_config = run
        self.num_rollouts = num_rollouts
        self._source = source
        self._rollout_id = -1  # the latest rollout that was returned
        self._rollouter = rollouter
        self._tokenizer = tokenizer
        self._teacher = teacher
        self._has_agents = run.agents.given
        self._needs_greedy = needs_greedy(run)
        self._is_sft = run.algorithm.loss_type == "sft_loss"
        self.buffer: GroupBuffer | None = None  # next prompts to sample
        self._collector = self._make_collector(evaluator)
        self.ahead = self._make_ahead()

    def groups_of(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """The graded groups of a rollout, and metrics of their collection."""
        run, self._rollout_id = self.run_config, step
        if run.debug.load_debug_rollout_data:
            template = run.debug.load_debug_rollout_data
            recorded = from_one_rank(lambda: self._recorded_groups(template, step))
            return self._taught(recorded, {}, None)
        if self._is_sft:
            assert isinstance(self._source, PromptSource)
            prompts = self._source.next_prompts(run.rollout.rollout_batch_size)
            made, count = self._answers(prompts), run.algorithm.samples_together
            metrics = {TRUNCATED_FRACTION: truncated_fraction(made)}
            rows = zip(*[iter(made)] * count, strict=True)
            return [SampleGroup(row[0].group_id, tuple(row)) for row in rows], metrics
        if not run.scheduling.async_rollout:
            return self._sampled_groups(step)
        assert self.ahead is not None
        self.ahead.allow(min(step + self.ahead.max_staleness, self.num_rollouts - 1))
        return self.ahead.take(step)

    def _answers(self, prompts: Sequence[Prompt]) -> list[AnySample]:
        """Supervised samples, one or a preference pair per prompt; each rank builds its share."""
        rank, world = dist.get_rank(), dist.get_world_size()
        algorithm = self.run_config.algorithm
        count, make = algorithm.samples_together, sft_samples
        if count > 1:
            make = partial(pair_samples, scored=algorithm.trains_reward_model)
        limit = self.run_config.rollout.rollout_max_response_len
        own = together(lambda: make(prompts[rank::world], self._tokenizer, max_response_len=limit))
        return share_index(own, [place // count % world for place in range(count * len(prompts))])

    def drain(self) -> None:
        """Wait until no request is in flight. Afterwards the caller has exclusive use of the engine
        until the next `groups_of`."""
        if self.ahead is not None:
            self.ahead.drain()

    def state_dict(self) -> dict[str, object]:
        """State for resuming, as plain JSON, including prefetched rollouts. Collective."""
        if self._source is not None and not isinstance(self._source, PromptSource):
            self.drain()
            self._source.save(self._rollout_id)
        if self.ahead is not None:
            return self.ahead.state()
        return {
            "data": None if self._source is None else self._source.state_dict(),
            "waiting_groups": None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Resume from `state`. Returns a message if prefetched rollouts must be sampled again
        because this run may not train on them."""
        ahead = state.get("sampled_ahead")
        problem = None if ahead is None else self._problem_with_ahead(ahead["rollouts"])
        position = state
        if ahead is not None and (problem is None or self.user_source is not None):
            position = ahead["behind"]  # a user's source saves only this position
        if self._source is not None:
            if position["data"] is None:
                raise ValueError(
                    "the checkpoint has no data position; --finetune starts at the first prompt"
                )
            check_source(self._source, position["data"])
            self._source.load_state_dict(position["data"])
        if self.buffer is not None:
            self.buffer.load(position.get("waiting_groups") or [])
        if ahead is None or problem is not None:
            return problem
        assert self.ahead is not None
        self.ahead.load_ahead(ahead)
        return None

    def _problem_with_ahead(self, rollouts: Sequence[Mapping[str, Any]]) -> str | None:
        """Why this run cannot train on the checkpoint's prefetched rollouts; None if it can."""
        count, run = len(rollouts), self.run_config
        again = f"{count} rollouts that the checkpoint's run had sampled ahead are sampled again: "
        if self.user_source is not None:
            again = f"{count} rollouts that the checkpoint's run had sampled ahead are lost: "
        if self.ahead is None or self.ahead.max_staleness < count:
            return again + "this run's --async-rollout and --max-staleness do not allow them"
        wanted = (run.rollout.rollout_batch_size, run.rollout.n_samples_per_prompt)
        for row in rollouts:
            sizes = {len(group["samples"]) for group in row["groups"]}
            if len(row["groups"]) != wanted[0] or sizes != {wanted[1]}:
                return again + "--rollout-batch-size or --n-samples-per-prompt is another one now"
        return None

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        if self.ahead is not None:
            self.ahead.close()
        if self._rollouter is not None and self._rollouter.custom_generate is not None:
            self._rollouter.custom_generate.close()

    def _sampled_groups(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """Sample and grade one rollout; runs in the sampling thread."""
        assert self._rollouter is not None and self._collector is not None
        self._rollouter.rollout_id = step
        collected = self._collector.collect(step)
        if self._needs_greedy:
            groups = with_greedy_rewards(
                self._rollouter,
                collected.prompts,
                collected.groups,
                training_sampling(self.run_config.rollout),
            )
            return self._taught(groups, collected.metrics, self._rollouter.group)
        return self._taught(collected.groups, collected.metrics, self._rollouter.group)

    def _taught(
        self, groups: list[SampleGroup], metrics: dict[str, float], group: dist.ProcessGroup | None
    ) -> tuple[list[SampleGroup], dict[str, float]]:
        """Add log-probs of a served teacher or self-distillation prompts to the groups, and agent
        metrics to the metrics."""
        if self._has_agents:
            from slime_like.agents.episode_samples import agent_metrics

            metrics = metrics | agent_metrics(groups, group)
        if self._teacher is None or self.run_config.debug.debug_rollout_only:
            return groups, metrics
        taught, more = self._teacher.grade(groups, group)
        return taught, metrics | more

    def _recorded_groups(self, template: str, step: int) -> list[SampleGroup]:
        rollout = self.run_config.rollout
        groups = load_rollout(template, step)
        found, wanted = (
            sum(len(g.samples) for g in groups),
            rollout.rollout_batch_size * rollout.n_samples_per_prompt,
        )
        if found != wanted:
            raise ValueError(
                f"--load-debug-rollout-data {template}: rollout {step + 1} has {found} samples, and --rollout-batch-size times "
                f"--n-samples-per-prompt is {wanted}; give the sizes of the recorded run"
            )
        try:
            check_recorded(groups, self.run_config.gpt.vocab_size or 2**31)
        except ValueError as error:
            raise ValueError(
                f"--load-debug-rollout-data {template}: rollout {step + 1}: {error}"
            ) from None
        return groups

    def _make_collector(self, evaluator: Evaluator | None) -> Collector | UserRollout | None:
        """The `Collector` or the user's rollout function; None if the run samples no groups."""
        config, rollouter = self.run_config, self._rollouter
        if (
            rollouter is None
            or self._source is None
            or self._is_sft
            or config.debug.load_debug_rollout_data
        ):
            return None
        path = config.scheduling.rollout_function_path
        if not isinstance(self._source, PromptSource):
            return source_rollout(config, rollouter, self._source, evaluator)
        streams = rollouter.engine.serves_all_ranks and leaves_stragglers(config)
        on_rank_zero = streams or path not in (None, OWN_ROLLOUT)
        world = dist.get_world_size()
        self.buffer = GroupBuffer(
            self._source,
            config.rollout.n_samples_per_prompt,
            rank=dist.get_rank(),
            num_holders=1 if on_rank_zero else asking_ranks(rollouter.engine, world),
        )
        if path not in (None, OWN_ROLLOUT):
            return rollout_function(
                config, path, "--rollout-function-path", rollouter, self.buffer, evaluator
            )
        return Collector(
            config,
            rollouter,
            self.buffer,
            training_sampling(config.rollout),
            group_filters(config),
            streams=streams,
        )

    def _make_ahead(self) -> AsyncRolloutQueue | None:
        """The queue that samples rollouts, ahead of training with --async-rollout."""
        config = self.run_config.scheduling
        if self._collector is None or self._rollouter is None:
            return None
        json = RankZeroJson(self._rollouter)
        if not config.async_rollout:
            return AsyncRolloutQueue(
                self._sampled_groups, self._position, max_staleness=0, json=json
            )
        # its own group: the training thread uses the default group concurrently
        self._rollouter.group = dist.new_group(backend="gloo")
        bound = staleness_bound(self.run_config)
        assert bound is not None
        return AsyncRolloutQueue(
            self._sampled_groups, self._position, max_staleness=bound, json=json
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


def staleness_bound(run: RunConfig) -> int | None:
    """Maximum staleness of rollout tokens in weight versions; None: unbounded."""
    config = run.scheduling
    if config.async_rollout:
        return 1 if config.max_staleness is None else config.max_staleness
    own = config.rollout_function_path in (None, OWN_ROLLOUT) and config.data_source_path is None
    return 0 if own and not config.partial_rollout else None


def needs_greedy(run: RunConfig) -> bool:
    """Whether the estimator needs a greedy response per prompt (ReMax)."""
    estimator = advantage_estimators.get(run.algorithm.advantage_estimator)
    return isinstance(estimator, TokenEstimator) and estimator.needs_greedy


def leaves_stragglers(run: RunConfig) -> bool:
    """Whether surplus requests are aborted on the servers. Otherwise ranks generate in synchronous
    rounds."""
    config, rollout = run.scheduling, run.rollout
    in_rounds = (
        config.rollout_slice_len is not None
        or rollout.renormalize_sampled_log_probs
        or rollout.use_rollout_routing_replay
        or needs_greedy(run)
    )
    return not in_rounds and (
        config.partial_rollout
        or config.rollout_time_limit_s is not None
        or (config.over_sampling_batch_size or 0) > rollout.rollout_batch_size
    )


def function_evaluator(
    run: RunConfig, rollouter: Rollouter | None, evaluator: Evaluator | None, supply: RolloutManager
) -> Evaluator | UserRollout | None:
    """The user's evaluation function, which defaults to the user's rollout function; `evaluator` if
    there is neither."""
    flag, path = "--eval-function-path", run.scheduling.eval_function_path
    if path is None:
        flag, path = "--rollout-function-path", run.scheduling.rollout_function_path
    if evaluator is None or rollouter is None or path is None or path == OWN_ROLLOUT:
        return evaluator
    prompts = supply.buffer or supply.user_source
    return rollout_function(run, path, flag, rollouter, prompts, evaluator)


def make_rollouter(
    run: RunConfig,
    backend: MegatronBackend,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
) -> Rollouter | None:
    """The rollout engine and the grader; None if the run never samples. Collective."""
    if run.debug.debug_train_only or (
        run.algorithm.loss_type == "sft_loss" and run.eval.eval_interval is None
    ):
        return None
    make_engine = rollout_engines.get(run.rollout.rollout_engine)
    engine = make_engine(EngineContext(run, tokenizer, backend.device, output_dir))
    if run.reward.custom_rm_path is None and dist.get_rank() == 0:
        for words in confinement.unenforced():
            logger.warning(f"graders run without {words}")
    custom = custom_generate(run)
    if run.agents.given:
        from slime_like.agents.rollouts import agent_generate

        custom = agent_generate(run, tokenizer, dist.get_rank())
    return Rollouter(
        engine,
        Grader(**dataclasses.asdict(run.reward)),
        tokenizer,
        seed=run.data.rollout_seed,
        custom_generate=custom,
        sample_hook=sample_hook(run),
        sample_buffer_size=run.rollout.sample_buffer_size,
    )


def make_teacher(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> ServedTeacher | TeacherPrompts | None:
    """The served teacher (checked to respond and to share the policy's tokenizer), or the prompt
    builder of self-distillation; None without either. Collective; raises RunError."""
    config = run.distillation
    if config.teaches_itself:
        keys = RowKeys.of(run.data.prompt_data or "", run.data)
        form = PromptFormat(run.data, tokenizer, keys=keys, teaches_itself=True)
        return TeacherPrompts(config, form, run.gpt.max_position_embeddings)
    if not config.served:
        return None
    assert config.opd_teacher_url is not None
    urls = tuple(server_url(address) for address in config.opd_teacher_url)
    settings = TeacherSettings(
        urls,
        config.opd_teacher_timeout_s,
        config.opd_teacher_attempts,
        config.opd_teacher_concurrency,
    )
    teacher = ServedTeacher(settings, tokenizer)
    teacher.probe()
    return teacher

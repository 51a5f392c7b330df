"""Builds the sampling side of a run: engine, grader, collector, evaluator, teacher."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arguments.function_args import function_args
from arguments.hf.quantization import folder_quantization
from arguments.rules.distillation import server_url
from arguments.rules.scheduling import OWN_ROLLOUT
from arguments.run_config import RunConfig
from slime_like.advantages import TokenEstimator, advantage_estimators
from slime_like.data.group_buffer import GroupBuffer
from slime_like.data.prompt_format import PromptFormat, RowKeys
from slime_like.data.prompts import PromptStream
from slime_like.engines.base import RolloutEngine, num_generating_ranks
from slime_like.engines.registry import EngineContext, engine_traits, rollout_engines
from slime_like.images.processor import ImageProcessor
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.metrics.progress import Progress
from slime_like.rewards import confinement
from slime_like.rewards.grader import Grader
from slime_like.rewards.source_grader import SourceGrader
from slime_like.rollout.collector import Collector
from slime_like.rollout.episode_pool import PoolSettings
from slime_like.rollout.evaluate import Evaluator, reward_of
from slime_like.rollout.factory import make_evaluator
from slime_like.rollout.hooks import (
    UserRollout,
    UserSource,
    custom_generate,
    group_filters,
    rollout_function,
    sample_hook,
    source_rollout,
)
from slime_like.rollout.pool_collector import PoolCollector
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.self_teacher import TeacherPrompts
from slime_like.rollout.teacher_client import ServedTeacher, TeacherSettings
from slime_like.trainer.rollout_manager import RolloutManager, RolloutSettings
from slime_like.trainer.sampling import Sampling
from slime_like.types import Prompt
from slime_like.weight_sync.sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arguments.schema import SchedulingConfig


logger = logging.getLogger(__name__)


def make_collector(
    config: RunConfig,
    rollouter: Rollouter | None,
    source: PromptStream | UserSource | None,
    evaluator: Evaluator | None,
    *,
    num_rollouts: int,
) -> tuple[Collector | UserRollout | None, GroupBuffer | None]:
    """The `Collector` or the user's rollout function, and the buffer that it draws from, unless
    the user brings a source; None if the run samples no groups."""
    if (
        rollouter is None
        or source is None
        or config.algorithm.loss_type == "sft_loss"
        or config.debug.load_debug_rollout_data
    ):
        return None, None
    path = config.scheduling.rollout_function_path
    if not isinstance(source, PromptStream):
        return source_rollout(config, rollouter, source, evaluator), None
    streams = rollouter.engine.serves_all_ranks and leaves_stragglers(config)
    on_rank_zero = streams or path not in (None, OWN_ROLLOUT)
    world = dist.get_world_size()
    buffer = GroupBuffer(
        source,
        config.rollout.n_samples_per_prompt,
        rank=dist.get_rank(),
        num_holders=1 if on_rank_zero else num_generating_ranks(rollouter.engine, world),
    )
    if path not in (None, OWN_ROLLOUT):
        flag = "--rollout-function-path"
        return rollout_function(config, path, flag, rollouter, buffer, evaluator), buffer
    sampling = training_sampling(config.rollout)
    filters = group_filters(config)
    max_failed = config.guards.max_failed_samples
    make: Callable[..., Collector] = Collector
    if config.scheduling.fully_async:
        make = partial(PoolCollector, pool_settings(config, num_rollouts))
    collector = make(
        config.scheduling,
        config.rollout,
        rollouter,
        buffer,
        sampling,
        filters,
        max_failed=max_failed,
        streams=streams,
    )
    return collector, buffer


def pool_settings(config: RunConfig, num_rollouts: int) -> PoolSettings:
    """The bounds of --fully-async."""
    scheduling = config.scheduling
    batch = config.rollout.rollout_batch_size
    workers = scheduling.num_parallel_generation_workers or (scheduling.staleness + 1) * batch
    size = config.rollout.n_samples_per_prompt if scheduling.fully_async_single_samples else 1
    return PoolSettings(
        batch * size,
        scheduling.staleness,
        workers * size,
        num_rollouts,
        waits=scheduling.stale_tokens == "wait",
    )


def staleness_bound(config: RunConfig) -> int | None:
    """Maximum staleness of rollout tokens in weight versions, including those that are masked out;
    None: unbounded."""
    scheduling = config.scheduling
    if scheduling.fully_async and scheduling.stale_tokens == "mask":
        return None
    if scheduling.async_rollout:
        return scheduling.staleness
    built_in = (
        scheduling.rollout_function_path in (None, OWN_ROLLOUT)
        and scheduling.data_source_path is None
    )
    return 0 if built_in and not scheduling.partial_rollout else None


def needs_greedy(config: RunConfig) -> bool:
    """Whether the estimator needs a greedy response per prompt (ReMax)."""
    estimator = advantage_estimators.get(config.algorithm.advantage_estimator)
    return isinstance(estimator, TokenEstimator) and estimator.needs_greedy


def leaves_stragglers(config: RunConfig) -> bool:
    """Whether surplus requests are aborted on the servers. Otherwise ranks generate in synchronous
    rounds."""
    scheduling = config.scheduling
    rollout = config.rollout
    in_rounds = (
        scheduling.rollout_slice_len is not None
        or rollout.renormalize_sampled_log_probs
        or config.replayed
        or needs_greedy(config)
    )
    return not in_rounds and (
        scheduling.partial_rollout
        or scheduling.fully_async
        or scheduling.rollout_time_limit_s is not None
        or (scheduling.over_sampling_batch_size or 0) > rollout.rollout_batch_size
    )


def function_evaluator(
    config: RunConfig,
    rollouter: Rollouter | None,
    evaluator: Evaluator | None,
    prompts: GroupBuffer | UserSource | None,
) -> Evaluator | UserRollout | None:
    """The user's evaluation function, which defaults to the user's rollout function; `evaluator` if
    there is neither."""
    flag = "--eval-function-path"
    path = config.scheduling.eval_function_path
    if path is None:
        flag = "--rollout-function-path"
        path = config.scheduling.rollout_function_path
    if evaluator is None or rollouter is None or path is None or path == OWN_ROLLOUT:
        return evaluator
    return rollout_function(config, path, flag, rollouter, prompts, evaluator)


def make_rollouter(
    config: RunConfig,
    backend: MegatronBackend,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
    image_processor: ImageProcessor | None = None,
) -> Rollouter | None:
    """The rollout engine and the grader; None if the run never samples. Collective."""
    if config.debug.debug_train_only or (
        config.algorithm.loss_type == "sft_loss" and config.eval.eval_interval is None
    ):
        return None
    make_engine = rollout_engines.get(config.rollout.rollout_engine)
    context = EngineContext(
        config, tokenizer, backend.device, output_dir, image_processor, backend.policy
    )
    engine = make_engine(context)
    if config.reward.custom_rm_path is None and dist.get_rank() == 0:
        for layer in confinement.unenforced():
            logger.warning(f"graders run without {layer}")
    custom = custom_generate(config)
    if config.agents.given:
        from slime_like.agents.factory import agent_generate

        custom = agent_generate(config, tokenizer, dist.get_rank(), output_dir)
    return Rollouter(
        engine,
        make_grader(config),
        tokenizer,
        seed=config.data.rollout_seed,
        custom_generate=custom,
        sample_hook=sample_hook(config),
        sample_buffer_size=config.rollout.sample_buffer_size,
        image_processor=image_processor,
        response_limits={
            source.name: source.max_response_len
            for source in config.prompt_sources
            if source.max_response_len is not None
        },
    )


def make_grader(config: RunConfig) -> Grader:
    """The grader of the run's reward, with those of the sources of a mix that have their own."""
    settings = function_args(config)
    by_source = {
        source.name: Grader(**dataclasses.asdict(reward), settings=settings)
        for source in config.prompt_sources
        if (reward := reward_of(source, config.reward)) is not None
    }
    if not by_source:
        return Grader(**dataclasses.asdict(config.reward), settings=settings)
    return SourceGrader(by_source, **dataclasses.asdict(config.reward), settings=settings)


def make_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> ServedTeacher | TeacherPrompts | None:
    """The served teacher (checked to respond and to share the policy's tokenizer), or the prompt
    builder of self-distillation; None without either. Collective; raises RunError."""
    distillation = config.distillation
    if distillation.teaches_itself:
        keys = RowKeys.of(config.data.prompt_data or "", config.data)
        form = PromptFormat(config.data, tokenizer, keys=keys, teaches_itself=True)
        return TeacherPrompts(distillation, form, config.gpt.max_position_embeddings)
    if not distillation.served:
        return None
    assert distillation.opd_teacher_url is not None
    urls = tuple(server_url(address) for address in distillation.opd_teacher_url)
    settings = TeacherSettings(
        urls,
        distillation.opd_teacher_timeout_s,
        distillation.opd_teacher_attempts,
        distillation.opd_teacher_concurrency,
    )
    teacher = ServedTeacher(settings, tokenizer)
    teacher.probe()
    return teacher


def make_weight_sync(
    config: RunConfig, backend: MegatronBackend, engine: RolloutEngine | None, progress: Progress
) -> WeightSync | None:
    """The weight sync of a run with an engine, with a check if the engine is remote. --certify
    checks more itself, and says why servers differ."""
    if engine is None:
        return None
    check = None
    if engine.is_remote and not config.guards.certify:
        from slime_like.weight_sync.check import WeightCheck

        limit = train_rollout_limit(config)
        check = WeightCheck(backend, engine, limit=limit, seed=config.data.rollout_seed)
    always = config.sglang.check_weight_update_equal
    return WeightSync(backend, engine, progress, check=check, check_always=always)


def train_rollout_limit(config: RunConfig) -> float:
    """Largest legal mean log-prob difference between trainer and rollout engine, in nats."""
    if config.guards.max_train_rollout_diff is not None:
        return config.guards.max_train_rollout_diff
    exact = (
        config.megatron.transformer.params_dtype == torch.float32
        and not torch.cuda.is_available()
        and not serves_quantized(config)
    )
    return 1e-3 if exact else 0.1


def serves_quantized(config: RunConfig) -> bool:
    """Whether servers hold quantised weights, in the format of --hf-checkpoint."""
    folder = config.model.hf_checkpoint
    takes_quantized = engine_traits(config.rollout.rollout_engine).takes_quantized
    return takes_quantized and bool(folder and folder_quantization(folder))


def make_sampling(
    config: RunConfig,
    backend: MegatronBackend,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    source: PromptStream | UserSource | None,
    eval_prompts: Mapping[str, Sequence[Prompt]],
    num_rollouts: int,
    output_dir: Path,
    image_processor: ImageProcessor | None = None,
) -> Sampling:
    """The engine side of a run. Collective. source, eval_prompts: see `make_source` and
    `load_prompts`."""
    rollouter = make_rollouter(
        config, backend, tokenizer, output_dir=output_dir, image_processor=image_processor
    )
    teacher = make_teacher(config, tokenizer)
    engine = None if rollouter is None else rollouter.engine
    weights = make_weight_sync(config, backend, engine, progress)
    evaluator = make_evaluator(config, rollouter, eval_prompts)
    collector, buffer = make_collector(
        config, rollouter, source, evaluator, num_rollouts=num_rollouts
    )
    manager = RolloutManager(
        rollout_settings(config),
        source,
        rollouter,
        collector,
        buffer,
        tokenizer,
        num_rollouts=num_rollouts,
        teacher=teacher,
        image_processor=image_processor,
    )
    trainer_memory = None
    if config.sglang.offload_train and rollouter is not None:
        from slime_like.megatron.offload import TrainerMemory

        networks = (backend.policy, backend.critic)
        trained = [each for each in networks if isinstance(each, TrainedNetwork)]
        trainer_memory = TrainerMemory(trained)
    prompts = manager.buffer or manager.user_source
    return Sampling(
        manager,
        rollouter,
        weights,
        function_evaluator(config, rollouter, evaluator, prompts),
        progress,
        trainer_memory=trainer_memory,
    )


def rollout_settings(config: RunConfig) -> RolloutSettings:
    return RolloutSettings(
        config.rollout,
        config.algorithm,
        recording=config.debug.load_debug_rollout_data,
        vocab_size=config.gpt.vocab_size,
        trains=not config.debug.debug_rollout_only,
        has_agents=config.agents.given,
        needs_greedy=needs_greedy(config),
        max_ahead=max_ahead(config.scheduling),
        max_staleness=config.scheduling.staleness if config.scheduling.async_rollout else None,
        takes_single_samples=config.scheduling.fully_async_single_samples,
        pass_rewards={source.name: source.pass_reward for source in config.prompt_sources},
    )


def max_ahead(scheduling: SchedulingConfig) -> int | None:
    """Rollouts that are complete before they are trained on; None: each is sampled in time. With
    --fully-async one suffices, because the pool goes on behind it."""
    if not scheduling.async_rollout:
        return None
    return 1 if scheduling.fully_async else scheduling.staleness

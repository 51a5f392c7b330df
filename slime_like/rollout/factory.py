"""Builds the prompt source and the evaluator of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arguments.eval_sets import EvalSet, setting_of
from arguments.function_args import function_args
from arguments.prompt_mix import MixSource
from arguments.run_config import RunConfig
from slime_like.config import flag_name
from slime_like.data.prompt_format import Room
from slime_like.data.prompt_mix import MixedRows, PromptMix
from slime_like.data.prompts import PromptSource, PromptStream, load_eval_sets
from slime_like.data.sft import answer_problem
from slime_like.images.processor import ImageProcessor
from slime_like.rewards.registry import AnswerCheck, answer_check
from slime_like.rollout.evaluate import Evaluator, reward_of
from slime_like.rollout.hooks import UserSource, user_source
from slime_like.rollout.rollouter import Rollouter, eval_sampling
from slime_like.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: ImageProcessor | None = None,
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Evaluation prompts by set name, and notes to log; empty if the run never evaluates. Raises
    ValueError naming file and row."""
    if config.eval.eval_interval is None or config.debug.debug_train_only:
        return {}, []
    check = answer_check(
        config.reward.rm_type,
        config.reward.custom_rm_path,
        from_metadata=config.reward.rm_type_from_metadata,
    )

    def room(eval_set: EvalSet) -> Room:
        return Room(
            config.gpt.max_position_embeddings,
            eval_sampling(eval_set, config.rollout).max_new_tokens,
        )

    return load_eval_sets(
        config.eval_sets,
        config.data,
        tokenizer,
        flag_of=lambda eval_set: flag_name(setting_of(eval_set, config.eval)),
        answer_check=check,
        room_of=room,
        raw_messages=config.scheduling.renders_prompts,
        for_agents=config.agents.given,
        image_processor=image_processor,
    )


def make_evaluator(
    config: RunConfig, rollouter: Rollouter | None, prompts: Mapping[str, Sequence[Prompt]]
) -> Evaluator | None:
    """The evaluator, None if the run never evaluates. prompts: from `load_prompts`."""
    if config.eval.eval_interval is None or rollouter is None:
        return None
    key = config.eval.eval_reward_key
    settings = function_args(config)
    return Evaluator(
        rollouter, config.eval_sets, prompts, config.rollout, config.reward, key, settings
    )


def make_source(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: ImageProcessor | None = None,
) -> PromptStream | UserSource | None:
    """The prompt source, None if the run reads no prompts. Collective."""
    if config.debug.debug_train_only:
        return None
    if config.scheduling.data_source_path is not None:
        return user_source(config, config.scheduling.data_source_path)
    if not config.data.prompt_data:
        return None
    check = _answer_check(config, None)
    if not config.prompt_sources:
        room = _room(config, None)
        options = _format_options(config, image_processor)
        return PromptSource(config.data, tokenizer, answer_check=check, room=room, **options)
    sources = [
        MixedRows(
            source,
            config.data,
            tokenizer,
            answer_check=_answer_check(config, source),
            room=_room(config, source),
            **_format_options(config, image_processor),
        )
        for source in config.prompt_sources
    ]
    batch = config.rollout.rollout_batch_size
    mix = PromptMix(config.data.prompt_data, sources, batch=batch)
    assert config.rollout.num_rollout is not None, "a rule of mixes"
    mix.check_enough(config.rollout.num_rollout * batch)
    return mix


def _answer_check(config: RunConfig, source: MixSource | None) -> AnswerCheck | None:
    """Validates the rows of --prompt-data, or of a source of a mix."""
    if config.debug.load_debug_rollout_data is not None:
        return None  # the prompts are only counted then
    if config.algorithm.loss_type == "sft_loss":
        return answer_problem
    reward = None if source is None else reward_of(source, config.reward)
    reward = reward or config.reward
    return answer_check(
        reward.rm_type, reward.custom_rm_path, from_metadata=reward.rm_type_from_metadata
    )


def _room(config: RunConfig, source: MixSource | None) -> Room:
    """Limits for the prompts of --prompt-data, or of a source of a mix."""
    is_recorded = config.debug.load_debug_rollout_data is not None
    sampled = config.algorithm.loss_type != "sft_loss" and not is_recorded
    response = config.rollout.rollout_max_response_len
    if source is not None and source.max_response_len is not None:
        response = source.max_response_len
    room = Room(config.gpt.max_position_embeddings if sampled else None, response)
    return room if source is None else room.of(source)


def _format_options(config: RunConfig, image_processor: ImageProcessor | None) -> dict[str, Any]:
    """What the rows of this run are, as arguments of `PromptSource`."""
    is_recorded = config.debug.load_debug_rollout_data is not None
    return dict(
        conversations=config.learns_conversations,
        pairs=config.algorithm.pair_loss is not None,
        teaches_itself=config.distillation.teaches_itself,
        trains_labels=config.algorithm.loss_type == "sft_loss" and not is_recorded,
        raw_messages=config.scheduling.renders_prompts,
        for_agents=config.agents.given,
        image_processor=image_processor,
    )

"""Builds the prompt source and the evaluator of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arguments.eval_sets import EvalSet
from arguments.function_args import function_args
from arguments.run_config import RunConfig
from slime_like.data.prompt_format import Room
from slime_like.data.prompts import PromptSource, load_eval_sets
from slime_like.data.sft import answer_problem
from slime_like.images.processor import ImageProcessor
from slime_like.rewards.registry import AnswerCheck, answer_check
from slime_like.rollout.evaluate import Evaluator
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
    flag = "--eval-config" if config.eval.eval_config is not None else "--eval-prompt-data"
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
        flag=flag,
        answer_check=check,
        room_of=room,
        raw_messages=config.scheduling.renders_prompts,
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
) -> PromptSource | UserSource | None:
    """The prompt source, None if the run reads no prompts. Collective."""
    if config.debug.debug_train_only:
        return None
    if config.scheduling.data_source_path is not None:
        return user_source(config, config.scheduling.data_source_path)
    if not config.data.prompt_data:
        return None
    is_sft = config.algorithm.loss_type == "sft_loss"
    is_recorded = (
        config.debug.load_debug_rollout_data is not None
    )  # the prompts are only counted then
    check: AnswerCheck | None = None
    if is_sft and not is_recorded:
        check = answer_problem
    elif not is_recorded:
        reward = config.reward
        check = answer_check(
            reward.rm_type, reward.custom_rm_path, from_metadata=reward.rm_type_from_metadata
        )
    sampled = not is_sft and not is_recorded
    room = Room(
        config.gpt.max_position_embeddings if sampled else None,
        config.rollout.rollout_max_response_len,
    )
    return PromptSource(
        config.data,
        tokenizer,
        answer_check=check,
        room=room,
        conversations=config.learns_conversations,
        pairs=config.algorithm.pair_loss is not None,
        teaches_itself=config.distillation.teaches_itself,
        trains_labels=is_sft and not is_recorded,
        raw_messages=config.scheduling.renders_prompts,
        image_processor=image_processor,
    )

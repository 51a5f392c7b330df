"""Source of a run's prompts: --prompt-data, or a user's data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from arguments.run_config import RunConfig
from slime_like.data.prompt_format import Room
from slime_like.data.prompts import PromptSource
from slime_like.data.sft import answer_problem
from slime_like.rewards.registry import AnswerCheck, answer_check
from slime_like.rollout.hooks import UserSource, user_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_source(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
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
    )


def check_source(source: PromptSource | UserSource, position: Mapping[str, object]) -> None:
    """Raise ValueError if the checkpoint's position belongs to another kind of source."""
    saved = position.get("data_source")
    if (saved is None) == isinstance(source, PromptSource):
        return
    raise ValueError(
        f"the checkpoint's run drew its prompts from {saved or '--prompt-data'}, so its position "
        "cannot be resumed here; give the same source, or --finetune"
    )

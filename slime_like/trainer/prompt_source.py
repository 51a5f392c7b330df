"""Source of a run's prompts: --prompt-data, or a user's data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from arguments.run_config import RunConfig
from slime_like.data.prompt_format import Room
from slime_like.data.prompts import PromptSource
from slime_like.data.sft import answer_problem
from slime_like.rewards.registry import answer_check
from slime_like.rollout.hooks import UserSource, user_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_source(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptSource | UserSource | None:
    """The prompt source, None if the run reads no prompts. Collective."""
    if run.debug.debug_train_only:
        return None
    if run.scheduling.data_source_path is not None:
        return user_source(run, run.scheduling.data_source_path)
    if not run.data.prompt_data:
        return None
    check = (
        answer_problem
        if run.algorithm.loss_type == "sft_loss"
        else answer_check(
            run.reward.rm_type,
            run.reward.custom_rm_path,
            from_metadata=run.reward.rm_type_from_metadata,
        )
    )
    recorded = run.debug.load_debug_rollout_data is not None  # the prompts are only counted then
    sampled = run.algorithm.loss_type != "sft_loss" and not recorded
    room = Room(
        run.gpt.max_position_embeddings if sampled else None,
        run.rollout.rollout_max_response_len,
    )
    return PromptSource(
        run.data,
        tokenizer,
        answer_check=None if recorded else check,
        room=room,
        conversations=run.learns_conversations,
        pairs=run.algorithm.pair_loss is not None,
        teaches_itself=run.distillation.teaches_itself,
    )


def check_source(source: PromptSource | UserSource, position: Mapping[str, object]) -> None:
    """Raise ValueError if the checkpoint's position belongs to another kind of source."""
    saved, ours = position.get("data_source"), not isinstance(source, PromptSource)
    if ours == (saved is not None):
        return
    raise ValueError(
        f"the checkpoint's run drew its prompts from {saved or '--prompt-data'}, so its position "
        "cannot be resumed here; give the same source, or --finetune"
    )

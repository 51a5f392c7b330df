"""Prompts and evaluation sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arguments.schema.rollout import TOP_K
from slime_like.config import (
    AT_LEAST_ONE,
    GREEDY_OR_TEMPERATURE,
    NON_NEGATIVE,
    POSITIVE,
    UNIT_OPEN_LOW,
    CheckedSettings,
    arg,
)


@dataclass(frozen=True, slots=True)
class DataConfig(CheckedSettings):
    prompt_data: str | None = arg(
        None,
        "Prompts: a .jsonl or .parquet file, with an optional row range as in file.jsonl@[0:100], or reasoning_gym:<task>?size=1000&seed=1&<option>=<value>.",
    )
    input_key: str = arg(
        "input", "Field of a row that holds the prompt: a string or a list of chat messages."
    )
    label_key: str | None = arg(
        None,
        "Field that holds the reference answer. --loss-type sft_loss without it: prompts are whole conversations, of which the assistant's turns "
        "are learnt.",
    )
    chosen_key: str = arg(
        "chosen",
        "Field with the preferred answer to --input-key: a text, or messages, which may begin with the prompt.",
        only_with="@pairs",
    )
    rejected_key: str = arg(
        "rejected", "Field with the other answer, of the same kind.", only_with="@pairs"
    )
    margin_key: str | None = arg(
        None,
        "Field with the least difference of a pair's scores that is no error; default: 0 for all pairs.",
        only_with="policy_loss_type=bradley_terry",
    )
    metadata_key: str = arg(
        "metadata", "Field that holds a JSON object handed to rewards and custom functions."
    )
    tool_key: str = arg(
        "tools",
        "Field with the tools that the chat template writes, a list or its JSON; rows without it have none.",
    )
    loss_mask_type: str | None = arg(
        None,
        "Which text of an assistant's turn is learnt from a conversation. qwen3: as the template writes it after its question. qwen: as it writes "
        "it alone. qwen3_5: as the whole conversation has it. distill_qwen: the last turn's content, unchanged, and an end. Default: as the whole "
        "conversation has it, where that is what the template wrote when the turn was the last.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
        needs="loss_type=sft_loss",
    )  # fmt: skip
    apply_chat_template: bool = arg(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = arg(
        {}, "JSON object of further arguments of the chat template."
    )
    opd_demonstration_key: str | None = arg(
        None,
        "Field with a demonstration of how to answer, text that the teacher alone sees.",
        needs="opd_type=self",
    )
    rollout_shuffle: bool = arg(False, "Shuffle the prompts anew in every epoch.")
    rollout_seed: int = arg(42, "Seed of shuffling and of sampling.")
    rollout_max_prompt_len: int | None = arg(
        None, "Prompts with more tokens are left out and counted.", legal=POSITIVE
    )
    skip_bad_rows: int = arg(
        0,
        "Bad rows to leave out (counted in the log) before the file is refused.",
        legal=NON_NEGATIVE,
    )


def learns_conversations(loss_type: str, data: DataConfig) -> bool:
    """Supervised fine-tuning on whole conversations: rows of a file, of which no answer is named."""
    from_file = not (data.prompt_data or "").startswith("reasoning_gym:")
    return loss_type == "sft_loss" and data.label_key is None and from_file


@dataclass(frozen=True, slots=True)
class EvalConfig(CheckedSettings):
    eval_interval: int | None = arg(
        None,
        "Evaluate every this many rollouts; also before the first and after the last.",
        legal=POSITIVE,
    )
    eval_prompt_data: list[str] | None = arg(
        None, "Evaluation sets: name path [name path ...].", nargs="+", metavar="NAME PATH"
    )
    eval_config: str | None = arg(
        None,
        "Evaluation sets in a YAML file, each with its own sampling and reward, in place of --eval-prompt-data.",
        metavar="FILE",
        excludes="eval_prompt_data",
    )
    skip_eval_before_train: bool = arg(False, "Do not evaluate before the first rollout.")
    eval_input_key: str | None = arg(None, "As --input-key; default: the same.")
    eval_label_key: str | None = arg(None, "As --label-key; default: the same.")
    n_samples_per_eval_prompt: int = arg(
        1,
        "Responses to each evaluation prompt; mean and pass@k are over these.",
        legal=AT_LEAST_ONE,
    )
    eval_temperature: float | None = arg(
        None,
        "Temperature of evaluation; 0 is greedy; default: --rollout-temperature.",
        legal=GREEDY_OR_TEMPERATURE,
    )
    eval_top_p: float | None = arg(None, "As --rollout-top-p.", legal=UNIT_OPEN_LOW)
    eval_top_k: int | None = arg(None, "As --rollout-top-k.", legal=TOP_K)
    eval_max_response_len: int | None = arg(None, "As --rollout-max-response-len.", legal=POSITIVE)

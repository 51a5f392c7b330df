"""Prompts and evaluation sets."""

from __future__ import annotations

from dataclasses import dataclass

from arguments.schema.rollout import ALL_OR_SOME
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
        "Prompts: a .jsonl or .parquet file, with an optional row range as in file.jsonl@[0:100], "
        "or reasoning_gym:<task>?size=1000&seed=1&<option>=<value>. A .yaml file is a mix of "
        "sources, each with its weight, keys and reward.",
    )
    input_key: str = arg(
        "input", "Field of a row that holds the prompt: a string or a list of chat messages."
    )
    label_key: str | None = arg(
        None,
        "Field with the reference answer. With --loss-type sft_loss and without this flag, rows "
        "are conversations and the assistant turns are trained on.",
    )
    chosen_key: str = arg(
        "chosen",
        "Field with the preferred answer to --input-key: a string, or a list of messages that may "
        "include the prompt.",
        only_with="@pairs",
    )
    rejected_key: str = arg(
        "rejected",
        "Field with the rejected answer, in the format of --chosen-key.",
        only_with="@pairs",
    )
    margin_key: str | None = arg(
        None,
        "Field with the margin that the two scores of a pair should differ by; default: 0.",
        only_with="policy_loss_type=bradley_terry",
    )
    desirable_key: str | None = arg(
        None,
        "Field that says whether the row's answer is desirable: true or false, 1 or 0.",
        only_with="policy_loss_type=kto",
    )
    metadata_key: str = arg(
        "metadata", "Field with a JSON object that is passed to rewards and custom functions."
    )
    tool_key: str = arg(
        "tools",
        "Field with the tools for the chat template, a list or its JSON; rows without it have no "
        "tools.",
    )
    multimodal_keys: dict[str, str] | None = arg(
        None,
        "Rows have images: a JSON object with the field that holds them, such as "
        '{"image": "images"}. Each belongs where the text has <image> or the message a part of '
        "type 'image', which may hold its image itself.",
        metavar="JSON",
        excludes=("@reward_model", "mtp_num_layers", "custom_model_provider_path"),
    )
    max_image_mb: float = arg(
        20.0,
        "Largest file of an image, in MiB.",
        legal=POSITIVE,
        needs="multimodal_keys",
    )
    max_image_pixels: int = arg(
        2**26,
        "Most pixels of an image's file, before the model's processor makes it smaller.",
        legal=POSITIVE,
        needs="multimodal_keys",
    )
    image_decode_timeout_s: float = arg(
        30.0,
        "Seconds in which an image must be read and decoded.",
        legal=POSITIVE,
        needs="multimodal_keys",
    )
    loss_mask_type: str | None = arg(
        None,
        "Which text of an assistant turn is trained on (loss mask). qwen3: as the template "
        "renders the turn after its question. qwen: as it renders the turn alone. qwen3_5: as in "
        "the full conversation. distill_qwen: only the content of the last turn, with an end "
        "token. Default: as in the full conversation, if that equals what the template renders "
        "when the turn is the last.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
        needs="loss_type=sft_loss",
    )
    apply_chat_template: bool = arg(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, object] = arg(
        {}, "Extra arguments of the chat template, as a JSON object."
    )
    opd_demonstration_key: str | None = arg(
        None,
        "Field with a demonstration, text that only the teacher sees.",
        needs="opd_type=self",
    )
    rollout_shuffle: bool = arg(False, "Shuffle the prompts in every epoch.")
    rollout_seed: int = arg(42, "Seed of shuffling and of sampling.")
    rollout_max_prompt_len: int | None = arg(
        None, "Prompts with more tokens are skipped and counted.", legal=POSITIVE
    )
    skip_bad_rows: int = arg(
        0,
        "Number of malformed rows to skip (and count in the log) before the file is rejected.",
        legal=NON_NEGATIVE,
    )


def learns_conversations(loss_type: str, data: DataConfig) -> bool:
    """Whether this is supervised fine-tuning on conversations: a file without --label-key."""
    from_file = not (data.prompt_data or "").startswith("reasoning_gym:")
    return loss_type == "sft_loss" and data.label_key is None and from_file


@dataclass(frozen=True, slots=True)
class EvalConfig(CheckedSettings):
    eval_interval: int | None = arg(
        None,
        "Evaluate every N rollouts, and before the first and after the last one.",
        legal=POSITIVE,
        excludes="@reward_model",
        needs="eval_prompt_data|eval_sets|eval_config|@eval_sources",
        required_with="eval_prompt_data|eval_sets|eval_config|@eval_sources",
    )
    eval_prompt_data: list[str] | None = arg(
        None, "Evaluation sets: name path [name path ...].", nargs="+", metavar="NAME PATH"
    )
    eval_sets: list[str] | None = arg(
        None,
        "Standard evaluation sets by name, with their prompts and rewards, and the file or folder "
        "of each; without a path, what this machine has. slime-like eval-sets lists them.",
        nargs="+",
        metavar="NAME[=PATH]",
    )
    eval_config: str | None = arg(
        None,
        "YAML file of evaluation sets, each with its own sampling and reward, in place of "
        "--eval-prompt-data.",
        metavar="FILE",
        excludes="eval_prompt_data",
    )
    skip_eval_before_train: bool = arg(
        False,
        "Do not evaluate before the first rollout.",
        idle_without="eval_interval",
    )
    eval_input_key: str | None = arg(
        None,
        "As --input-key; default: the same.",
        idle_without="eval_interval",
    )
    eval_label_key: str | None = arg(
        None,
        "As --label-key; default: the same.",
        idle_without="eval_interval",
    )
    eval_reward_key: str | None = arg(
        None,
        "As --reward-key, for evaluations; default: the same.",
        idle_without="eval_interval",
    )
    n_samples_per_eval_prompt: int = arg(
        1,
        "Responses per evaluation prompt; mean and pass@k are computed over these.",
        legal=AT_LEAST_ONE,
        idle_without="eval_interval",
    )
    eval_temperature: float | None = arg(
        None,
        "Temperature of evaluation; 0 is greedy; default: --rollout-temperature.",
        legal=GREEDY_OR_TEMPERATURE,
        idle_without="eval_interval",
    )
    eval_top_p: float | None = arg(
        None,
        "As --rollout-top-p.",
        legal=UNIT_OPEN_LOW,
        idle_without="eval_interval",
    )
    eval_top_k: int | None = arg(
        None,
        "As --rollout-top-k.",
        legal=ALL_OR_SOME,
        idle_without="eval_interval",
    )
    eval_max_response_len: int | None = arg(
        None,
        "As --rollout-max-response-len.",
        legal=POSITIVE,
        idle_without="eval_interval",
    )

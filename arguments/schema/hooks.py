"""Functions of the user's, called as slime calls them, that take part in training and logging."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings, arg

_PATH = "module.function or file.py:function"
_SUPERVISED = "loss_type=sft_loss"


@dataclass(frozen=True, slots=True)
class HooksConfig(CheckedSettings):
    custom_advantage_function_path: str | None = arg(
        None,
        f"{_PATH} in place of --advantage-estimator: function(args, rollout_data), which sets advantages and returns in the dict, [R] by sample of "
        "the rank. The estimator is then not asked; --normalize-advantages and a teacher come after it.",
        excludes=(_SUPERVISED, "custom_reward_post_process_path"),
    )  # fmt: skip
    custom_pg_loss_reducer_function_path: str | None = arg(
        None,
        f"{_PATH} that weighs the tokens of the policy term, KL and entropy apart: function(total_lengths, response_lengths, loss_masks, "
        "calculate_per_token_loss), which returns a function that sums the losses of all tokens; it must be linear.",
        excludes=_SUPERVISED,
    )  # fmt: skip
    custom_convert_samples_to_train_data_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with a rollout: function(args, samples) returns the dict to train on, with lists of tokens, "
        "response_lengths, loss_masks and rewards, which are not compared within groups again.",
        excludes=(_SUPERVISED, "custom_reward_post_process_path", "gdpo_reward_keys"),
    )  # fmt: skip
    rollout_data_postprocess_path: str | None = arg(
        None,
        f"{_PATH} that is called before the optimizer steps of a rollout: function(args, rollout_id, rollout_data). It may change advantages and "
        "take tokens out of loss_masks.",
        excludes=_SUPERVISED,
    )  # fmt: skip
    rollout_sample_hook_path: list[str] = arg(
        [],
        f"{_PATH}, one or several, for each sample before its reward: function(args, sample, *, rollout_id, evaluation), async or not, which "
        "returns the sample or None.",
        nargs="+",
    )  # fmt: skip
    custom_rollout_log_function_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with each rollout: function(rollout_id, args, samples, rollout_extra_metrics, rollout_time). True leaves "
        "rollout/ out of the metrics.",
        excludes=_SUPERVISED,
    )  # fmt: skip
    custom_eval_rollout_log_function_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with each evaluation: function(rollout_id, args, data, extra_metrics), where data has rewards, truncated and "
        "samples of each set. True leaves eval/ out of the metrics.",
        needs="eval_interval",
        excludes="eval_function_path",
    )  # fmt: skip
    custom_megatron_init_path: str | None = arg(
        None, f"{_PATH} called as function(args) on every rank, once parallel groups are there."
    )
    custom_megatron_before_log_prob_hook_path: str | None = arg(
        None,
        f"{_PATH} called as function(args, model, store_prefix) before log-probs are computed: model is the list of chunks, store_prefix empty "
        "for the policy, ref_ or teacher_.",
        excludes=_SUPERVISED,
    )  # fmt: skip
    custom_megatron_before_train_step_hook_path: str | None = arg(
        None,
        f"{_PATH} called as function(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) before each optimizer step of the policy.",
    )  # fmt: skip

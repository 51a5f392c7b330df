"""User functions in training and logging, with slime's signatures."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings, arg

_PATH = "module.function or file.py:function"
_SUPERVISED = "loss_type=sft_loss"


@dataclass(frozen=True, slots=True)
class HooksConfig(CheckedSettings):
    custom_advantage_function_path: str | None = arg(
        None,
        f"{_PATH} in place of --advantage-estimator: function(args, rollout_data) sets advantages "
        "and returns in the dict, [R] per sample of the rank. --normalize-advantages and a "
        "teacher are applied afterwards.",
        excludes=(_SUPERVISED, "custom_reward_post_process_path"),
    )
    custom_pg_loss_reducer_function_path: str | None = arg(
        None,
        f"{_PATH} that reduces the policy loss (not KL and entropy) over tokens: "
        "function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) returns "
        "a function from per-token losses to their reduced value; it must be linear.",
        excludes=_SUPERVISED,
    )
    custom_convert_samples_to_train_data_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with a rollout: function(args, samples) returns the dict to "
        "train on, with lists of tokens, response_lengths, loss_masks and rewards, which are not "
        "normalised within groups again.",
        excludes=(_SUPERVISED, "custom_reward_post_process_path", "gdpo_reward_keys"),
    )
    rollout_data_postprocess_path: str | None = arg(
        None,
        f"{_PATH} called before the optimizer steps of a rollout: function(args, rollout_id, "
        "rollout_data). It may change advantages and remove tokens from loss_masks.",
        excludes=_SUPERVISED,
    )
    rollout_sample_hook_path: list[str] = arg(
        [],
        f"{_PATH}, one or several, called for each sample before its reward: function(args, "
        "sample, *, rollout_id, evaluation), sync or async, returns the sample or None.",
        nargs="+",
    )
    custom_rollout_log_function_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with each rollout: function(rollout_id, args, samples, "
        "rollout_extra_metrics, rollout_time). Returning True omits rollout/ metrics.",
        excludes=_SUPERVISED,
    )
    custom_eval_rollout_log_function_path: str | None = arg(
        None,
        f"{_PATH} called on rank 0 with each evaluation: function(rollout_id, args, data, "
        "extra_metrics), where data has rewards, truncated and samples of each set. Returning "
        "True omits eval/ metrics.",
        needs="eval_interval",
        excludes="eval_function_path",
    )
    custom_megatron_init_path: str | None = arg(
        None,
        f"{_PATH} called as function(args) on every rank after the process groups are created.",
    )
    custom_megatron_before_log_prob_hook_path: str | None = arg(
        None,
        f"{_PATH} called as function(args, model, store_prefix) before log-probs are computed: "
        "model is the list of model chunks; store_prefix is empty for the policy, or ref_ or "
        "teacher_.",
        excludes=_SUPERVISED,
    )
    custom_megatron_before_train_step_hook_path: str | None = arg(
        None,
        f"{_PATH} called as function(args, rollout_id, step_id, model, optimizer, "
        "opt_param_scheduler) before each optimizer step of the policy.",
    )

"""Every flag decides whether it can be without effect: it declares a condition with its field, or it
is listed here, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.flags import Flag
from arguments.rules.declared import ONLY_WITH, group_of_fields
from tests.unit.command_lines import parse_flags

# groups whose flags are all checked in one place, or all describe the network
GROUPS = {
    "policy loss": "unused_loss_settings",
    "server": "reject_server_flags",
    "sglang": "check_unused_sglang_flags",
    "vllm": "check_unused_sglang_flags",
    "network": "the network: config.json, check_dense_network and megatron-core itself",
    "embeddings and positions": "the network",
    "parallel": "the layout",
    "run file": "read before all others",
}
# a function checks what a condition cannot say
CHECKED = """
    rollout_temperature rollout_top_p rollout_top_k rollout_stop rollout_stop_token_ids
    rm_type custom_rm_path reward_key
    rollout_function_timeout_s rollout_time_limit_s
    disable_grpo_std_normalization singleton_advantage gamma
    use_opsm estr_threshold m2po_threshold tis_ratio_type sequence_mask_metric
    outlier_token_is_threshold_low outlier_token_is_threshold_high
    actor_num_nodes actor_num_gpus_per_node
"""
# these select what the run does, or hold in every run
EFFECTIVE = """
    only_train_params_name_list freeze_params_name_list allow_untested transformer_impl
    trust_remote_code seed
    prompt_data input_key label_key metadata_key tool_key multimodal_keys apply_chat_template
    apply_chat_template_kwargs rollout_shuffle rollout_seed rollout_max_prompt_len skip_bad_rows
    eval_prompt_data eval_sets eval_config
    num_rollout num_epoch rollout_batch_size n_samples_per_prompt rollout_engine
    rollout_max_response_len rollout_skip_special_tokens rollout_local_batch_size sample_buffer_size
    over_sampling_batch_size dynamic_sampling_filter_path partial_rollout rollout_sample_filter_path
    custom_generate_function_path rollout_function_path data_source_path async_rollout
    agent_function_path agent_command agent_environment agent_worker_keys
    custom_advantage_function_path custom_pg_loss_reducer_function_path
    custom_convert_samples_to_train_data_path rollout_data_postprocess_path rollout_sample_hook_path
    custom_rollout_log_function_path custom_megatron_init_path
    custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path
    rm_timeout_s rm_num_workers max_abs_reward rm_type_from_metadata sum_token_rewards
    loss_type policy_loss_type custom_loss_function_path loss_reduction advantage_estimator
    custom_reward_post_process_path normalize_advantages use_kl_loss kl_coef entropy_coef
    entropy_ctrl_type positive_nll_coef use_rollout_logprobs num_steps_per_rollout global_batch_size
    micro_batch_size log_probs_micro_batch_size use_dynamic_batch_size balance_data qkv_format
    log_probs_chunk_size use_opd
    max_train_rollout_diff true_on_policy_mode train_rollout_diff_patience
    max_consecutive_skipped_steps max_failed_samples
    lr_decay_style lr_warmup_iters lr_warmup_fraction weight_decay_incr_style
    save load exit_interval exit_duration_in_mins
    output_dir no_tensorboard no_plot no_progress log_interval record_timeline tracker use_wandb
    save_debug_rollout_data debug_rollout_only debug_train_only print_megatron_patches
    profile device_peak_tflops preflight
    train_backend rollout_max_context_len custom_config_path
    lr decoupled_lr weight_decay apply_wd_to_qk_layernorm optimizer use_distributed_optimizer
    clip_grad grad_reduce_in_fp32 overlap_grad_reduce align_param_gather bucket_size
    pad_buckets_for_high_nccl_busbw average_in_collective
"""
LISTED = frozenset(CHECKED.split()) | frozenset(EFFECTIVE.split())


def declares(flag: Flag) -> bool:
    conditions = (flag.needs, flag.only_with, flag.required_with, flag.idle_without)
    return any(conditions) or group_of_fields().get(flag.dest) in ONLY_WITH


def decided() -> list[Flag]:
    """The flags that decide for themselves."""
    return [f for f in flag_table().flags if not f.rejection and not f.group.startswith((*GROUPS,))]


def test_every_flag_says_when_it_has_no_effect() -> None:
    undecided = [f.dest for f in decided() if not declares(f) and f.dest not in LISTED]
    assert not undecided, f"declare needs= or idle_without=, or list them here: {undecided}"


def test_the_list_is_no_longer_than_it_must_be() -> None:
    own = {flag.dest: flag for flag in decided()}
    assert not LISTED - own.keys(), "no such flags"
    assert not [name for name in LISTED if declares(own[name])], "these declare a condition"


EVAL = "--eval-interval"
TRACKER = "--tracker or --use-wandb"
REFERENCE = "--use-kl-loss, --kl-coef"
IDLE = (
    ("--ref-load {folder}/hf", REFERENCE),
    ("--ref-load {folder}/hf --ref-offload", REFERENCE),
    ("--ref-load {folder}/hf --ref-update-interval 2", REFERENCE),
    *((f"{flag} 1", EVAL) for flag in (
        "--eval-temperature", "--eval-input-key", "--eval-label-key", "--eval-reward-key",
        "--eval-top-p", "--eval-top-k", "--eval-max-response-len", "--n-samples-per-eval-prompt",
    )),
    ("--skip-eval-before-train", EVAL),
    ("--lr-wsd-decay-style linear", "--lr-decay-style WSD"),
    ("--lr-warmup-init 1e-7", "--lr-warmup-iters or --lr-warmup-fraction"),
    ("--lr-decay-iters 5", "--lr-decay-style or --weight-decay-incr-style"),
    ("--min-lr 1e-7", "--lr-decay-style other than constant"),
    ("--decoupled-min-lr 1e-7", "--decoupled-lr"),
    ("--sgd-momentum 0.5", "--optimizer sgd"),
    ("--optimizer sgd --adam-beta1 0.5", "--optimizer adam"),
    ("--no-load-optim", "--load"),
    ("--no-load-rng", "--load"),
    ("--no-save-optim", "--save"),
    ("--no-save-rng", "--save"),
    ("--on-save-failure continue", "--save"),
    ("--wandb-mode offline", "--use-wandb or --tracker wandb"),
    ("--wandb-team a", "--use-wandb or --tracker wandb"),
    ("--disable-wandb-random-suffix", "--use-wandb or --tracker wandb"),
    ("--tracker-project a", TRACKER),
    ("--tracker-run-name a", TRACKER),
    ("--mlflow-tracking-uri a", "--tracker mlflow"),
    ("--no-tensorboard --tensorboard-dir {folder}/a", "TensorBoard"),
    ("--rm-concurrency 2", "--rm-type remote_rm, judge or reward_model"),
    ("--rm-cache-size 2", "--rm-type judge or reward_model"),
    ("--custom-generate-timeout-s 5", "--custom-generate-function-path"),
    ("--certify-search-minutes 5", "--certify or --certify-interval"),
    ("--no-agent-isolation", "--agent-command or --agent-function-isolation"),
)  # fmt: skip


@pytest.mark.parametrize(("flags", "missing"), IDLE, ids=[flags for flags, _ in IDLE])
def test_a_flag_without_effect_is_a_warning(tmp_path: Path, flags: str, missing: str) -> None:
    found = [text for text in parse_flags(tmp_path, flags).warnings if missing in text]
    last = flags[flags.rindex("--") :].split()[0].replace("--no-agent", "--agent")
    assert any(text.startswith(f"{last} has no effect without") for text in found), found


EFFECT = (
    "--ref-load {folder}/hf --use-kl-loss --ref-offload",
    "--eval-interval 1 --eval-prompt-data a {folder}/prompts.jsonl --eval-temperature 1",
    "--min-lr 1e-7 --lr-decay-style cosine --lr-decay-iters 2",
    "--lr-warmup-fraction 0.5 --lr-warmup-init 1e-7 --lr-decay-iters 2",
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 "
    "--lr-decay-iters 2",
    "--rm-type judge --judge-url http://a --judge-model b --rm-concurrency 2 --rm-cache-size 2",
    "--custom-rm-path json.dumps --rm-concurrency 2",
    "--rm-type-from-metadata --rm-concurrency 2 --rm-cache-size 2",
    "--use-wandb --wandb-mode offline --tracker-project a",
)


@pytest.mark.parametrize("flags", EFFECT)
def test_a_flag_with_an_effect_is_none(tmp_path: Path, flags: str) -> None:
    assert not [w for w in parse_flags(tmp_path, flags).warnings if "no effect" in w]

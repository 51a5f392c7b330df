"""Rules between settings: each is broken once, alone, and names flag, value and remedy."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.flags import Flag
from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from arguments.rules.advantages import ADVANTAGE_WARNINGS
from arguments.rules.declared import FACTS, parse_alternative, unknown_names, without_reason
from arguments.rules.layout import warn_attention_sinks as SINKS
from arguments.rules.layout import warn_mla_context_parallel as LATENT
from arguments.rules.moe import MOE_WARNINGS
from arguments.rules.muon import warn_muon_blockwise
from arguments.rules.rows import first_keys
from arguments.rules.run import RULES, WARNINGS
from arguments.rules.server import SERVER_RULES
from arguments.rules.sglang import warn_few_servers
from arguments.rules.training import OPTIMIZER_WARNINGS
from arguments.schema import CriticConfig
from arguments.untested import warn_untested
from slime_like.config import ConfigError, flag_name
from slime_like.rewards.registry import reward_of
from tests.paths import ROOT
from tests.unit.command_lines import HF_CONFIG, TWO_STEPS, complete, parse_flags, problems_of

DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
STALE = "--async-rollout --max-staleness 2"
EVAL = "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl"
# without effect in supervised fine-tuning
IDLE = (
    "--entropy-coef 0.01", "--use-unbiased-kl", "--advantage-estimator rloo",
    "--normalize-advantages", "--kl-loss-coef 0.1", "--kl-coef 0.1",
    "--use-kl-loss", "--kl-loss-type k3", "--kl-target 0.2", "--use-rollout-logprobs",
    "--rollout-temperature 0.5", "--rollout-top-k 5",
    "--rm-type math", "--custom-rm-path json.dumps",
)  # fmt: skip
# name of the rule, flags that are added, flags that are left out, processes, the flag that is
# named, words of the message
CASES: list[tuple[str, str, tuple[str, ...], int, str, str]] = [
    ("check_model_provider", "--custom-model-provider-path json.nothing", (), 1,
     "--custom-model-provider-path", "has no 'nothing'"),
    ("check_model_provider", "--custom-model-provider-path json.dumps --advantage-estimator ppo",
     (), 1, "--advantage-estimator", "--custom-model-provider-path"),
    ("check_parameter_patterns", "--freeze-params-name-list ok (", (), 1,
     "--freeze-params-name-list", "not a valid regular expression"),
    ("check_slime_world_size", "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --optimizer adam",
     (), 1, "--actor-num-gpus-per-node", "1 x 2 processes, and 1 run"),
    ("check_slime_world_size", "--actor-num-gpus-per-node 2 --num-gpus-per-node 1", (), 2,
     "--num-gpus-per-node", "--actor-num-gpus-per-node 2"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1", (), 3,
     "--decoder-first-pipeline-num-layers", "leaves 3 of the 4 layers"),
    ("check_pipeline_split", "--decoder-last-pipeline-num-layers 1", (), 1,
     "--decoder-last-pipeline-num-layers", "above 1"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--decoder-last-pipeline-num-layers 1", (), 2, "--decoder-last-pipeline-num-layers",
     "interleaved"),
    ("check_pipeline_split", "--pipeline-model-parallel-layout E|t*4L", (), 1,
     "--pipeline-model-parallel-layout", "above 1"),
    ("check_pipeline_split", "--account-for-loss-in-pipeline-split", (), 1,
     "--account-for-loss-in-pipeline-split", "above 1"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split", (), 2,
     "--pipeline-model-parallel-size", "5, the number of layers, with --account"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split "
     "--decoder-last-pipeline-num-layers 1", (), 2, "--decoder-last-pipeline-num-layers",
     "cannot be combined with"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL "
     "--decoder-last-pipeline-num-layers 2", (), 2, "--pipeline-model-parallel-layout",
     "--decoder-last-pipeline-num-layers"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--pipeline-model-parallel-layout Et|t|t|tL", (), 2, "--pipeline-model-parallel-layout",
     "--num-virtual-stages-per-pipeline-rank"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttmL", (), 2,
     "--pipeline-model-parallel-layout", "multi-token prediction"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|xtL", (), 2,
     "--pipeline-model-parallel-layout", "has 'x'"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||ttL", (), 2,
     "--pipeline-model-parallel-layout", "has an empty stage"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL|", (), 2,
     "--pipeline-model-parallel-layout", "has an empty stage"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttL", (), 2,
     "--pipeline-model-parallel-layout", "has 3 layers"),
    ("check_pipeline_split",
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t|)*4L", (), 2,
     "--pipeline-model-parallel-layout", "has 5 stages"),
    ("check_world_size", "--tensor-model-parallel-size 2", (), 3, "--tensor-model-parallel-size",
     "does not divide the 3 processes"),
    ("check_world_size", "--context-parallel-size 2", (), 3, "--context-parallel-size",
     "x --pipeline-model-parallel-size 1 = 2 does not divide"),
    ("check_declared_rules", "--sequence-parallel", (), 1, "--sequence-parallel",
     "--tensor-model-parallel-size above 1"),
    ("check_tensor_parallel", "--tensor-model-parallel-size 4", (), 4,
     "--tensor-model-parallel-size", "--num-query-groups 2"),
    ("check_context_parallel", "--cp-comm-type all_gather", (), 1, "--cp-comm-type",
     "--context-parallel-size above 1"),
    ("check_context_parallel", "--context-parallel-size 2 --cp-comm-type p2p", (), 2,
     "--cp-comm-type", "Transformer Engine"),
    ("check_context_parallel", "--context-parallel-size 2 --attention-dropout 0.1", (), 2,
     "--attention-dropout", "must be 0"),
    ("check_context_parallel", "--context-parallel-size 2 --hidden-dropout 0.1", (), 2,
     "--hidden-dropout", "must be 0"),
    (
        "check_declared_rules",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        (), 2, "--num-layers-per-virtual-pipeline-stage", "cannot be combined with",
    ),
    ("check_declared_rules", "--num-virtual-stages-per-pipeline-rank 2", (), 1,
     "--num-virtual-stages-per-pipeline-rank", "without --pipeline"),
    ("check_pipeline_split", "--pipeline-model-parallel-size 3", (), 3,
     "--pipeline-model-parallel-size", "divisor of 4"),
    (
        "check_pipeline_split",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", (), 2,
        "--num-virtual-stages-per-pipeline-rank", "2 layers of a pipeline rank",
    ),
    ("check_mtp_layers", "--mtp-num-layers 1", (), 1, "--mtp-num-layers",
     "no trainable MTP layers"),
    ("check_hf_checkpoint", "", ("--hf-checkpoint",), 1, "--hf-checkpoint", "required"),
    ("check_network_flags", "--num-layers 2 --hidden-size 8 --num-attention-heads 2 "
                            "--position-embedding-type rope --debug-train-only "
     "--load-debug-rollout-data {folder}/{rollout_id}", ("--hf-checkpoint",), 1, "--vocab-size",
     "required"),
    ("check_declared_rules", "--recompute-granularity full --recompute-method uniform", (), 1,
     "--recompute-num-layers", "required"),
    ("check_declared_rules", "--recompute-granularity selective --recompute-method block", (), 1,
     "--recompute-method", "remove it"),
    ("check_declared_rules",
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
     "--recompute-modules mlp", (), 1, "--recompute-modules", "remove it"),
    ("check_declared_rules", "--distribute-saved-activations", (), 1, "--distribute-saved-activations",
     "without --recompute-granularity full"),
    ("check_declared_rules",
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
     "--distribute-saved-activations", (), 1, "--distribute-saved-activations",
     "without --tensor-model-parallel-size above 1"),
    ("check_declared_rules", "--recompute-modules mlp", (), 1, "--recompute-modules",
     "only valid with --recompute-granularity selective"),
    ("check_declared_rules", "--attention-dropout 1", (), 1, "--attention-dropout", "0 <= x < 1"),
    ("check_network_sizes", "--num-layers 2 --hidden-size 8 --num-attention-heads 2 "
     "--num-query-groups 3 --position-embedding-type rope --vocab-size 9 --debug-train-only "
     "--load-debug-rollout-data {folder}/{rollout_id}", ("--hf-checkpoint",), 1,
     "--num-query-groups", "must divide --num-attention-heads 2"),
    ("check_run_length", "", ("--num-rollout",), 1, "--num-rollout", "required"),
    ("check_supervised_samples", "--loss-type sft_loss --n-samples-per-prompt 4", (), 1,
     "--n-samples-per-prompt", "must be 1"),
    ("check_rollout_split", "--num-steps-per-rollout 3", (), 1, "--num-steps-per-rollout",
     "does not divide"),
    ("check_rollout_split", "--global-batch-size 5", (), 1, "--global-batch-size",
     "does not divide"),
    ("check_rollout_split", "--global-batch-size 8 --num-steps-per-rollout 4", (), 1,
     "--num-steps-per-rollout", "conflicts with"),
    ("check_global_batch", "--micro-batch-size 3", (), 1, "--rollout-batch-size", "not divisible"),
    ("check_global_batch", "--global-batch-size 2", (), 4, "--global-batch-size",
     "4 data-parallel ranks"),
    (
        "check_global_batch",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 16 --micro-batch-size 16",
        (), 2, "--global-batch-size", "interleaved",
    ),
    (
        "check_log_prob_micro_batches",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--log-probs-micro-batch-size 16",
        (), 2, "--log-probs-micro-batch-size", "divisible by",
    ),
    ("check_token_budget", "--use-dynamic-batch-size", (), 1, "--max-tokens-per-gpu", "required"),
    ("check_declared_rules", "--max-tokens-per-gpu 64", (), 1, "--max-tokens-per-gpu",
     "without --use-dynamic-batch-size"),
    ("check_declared_rules", "--log-probs-max-tokens-per-gpu 64", (), 1,
     "--log-probs-max-tokens-per-gpu", "without --use-dynamic-batch-size"),
    ("check_token_budget", f"{DYNAMIC} --micro-batch-size 1", (), 1, "--micro-batch-size",
     "conflicts with --use-dynamic-batch-size"),
    ("check_token_budget", f"{DYNAMIC} --log-probs-micro-batch-size 2", (), 1,
     "--log-probs-micro-batch-size", "fills by tokens"),
    ("check_token_budget", f"{DYNAMIC} --loss-reduction token_mean_legacy", (), 1,
     "--loss-reduction", "use token_mean"),
    ("check_samples_per_rank", f"{DYNAMIC} --global-batch-size 2", (), 4, "--global-batch-size",
     "fewer than the 4 data-parallel ranks"),
    ("check_declared_rules", f"{DYNAMIC} --qkv-format bshd", (), 1, "--qkv-format",
     "cannot be combined with --use-dynamic-batch-size"),
    ("check_sequence_lengths", "--rollout-max-response-len 512", (), 1,
     "--rollout-max-response-len", "512 positions"),
    ("check_sequence_lengths", f"{EVAL} --eval-max-response-len 512", (), 1,
     "--eval-max-response-len", "512 positions"),
    ("check_sequence_lengths",
     f"{EVAL} --loss-type sft_loss --rm-type math --rollout-max-response-len 600", (), 1,
     "--rollout-max-response-len", "512"),
    ("check_declared_rules", "--renormalize-sampled-log-probs", (), 1,
     "--renormalize-sampled-log-probs", "--rollout-top-p below 1"),
    (
        "check_declared_rules", "--renormalize-sampled-log-probs --loss-type sft_loss", (), 1,
        "--renormalize-sampled-log-probs",
        "--loss-type sft_loss",
    ),
    ("check_declared_rules", "--kl-coef 0.1 --kl-loss-coef 0.1 --use-kl-loss --ref-load {folder}/hf", (),
     1, "--kl-coef", "with --kl-loss-coef 0.1; set only one of them"),
    ("check_declared_rules", "--kl-loss-coef 0.1", (), 1, "--kl-loss-coef",
     "without --use-kl-loss"),
    ("check_declared_rules", "--use-unbiased-kl", (), 1, "--use-unbiased-kl",
     "without --use-kl-loss"),
    ("check_declared_rules", "--kl-coef 0.1 --ref-load {folder}/hf --use-unbiased-kl", (), 1,
     "--use-unbiased-kl", "without --use-kl-loss"),
    ("check_declared_rules", "--kl-loss-type k3", (), 1, "--kl-loss-type",
     "without --use-kl-loss or --kl-coef"),
    ("check_reference_model", "--use-kl-loss", (), 1, "--ref-load", "required with --use-kl-loss"),
    ("check_reference_model", "--kl-coef 0.1", (), 1, "--ref-load", "required with --kl-coef"),
    ("check_declared_rules", "--ref-offload", (), 1, "--ref-offload", "without --ref-load"),
    ("check_loss_reduction", "--policy-loss-type gmpo --loss-reduction token_mean", (), 1,
     "--loss-reduction", "requires rollout_mean or"),
    ("check_declared_rules", "--loss-reduction seq_mean_token_sum_norm", (), 1,
     "--loss-norm-length", "required"),
    ("check_declared_rules", "--loss-norm-length 8", (), 1, "--loss-norm-length",
     "only valid with"),
    ("check_supervised_loss", "--loss-type sft_loss", ("--label-key",), 1, "--label-key",
     "required"),
    ("check_supervised_loss", "--loss-type sft_loss --policy-loss-type sapo", (), 1,
     "--policy-loss-type", "remove it"),
    *[("check_unused_supervised_flags", f"--loss-type sft_loss {flag}", (), 1, flag.split()[0],
    "has no effect with") for flag in IDLE],
    ("check_cross_entropy", "--policy-loss-type cross_entropy", (), 1, "--policy-loss-type",
     "use --loss-type sft_loss"),
    ("check_cross_entropy", "--policy-loss sft", (), 1, "--policy-loss-type",
     "use --loss-type sft_loss"),
    ("check_lr", "", ("--lr",), 1, "--lr", "required"),
    ("check_declared_rules", "--lr 0", (), 1, "--lr", "must be > 0"),
    ("check_declared_rules", "--min-lr 1", (), 1, "--min-lr", "must not be above --lr 1e-05"),
    ("check_declared_rules", "--adam-beta1 1", (), 1, "--adam-beta1", "0 <= x < 1"),
    ("check_declared_rules", "--weight-decay -0.1", (), 1, "--weight-decay", ">= 0"),
    ("check_declared_rules", "--lr-warmup-iters 1 --lr-warmup-fraction 0.1", (), 1,
     "--lr-warmup-fraction", "cannot be combined with"),
    ("check_declared_rules", "--lr-warmup-iters 5 --lr-decay-iters 5", (), 1, "--lr-warmup-iters",
     "below --lr-decay-iters 5"),
    ("check_declared_rules", "--lr-decay-style WSD", (), 1, "--lr-wsd-decay-iters", "required"),
    ("check_declared_rules", "--weight-decay-incr-style linear --end-weight-decay 0.1", (), 1,
     "--start-weight-decay", "--weight-decay-incr-style linear"),
    ("check_declared_rules", "--start-weight-decay 0.1", (), 1, "--start-weight-decay",
     "--weight-decay-incr-style"),
    ("check_declared_rules", "--overlap-param-gather --use-distributed-optimizer", (), 1,
     "--overlap-param-gather", "without --overlap-grad-reduce"),
    ("check_prompt_data", "", ("--prompt-data",), 1, "--prompt-data", "required"),
    ("check_prompt_data", "--prompt-data {folder}/none.jsonl@[0:3]", (), 1, "--prompt-data",
     "no such file"),
    ("check_prompt_data", "--prompt-data {folder}", (), 1, "--prompt-data", "is a folder"),
    ("check_row_keys", "--input-key question", (), 1, "--input-key",
     "prompts.jsonl; its keys: 'input', 'label'"),
    ("check_row_keys", "--label-key answer --prompt-data {folder}/prompts.jsonl@[0:1]", (), 1,
     "--label-key", "no such key in"),
    ("check_row_keys", f"{EVAL} --eval-label-key answer", (), 1, "--eval-prompt-data",
     "set a: no key 'answer' in"),
    ("check_images", '--multimodal-keys {"image":"images","video":"videos"} --apply-chat-template', (),
     1, "--multimodal-keys", "'video' is not offered; must be like"),
    ("check_images", "--multimodal-keys {} --apply-chat-template", (), 1, "--multimodal-keys",
     "must be like"),
    ("check_images", '--multimodal-keys {"image":"images"}', (), 1, "--multimodal-keys",
     "requires --apply-chat-template"),
    ("check_reward", "", ("--rm-type",), 1, "--rm-type", "required"),
    ("check_reward", "", ("--label-key",), 1, "--label-key", "required"),
    ("check_reward", f"{EVAL} --loss-type sft_loss", (), 1, "--rm-type", "required"),
    ("check_reward_function", f"{EVAL} --loss-type sft_loss --custom-rm-path json.nothing", (), 1,
     "--custom-rm-path", "nothing"),
    ("check_reward_function", "--custom-rm-path json.nothing", ("--rm-type",), 1,
     "--custom-rm-path", "nothing"),
    ("check_declared_rules", "--eval-interval 2", (), 1, "--eval-interval",
     "without --eval-prompt-data or --eval-sets or --eval-config"),
    ("check_evaluation", "--eval-prompt-data a {folder}/prompts.jsonl", (), 1, "--eval-interval",
     "required"),
    ("check_evaluation", "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl b "
                         "{folder}/prompts.jsonl a {folder}/prompts.jsonl", (), 1,
     "--eval-prompt-data", "two sets of the same name"),
    ("check_evaluation", "--eval-interval 2 --eval-prompt-data a", (), 1, "--eval-prompt-data",
     "pairs"),
    ("check_stop", "--rollout-stop-token-ids 7 -3", (), 1, "--rollout-stop-token-ids",
     "must be from 0 to 319"),
    ("check_stop", "--rollout-stop-token-ids 320", (), 1, "--rollout-stop-token-ids",
     "must be from 0 to 319, a token of the model"),
    ("check_evaluation", "--eval-interval 2 --eval-prompt-data a {folder}/none.jsonl", (), 1,
     "--eval-prompt-data", "no such file"),
    ("check_input_folders", "--ref-load {folder}/none", (), 1, "--ref-load", "no such folder"),
    ("check_input_folders", "--load {folder}/none", (), 1, "--load", "no such folder"),
    ("check_input_folders", "--ref-load {folder}", (), 1, "--ref-load",
     "neither checkpoints nor a Hugging Face model"),
    ("check_declared_rules", "--ref-ckpt-step 2", (), 1, "--ref-ckpt-step", "without --ref-load"),
    ("check_declared_rules", "--save-interval 2", (), 1, "--save-interval", "without --save"),
    ("check_declared_rules", "--finetune", (), 1, "--finetune", "without --load"),
    ("check_declared_rules", "--save-hf {folder}/out --debug-train-only --load-debug-rollout-data "
                      "{folder}/{rollout_id} --num-layers 2 --hidden-size 8 "
     "--num-attention-heads 2 --position-embedding-type rope --vocab-size 9", ("--hf-checkpoint",),
     1, "--save-hf", "requires --hf-checkpoint"),
    ("check_checkpoint_steps", "--load {folder}/hf --ckpt-step 3", (), 1, "--ckpt-step",
     "complete steps: none"),
    ("check_sgd_checkpoints", "--optimizer sgd --save {folder}/out", (), 1, "--save",
     "add --no-save-optim"),
    ("check_sgd_checkpoints", "--optimizer sgd --load {folder}/hf", (), 1, "--load",
     "--no-load-optim"),
    ("check_sgd_checkpoints", "--optimizer sgd --use-distributed-optimizer", (), 1,
     "--use-distributed-optimizer", "--optimizer sgd"),
    ("check_overwritten_folders", "--save-hf {folder}/hf", (), 1, "--save-hf",
     "would overwrite --hf-checkpoint"),
    ("check_overwritten_folders", "--save-hf {folder}", (), 1, "--save-hf",
     "would overwrite --hf-checkpoint"),
    ("check_overwritten_folders", "--save {folder}/hf", (), 1, "--save",
     "would overwrite --hf-checkpoint"),
    ("check_output_folders", "--save {folder}/prompts.jsonl", (), 1, "--save", "is a file"),
    ("check_output_folders", "--output-dir {folder}/prompts.jsonl", (), 1, "--output-dir",
     "is a file"),
    ("check_output_folders", "--save-hf {folder}/prompts.jsonl/a/{rollout_id}", (), 1, "--save-hf",
     "prompts.jsonl is a file"),
    ("check_output_folders", "--tensorboard-dir {folder}/prompts.jsonl/a", (), 1,
     "--tensorboard-dir", "prompts.jsonl is a file"),
    ("check_debug_path", "--save-debug-rollout-data {folder}/rollout", (), 1,
     "--save-debug-rollout-data", "must contain {rollout_id}"),
    ("check_debug_path", "--save-debug-rollout-data {folder}/rollout --num-epoch 1",
     ("--num-rollout",), 1,
     "--save-debug-rollout-data", "must contain {rollout_id}"),
    ("check_declared_rules", "--debug-train-only", (), 1, "--load-debug-rollout-data", "required"),
    ("check_declared_rules", "--debug-rollout-only --load-debug-rollout-data {folder}/{rollout_id}",
     (), 1, "--load-debug-rollout-data", "--debug-rollout-only"),
    ("check_declared_rules",
     "--debug-rollout-only --debug-train-only --load-debug-rollout-data {folder}/{rollout_id}", (),
     1, "--debug-rollout-only", "--debug-train-only"),
    ("reject_server_flags", "--port 8000", (), 1, "--port", "python -m slime_like.tinker"),
    ("check_debug_files", "--load-debug-rollout-data {folder}/none", (), 1,
     "--load-debug-rollout-data", "no such file"),
]  # fmt: skip
# Tested otherwise than by a row of a table, in these files below tests/unit/arguments.
TESTED_ELSEWHERE = {
    "check_attention_backend": "rules/test_rules.py",
    "check_critic_layout": "test_critic_layout.py",
    "check_delta_net_parallel": "hf/test_delta_nets.py",
    "check_dense_network": "hf/test_moe.py",
    "check_distributed_backend": "test_machines.py",
    "check_fused_activation": "hf/test_glm5_next.py",
    "check_indexer_replay": "hf/test_sparse_attention.py",
    "check_indexer_stages": "hf/test_sparse_attention.py",
    "check_local_layers": "test_machines.py",
    "check_loss_scale": "test_untested.py",
    "check_memory_parallel": "hf/test_qwen4_exp.py",
    "check_model_base": "test_model_base.py",
    "check_output_groups": "hf/test_deepseek_v4.py",
    "check_capacity": "hf/test_deepseek_v4.py",
    "check_prompt_mix": "test_prompt_mix.py",
    "check_servers": "rules/test_on_policy.py",
    "check_stages_of_shared_keys": "hf/test_gemma4.py",
    "check_single_answers": "rules/test_pairs.py",
    "check_muon_package": "rules/test_muon.py",
    "check_muon_split_qkv": "rules/test_muon.py",
    "check_pair_loss": "rules/test_pairs.py",
    "check_pairs": "rules/test_pairs.py",
    "check_profile_ranks": "../preflight/test_flops.py",
    "check_server_packages": "rules/test_server.py",
    "check_transformer_engine": "test_machines.py",
}


@pytest.mark.parametrize(
    ("rule", "flags", "without", "world_size", "flag", "wording"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_a_broken_rule(
    tmp_path: Path,
    rule: str,
    flags: str,
    without: tuple[str, ...],
    world_size: int,
    flag: str,
    wording: str,
) -> None:
    words = [word.replace("{folder}", str(tmp_path)) for word in flags.split()]
    found = problems_of(complete(tmp_path, *words, without=without), world_size)
    named = [p for p in found if p.flag == flag and wording in str(p)]
    assert named, "\n".join(map(str, found))
    others = {p.flag for p in found} - {flag}
    assert not others or "--debug" in flags, "one mistake is reported once"


def test_declarations_name_settings_that_exist() -> None:
    assert unknown_names() == []


DECLARED = [
    (flag, kind, condition)
    for flag in flag_table().flags
    for kind in ("needs", "only_with", "excludes")
    for condition in getattr(flag, kind)
]


def value_for(flag: Flag) -> str | None:
    """A legal word other than the default; None for a switch."""
    if flag.kind == "switch":
        return None
    if flag.kind == "json":
        return '{"image":"images"}'
    if flag.dest == "lora_target_modules":
        return "q_proj"
    if flag.choices:
        return str(next(c for c in flag.choices if c != flag.default))
    if flag.item is str:
        return "{folder}/hf"
    numbers = (1, 2, 0.5, 3, 0.25)
    return str(next(n for n in numbers if n != flag.default and isinstance(n, flag.item)
                    and (flag.legal is None or flag.legal.holds(n))))  # fmt: skip


# What a setting needs to have an effect, where that is not declared as a condition.
CRITIC = [field.name for field in dataclasses.fields(CriticConfig)]
EFFECTIVE = dict.fromkeys(CRITIC, "--advantage-estimator ppo") | {
    "dpo_label_smoothing": "--loss-type dpo_loss",
}
# How a fact about the run is made on a command line.
FACT_WORDS = {
    "@decay": "--lr-decay-style cosine",
    "@reward_model": "--loss-type rm_loss",
    "@served_teacher": "--use-opd --opd-type sglang --opd-teacher-url http://x:1",
    "@self_teacher": "--use-opd --opd-type self --opd-feedback-key feedback",
    "@weight_folder": "--update-weight-transport disk",
}


def made_true(name: str, sign: str, wanted: str) -> list[str]:
    """The words that make a condition true."""
    if name in FACTS:
        return FACT_WORDS[name].split()
    flag = flag_table().by_dest[name]
    if flag.kind == "switch":
        return [flag.on[0]]
    beyond = {"<": 0.5, ">": 2}
    if sign in beyond:
        number = beyond[sign]
        return [flag.on[0], str(int(number) if flag.item is int else number)]
    return [flag.on[0], wanted if sign else str(value_for(flag))]


def made_false(condition: str) -> tuple[list[str], list[str]]:
    """The words that make a condition false which is true by default, and the flags that are left
    out for it."""
    name, sign, _ = parse_alternative(condition.split("|")[0])
    if name in FACTS:
        return [], []
    flag = flag_table().by_dest[name]
    legal = {parse_alternative(part)[2] for part in condition.split("|")}
    if sign == "=" and str(flag.default) in legal:
        other = next(choice for choice in flag.choices or () if choice not in legal)
        return [flag.on[0], str(other)], []
    if name == "hf_checkpoint":  # without this switch, it is asked for in place of the rule
        return ["--debug-train-only"], [flag.on[0]]
    return [], [flag.on[0]] if name == "num_rollout" else []


@pytest.mark.parametrize(
    ("flag", "kind", "condition"), DECLARED, ids=[f"{f.name} {k} {c}" for f, k, c in DECLARED]
)
def test_every_declaration_is_checked(
    tmp_path: Path, flag: Flag, kind: str, condition: str
) -> None:
    """Broken on a command line, it names both flags, and the reason."""
    test, reason = without_reason(condition)
    name, sign, wanted = parse_alternative(test.split("|")[0])
    words = [flag.name] + ([value_for(flag)] if flag.kind != "switch" else [])
    left_out: list[str] = []
    if kind == "excludes":
        words += [*made_true(name, sign, wanted), *EFFECTIVE.get(flag.dest, "").split()]
        if flag.dest.startswith("opd_"):
            words.append("--use-opd")
    else:
        more, left_out = made_false(test)
        others = (*flag.only_with, *flag.needs) if kind == "needs" else ()
        for other in (without_reason(other)[0] for other in others if other != condition):
            more += made_true(*parse_alternative(other.split("|")[0]))
        words += [*more, *EFFECTIVE.get(flag.dest, "").split()]
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    found = problems_of(complete(tmp_path, *words, without=tuple(left_out)), 1)
    reported = [p for p in found if p.flag in (flag.name, flag_name(flag.dest))]
    expected = FACTS[name][1] if name in FACTS else flag_name(name)
    assert any(expected in p.message and reason in p.message for p in reported), "\n".join(
        map(str, found)
    )


RELATED = [
    (flag, kind, name)
    for flag in flag_table().flags
    for kind, names in flag.relations
    for name in names.split("|")
]


@pytest.mark.parametrize(
    ("flag", "kind", "name"), RELATED, ids=[f"{f.name} {k} {n}" for f, k, n in RELATED]
)
def test_every_bound_is_checked(tmp_path: Path, flag: Flag, kind: str, name: str) -> None:
    """Out of it, the message names the other flag and its value."""
    other = flag_table().by_dest[name]
    conditions = (*flag.needs, *flag.only_with, *flag.idle_without)
    tests = [without_reason(condition)[0].split("|")[0] for condition in conditions]
    words = [word for test in tests for word in made_true(*parse_alternative(test))]
    words += EFFECTIVE.get(flag.dest, "").split()
    unit = 0.25 if float in (flag.item, other.item) else 1
    small, large = (unit, 3 * unit) if kind in ("at_most", "below") else (3 * unit, unit)
    bound = small
    if name == "vocab_size":
        bound = int(HF_CONFIG["vocab_size"])
        large = bound + 1
    else:
        words += [other.on[0], str(small)]
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    found = problems_of(complete(tmp_path, *words, flag.on[0], str(large)), 1)
    reported = [p for p in found if p.flag == flag_name(flag.dest)]
    assert any(f"{flag_name(name)} {bound}" in p.message for p in reported), "\n".join(
        map(str, found)
    )


def rules_of_rows(folder: Path) -> set[str]:
    """Names of rules with which the rows of tables begin, in all unit tests."""
    rows = [
        node.elts[0]
        for path in folder.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Tuple) and node.elts
    ]
    first = {row.value for row in rows if isinstance(row, ast.Constant)}
    return {word for word in first if re.fullmatch(r"(check|reject)_\w+", str(word))}


def test_every_rule_is_broken_somewhere() -> None:
    every = {rule.__name__ for rule in (*RULES, *SERVER_RULES)}
    broken = rules_of_rows(ROOT / "tests" / "unit")
    assert broken - every == set(), "no such rule"
    assert every - broken == set(TESTED_ELSEWHERE)
    for file in TESTED_ELSEWHERE.values():
        assert (ROOT / "tests/unit/arguments" / file).is_file()


@pytest.mark.parametrize(
    ("flags", "wording"),
    [
        (
            "--policy-loss-type sapo --loss-reduction token_mean",
            "is meant for --loss-reduction",
        ),
        (
            "--use-kl-loss --ref-load {folder}/hf --kl-loss-type k1",
            "only noise",
        ),
        ("--n-samples-per-prompt 1", "every advantage is 0"),
        (
            "--lora-rank 4 --overlap-grad-reduce --use-distributed-optimizer",
            "no effect with --lora-rank",
        ),
        ("--num-steps-per-rollout 1", "every ratio is 1"),
        ("--policy-loss-type gspo --eps-clip 0.2", "never acts"),
        (
            "--policy-loss-type gmpo --advantage-estimator reinforce_plus_plus "
            "--normalize-advantages",
            "--policy-loss-type gmpo",
        ),
        ("--advantage-estimator gdpo", "without --gdpo-reward-keys"),
        ("--rm-type zero", "nothing to learn from"),
        (STALE, "does not see the policy that sampled, and tokens may be 2 weight versions old"),
        (f"{STALE} --fully-async --max-staleness 4", "tokens may be 4 weight versions old"),
        (
            f"{STALE} --policy-loss-type importance_sampling --use-rollout-logprobs",
            "has no bound on its ratio to the policy that sampled",
        ),
        ("--rollout-top-p 0.9", "see --renormalize-sampled-log-probs"),
        (
            "--geo-mask-low 0.9",
            "has no effect without --sequence-mask-metric geometric",
        ),
        (
            "--gamma 0.9",
            "--gamma has no effect with --advantage-estimator grpo",
        ),
        (
            "--policy-loss-type sapo --advantage-estimator ppo",
            "takes its baseline from a critic",
        ),
        (
            "--policy-loss-type sapo --advantage-estimator reinforce++ --normalize-advantages",
            "has no group",
        ),
        ("--lr-warmup-iters 100", "never reaches --lr"),
        ("--advantage-estimator ppo --critic-lr-warmup-iters 100", "never reaches --critic-lr"),
        ("--advantage-estimator maxrl --rm-type dapo", "gives 1 and -1"),
    ],
)
def test_warnings(tmp_path: Path, flags: str, wording: str) -> None:
    warnings = parse_flags(tmp_path, TWO_STEPS + flags).warnings
    assert len(warnings) == 1 and wording in warnings[0]
    assert (
        len(
            set(WARNINGS)
            - {
                *ADVANTAGE_WARNINGS,  # test_advantages.py
                *MOE_WARNINGS,
                *OPTIMIZER_WARNINGS,
                LATENT,
                SINKS,
                warn_untested,
                warn_few_servers,  # of several processes: preflight/test_check.py
                warn_muon_blockwise,
            }
        )
        == 14
    ), "a new warning has a case here"


@pytest.mark.parametrize(
    "flags",
    [
        "--use-kl-loss --kl-loss-coef 0.1 --ref-load {folder}/hf",
        "--kl-coef 0.1 --ref-load {folder}/hf",
        "--prompt-data reasoning_gym:chain_sum?size=4 --rm-type task",
        "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl@[0:1] b "
        "{folder}/prompts.jsonl",
        "--debug-rollout-only",
        "--save {folder}/out --save-interval 1",
        "--global-batch-size 8 --num-steps-per-rollout 2 --micro-batch-size 2",
        "--lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 1e-6",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--load-debug-rollout-data {folder}/{rollout_id} --debug-train-only",
        "--loss-reduction seq_mean_token_sum_norm --loss-norm-length 128",
        "--loss-type sft_loss --prompt-data reasoning_gym:chain_sum?size=4",
        "--loss-type sft_loss --entropy-coef 0 --no-use-kl-loss",
        "--loss-type sft_loss --rm-type math --rollout-temperature 0.5 --eval-interval 2 "
        "--eval-prompt-data a {folder}/prompts.jsonl",
        "--loss-type sft_loss --eval-interval 2 --eval-prompt-data a "
        "reasoning_gym:chain_sum?size=4",
        "--kl-coef 0.1 --kl-loss-type k3 --ref-load {folder}/hf",
        "--optimizer sgd --save {folder}/out --no-save-optim",
        "--optimizer sgd --load {folder}/hf --finetune",
        "--save-debug-rollout-data {folder}/rollout --num-rollout 1",
        f"{DYNAMIC} --log-probs-max-tokens-per-gpu 200 --balance-data",
        f"{DYNAMIC} --global-batch-size 2 --no-balance-data --loss-reduction prompt_mean",
        "--balance-data --micro-batch-size 2 --qkv-format bshd",
    ],
)
def test_what_is_right_passes(tmp_path: Path, flags: str) -> None:
    words = [word.replace("{folder}", str(tmp_path)) for word in flags.split()]
    parse_args(complete(tmp_path, *words), 2)


@pytest.mark.parametrize(
    "flags",
    [
        f"{STALE} --tis-ratio-type token",
        f"{STALE} --estr-threshold 0.5",
        f"{STALE} --policy-loss-type dppo_kl",
        f"{STALE} --policy-loss-type cispo --cispo-anchor rollout",
        f"{STALE} --use-rollout-logprobs",
        "--async-rollout --policy-loss-type importance_sampling",
        "--n-samples-per-prompt 1 --advantage-estimator batch_mean",
    ],
)
def test_what_is_bounded_causes_no_warning(tmp_path: Path, flags: str) -> None:
    assert parse_flags(tmp_path, TWO_STEPS + flags).warnings == ()


def test_a_task_source_scores_itself_unless_a_reward_is_chosen(tmp_path: Path) -> None:
    source = ("--prompt-data", "reasoning_gym:spell_backward?size=4")
    left_out = ("--prompt-data", "--label-key", "--rm-type")
    assert parse_args(complete(tmp_path, *source, without=left_out), 1).reward.rm_type is None
    assert (
        reward_of(None, {"task": {"name": "spell_backward", "options": {}}, "entry": {}}) == "task"
    )
    file = ("--eval-interval", "2", "--eval-prompt-data", "a", f"{tmp_path}/prompts.jsonl")
    (found,) = problems_of(complete(tmp_path, *source, *file, without=left_out), 1)
    assert found.flag == "--rm-type", "a file next to it has no scorer"
    assert (
        parse_args(
            complete(tmp_path, *source, "--rm-type", "math", without=left_out), 1
        ).reward.rm_type
        == "math"
    )
    (tmp_path / "own.py").write_text("def reward(args, sample):\n    return 1.0\n")
    own = f"{tmp_path}/own.py:reward"
    assert (
        parse_args(
            complete(tmp_path, *source, "--custom-rm-path", own, without=left_out), 1
        ).reward.rm_type
        is None
    )


def test_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"run/iter_{step:07d}").mkdir(parents=True)
        (tmp_path / f"run/iter_{step:07d}/manifest.json").write_text("{}")
    load = ("--load", str(tmp_path / "run"), "--ckpt-step")
    assert parse_args(complete(tmp_path, *load, "4"), 1).checkpoint.ckpt_step == 4
    (found,) = problems_of(complete(tmp_path, *load, "3"), 1)
    assert found.flag == "--ckpt-step" and found.message.endswith("complete steps: 2, 4")


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--output-dir", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """Also for root, whom modes do not stop: what the system says is replaced."""
    argv = complete(tmp_path, flag, str(tmp_path / "locked/new/run"))
    (tmp_path / "locked").mkdir()
    parse_args(argv, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked")
    (found,) = problems_of(argv, 1)
    assert found.flag == flag and f"{tmp_path / 'locked'} is not writable" in found.message


def test_balancing_comes_with_token_budgets(tmp_path: Path) -> None:
    def balanced(flags: str) -> bool | None:
        return parse_args(complete(tmp_path, *flags.split()), 1).algorithm.balance_data

    by_samples = "--micro-batch-size 1"
    assert balanced(by_samples) is False and balanced(f"{by_samples} --balance-data") is True
    assert balanced("") is True, "the default is a budget"
    assert balanced(DYNAMIC) is True and balanced(f"{DYNAMIC} --no-balance-data") is False


@pytest.mark.parametrize(
    ("gpu", "flags", "environment", "wording"),
    [
        (False, "--attention-backend flash", {}, "requires Transformer Engine layers"),
        (False, "--attention-backend auto", {"NVTE_FLASH_ATTN": "0"}, None),
        (True, "--attention-backend local", {}, "requires --transformer-impl local"),
        (True, "--attention-backend local --transformer-impl local", {}, None),
        (True, "--attention-backend flash", {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "1"},
         "NVTE_FUSED_ATTN=1"),
        (True, "--attention-backend fused", {"NVTE_FUSED_ATTN": "1"}, None),
    ],
)  # fmt: skip
def test_attention_backends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    flags: str,
    environment: dict[str, str],
    wording: str | None,
) -> None:
    """What can be chosen depends on the layers. A second mistake is on the line, so that
    megatron-core need not be there for a GPU."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        Machine, "here", lambda: Machine(cuda=gpu, transformer_engine=gpu, gradient_fusion=False)
    )
    found = [
        p
        for p in problems_of(complete(tmp_path, *flags.split(), "--gamma", "2"), 1)
        if p.flag != "--gamma"
    ]
    assert [p.flag for p in found] == ([] if wording is None else ["--attention-backend"])
    assert all(wording is not None and wording in p.message for p in found)


def rows_file(folder: Path, name: str, rows: list[bytes]) -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


GOOD, OTHER = b'{"input": "1+1=", "label": "2"}', b'{"question": "1+1="}'


@pytest.mark.parametrize(
    ("rows", "may_be_bad", "keys"),
    [
        ([GOOD, OTHER], 0, {"input", "label"}),
        ([b"\xef\xbb\xbf" + GOOD], 0, {"input", "label"}),
        ([b"", b"  ", OTHER], 0, {"question"}),
        ([OTHER, GOOD], 1, {"input", "label", "question"}),
        ([OTHER, b"{", GOOD], 1, None),  # reported with its line by the pass over the whole file
        ([b"[1]"], 0, None),
        ([b""], 0, None),
        ([OTHER], 1000, None),
    ],
)
def test_keys_of_the_first_rows(tmp_path, rows, may_be_bad, keys):
    assert first_keys(rows_file(tmp_path, "a.jsonl", rows), may_be_bad) == keys


def test_keys_of_a_parquet_file_are_its_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"question": ["1+1="], "answer": ["2"]}), path)
    assert first_keys(path, 0) == {"question", "answer"}
    path.write_bytes(b"PAR1 and no more")
    assert first_keys(path, 0) is None


def test_a_job_that_continues_with_fewer_nodes_may_have_fewer_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--actor-num-nodes 2 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"

    def wording(world_size: int) -> list[str]:
        try:
            parse_args(complete(tmp_path, *words.split()), world_size)
        except ConfigError as error:
            return [str(p) for p in error.problems]
        return []

    assert any("2 x 2 processes, and 2 run" in text for text in wording(2))
    for name in ("TORCHELASTIC_MAX_RESTARTS", "MIN_NODES"):
        with monkeypatch.context() as set_here:
            set_here.setenv(name, "3")
            assert wording(2) == []
            assert any("2 x 2 processes, and 6 run" in text for text in wording(6))
            assert any("and the model needs at least 2" in text for text in wording(1))


def test_what_has_no_name_and_no_text_is_refused(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--eval-interval", "1", "--eval-prompt-data", "")
    (found,) = problems_of([*argv, str(tmp_path / "prompts.jsonl")])
    assert found.flag == "--eval-prompt-data" and "without a name" in str(found)
    (found,) = problems_of(complete(tmp_path, "--rollout-stop", "a", ""))
    assert found.flag == "--rollout-stop" and "ends no response" in str(found)
    sets = tmp_path / "sets.yaml"
    path = tmp_path / "prompts.jsonl"
    sets.write_text(f"datasets: [{{name: a, path: {path}, stop_token_ids: [-1]}}]")
    (found,) = problems_of(complete(tmp_path, "--eval-interval", "1", "--eval-config", str(sets)))
    assert found.flag == "--eval-config" and "set a: must be from 0 to 319" in str(found)

"""Rules between settings: each is broken once, alone, and names its flag, the value and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table
from arguments.flags import Flag
from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from arguments.rules.advantages import ADVANTAGE_RULES
from arguments.rules.agents import AGENT_RULES
from arguments.rules.algorithm import CORRECTION_RULES, CRITIC_RULES, LOSS_RULES
from arguments.rules.data import DISTILLATION_RULES
from arguments.rules.declared import FACTS, parts_of, unknown_names
from arguments.rules.layout import latent_attention_with_context_parallel as LATENT
from arguments.rules.moe import MOE_RULES, MOE_WARNINGS
from arguments.rules.muon import MUON_RULES, blocks_of_the_layout
from arguments.rules.profiling import PROFILING_RULES
from arguments.rules.rows import first_keys
from arguments.rules.run import RULES, WARNINGS
from arguments.rules.scheduling import SCHEDULING_RULES
from arguments.rules.sglang import SGLANG_RULES
from arguments.rules.training import LORA_RULES, OPTIMIZER_RULES, OPTIMIZER_WARNINGS
from slime_like.config import ConfigError, flag_name
from slime_like.rewards.registry import reward_of
from tests.unit.command_lines import complete, problems_of

DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
EVAL = "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl"
# without effect in supervised fine-tuning
IDLE = (
    "--entropy-coef 0.01", "--use-unbiased-kl", "--advantage-estimator rloo", "--normalize-advantages", "--kl-loss-coef 0.1", "--kl-coef 0.1",
    "--use-kl-loss", "--kl-loss-type k3", "--kl-target 0.2", "--use-rollout-logprobs", "--rollout-temperature 0.5", "--rollout-top-k 5",
    "--rm-type math", "--custom-rm-path json.dumps",
)  # fmt: skip
# name of the rule, flags that are added, flags that are left out, processes, the flag that is
# named, words of the message
CASES: list[tuple[str, str, tuple[str, ...], int, str, str]] = [
    ("model_provider", "--custom-model-provider-path json.nothing", (), 1, "--custom-model-provider-path", "has no 'nothing'"),
    ("model_provider", "--custom-model-provider-path json.dumps --advantage-estimator ppo", (), 1, "--advantage-estimator", "a critic is built as without it"),
    ("parameter_patterns", "--freeze-params-name-list ok (", (), 1, "--freeze-params-name-list", "is no regular expression"),
    ("world_is_slimes", "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --optimizer adam", (), 1, "--actor-num-gpus-per-node", "1 x 2 processes, and 1 run"),
    ("world_is_slimes", "--actor-num-gpus-per-node 2 --num-gpus-per-node 1", (), 2, "--num-gpus-per-node", "is fewer than"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1", (), 3, "--decoder-first-pipeline-num-layers", "leaves 3 of the 4 layers"),
    ("pipeline_divides_the_layers", "--decoder-last-pipeline-num-layers 1", (), 1, "--decoder-last-pipeline-num-layers", "above 1"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 1", (), 2, "--decoder-last-pipeline-num-layers", "interleaved"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-layout E|t*4L", (), 1, "--pipeline-model-parallel-layout", "above 1"),
    ("pipeline_divides_the_layers", "--account-for-loss-in-pipeline-split", (), 1, "--account-for-loss-in-pipeline-split", "above 1"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split", (), 2, "--pipeline-model-parallel-size", "5 layers, with --account"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split --decoder-last-pipeline-num-layers 1", (), 2, "--decoder-last-pipeline-num-layers", "does not go with"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL --decoder-last-pipeline-num-layers 2", (), 2, "--pipeline-model-parallel-layout", "what --decoder-last-pipeline-num-layers says"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Et|t|t|tL", (), 2, "--pipeline-model-parallel-layout", "what --num-virtual-stages-per-pipeline-rank says"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttmL", (), 2, "--pipeline-model-parallel-layout", "multi-token prediction"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|xtL", (), 2, "--pipeline-model-parallel-layout", "has 'x'"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||ttL", (), 2, "--pipeline-model-parallel-layout", "has an empty stage"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL|", (), 2, "--pipeline-model-parallel-layout", "has an empty stage"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttL", (), 2, "--pipeline-model-parallel-layout", "has 3 layers"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t|)*4L", (), 2, "--pipeline-model-parallel-layout", "has 5 stages"),
    ("world_is_divisible", "--tensor-model-parallel-size 2", (), 3, "--tensor-model-parallel-size", "does not divide the 3 processes"),
    ("world_is_divisible", "--context-parallel-size 2", (), 3, "--tensor-model-parallel-size", "--context-parallel-size 2 = 2 does not divide"),
    ("sequence_parallel_needs_tensor_parallel", "--sequence-parallel", (), 1, "--sequence-parallel", "--tensor-model-parallel-size above 1"),
    ("tensor_parallel_divides_the_network", "--tensor-model-parallel-size 4", (), 4, "--tensor-model-parallel-size", "--num-query-groups 2"),
    ("context_parallel_has_limits", "--cp-comm-type all_gather", (), 1, "--cp-comm-type", "--context-parallel-size above 1"),
    ("context_parallel_has_limits", "--context-parallel-size 2 --cp-comm-type p2p", (), 2, "--cp-comm-type", "Transformer Engine"),
    ("context_parallel_has_limits", "--context-parallel-size 2 --attention-dropout 0.1", (), 2, "--attention-dropout", "must be 0"),
    ("context_parallel_has_limits", "--context-parallel-size 2 --hidden-dropout 0.1", (), 2, "--hidden-dropout", "must be 0"),
    (
        "interleaved_flags",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        (), 2, "--num-layers-per-virtual-pipeline-stage", "excludes",
    ),
    ("interleaved_flags", "--num-virtual-stages-per-pipeline-rank 2", (), 1, "--num-virtual-stages-per-pipeline-rank", "needs --pipeline"),
    ("pipeline_divides_the_layers", "--pipeline-model-parallel-size 3", (), 3, "--pipeline-model-parallel-size", "divisor of 4"),
    (
        "pipeline_divides_the_layers", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", (), 2,
        "--num-virtual-stages-per-pipeline-rank", "2 layers of a pipeline rank",
    ),
    ("prediction_layers_are_there", "--mtp-num-layers 1", (), 1, "--mtp-num-layers", "has no layer of multi-token prediction"),
    ("checkpoint_is_needed", "", ("--hf-checkpoint",), 1, "--hf-checkpoint", "is missing"),
    ("network_is_complete", "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --position-embedding-type rope --debug-train-only "
     "--load-debug-rollout-data {folder}/{rollout_id}", ("--hf-checkpoint",), 1, "--vocab-size", "is missing"),
    ("recompute_is_complete", "--recompute-granularity full --recompute-method uniform", (), 1, "--recompute-num-layers", "is missing"),
    ("recompute_is_complete", "--recompute-granularity selective --recompute-method block", (), 1, "--recompute-method", "leave it out"),
    ("recompute_is_complete", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --recompute-modules mlp", (), 1, "--recompute-modules", "leave it out"),
    ("recompute_is_complete", "--distribute-saved-activations", (), 1, "--distribute-saved-activations", "needs --recompute-granularity full"),
    ("recompute_is_complete", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations", (), 1, "--distribute-saved-activations", "needs --tensor-model-parallel-size"),
    ("recompute_is_complete", "--recompute-modules mlp", (), 1, "--recompute-modules", "needs --recompute-granularity"),
    ("network_numbers", "--attention-dropout 1", (), 1, "--attention-dropout", "0 <= x < 1"),
    ("run_length", "", ("--num-rollout",), 1, "--num-rollout", "is missing"),
    ("declared_rules", "--num-epoch 1", (), 1, "--num-epoch", "excludes --num-rollout"),
    ("supervised_samples", "--loss-type sft_loss --n-samples-per-prompt 4", (), 1, "--n-samples-per-prompt", "must be 1"),
    ("rollout_is_divisible", "--num-steps-per-rollout 3", (), 1, "--num-steps-per-rollout", "does not divide"),
    ("rollout_is_divisible", "--global-batch-size 5", (), 1, "--global-batch-size", "does not divide"),
    ("rollout_is_divisible", "--global-batch-size 8 --num-steps-per-rollout 4", (), 1, "--num-steps-per-rollout", "contradicts"),
    ("global_batch_is_divisible", "--micro-batch-size 3", (), 1, "--rollout-batch-size", "not divisible"),
    ("global_batch_is_divisible", "--global-batch-size 2", (), 4, "--global-batch-size", "4 data-parallel ranks"),
    (
        "global_batch_is_divisible",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16 --micro-batch-size 16",
        (), 2, "--global-batch-size", "interleaved",
    ),
    (
        "log_prob_micro_batches",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --log-probs-micro-batch-size 16",
        (), 2, "--log-probs-micro-batch-size", "divisible by",
    ),
    ("token_budgets", "--use-dynamic-batch-size", (), 1, "--max-tokens-per-gpu", "is missing"),
    ("declared_rules", "--max-tokens-per-gpu 64", (), 1, "--max-tokens-per-gpu", "without --use-dynamic-batch-size"),
    ("declared_rules", "--log-probs-max-tokens-per-gpu 64", (), 1, "--log-probs-max-tokens-per-gpu", "without --use-dynamic-batch-size"),
    ("token_budgets", f"{DYNAMIC} --micro-batch-size 1", (), 1, "--micro-batch-size", "contradicts --use-dynamic-batch-size"),
    ("token_budgets", f"{DYNAMIC} --log-probs-micro-batch-size 2", (), 1, "--log-probs-micro-batch-size", "fills by tokens"),
    ("token_budgets", f"{DYNAMIC} --loss-reduction token_mean_legacy", (), 1, "--loss-reduction", "use token_mean"),
    ("every_rank_gets_a_sample", f"{DYNAMIC} --global-batch-size 2", (), 4, "--global-batch-size", "fewer than the 4 data-parallel ranks"),
    ("declared_rules", f"{DYNAMIC} --qkv-format bshd", (), 1, "--qkv-format", "excludes --use-dynamic-batch-size"),
    ("sequences_fit", "--rollout-max-response-len 512", (), 1, "--rollout-max-response-len", "512 positions"),
    ("sequences_fit", f"{EVAL} --eval-max-response-len 512", (), 1, "--eval-max-response-len", "512 positions"),
    ("sequences_fit", f"{EVAL} --loss-type sft_loss --rm-type math --rollout-max-response-len 600", (), 1, "--rollout-max-response-len", "512"),
    ("declared_rules", "--renormalize-sampled-log-probs", (), 1, "--renormalize-sampled-log-probs", "--rollout-top-p below 1"),
    (
        "declared_rules", "--renormalize-sampled-log-probs --loss-type sft_loss", (), 1, "--renormalize-sampled-log-probs",
        "--loss-type sft_loss",
    ),
    ("kl_in_one_place", "--kl-coef 0.1 --kl-loss-coef 0.1 --use-kl-loss --ref-load {folder}/hf", (), 1, "--kl-coef", "choose one"),
    ("declared_rules", "--kl-loss-coef 0.1", (), 1, "--kl-loss-coef", "without --use-kl-loss"),
    ("declared_rules", "--use-unbiased-kl", (), 1, "--use-unbiased-kl", "without --use-kl-loss"),
    ("declared_rules", "--kl-coef 0.1 --ref-load {folder}/hf --use-unbiased-kl", (), 1, "--use-unbiased-kl", "without --use-kl-loss"),
    ("declared_rules", "--kl-loss-type k3", (), 1, "--kl-loss-type", "without --use-kl-loss or --kl-coef"),
    ("kl_needs_a_reference", "--use-kl-loss", (), 1, "--ref-load", "--use-kl-loss needs a reference"),
    ("kl_needs_a_reference", "--kl-coef 0.1", (), 1, "--ref-load", "--kl-coef needs a reference"),
    ("declared_rules", "--ref-offload", (), 1, "--ref-offload", "without --ref-load"),
    ("reduction_fits_the_loss", "--policy-loss-type gmpo --loss-reduction token_mean", (), 1, "--loss-reduction", "needs rollout_mean or"),
    ("declared_rules", "--loss-reduction seq_mean_token_sum_norm", (), 1, "--loss-norm-length", "is missing"),
    ("declared_rules", "--loss-norm-length 8", (), 1, "--loss-norm-length", "goes with"),
    ("supervised_loss", "--loss-type sft_loss", ("--label-key",), 1, "--label-key", "is missing"),
    ("supervised_loss", "--loss-type sft_loss --policy-loss-type sapo", (), 1, "--policy-loss-type", "leave it out"),
    *[("idle_in_supervised_training", f"--loss-type sft_loss {flag}", (), 1, flag.split()[0], "has no effect with") for flag in IDLE],
    ("cross_entropy_is_supervised", "--policy-loss-type cross_entropy", (), 1, "--policy-loss-type", "use --loss-type sft_loss"),
    ("cross_entropy_is_supervised", "--policy-loss sft", (), 1, "--policy-loss-type", "use --loss-type sft_loss"),
    ("learning_rate", "", ("--lr",), 1, "--lr", "is missing"),
    ("learning_rate", "--lr 0", (), 1, "--lr", "must be > 0"),
    ("learning_rate", "--min-lr 1", (), 1, "--min-lr", "between 0 and --lr"),
    ("optimizer_numbers", "--adam-beta1 1", (), 1, "--adam-beta1", "0 <= x < 1"),
    ("optimizer_numbers", "--weight-decay -0.1", (), 1, "--weight-decay", ">= 0"),
    ("declared_rules", "--lr-warmup-iters 1 --lr-warmup-fraction 0.1", (), 1, "--lr-warmup-fraction", "excludes"),
    ("warmup", "--lr-warmup-iters 5 --lr-decay-iters 5", (), 1, "--lr-warmup-iters", "below --lr-decay-iters 5"),
    ("declared_rules", "--lr-decay-style WSD", (), 1, "--lr-wsd-decay-iters", "is missing"),
    ("declared_rules", "--weight-decay-incr-style linear --end-weight-decay 0.1", (), 1, "--start-weight-decay", "--weight-decay-incr-style linear"),
    ("declared_rules", "--start-weight-decay 0.1", (), 1, "--start-weight-decay", "--weight-decay-incr-style"),
    ("declared_rules", "--overlap-param-gather --use-distributed-optimizer", (), 1, "--overlap-param-gather", "without --overlap-grad-reduce"),
    ("prompts", "", ("--prompt-data",), 1, "--prompt-data", "is missing"),
    ("prompts", "--prompt-data {folder}/none.jsonl@[0:3]", (), 1, "--prompt-data", "no such file"),
    ("prompts", "--prompt-data {folder}", (), 1, "--prompt-data", "is a folder"),
    ("keys_of_rows", "--input-key question", (), 1, "--input-key", "prompts.jsonl, which has 'input', 'label'"),
    ("keys_of_rows", "--label-key answer --prompt-data {folder}/prompts.jsonl@[0:1]", (), 1, "--label-key", "is no key of"),
    ("keys_of_rows", f"{EVAL} --eval-label-key answer", (), 1, "--eval-prompt-data", "set a: 'answer' is no key of"),
    ("reward_is_chosen", "", ("--rm-type",), 1, "--rm-type", "is missing"),
    ("reward_is_chosen", "", ("--label-key",), 1, "--label-key", "is missing"),
    ("reward_is_chosen", f"{EVAL} --loss-type sft_loss", (), 1, "--rm-type", "is missing"),
    ("reward_is_usable", f"{EVAL} --loss-type sft_loss --custom-rm-path json.nothing", (), 1, "--custom-rm-path", "nothing"),
    ("reward_is_usable", "--custom-rm-path json.dumps", (), 1, "--rm-type", "excludes --custom-rm-path"),
    ("reward_is_usable", "--custom-rm-path json.nothing", ("--rm-type",), 1, "--custom-rm-path", "nothing"),
    ("evaluation", "--eval-interval 2", (), 1, "--eval-interval", "needs --eval-prompt-data"),
    ("evaluation", "--eval-prompt-data a {folder}/prompts.jsonl", (), 1, "--eval-interval", "is missing"),
    ("evaluation", "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl b {folder}/prompts.jsonl a {folder}/prompts.jsonl", (), 1,
     "--eval-prompt-data", "names a set twice"),
    ("evaluation", "--eval-interval 2 --eval-prompt-data a", (), 1, "--eval-prompt-data", "pairs"),
    ("evaluation", "--eval-interval 2 --eval-prompt-data a {folder}/none.jsonl", (), 1, "--eval-prompt-data", "no such file"),
    ("folders", "--ref-load {folder}/none", (), 1, "--ref-load", "no such folder"),
    ("folders", "--load {folder}/none", (), 1, "--load", "no such folder"),
    ("folders", "--ref-load {folder}", (), 1, "--ref-load", "neither a Hugging Face model"),
    ("declared_rules", "--ref-ckpt-step 2", (), 1, "--ref-ckpt-step", "without --ref-load"),
    ("declared_rules", "--save-interval 2", (), 1, "--save-interval", "without --save"),
    ("declared_rules", "--finetune", (), 1, "--finetune", "without --load"),
    ("saving", "--save-hf {folder}/out --debug-train-only --load-debug-rollout-data {folder}/{rollout_id} --num-layers 2 --hidden-size 8 "
     "--num-attention-heads 2 --position-embedding-type rope --vocab-size 9", ("--hf-checkpoint",), 1, "--save-hf", "needs --hf-checkpoint"),
    ("checkpoint_step", "--load {folder}/hf --ckpt-step 3", (), 1, "--ckpt-step", "complete steps there: none"),
    ("sgd_has_no_checkpoints", "--optimizer sgd --save {folder}/out", (), 1, "--save", "add --no-save-optim"),
    ("sgd_has_no_checkpoints", "--optimizer sgd --load {folder}/hf", (), 1, "--load", "--no-load-optim"),
    ("sgd_has_no_checkpoints", "--optimizer sgd --use-distributed-optimizer", (), 1, "--use-distributed-optimizer", "--optimizer sgd"),
    ("output_folders", "--save {folder}/prompts.jsonl", (), 1, "--save", "is a file"),
    ("output_folders", "--output-dir {folder}/prompts.jsonl", (), 1, "--output-dir", "is a file"),
    ("output_folders", "--save-hf {folder}/prompts.jsonl/a/{rollout_id}", (), 1, "--save-hf", "prompts.jsonl is a file"),
    ("output_folders", "--tensorboard-dir {folder}/prompts.jsonl/a", (), 1, "--tensorboard-dir", "prompts.jsonl is a file"),
    ("each_rollout_has_its_file", "--save-debug-rollout-data {folder}/rollout", (), 1, "--save-debug-rollout-data", "needs {rollout_id}"),
    ("each_rollout_has_its_file", "--save-debug-rollout-data {folder}/rollout --num-epoch 1", ("--num-rollout",), 1,
     "--save-debug-rollout-data", "needs {rollout_id}"),
    ("debugging", "--debug-train-only", (), 1, "--load-debug-rollout-data", "is missing"),
    ("debugging", "--debug-rollout-only --load-debug-rollout-data {folder}/{rollout_id}", (), 1, "--load-debug-rollout-data", "--debug-rollout-only"),
    ("debugging", "--debug-rollout-only --debug-train-only --load-debug-rollout-data {folder}/{rollout_id}", (), 1, "--debug-rollout-only", "--debug-train-only"),
    ("only_the_server_has_these", "--port 8000", (), 1, "--port", "python -m slime_like.tinker"),
    ("debug_files", "--load-debug-rollout-data {folder}/none", (), 1, "--load-debug-rollout-data", "no such file"),
]  # fmt: skip
NEEDS_A_DEVICE = {
    "backend_is_there",
    "transformer_engine_is_there",
    "local_layers_have_limits",
    "attention_backend_is_there",
}
# Those of validate_algorithm.py: test_arguments_off_policy.py and test_arguments_advantages.py; of
# validate_critic.py: test_arguments_critic.py; of validate_moe.py: test_arguments_moe.py; of
# validate_scheduling.py: test_arguments_rollouts.py; of validate_lora.py: test_arguments_lora.py;
# of validate_sglang.py: test_arguments_sglang.py; of profiling.py: test_throughput.py.
ELSEWHERE = {
    rule.__name__
    for rules in (
        CORRECTION_RULES,
        ADVANTAGE_RULES,
        AGENT_RULES,
        CRITIC_RULES,
        LORA_RULES,
        DISTILLATION_RULES,
        LOSS_RULES,
        MOE_RULES,
        MUON_RULES,
        OPTIMIZER_RULES,
        PROFILING_RULES,
        SCHEDULING_RULES,
        SGLANG_RULES,
    )
    for rule in rules
}
ELSEWHERE |= {  # test_arguments_pairs.py
    "noise_of_labels",
    "pairs_are_supervised",
    "pairs_are_whole",
    "reward_models_have_no_vocabulary",
}
ELSEWHERE |= {"critic_layout_is_possible"}  # test_arguments_critic_layout.py
ELSEWHERE |= {"delta_nets_share_their_groups"}  # test_arguments_delta_nets.py
ELSEWHERE |= {"stages_begin_with_an_indexer"}  # test_arguments_sparse.py


@pytest.mark.parametrize(
    ("rule", "flags", "without", "world_size", "flag", "said"),
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
    said: str,
) -> None:
    words = [word.replace("{folder}", str(tmp_path)) for word in flags.split()]
    found = problems_of(complete(tmp_path, *words, without=without), world_size)
    named = [p for p in found if p.flag == flag and said in str(p)]
    assert named, "\n".join(map(str, found))
    others = {p.flag for p in found} - {flag}
    assert not others or "debugging" in rule, "one mistake is told once"


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
    if flag.dest == "lora_target_modules":
        return "q_proj"
    if flag.choices:
        return str(next(c for c in flag.choices if c != flag.default))
    if flag.item is str:
        return "{folder}/hf"
    numbers = (1, 2, 0.5, 3)
    return str(next(n for n in numbers if n != flag.default and isinstance(n, flag.item)
                    and (flag.legal is None or flag.legal.holds(n))))  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "kind", "condition"), DECLARED, ids=[f"{f.name} {k} {c}" for f, k, c in DECLARED]
)
def test_every_declaration_is_checked(
    tmp_path: Path, flag: Flag, kind: str, condition: str
) -> None:
    """Broken on a command line, it names both flags."""
    name, sign, wanted = parts_of(condition.split("|")[0])
    words = [flag.name] + ([value_for(flag)] if flag.kind != "switch" else [])
    if kind == "excludes":
        other = flag_table().by_dest[name]
        words += [other.on[0]]
        if other.kind != "switch":
            words.append(wanted if sign else value_for(other))
        if flag.dest.startswith("opd_"):
            words.append("--use-opd")
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    given = [] if name != "num_rollout" else ["--num-rollout"]
    found = problems_of(complete(tmp_path, *words, without=tuple(given)), 1)
    told = [p for p in found if p.flag in (flag.name, flag_name(flag.dest))]
    expected = FACTS[name][1] if name in FACTS else flag_name(name)
    assert any(expected in p.message for p in told), "\n".join(map(str, found))


def test_every_rule_is_broken_somewhere() -> None:
    tested = {case[0] for case in CASES} | NEEDS_A_DEVICE | ELSEWHERE
    assert {rule.__name__ for rule in RULES} == tested


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--policy-loss-type sapo --loss-reduction token_mean --num-steps-per-rollout 2",
            "is meant for --loss-reduction",
        ),
        (
            "--use-kl-loss --ref-load {folder}/hf --kl-loss-type k1 --num-steps-per-rollout 2",
            "only noise",
        ),
        ("--n-samples-per-prompt 1 --num-steps-per-rollout 2", "every advantage is 0"),
        (
            "--lora-rank 4 --overlap-grad-reduce --use-distributed-optimizer --num-steps-per-rollout 2",
            "adapters are exchanged at once",
        ),
        ("--num-steps-per-rollout 1", "every ratio is 1"),
        ("--policy-loss-type gspo --eps-clip 0.2 --num-steps-per-rollout 2", "never acts"),
        (
            "--policy-loss-type gmpo --advantage-estimator reinforce_plus_plus --normalize-advantages --num-steps-per-rollout 2",
            "each token its own",
        ),
        ("--advantage-estimator gdpo --num-steps-per-rollout 2", "has one reward to compare"),
        ("--rm-type zero --num-steps-per-rollout 2", "nothing to learn from"),
        ("--rollout-top-p 0.9 --num-steps-per-rollout 2", "truncates what is sampled"),
        (
            "--geo-mask-low 0.9 --num-steps-per-rollout 2",
            "has no effect without --sequence-mask-metric geometric",
        ),
        (
            "--gamma 0.9 --num-steps-per-rollout 2",
            "--gamma has no effect with --advantage-estimator grpo",
        ),
        (
            "--policy-loss-type sapo --advantage-estimator ppo --num-steps-per-rollout 2",
            "takes its baseline from a critic",
        ),
        (
            "--policy-loss-type sapo --advantage-estimator reinforce++ --normalize-advantages --num-steps-per-rollout 2",
            "has no group",
        ),
    ],
)
def test_warnings(tmp_path: Path, flags: str, said: str) -> None:
    words = [word.replace("{folder}", str(tmp_path)) for word in flags.split()]
    warnings = parse_args(complete(tmp_path, *words), 1).warnings
    assert len(warnings) == 1 and said in warnings[0]
    assert (
        len(set(WARNINGS) - {*MOE_WARNINGS, *OPTIMIZER_WARNINGS, LATENT, blocks_of_the_layout})
        == 12
    ), "a new warning has a case here"


@pytest.mark.parametrize(
    "flags",
    [
        "--use-kl-loss --kl-loss-coef 0.1 --ref-load {folder}/hf",
        "--kl-coef 0.1 --ref-load {folder}/hf",
        "--prompt-data reasoning_gym:chain_sum?size=4 --rm-type task",
        "--eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl@[0:1] b {folder}/prompts.jsonl",
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
        "--loss-type sft_loss --rm-type math --rollout-temperature 0.5 --eval-interval 2 --eval-prompt-data a {folder}/prompts.jsonl",
        "--loss-type sft_loss --eval-interval 2 --eval-prompt-data a reasoning_gym:chain_sum?size=4",
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


def test_a_task_source_scores_itself_unless_a_reward_is_chosen(tmp_path: Path) -> None:
    source = ("--prompt-data", "reasoning_gym:spell_backward?size=4")
    left_out = ("--prompt-data", "--label-key", "--rm-type")
    assert parse_args(complete(tmp_path, *source, without=left_out), 1).reward.rm_type is None
    assert (
        reward_of(None, {"task": {"name": "spell_backward", "options": {}}, "entry": {}}) == "task"
    )
    file = ("--eval-interval", "2", "--eval-prompt-data", "a", f"{tmp_path}/prompts.jsonl")
    (found,) = problems_of(complete(tmp_path, *source, *file, without=left_out), 1)
    assert found.flag == "--rm-type", "a file beside it has no scorer"
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
    assert found.flag == "--ckpt-step" and found.message.endswith("complete steps there: 2, 4")


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
    ("gpu", "flags", "environment", "said"),
    [
        (False, "--attention-backend flash", {}, "needs Transformer Engine layers"),
        (False, "--attention-backend auto", {"NVTE_FLASH_ATTN": "0"}, None),
        (True, "--attention-backend local", {}, "attention of layers without Transformer Engine"),
        (True, "--attention-backend local --transformer-impl local", {}, None),
        (
            True,
            "--attention-backend flash",
            {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "1"},
            "environment's NVTE_FUSED_ATTN=1",
        ),
        (True, "--attention-backend fused", {"NVTE_FUSED_ATTN": "1"}, None),
    ],
)
def test_attention_backends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    flags: str,
    environment: dict[str, str],
    said: str | None,
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
    assert [p.flag for p in found] == ([] if said is None else ["--attention-backend"])
    assert all(said is not None and said in p.message for p in found)


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
        ([OTHER, b"{", GOOD], 1, None),  # told with its line by the pass over the whole file
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


def test_a_job_that_goes_on_with_fewer_nodes_may_have_fewer_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--actor-num-nodes 2 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"

    def said(world_size: int) -> list[str]:
        try:
            parse_args(complete(tmp_path, *words.split()), world_size)
        except ConfigError as error:
            return [str(p) for p in error.problems]
        return []

    assert any("2 x 2 processes, and 2 run" in text for text in said(2))
    for name in ("TORCHELASTIC_MAX_RESTARTS", "MIN_NODES"):
        with monkeypatch.context() as set_here:
            set_here.setenv(name, "3")
            assert said(2) == []
            assert any("2 x 2 processes, and 6 run" in text for text in said(6))
            assert any("and the model needs 2 at least" in text for text in said(1))

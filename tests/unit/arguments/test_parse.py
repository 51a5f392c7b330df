"""parse_args: a command line -> RunConfig, without a process group."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_like
from arguments import parse
from arguments.megatron_configs import Build, Machine, _fusions, resolve_transformer_impl
from arguments.parse import parse_args, parse_or_exit
from arguments.parser import HelpRequested
from arguments.schema import ModelConfig, ParallelConfig
from slime_like.config import ConfigError
from slime_like.losses.sapo import SAPOConfig
from tests.unit.command_lines import complete, problems_of, write_files


def test_a_complete_command_line(tmp_path: Path) -> None:
    argv = complete(
        tmp_path,
        "--policy-loss-type",
        "sapo",
        "--sapo-tau-pos",
        "1.5",
        "--num-steps-per-rollout",
        "2",
    )
    config = parse_args(argv, 2)
    assert config.argv == tuple(argv)
    assert config.policy_loss == SAPOConfig(sapo_tau_pos=1.5)
    assert (
        config.algorithm.policy_loss_type == "sapo"
        and config.algorithm.loss_reduction == "rollout_mean"
    )
    assert (config.algorithm.global_batch_size, config.algorithm.num_steps_per_rollout) == (8, 2)
    assert (config.world_size, config.data_parallel_size, config.virtual_stages) == (2, 2, None)
    assert (
        config.gpt.vocab_size,
        config.gpt.position_embedding_type,
        config.gpt.max_position_embeddings,
    ) == (320, "rope", 512)
    assert config.model.transformer_impl in ("local", "transformer_engine")
    assert config.warnings == ()


def test_megatron_configs_come_from_the_checkpoint(tmp_path: Path) -> None:
    transformer = parse_args(complete(tmp_path), 1).megatron.transformer
    assert (transformer.num_layers, transformer.hidden_size, transformer.ffn_hidden_size) == (
        4,
        64,
        128,
    )
    assert (
        transformer.num_attention_heads,
        transformer.num_query_groups,
        transformer.kv_channels,
    ) == (4, 2, 16)
    assert transformer.activation_func is torch.nn.functional.silu and transformer.gated_linear_unit
    assert transformer.normalization == "RMSNorm" and transformer.layernorm_epsilon == 1e-6
    assert transformer.add_qkv_bias and not transformer.add_bias_linear
    assert (transformer.hidden_dropout, transformer.attention_dropout) == (0.0, 0.0)
    assert not transformer.calculate_per_token_loss and not transformer.barrier_with_L1_time
    assert transformer.deallocate_pipeline_outputs and not transformer.variable_seq_lengths


def test_optimizer_and_data_parallelism(tmp_path: Path) -> None:
    flags = [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--weight-decay",
        "0.1",
        "--adam-beta2",
        "0.98",
        "--clip-grad",
        "0.5",
    ]
    megatron = parse_args(complete(tmp_path, *flags), 1).megatron
    assert (megatron.optimizer.lr, megatron.optimizer.min_lr, megatron.optimizer.weight_decay) == (
        1e-5,
        0.0,
        0.1,
    )
    assert (
        megatron.optimizer.adam_beta2,
        megatron.optimizer.clip_grad,
        megatron.optimizer.optimizer,
    ) == (0.98, 0.5, "adam")
    assert (
        megatron.optimizer.use_distributed_optimizer
        and megatron.ddp.use_distributed_optimizer
        and megatron.ddp.overlap_grad_reduce
    )
    assert not megatron.ddp.check_for_nan_in_grad, "a non-finite gradient is counted, not raised"


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), (None, torch.float32)])
def test_precision_is_the_same_everywhere(
    tmp_path: Path, flag: str | None, dtype: torch.dtype
) -> None:
    megatron = parse_args(complete(tmp_path, *([flag] if flag else [])), 1).megatron
    transformer, optimizer = megatron.transformer, megatron.optimizer
    assert transformer.params_dtype == transformer.pipeline_dtype == optimizer.params_dtype == dtype
    assert transformer.bf16 == optimizer.bf16 == (dtype == torch.bfloat16)
    assert not transformer.fp16 and not optimizer.fp16
    assert megatron.ddp.grad_reduce_in_fp32 == (dtype == torch.bfloat16)


def test_layout(tmp_path: Path) -> None:
    argv = complete(
        tmp_path,
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--pipeline-model-parallel-size",
        "2",
    )
    config = parse_args(
        [*argv, "--num-layers-per-virtual-pipeline-stage", "1", "--distributed-backend", "gloo"], 4
    )
    transformer = config.megatron.transformer
    assert (transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size) == (
        2,
        2,
    )
    assert transformer.virtual_pipeline_model_parallel_size == config.virtual_stages == 2
    assert (
        transformer.sequence_parallel
        and not transformer.variable_seq_lengths
        and transformer.moe_token_dispatcher_type == "alltoall"
    )
    assert not transformer.batch_p2p_comm and not transformer.overlap_p2p_comm
    assert config.data_parallel_size == 1


MODEL_ARGS = [
    "--swiglu",
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--ffn-hidden-size",
    "128",
    "--num-attention-heads",
    "4",
    "--use-rotary-position-embeddings",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--normalization",
    "RMSNorm",
    "--norm-epsilon",
    "1e-6",
    "--rotary-base",
    "10000",
    "--group-query-attention",
    "--num-query-groups",
    "2",
    "--vocab-size",
    "320",
]


def test_flags_that_agree_with_the_checkpoint(tmp_path: Path) -> None:
    with_flags, without = (
        parse_args(complete(tmp_path, *MODEL_ARGS), 1),
        parse_args(complete(tmp_path), 1),
    )
    assert with_flags.gpt == without.gpt

    def plain(config: Any) -> dict[str, Any]:
        return {k: v for k, v in vars(config).items() if not callable(v)}

    assert plain(with_flags.megatron.transformer) == plain(without.megatron.transformer)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num-layers", "3"], "--num-layers (given: 3): conflicts with --hf-checkpoint's 4"),
        (["--norm-epsilon", "1e-5"],
         "--norm-epsilon (given: 1e-05): conflicts with --hf-checkpoint's 1e-06"),
        (["--rotary-base", "500"],
         "--rotary-base (given: 500.0): conflicts with --hf-checkpoint's 10000.0"),
        (["--squared-relu"], "--squared-relu: conflicts with --hf-checkpoint's gated silu"),
        (["--qk-layernorm"],
         "--qk-layernorm (given: True): conflicts with --hf-checkpoint's False"),
        (["--add-bias-linear"],
         "--add-bias-linear (given: True): conflicts with --hf-checkpoint's False"),
        (["--untie-embeddings-and-output-weights"],
         "(given: True): conflicts with --hf-checkpoint's False"),
        (["--vocab-size", "321"],
         "--vocab-size (given: 321): conflicts with --hf-checkpoint's 320"),
    ],
)  # fmt: skip
def test_flags_that_disagree_with_the_checkpoint(
    tmp_path: Path, argv: list[str], expected: str
) -> None:
    found = problems_of(complete(tmp_path, *argv))
    assert len(found) == 1 and expected in str(found[0])


def test_dropout_is_not_a_matter_of_the_checkpoint(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--attention-dropout", "0.1")
    write_files(tmp_path, attention_dropout=0.2)
    assert parse_args(argv, 1).megatron.transformer.attention_dropout == 0.1


def test_groups_of_every_head_contradict_group_query_attention(tmp_path: Path) -> None:
    argv = complete(tmp_path, "--group-query-attention")
    write_files(tmp_path, num_key_value_heads=4)
    assert [p.flag for p in problems_of(argv)] == ["--group-query-attention"]


def test_the_reference_has_the_shape_of_the_policy(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ref = write_files(other, num_hidden_layers=2)["hf"]
    found = problems_of(complete(tmp_path, "--use-kl-loss", "--ref-load", ref))
    assert [p.flag for p in found] == ["--ref-load"] and "num_layers 2 (expected: 4)" in found[
        0
    ].message
    write_files(other)
    parse_args(complete(tmp_path, "--use-kl-loss", "--ref-load", ref), 1)
    write_files(other, hidden_act="gelu")
    assert [
        p.flag for p in problems_of(complete(tmp_path, "--use-kl-loss", "--ref-load", ref))
    ] == ["--ref-load"]


@pytest.mark.parametrize(
    ("cuda", "engine", "impl", "fused", "rope"),
    [
        (False, False, "local", False, False),
        (True, False, "local", False, False),
        (True, True, "transformer_engine", True, True),
    ],
)
def test_defaults_follow_the_machine(
    cuda: bool, engine: bool, impl: str, fused: bool, rope: bool
) -> None:
    machine = Machine(cuda=cuda, transformer_engine=engine, gradient_fusion=False)
    values = {"activation_func": "silu", "gated_linear_unit": True}
    build = Build(values, ParallelConfig(), None, impl, cuda, machine)
    assert resolve_transformer_impl(ModelConfig(), machine) == impl
    fusions = _fusions(build)
    assert fusions["bias_activation_fusion"] == fusions["bias_dropout_fusion"] == fused
    assert fusions["apply_rope_fusion"] == rope and not fusions["gradient_accumulation_fusion"]


@pytest.mark.parametrize(("activation", "fused"), [("silu", False), ("quick_gelu", True)])
def test_a_fused_activation_is_clamped(activation: str, fused: bool) -> None:
    """megatron-core's fused SwiGLU ignores the limit, its fused quick GELU does not."""
    values = {"activation_func": activation, "gated_linear_unit": True}
    machine = Machine(cuda=True, transformer_engine=True, gradient_fusion=False)
    for limit, expected in ((7.0, fused), (None, True)):
        given = {**values, "activation_func_clamp_value": limit}
        build = Build(given, ParallelConfig(), None, "transformer_engine", True, machine)
        assert _fusions(build)["bias_activation_fusion"] == expected


def without_checkpoint(folder: Path, *more: str) -> list[str]:
    return complete(
        folder,
        "--debug-train-only",
        "--load-debug-rollout-data",
        str(folder / "{rollout_id}"),
        *more,
        without=("--hf-checkpoint",),
    )


def test_a_network_of_flags_alone(tmp_path: Path) -> None:
    config = parse_args(without_checkpoint(tmp_path, *MODEL_ARGS), 1)
    assert (
        config.megatron.transformer.num_layers,
        config.megatron.transformer.num_query_groups,
    ) == (4, 2)
    assert (config.gpt.vocab_size, config.gpt.rotary_base) == (320, 10000.0)


def test_each_missing_flag_of_a_network_is_named(tmp_path: Path) -> None:
    found = problems_of(without_checkpoint(tmp_path))
    missing = [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--vocab-size",
        "--position-embedding-type",
    ]
    assert [p.flag for p in found] == missing


def test_group_query_attention_without_groups_is_one_group(tmp_path: Path) -> None:
    argv = [word for word in MODEL_ARGS if word not in ("--num-query-groups", "2")]
    config = parse_args(without_checkpoint(tmp_path, *argv), 1)
    assert config.megatron.transformer.num_query_groups == 1


def test_what_megatron_core_refuses_is_a_problem_with_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What none of our rules has foreseen."""
    from megatron.core.transformer import TransformerConfig

    def refuse(self: TransformerConfig) -> None:
        raise ValueError(f"hidden_dropout: {self.hidden_dropout} is out of fashion")

    monkeypatch.setattr(TransformerConfig, "__post_init__", refuse)
    (found,) = problems_of(complete(tmp_path, "--hidden-dropout", "0.25"), 1)
    assert (found.flag, found.value) == ("--hidden-dropout", 0.25)
    assert found.message == "rejected by megatron-core: hidden_dropout: 0.25 is out of fashion"


def test_aliases_of_losses_bring_their_defaults(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, "--policy-loss-type", "dual_clip"), 1)
    assert config.algorithm.policy_loss_type == "ppo" and config.policy_loss.eps_clip_c == 3.0
    config = parse_args(
        complete(tmp_path, "--policy-loss-type", "dual_clip", "--eps-clip-c", "2"), 1
    )
    assert config.policy_loss.eps_clip_c == 2.0


def test_settings_of_another_loss_are_reported(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, "--policy-loss-type", "sapo", "--eps-clip", "0.2"), 1)
    assert any("--eps-clip has no effect" in words for words in config.warnings)


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, "--loss-type", "sft_loss"), 1)
    assert config.rollout.n_samples_per_prompt == 1 and config.algorithm.global_batch_size == 4
    assert (
        config.algorithm.loss_reduction == "token_mean"
        and config.algorithm.policy_loss_type == "cross_entropy"
    )


def test_the_command_line_wins_over_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\npolicy_loss_type: sapo\nsapo_tau_neg: 1.5\n")
    argv = complete(tmp_path, "--config", str(file), "--sapo-tau-neg", "2")
    config = parse_args(argv, 1)
    assert config.megatron.optimizer.lr == 1e-5 and config.policy_loss == SAPOConfig(
        sapo_tau_neg=2.0
    )


@pytest.mark.parametrize(
    ("in_the_file", "without", "on_the_line"),
    [
        ("num_epoch: 3", (), ""),
        ("num_rollout: 3", ("--num-rollout",), "--num-epoch 1"),
        ("num_steps_per_rollout: 4", (), "--global-batch-size 8"),
        ("global_batch_size: 8", (), "--num-steps-per-rollout 4"),
        ("num_layers_per_virtual_pipeline_stage: 1", (),
         "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        ("num_virtual_stages_per_pipeline_rank: 2", (),
         "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        ("lr_warmup_iters: 1", (), "--lr-warmup-fraction 0.1"),
        ("lr_warmup_fraction: 0.1", (), "--lr-warmup-iters 1"),
        ("custom_rm_path: json.dumps", (), ""),
        ("rm_type: gsm8k", ("--rm-type",), "--custom-rm-path json.dumps"),
        ("custom_loss_function_path: json.dumps", (), "--policy-loss-type sapo"),
    ],
)  # fmt: skip
def test_the_command_line_replaces_an_exclusive_partner(
    tmp_path: Path, in_the_file: str, without: tuple[str, ...], on_the_line: str
) -> None:
    file = tmp_path / "run.yaml"
    argv = complete(tmp_path, *on_the_line.split(), without=without)
    file.write_text("")
    alone = parse_args([*argv, "--config", str(file)], 2)
    file.write_text(in_the_file + "\n")
    both = parse_args([*argv, "--config", str(file)], 2)
    for name in ("rollout", "algorithm", "parallel", "schedule", "reward", "policy_loss"):
        assert getattr(both, name) == getattr(alone, name)


def test_a_run_file_contradicts_itself(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr_warmup_iters: 3\nlr_warmup_fraction: 0.5\n")
    (found,) = problems_of(complete(tmp_path, "--config", str(file)))
    assert found.flag.startswith("--lr-warmup-")


def test_problems_of_run_file_command_line_and_rules_come_together(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("polcy_loss_type: sapo\n")
    found = problems_of(
        complete(
            tmp_path,
            "--config",
            str(file),
            "--release-train",
            "--kl-loss-coef",
            "0.1",
            "--num-layers",
            "7",
        )
    )
    assert [p.flag for p in found] == [
        f"{file}, line 1: polcy_loss_type",
        "--release-train",
        "--num-layers",
        "--kl-loss-coef",
    ]


def test_a_value_that_cannot_be_read_is_reported_once(tmp_path: Path) -> None:
    assert [p.flag for p in problems_of(complete(tmp_path, "--lr", "fast"))] == ["--lr"]
    assert [p.flag for p in problems_of(complete(tmp_path, "--num-rollout", "many"))] == [
        "--num-rollout"
    ]


def test_a_bad_checkpoint_is_reported_with_the_rest(tmp_path: Path) -> None:
    found = problems_of(complete(tmp_path, "--hf-checkpoint", str(tmp_path / "none"), "--bogus"))
    assert [p.flag for p in found] == ["--bogus", "--hf-checkpoint"]


def test_help_and_version() -> None:
    with pytest.raises(HelpRequested) as everything:
        parse_args(["--help"], 1)
    for flag in (
        "--policy-loss-type",
        "--sapo-tau-pos",
        "--num-layers",
        "--disable-bias-linear",
        "--config",
    ):
        assert flag in str(everything.value)
    with pytest.raises(HelpRequested) as part:
        parse_args(["--lr", "x", "--help", "sapo"], 1)
    assert "--sapo-tau-pos" in str(part.value) and "--num-layers" not in str(part.value)
    assert "default: 1.05" in str(part.value) and "legal: > 0" in str(part.value)
    with pytest.raises(HelpRequested, match=slime_like.__version__):
        parse_args(["--version"], 1)
    with pytest.raises(HelpRequested, match="did you mean --policy-loss-type"):
        parse_args(["--help", "polcy-loss-type"], 1)


def test_each_program_shows_the_flags_that_it_takes(tmp_path: Path) -> None:
    shown = {}
    for name, program in (("train", parse.TRAIN), ("server", parse.SERVER)):
        with pytest.raises(HelpRequested) as wanted:
            parse_args(["--help"], 1, program)
        shown[name] = str(wanted.value)
    assert (
        shown["train"].startswith("usage: python train.py")
        and "  --max-models " not in shown["train"]
        and "  --lr " in shown["train"]
    )
    assert (
        shown["server"].startswith("usage: python -m slime_like.tinker")
        and "  --max-models " in shown["server"]
    )
    for flag in ("--lr", "--prompt-data", "--sapo-tau-pos", "--ref-load"):
        assert f"  {flag} " not in shown["server"]
        with pytest.raises(ConfigError, match=f"{flag}\\b.*(flag of train.py|set by the client)"):
            parse_args(["--hf-checkpoint", str(tmp_path), flag, "1"], 1, parse.SERVER)


def test_only_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parse, "_WAIT_FOR_RANK_0_S", 0.05)
    with pytest.raises(SystemExit) as first:
        parse_or_exit(["--bogus"], 2, 0)
    printed = capsys.readouterr()
    assert first.value.code == 2 and printed.err.count("--bogus") == 1 and printed.out == ""
    start = time.monotonic()
    with pytest.raises(SystemExit) as second:
        parse_or_exit(["--bogus"], 2, 1)
    assert second.value.code == 2 and capsys.readouterr().err == ""
    assert time.monotonic() - start >= 0.05, "rank 0 gets time to print before torchrun ends it"
    with pytest.raises(SystemExit) as helped:
        parse_or_exit(["--help"], 1, 0)
    assert helped.value.code == 0 and "--policy-loss-type" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ("", 4096),
        ("--micro-batch-size 1", None),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 99", 99),
        ("--log-probs-micro-batch-size 2", None),
        ("--qkv-format bshd", None),
        ("--loss-reduction token_mean_legacy", None),
        ("--pipeline-model-parallel-size 2", None),
    ],
)
def test_micro_batches_are_a_token_budget_by_default(
    tmp_path: Path, flags: str, budget: int | None
) -> None:
    config = parse_args(complete(tmp_path, *flags.split()), 2)
    assert config.algorithm.use_dynamic_batch_size is (budget is not None)
    assert config.algorithm.max_tokens_per_gpu == budget
    assert any("micro-batches of up to" in note for note in config.notes) is (flags == "")


def test_what_differs_from_slime_is_noted_for_slimes_command_lines_alone(tmp_path: Path) -> None:
    assert parse_args(complete(tmp_path, "--micro-batch-size", "1"), 1).notes == ()
    own = ("--custom-rm-path", "json.dumps", "--micro-batch-size", "1")
    assert parse_args(complete(tmp_path, *own, without=("--rm-type",)), 1).notes == ()
    slimes = (*own, "--actor-num-gpus-per-node", "1")
    (note,) = parse_args(complete(tmp_path, *slimes, without=("--rm-type",)), 1).notes
    assert "sample.response" in note and "--bf16" not in note
    reported = (*slimes, "--no-rollout-skip-special-tokens")
    assert parse_args(complete(tmp_path, *reported, without=("--rm-type",)), 1).notes == ()


def test_skyrls_names_of_gmpos_bounds(tmp_path: Path) -> None:
    flags = "trainer.algorithm.eps_clip_low=0.3 trainer.algorithm.eps_clip_high=0.5"
    line = complete(tmp_path, "--policy-loss-type", "gmpo", *flags.split())
    loss = parse_args(line, 1).policy_loss
    assert (loss.gmpo_eps_low, loss.gmpo_eps_high) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ("--eps-clip 0.1", (0.1, 0.1)),
        ("--eps-clip 0.1 --gmpo-eps-high 0.3", (0.1, 0.3)),
        ("--eps-clip-high 0.3", (0.4, 0.3)),
        ("--eps-clip 0.1 --gmpo-eps-low 0.1", (0.1, 0.1)),
        ("--gmpo-eps-low 0.1", (0.1, 0.4)),
    ],
)
def test_gmpos_upper_bound_follows_the_lower_one(
    tmp_path: Path, flags: str, bounds: tuple[float, float]
) -> None:
    loss = parse_args(
        complete(tmp_path, "--policy-loss-type", "gmpo", *flags.split()), 1
    ).policy_loss
    assert (loss.gmpo_eps_low, loss.gmpo_eps_high) == bounds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--gmpo-eps-low 0.5 --eps-clip 0.3",
            "--gmpo-eps-low (given: 0.5): conflicts with --eps-clip 0.3",
        ),
        (
            "--gmpo-eps-high 0.5 --eps-clip 0.3 --eps-clip-high 0.4",
            "--gmpo-eps-high (given: 0.5): conflicts with --eps-clip-high 0.4",
        ),
    ],
)
def test_two_names_of_gmpos_bounds_agree(tmp_path: Path, flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(complete(tmp_path, "--policy-loss-type", "gmpo", *flags.split()), 1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--lr", "1_0"), ("--lr", "１e-3"), ("--lr", "1e-0_3"), ("--num-rollout", "1_0"),
        ("--num-rollout", "٣"), ("--num-rollout", "२"), ("--eps-clip", "0.1_5"), ("--lr", "1,5"),
    ],
)  # fmt: skip
def test_numbers_have_ascii_digits_and_no_separators(tmp_path: Path, flag: str, value: str) -> None:
    """int() and float() take both."""
    with pytest.raises(ConfigError, match=f"{flag} .*must be an? (integer|number)"):
        parse_args(complete(tmp_path, flag, value, without=(flag,)), 1)


def test_numbers_of_every_ordinary_form(tmp_path: Path) -> None:
    for value, number in (("1e-6", 1e-6), (".5", 0.5), ("5.", 5.0), ("+1E-3", 1e-3), ("2", 2.0)):
        assert parse_args(complete(tmp_path, "--lr", value), 1).megatron.optimizer.lr == number


def test_skyrls_switch_of_the_standard_deviation(tmp_path: Path) -> None:
    for word, off in (("false", True), ("true", False)):
        line = complete(tmp_path, f"trainer.algorithm.grpo_norm_by_std={word}")
        assert parse_args(line, 1).algorithm.disable_grpo_std_normalization is off

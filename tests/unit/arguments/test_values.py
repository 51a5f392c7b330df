"""argv and YAML -> values: spellings, types, problems."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from arguments import get_parser
from arguments.eval_sets import eval_sets_of
from arguments.flag_registry import flag_table, normalise
from arguments.flags import Flag
from arguments.parse import launcher_parser
from arguments.run_file import read_run_file
from arguments.schema.data import EvalConfig
from arguments.translate.names import ALIASES, NO_EFFECT, NOT_IMPLEMENTED, VALUES_NOT_IMPLEMENTED
from arguments.unique_keys import load_yaml
from arguments.values import ParsedArgs
from slime_like.config import ConfigError
from slime_like.losses import policy_losses
from slime_like.rewards.registry import rewards
from tests.paths import ROOT
from tests.unit.command_lines import illegal_value

PARSER = get_parser()


def read(*argv: str) -> ParsedArgs:
    return PARSER.read(argv)


def messages(given: ParsedArgs) -> str:
    return "\n".join(map(str, given.problems))


@pytest.mark.parametrize(
    "typed",
    [
        "--sapo-tau-pos",
        "--sapo_tau_pos",
        "--sapo.tau_pos",
        "--algorithm.sapo.tau_pos",
        "--trainer.algorithm.sapo.tau_pos",
    ],
)
def test_dashes_underscores_and_dots(typed: str) -> None:
    assert read(typed, "1.5").values == {"sapo_tau_pos": 1.5}
    assert read(f"{typed}=1.5").values == {"sapo_tau_pos": 1.5}


def test_types() -> None:
    given = read(
        "--num-rollout", "3", "--lr", "1e-6", "--rollout-stop", "a", "b",
        "--rollout-stop-token-ids", "1", "2", "--use-kl-loss",
        "--apply-chat-template-kwargs", '{"enable_thinking": false}', "--rollout-top-k", "-1",
        "--attention-backend", "auto",
        "--recompute-modules", "mlp", "core_attn",
    )  # fmt: skip
    assert not given.problems
    assert given.values == {
        "num_rollout": 3,
        "lr": 1e-6,
        "rollout_stop": ["a", "b"],
        "rollout_stop_token_ids": [1, 2],
        "use_kl_loss": True,
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "rollout_top_k": -1,
        "attention_backend": "auto",
        "recompute_modules": ["mlp", "core_attn"],
    }


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--qk-layernorm"], True),
        (["--no-qk-layernorm"], False),
        (["--qk-layernorm=false"], False),
        (["--no-qk-layernorm=false"], True),
        (["--qk-layernorm", "--no-qk-layernorm"], False),
    ],
)
def test_switches(argv: list[str], value: bool) -> None:
    assert read(*argv).values == {"qk_layernorm": value}


def test_the_last_word_counts() -> None:
    assert read("--lr", "1e-6", "--lr", "1e-5").values == {"lr": 1e-5}


def test_negative_and_scientific_numbers_are_values() -> None:
    assert "requires a value" not in messages(read("--kl-coef", "-1e-3"))
    assert "must be >= 0" in messages(read("--kl-coef", "-1e-3"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--polcy-loss-type", "sapo"], "did you mean --policy-loss-type?"),
        (["--policy-los"], "did you mean --policy-loss-type?"),
        (["--num-rolout=3"], "did you mean --num-rollout?"),
        (["--xyzzy"], "see --help"),
        (["-lr", "1"], "flags start with two dashes: --lr"),
        (["--lr"], "requires a value"),
        (["--lr", "--use-kl-loss"], "requires a value"),
        (["--lr", "fast"], "must be a number"),
        (["--num-rollout", "2.5"], "must be an integer"),
        (["--lr", "nan"], "must be a finite number"),
        (["--lr", "inf"], "must be a finite number"),
        (["--loss-reduction", "mean"], "legal values: rollout_mean, sequence_mean, token_mean"),
        (
            ["--policy-loss-type", "sappo"],
            f"legal values: {', '.join(policy_losses.names())}",
        ),
        (["--sapo-tau-neg", "0"], "must be > 0"),
        (["--apply-chat-template-kwargs", "{x"], "must be a JSON object"),
        (["--use-kl-loss", "maybe"], "must be true or false"),
        (["--use-kl-loss=maybe"], "must be true or false"),
        (["stray"], "stray: is not a flag"),
        (["--rollout-stop"], "requires a value"),
        (["--eval-top-k", "0"], "must be -1 (all) or >= 1"),
        (["--max-failed-samples", "10"], "must be 0 <= x <= 1"),
        (["--normalization", "BatchNorm"], "legal values: LayerNorm, RMSNorm"),
    ],
)
def test_problems_say_what_is_wanted(argv: list[str], expected: str) -> None:
    given = read(*argv)
    assert len(given.problems) == 1, messages(given)
    assert expected in messages(given)


BOUNDED = [
    flag for flag in flag_table().flags if (flag.choices or flag.legal) and not flag.rejection
]


@pytest.mark.parametrize("flag", BOUNDED, ids=lambda flag: flag.name)
def test_every_range_and_choice_is_checked(flag: Flag) -> None:
    """It names the flag, what was given, and what is legal."""
    value = illegal_value(
        flag.choices, flag.legal, is_integer=flag.item is int, is_text=flag.item is str
    )
    given = read(flag.name, str(value))
    (found,) = given.problems
    shown = [str(value)] if flag.kind == "list" else value
    assert (found.flag, str(found.value)) == (flag.name, str(shown)) and flag.dest in given.invalid
    legal = map(str, flag.choices) if flag.choices else (f"must be {flag.legal.description}",)
    assert all(words in found.message for words in legal)


def test_prefixes_are_not_completed() -> None:
    assert read("--num-roll", "3").values == {}


def test_all_problems_are_collected() -> None:
    given = read(
        "--lr",
        "x",
        "--num-rolout",
        "3",
        "--release-train",
        "--sapo-tau-pos",
        "-1",
        "--bogus",
        "a",
        "b",
        "--save-interval",
        "0",
    )
    assert [p.flag for p in given.problems] == [
        "--lr",
        "--num-rolout",
        "--release-train",
        "--sapo-tau-pos",
        "--bogus",
        "--save-interval",
    ]
    assert given.invalid == {"lr", "sapo_tau_pos", "save_interval"}


SLIME_FLAGS_NOT_HERE = [
    "--critic-num-nodes",
    "--lora-dropout",
    "--moe-shared-expert-overlap",
    "--fp8-format",
    "--critic-train-only",
]


@pytest.mark.parametrize("typed", SLIME_FLAGS_NOT_HERE)
def test_known_flags_of_peers_are_refused_by_name(typed: str) -> None:
    given = read(typed, "1", "--lr", "1e-6")
    assert given.values == {"lr": 1e-6}
    assert len(given.problems) == 1 and f"{typed}: not implemented" in messages(given)


@pytest.mark.parametrize(
    ("dest", "flag", "value"),
    [("rm_type", "--rm-type", "random"),
     ("optimizer", "--optimizer", "dist_muon")],
)  # fmt: skip
def test_known_values_of_peers_are_refused_by_name(dest: str, flag: str, value: str) -> None:
    given = read(flag, value)
    assert (
        dest in given.invalid
        and "not implemented" in messages(given)
        and "legal values" in messages(given)
    )


def test_what_is_registered_is_implemented() -> None:
    by_dest = flag_table().by_dest
    for dest, values in VALUES_NOT_IMPLEMENTED.items():
        assert not set(values) & set(by_dest[dest].choices or ()), dest
    assert not set(VALUES_NOT_IMPLEMENTED["rm_type"]) & set(rewards.names())
    usable = {
        name for name, spelling in flag_table().spellings.items() if not spelling.flag.rejection
    }
    assert not usable & NOT_IMPLEMENTED.keys()
    assert not usable & ALIASES.keys() and not usable & NO_EFFECT.keys()


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--calculate-per-token-loss"], {"loss_reduction": "token_mean"}),
        (["--use-rotary-position-embeddings"], {"position_embedding_type": "rope"}),
        (["--clip-ratio-c", "3"], {"eps_clip_c": 3.0}),
        (["--kl_estimator_type", "k3"], {"kl_loss_type": "k3"}),
        (["--trainer.algorithm.eps_clip_low", "0.1"], {"eps_clip": 0.1}),
        (["--max_seq_len", "512"], {"loss_norm_length": 512}),
        (["--use-tensorboard"], {"no_tensorboard": False}),
    ],
)
def test_aliases(argv: list[str], values: dict[str, Any]) -> None:
    given = read(*argv)
    assert given.values == values and not given.problems


def test_flags_without_effect_are_reported() -> None:
    given = read("--get-mismatch-metrics", "--no-check-for-nan-in-loss-and-grad")
    assert not given.problems and len(given.warnings) == 2


def read_yaml(folder: Path, text: str) -> ParsedArgs:
    file = folder / "run.yaml"
    file.write_text(text)
    return read_run_file(str(file), PARSER)


def test_run_file(tmp_path: Path) -> None:
    given = read_yaml(
        tmp_path,
        """
lr: 1e-6            # YAML reads this as text
num-rollout: 3
use_kl_loss: true
no-qk-layernorm: true
rollout_stop: [a, b]
apply_chat_template_kwargs: {enable_thinking: false}
rope_scaling_factor: null
algorithm:
  policy_loss_type: sapo
  sapo: {tau_pos: 1.5}
offload: false
""",
    )
    assert not given.problems
    assert given.values == {
        "lr": 1e-6,
        "num_rollout": 3,
        "use_kl_loss": True,
        "qk_layernorm": False,
        "rollout_stop": ["a", "b"],
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "policy_loss_type": "sapo",
        "sapo_tau_pos": 1.5,
        "offload_train": False,
        "offload_rollout": False,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polcy_loss_type: sapo", "did you mean policy_loss_type?"),
        ("algoritm: {kl_coef: 0}", "algoritm: unknown section; did you mean algorithm?"),
        ("lr: [1, 2]", "must be a number"),
        ("lr: true", "must be a number"),
        ("num_rollout: 2.5", "must be an integer"),
        ("use_kl_loss: 3", "must be true or false"),
        ("release_train: true", "not implemented"),
        ("rollout_stop: []", "at least one"),
        ("policy_loss_type: 3", "unknown value"),
        ("config: other.yaml", "another run file"),
    ],
)
def test_problems_of_a_run_file(tmp_path: Path, text: str, expected: str) -> None:
    given = read_yaml(tmp_path, text)
    assert len(given.problems) == 1 and expected in messages(given)


def test_every_title_of_the_list_of_flags_is_a_section(tmp_path: Path) -> None:
    listed = (ROOT / "docs" / "flags.md").read_text("utf-8")
    first: dict[str, Flag] = {}
    for flag in flag_table().flags:
        if (not flag.rejection and flag.kind == "switch") or (flag.item is str and flag.choices):
            first.setdefault(flag.group, flag)
    titles = [line[3:] for line in listed.splitlines() if line.startswith("## ")]
    titles = [t for t in titles if t not in ("Other spellings", "Not implemented")]
    assert len(titles) > 30
    for title in titles:
        flag = first.get(title)
        key, value = (flag.dest, "true") if flag else ("lr", "1.0")
        if flag is not None and flag.choices:
            value = str(flag.choices[0])
        for name in (title, title.split(" (")[0], title.title().replace(" ", "_")):
            given = read_yaml(tmp_path, f'"{name}":\n  {key}: {value}\n')
            assert not given.problems and set(given.values) == {key}, name


def test_a_section_and_a_flag_of_one_name(tmp_path: Path) -> None:
    assert read_yaml(tmp_path, "optimizer: sgd\n").values == {"optimizer": "sgd"}
    nested = read_yaml(tmp_path, "optimizer: {optimizer: sgd, lr: 1.0}\n")
    assert nested.values == {"optimizer": "sgd", "lr": 1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: 1.0\nlr: 2.0\n", "line 2: the key 'lr' is given twice, first in line 1"),
        ("num-rollout: 1\nlr: 1.0\nnum_rollout: 2\n", "line 3: the key 'num_rollout'"),
        ("optimizer:\n  lr: 1.0\n  lr: 2.0\n", "line 3: the key 'lr'"),
    ],
)
def test_a_key_that_is_given_twice(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path, text)
    assert expected in str(caught.value)


def test_a_setting_that_two_sections_give(tmp_path: Path) -> None:
    given = read_yaml(tmp_path, "lr: 1.0\noptimizer: {lr: 2.0}\n")
    (problem,) = given.problems
    assert problem.flag == "--lr"
    assert "in line 2, first as --lr in line 1" in problem.message


def test_a_key_that_is_given_twice_in_another_file_or_in_json(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("datasets:\n- name: a\n  path: x\n  path: y\n")
    words = PARSER.read(["--apply-chat-template-kwargs", '{"a": 1, "b": {"c": 1, "c": 2}}'])
    assert "the key 'c' is given twice" in words.problems[0].message
    (problem,) = eval_sets_of(EvalConfig(eval_config=str(file)))[1]
    assert "line 4: the key 'path' is given twice, first in line 3" in problem.message


@pytest.mark.parametrize("value", ['"false"', "'off'", "0", "no"])
def test_a_switch_in_a_run_file_is_what_it_reads(tmp_path: Path, value: str) -> None:
    assert read_yaml(tmp_path, f"use_tis: {value}\nuse_kl_loss: {value}\n").values == {
        "use_kl_loss": False
    }


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--megatron-fsdp", "Megatron-FSDP"),
        ("--pytorch-profiler", "--use-pytorch-profiler"),
        ("--bogus", "see --help"),
    ],
)
def test_neighbours_of_names_that_are_not_here(typed: str, expected: str) -> None:
    assert expected in messages(read(typed))


MEGATRON_LM_SWITCHES = [
    "--enable-experimental",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion",
    "--no-persist-layer-norm",
    "--no-create-attention-mask-in-dataloader",
    "--no-async-tensor-model-parallel-allreduce",
    "--no-query-key-layer-scaling",
    "--no-overlap-p2p-communication",
    "--no-one-logger",
    "--no-use-tokenizer-model-from-checkpoint-args",
    "--no-check-for-nan-in-loss-and-grad",
    "--no-initialization",
]


@pytest.mark.parametrize("typed", MEGATRON_LM_SWITCHES)
def test_switches_of_megatron_lm_are_read(typed: str) -> None:
    assert not read(typed).problems


@pytest.mark.parametrize(
    ("text", "expected"), [("a: [", "cannot be read"), ("- a", "must be a mapping")]
)
def test_damaged_run_files(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_yaml(tmp_path, text)


def test_absent_run_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_run_file(str(tmp_path / "none.yaml"), PARSER)


def test_no_name_has_two_meanings() -> None:
    table = flag_table()
    for name, spelling in table.spellings.items():
        assert name == normalise(name)
        assert table.by_dest[spelling.flag.dest] is spelling.flag


def test_a_run_file_has_the_text_that_is_written(tmp_path: Path) -> None:
    """YAML 1.1 reads 12:30 as 750, 010 as 8, 0123 as 83, and 1e-6 as text."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "tracker_run_name: 12:30\nwandb_run_id: 0123\nseed: 010\nlr: 1e-6\nsave: null\n"
        "rollout_stop: [1.10, 2024-01-01]\nrollout_stop_token_ids: [1, 2]\nuse_kl_loss: yes\n"
        "apply_chat_template_kwargs: {thinking: false, budget: 5, level: '5', rate: 1e-1}\n"
    )
    parsed = read_run_file(str(file), launcher_parser())
    assert not parsed.problems
    assert parsed.values == {
        "tracker_run_name": "12:30", "wandb_run_id": "0123", "seed": 10, "lr": 1e-6, "rollout_stop": ["1.10", "2024-01-01"],
        "rollout_stop_token_ids": [1, 2], "use_kl_loss": True,
        "apply_chat_template_kwargs": {"thinking": False, "budget": 5, "level": "5", "rate": 0.1},
    }  # fmt: skip
    file.write_text("seed: 12:30\nnum_rollout: 0x10\nrollout_stop: [yes]\n")
    found = read_run_file(str(file), launcher_parser()).problems
    assert [p.flag for p in found] == ["--seed", "--num-rollout", "--rollout-stop"]
    content = load_yaml("a: 12:30\nb: 010\nc: 1e-6\nd: [1, 2.5, 2024-01-01]\n5: -.inf\n'6': 1\n")
    assert content == {
        "a": "12:30", "b": 10, "c": 1e-6, "d": [1, 2.5, "2024-01-01"], 5: -math.inf, "6": 1,
    }  # fmt: skip

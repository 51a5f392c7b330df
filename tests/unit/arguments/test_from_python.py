"""A run's configuration from Python values is that of the same command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from arguments.flag_registry import flag_table
from arguments.from_python import as_words, read_settings
from arguments.parse import launcher_parser, make_config, parse_args
from arguments.run_config import RunConfig
from slime_like.config import ConfigError
from tests.unit.command_lines import complete


def settings_of(config: RunConfig) -> dict[str, object]:
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in ("argv", "megatron")
    }


@pytest.fixture
def given(tmp_path: Path) -> dict[str, object]:
    """The settings of `complete` by name."""
    words = complete(tmp_path)
    names = [i for i, word in enumerate(words) if word.startswith("--")]
    values: dict[str, object] = {}
    for start, end in zip(names, [*names[1:], len(words)], strict=True):
        rest = words[start + 1 : end]
        name = words[start].removeprefix("--").replace("-", "_")
        values[name] = True if not rest else rest[0] if len(rest) == 1 else rest
    return values


def test_settings_are_those_of_the_command_line(tmp_path: Path, given: dict[str, object]) -> None:
    more = {
        "lr": 1e-3, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "micro_batch_size": None,
        "policy_loss_type": "sapo", "sapo_tau_pos": 1.5, "rollout_shuffle": False, "save": tmp_path / "checkpoints",
        "apply_chat_template_kwargs": {"enable_thinking": False}, "apply_chat_template": True,
    }  # fmt: skip
    given = {k: v for k, v in given.items() if k != "micro_batch_size"}
    config = make_config(given, **more)
    assert config.checkpoint.save == str(tmp_path / "checkpoints")
    assert settings_of(parse_args(config.argv, 1)) == settings_of(config)


def test_sections_are_those_of_a_run_file(given: dict[str, object]) -> None:
    flat = make_config(given, sapo_tau_pos=1.5, policy_loss_type="sapo")
    nested = make_config(given, algorithm={"policy_loss_type": "sapo"}, sapo={"tau_pos": 1.5})
    assert settings_of(flat) == settings_of(nested)


def test_a_run_file_is_read_under_the_settings(tmp_path: Path, given: dict[str, object]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout_seed: 5\neps_clip: 0.3\n")
    config = make_config(given, config=file, rollout_seed=7)
    assert config.data.rollout_seed == 7 and config.policy_loss.eps_clip == 0.3


def test_every_problem_is_named_at_once(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(given, lr="fast", num_rolouts=3, gamma=2.0)
    text = str(caught.value)
    assert all(word in text for word in ("--lr", "--num-rolouts", "--gamma")), text


def test_later_mappings_take_precedence(given: dict[str, object]) -> None:
    assert make_config({**given, "rollout_seed": 3}, rollout_seed=4).data.rollout_seed == 4


@pytest.mark.parametrize(
    "settings_", [{"eps-clip": 0.3}, {"algorithm": {"eps_clip": 0.3}}, {"eps": {"clip": 0.3}}]
)
def test_flags_take_precedence_however_settings_are_written(
    given: dict[str, object], settings_: dict[str, object]
) -> None:
    assert make_config({**given, **settings_}).policy_loss.eps_clip == 0.3
    config = make_config({**given, **settings_}, eps_clip=0.1)
    assert config.policy_loss.eps_clip == 0.1
    assert parse_args(config.argv, 1).policy_loss.eps_clip == 0.1
    assert make_config({**given, **settings_}, eps_clip=None).policy_loss.eps_clip == 0.2


def test_a_flag_replaces_the_other_of_its_pair(given: dict[str, object]) -> None:
    """As the command line does over a run file: num_epoch over num_rollout of the settings."""
    config = make_config(given, num_epoch=1)
    assert config.rollout.num_epoch == 1 and "--num-rollout" not in config.argv


def test_two_spellings_in_one_mapping_are_a_problem(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is set twice, first as --eps-clip") as caught:
        make_config({**given, "eps-clip": 0.1, "eps_clip": 0.3})
    assert "run file" not in str(caught.value)


PARSER = launcher_parser()
TEXT_FLAGS = {
    flag.dest: flag.kind
    for flag in flag_table().flags
    if flag.item is str and not (flag.choices or flag.rejection) and flag.kind in ("value", "list")
}
ODD = ("null", '"null"', '""null', "-END", "--x", "--lr=3", "--", "-", "-1", "a=b", "lr=3", "+seed=3", '["a"]', "[1]", "", " ", "x.yaml", "\n-a", "--help")  # fmt: skip
TEXTS = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5)  # fmt: skip


@st.composite
def text_settings(draw: st.DrawFn) -> dict[str, object]:
    names = draw(st.lists(st.sampled_from(sorted(TEXT_FLAGS)), min_size=1, max_size=3, unique=True))
    lists = st.lists(TEXTS, min_size=1, max_size=3)
    return {name: draw(lists if TEXT_FLAGS[name] == "list" else TEXTS) for name in names}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@drawn(text_settings())
def test_a_command_line_has_any_text(values: dict[str, object]) -> None:
    parsed = read_settings(values, PARSER)
    again = PARSER.read(as_words(parsed, PARSER.table))
    assert not again.problems and not again.unset and again.values == parsed.values == values


def test_the_words_after_a_list_flag_are_its_values(tmp_path: Path) -> None:
    """Those that look like settings too, until the next flag."""
    line = complete(tmp_path, "--rollout-stop", "a", "rollout_seed=3", "--lr", "1e-3")
    parsed = PARSER.read([*line, "seed=5", "--router-policy", "seed=7"])
    assert not parsed.problems and "rollout_seed" not in parsed.values
    assert parsed.values["rollout_stop"] == ["a", "rollout_seed=3"] and parsed.values["seed"] == 5
    assert parsed.values["sglang_router_flags"] == {"policy": "seed=7"}

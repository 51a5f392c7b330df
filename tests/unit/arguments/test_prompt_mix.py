"""--prompt-data sources.yaml: what a mix may say, and one error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.prompt_mix import MixSource
from slime_like.preflight.batches import PROMPTS_READ, prompt_lengths, prompt_limit
from slime_like.trainer.run_record import settings_by_flag
from slime_like.trainer.saved_settings import changes, settings_of
from tests.unit.command_lines import complete, parse_flags, problems_of


def mix(folder: Path, text: str) -> Path:
    path = folder / "mix.yaml"
    path.write_text(text.replace("{folder}", str(folder)))
    return path


def two(folder: Path, settings: str = "") -> str:
    """Two sources, of which the first has these settings."""
    text = "sources: [{name: a, path: {folder}/prompts.jsonl%s}, {name: b, path: {folder}/prompts.jsonl}]"
    return f"--prompt-data {mix(folder, text % (settings and f', {settings}'))} "


def test_sources_with_defaults_and_their_own_settings(tmp_path: Path) -> None:
    path = mix(tmp_path, """
defaults: {weight: 2, label_key: label, metadata_overrides: {k: 1}}
sources:
  a: {path: "{folder}/prompts.jsonl", weight: {3: 1, 0: 0.5}, pass_rate: [0.1, 0.9]}
  b: {path: "{folder}/prompts.jsonl@[0:1]", after: {a: 0.7}, rm_type: math, max_response_len: 7,
      apply_chat_template: true, prompt_key: input}
""")  # fmt: skip
    config = parse_flags(tmp_path, f"--prompt-data {path}")
    first, second = config.prompt_sources
    assert first.weight == {0: 0.5, 3: 1} and second.weight == {0: 2}
    assert [first.weight_at(rollout) for rollout in (0, 2, 3, 9)] == [0.5, 0.5, 1, 1]
    assert first.pass_rate == (0.1, 0.9) and first.metadata == {"k": 1}
    assert second.metadata == {"k": 1, "rm_type": "math"} and second.grades_itself
    data = second.data_config(config.data)
    assert data.prompt_data == f"{tmp_path}/prompts.jsonl@[0:1]"
    assert data.apply_chat_template and not config.data.apply_chat_template


def test_a_file_of_rows_is_no_mix(tmp_path: Path) -> None:
    assert parse_flags(tmp_path, "").prompt_sources == ()


MISTAKES = [
    ("sources: [", "cannot be read: line 1, column 11"),
    ("", "must have 'sources'"),
    ("source: []", "must have 'sources'"),
    ("sources: 3", "'sources' must be a list, or a mapping by name"),
    ("source: [], sources: [{name: a, path: x}]", "cannot be read"),
    ("extra: 1\nsources: [{name: a, path: x}]", "has the unknown key 'extra'"),
    ("sources: [3]", "source 0 must be a mapping, not int"),
    ("sources: [{path: x}]", "source 0 has no 'name'"),
    ("sources: [{name: a}]", "source a has no 'path'"),
    ("sources: [{name: a, path: x}, {name: a, path: x}]", "has two sources named 'a'"),
    ("sources: [{name: a/b, path: x}]", "source a/b: the name is part of metrics"),
    ("defaults: {path: x}\nsources: [{name: a, path: x}]", "defaults has the unknown key 'path'"),
    ("sources: [{name: a, path: x, weigth: 1}]", "unknown key 'weigth'; did you mean weight?"),
    ("sources: [{name: a, path: x, weight: 0}]", "source a: weight is 0, must be > 0"),
    ("sources: [{name: a, path: x, weight: -1}]", "weight is -1, must be > 0"),
    ("sources: [{name: a, path: x, weight: .nan}]", "weight is nan, must be a finite number"),
    ("sources: [{name: a, path: x, weight: heavy}]", "weight is 'heavy', must be a int or float"),
    ("sources: [{name: a, path: x, weight: {0: 0}}]", "weight is 0 throughout"),
    ("sources: [{name: a, path: x, weight: {0: -1}}]", "weight is -1 from rollout 0, must be >= 0"),
    ("sources: [{name: a, path: x, weight: {b: 1}}]", "weight from 'b', must be from a rollout"),
    ("sources: [{name: a, path: x, weight: {5: 1}}]", "no source can be drawn from in rollout 0"),
    ("sources: [{name: a, path: x, max_epochs: 0}]", "max_epochs is 0, must be >= 1"),
    ("sources: [{name: a, path: x, after: {a: 0.5}}]", "after names 'a'; legal names: none"),
    ("sources: [{name: a, path: x, after: {b: 0.5}}, {name: c, path: x}]", "legal names: c"),
    ("sources: [{name: a, path: x}, {name: b, path: x, after: {a: 2}}]", "of a is 2, must be 0 < x"),
    ("sources: [{name: a, path: x, after: {b: 1}}, {name: b, path: x, after: {a: 1}}]",
     "one without 'after' must have a weight > 0"),
    ("sources: [{name: a, path: x, after: {b: 1}}, {name: b, path: x, after: {c: 1, a: 1}}, {name: c, path: x}]",
     "wait for each other, and none begins: a after b after a"),
    ("sources: [{name: d, path: x, after: {a: 1}}, {name: a, path: x, after: {b: 1}}, {name: b, path: x, after: {a: 1}}, {name: c, path: x}]",
     "none begins: a after b after a"),
    ("sources: [{name: a, path: x, pass_rate: [0.5]}]", "pass_rate is [0.5], must be two numbers"),
    ("sources: [{name: a, path: x, pass_rate: [1, 0]}]", "0 <= low <= high <= 1"),
    ("sources: [{name: a, path: x, pass_rate: [a, b]}]", "must be two numbers"),
    ("sources: [{name: a, path: x, apply_chat_template: 1}]", "is 1, must be a bool"),
    ("sources: [{name: a, path: x, name: b}]", "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    argv = complete(tmp_path, "--prompt-data", str(mix(tmp_path, text)))
    (found,) = problems_of(argv)
    assert found.flag == "--prompt-data" and message in found.message, found


def test_no_such_file(tmp_path: Path) -> None:
    (found,) = problems_of(complete(tmp_path, "--prompt-data", str(tmp_path / "none.yaml")))
    assert "cannot be read" in found.message


IN_A_RUN = [
    ("path: {folder}/none.jsonl", "", "no such file"),
    ("path: {folder}/mix.yaml", "", "the sources of a mix must be data files"),
    ("rm_type: maths", "", "source a: rm_type is 'maths'; legal values"),
    ("custom_rm_path: json.none", "", "source a: custom_rm_path"),
    ("max_response_len: 2000", "", "max_response_len is 2000, must not be above --rollout-max-response-len"),
    ("max_prompt_len: 505, eval_path: {folder}/prompts.jsonl", "--eval-interval 1",
     "source a: max_prompt_len 505 and a response of 128 exceed the 512 positions"),
    ("", "--num-rollout-none --num-epoch 1", "cannot be combined with --num-epoch"),
    ("", "--data-source-path json.dumps", "cannot be combined with --data-source-path"),
    ("custom_rm_path: json.dumps", "--group-rm --custom-rm-path json.dumps", "cannot be combined with --group-rm"),
    ("pass_rate: [0, 1]", "--rollout-function-path json.dumps", "need the run's own rollouts"),
    ("pass_rate: [0, 1]", "--async-rollout --fully-async --fully-async-single-samples --advantage-estimator batch_mean",
     "a need the pass rates of whole ones"),
    ("pass_rate: [0, 1]", "--loss-type sft_loss", "pass_rate has no effect with --loss-type sft_loss"),
    ("max_response_len: 5", "--loss-type sft_loss", "max_response_len has no effect"),
    ("rm_type: math", "--loss-type sft_loss", "rm_type has no effect"),
    ("input_key: question", "", "no such key in"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "flags", "message"), IN_A_RUN)
def test_a_source_that_does_not_fit_the_run(
    tmp_path: Path, settings: str, flags: str, message: str
) -> None:
    """The flag --num-rollout-none stands for its absence."""
    text = "sources: {a: {path: {folder}/prompts.jsonl}, b: {path: {folder}/prompts.jsonl}}"
    if settings.startswith("path"):
        text = text.replace("path: {folder}/prompts.jsonl", settings, 1)
    elif settings:
        text = text.replace("jsonl}", f"jsonl, {settings}}}", 1)
    without = ("--num-rollout",) if "--num-rollout-none" in flags else ()
    words = [word for word in flags.split() if word != "--num-rollout-none"]
    argv = complete(tmp_path, *words, "--prompt-data", str(mix(tmp_path, text)), without=without)
    found = [p for p in problems_of(argv) if message in p.message]
    assert len(found) == 1, problems_of(argv)
    if "num-epoch" not in flags and "input_key" not in settings:
        assert found[0].flag == "--prompt-data"


def test_held_out_rows_are_evaluated_as_the_source(tmp_path: Path) -> None:
    settings = "eval_path: {folder}/prompts.jsonl, rm_type: math, max_response_len: 9"
    text = "sources: {a: {path: {folder}/prompts.jsonl, %s}, b: {path: {folder}/prompts.jsonl}}"
    path = mix(tmp_path, text % settings)
    argv = complete(tmp_path, "--prompt-data", str(path))
    (found,) = problems_of(argv)
    assert found.flag == "--eval-interval" and "an eval_path in the mix" in found.message
    config = parse_flags(tmp_path, f"--prompt-data {path} --eval-interval 2")
    (held_out,) = config.eval_sets
    assert (held_out.name, held_out.rm_type, held_out.max_response_len) == ("a", "math", 9)
    more = ["--eval-interval", "2", "--eval-prompt-data", "a", str(tmp_path / "prompts.jsonl")]
    (found,) = problems_of([*argv, *more])
    assert "source a: another evaluation set has its name" in found.message
    path.write_text(path.read_text().replace("eval_path: ", "eval_path: no"))
    (found,) = problems_of([*argv, "--eval-interval", "2"])
    assert found.flag == "--prompt-data" and "no such file" in found.message


def test_a_run_needs_no_reward_if_every_source_has_one(tmp_path: Path) -> None:
    text = "sources: {a: {path: {folder}/prompts.jsonl, rm_type: math}, b: {path: {folder}/prompts.jsonl}}"
    argv = complete(tmp_path, "--prompt-data", str(mix(tmp_path, text)), without=("--rm-type",))
    (found,) = problems_of(argv)
    assert found.flag == "--rm-type" and "required" in found.message
    graded = text.replace("jsonl}}", "jsonl, rm_type: f1}}")
    mix(tmp_path, graded)
    assert parse_args(argv, 1).reward.rm_type is None


def test_records_and_checkpoints_have_the_sources(tmp_path: Path) -> None:
    before = parse_flags(tmp_path, two(tmp_path, "weight: 2"))
    after = parse_flags(tmp_path, two(tmp_path, "weight: 3"))
    (change,) = changes(settings_of(before), settings_of(after))
    assert change.startswith("--prompt-data, source a") and "'weight': {'0': 2}" in change
    assert settings_by_flag(before)[0]["--prompt-data"] == str(tmp_path / "mix.yaml")
    assert isinstance(before.prompt_sources[0], MixSource)


def test_preflight_reads_every_source_by_its_weight(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text('{"input": "' + 400 * "x" + '", "label": "2"}\n')
    text = "sources: {a: {path: {folder}/prompts.jsonl, weight: {5: 2, 0: 3}}, b: {path: {folder}/long.jsonl}}"
    config = parse_flags(tmp_path, f"--prompt-data {mix(tmp_path, text)}")
    lengths, source = prompt_lengths(config)
    assert len(lengths) == PROMPTS_READ and sorted(set(lengths.tolist())) == [1, 100]
    assert (lengths == 100).mean() == 0.25
    assert source.startswith("a (") and "; b (" in source
    assert prompt_limit(config) == 100

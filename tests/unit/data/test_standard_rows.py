"""Standard evaluation sets as people have them: files, folders, formats, ranges."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from arguments.eval_sets import EvalSet
from arguments.schema.data import DataConfig
from slime_like.data.prompts import load_eval_sets
from slime_like.data.standard_rows import open_standard
from slime_like.rewards import sandbox
from tests.unit.data.test_prompts import chat_tokenizer, tokenizer  # noqa: F401
from tests.unit.standard_sets.test_sets import GPQA, HUMAN_EVAL, MBPP_SANITIZED

ROWS = [{"question": f"{i} + 1?", "answer": f"So.\n#### {i + 1}"} for i in range(6)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(name: str, path: Path | str, **more: Any) -> list[dict[str, Any]]:
    source = open_standard(
        EvalSet(name, str(path), set=name), check=lambda row: None, flag="--eval-sets", **more
    )
    return source.rows(range(len(source)))


def labels(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["label"].rpartition(" ")[2]) for row in rows]


def test_a_file_a_folder_and_a_range(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "gsm8k/test.jsonl", ROWS)
    jsonl(tmp_path / "gsm8k/train.jsonl", ROWS * 3)
    whole = opened("gsm8k", path)
    assert labels(whole) == [1, 2, 3, 4, 5, 6] and "0 + 1?" in whole[0]["prompt"]
    assert opened("gsm8k", tmp_path / "gsm8k") == whole
    assert opened("gsm8k", f"{path}@[2:4]") == whole[2:4] == opened("gsm8k", f"{path.parent}@[2:4]")


def test_parquet_of_the_hub(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "main").mkdir()
    for i, rows in enumerate((ROWS[:2], ROWS[2:])):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"main/test-0000{i}-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "main/train-00000-of-00001.parquet")
    rows = opened("gsm8k", tmp_path)
    assert labels(rows) == [1, 2, 3, 4, 5, 6]
    source = open_standard(EvalSet("x", str(tmp_path), set="gsm8k"), check=lambda _: None, flag="f")
    assert labels(source.rows([5, 0, 1, 3])) == [6, 1, 2, 4]
    assert source.where(3).endswith("test-00001-of-00002.parquet: row 1")
    kwargs = [[{"n": 1, "m": None}], [{"n": None, "m": "x"}, {"n": None, "m": None}]]
    rows = [
        {"key": "1", "prompt": "p", "instruction_id_list": ["a"] * len(k), "kwargs": k}
        for k in kwargs
    ]
    path = tmp_path / "data/train-00000-of-00001.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert [r["metadata"]["kwargs"] for r in opened("ifeval", tmp_path)] == [[{"n": 1}], [{"m": "x"}, {}]]  # fmt: skip


def test_csv_json_and_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, GPQA)
        writer.writeheader()
        writer.writerows([GPQA, {**GPQA, "Question": 'Which one,\n"the other"?'}])
    rows = opened("gpqa-diamond", tmp_path)
    assert (
        "Which planet is the largest?" in rows[0]["prompt"] and '"the other"?' in rows[1]["prompt"]
    )
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([MBPP_SANITIZED]))
    assert len(opened("mbpp", tmp_path)) == 1
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMAN_EVAL).encode()))
    assert "def total" in opened("humaneval", tmp_path / "HumanEval.jsonl.gz")[0]["prompt"]


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("gsm8k", "a.jsonl", b'{"question": "x"}\n', "a.jsonl:1: no row of gsm8k: has no 'answer'; its columns: question"),
        ("mbpp", "a.json", b'[{"prompt": "x"}]', "a.json: row 0: no row of mbpp: has no 'test_list'"),
        ("mbpp", "a.json", b"[3]", "a.json: row 0: the row is no object"),
        ("mbpp", "a.json", b"{}", "a.json: cannot be read: is no list of rows"),
        ("mbpp", "a.json", b"[", "a.json: cannot be read: Expecting value"),
        ("mbpp", "a.json", b"[]", "a.json: the file holds no rows"),
        ("humaneval", "a.jsonl.gz", b"no", "a.jsonl.gz: cannot be read: Not a gzipped file"),
        ("humaneval", "a.jsonl.gz", gzip.compress(b"x" * 100, mtime=0)[:20], "a.jsonl.gz: cannot be read"),
        ("gpqa-diamond", "a.csv", b"Question\nx\n", "row 0: no row of gpqa-diamond: has no 'Correct Answer'"),
        ("gpqa-diamond", "a.csv", b"\xff\xfe", "a.csv: cannot be read: 'utf-8' codec"),
        ("gsm8k", "a.txt", b"x", "unknown format; legal: .jsonl, .parquet, .csv, .json, .jsonl.gz"),
    ],
)  # fmt: skip
def test_files_of_something_else(
    tmp_path: Path, name: str, file: str, content: bytes, message: str
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError) as raised:
        opened(name, tmp_path / file)
    assert message in str(raised.value)


def test_a_template_that_fails_names_its_set(tmp_path: Path) -> None:
    """It is no fault of the row's form."""
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    own = EvalSet("mine", str(path), set="gsm8k", prompt_template="{{ question.text }}")
    with pytest.raises(ValueError) as raised:
        open_standard(own, check=lambda row: None, flag="--eval-config")
    assert "a.jsonl:1: set mine: prompt_template fails: UndefinedError" in str(raised.value)
    assert "no row of" not in str(raised.value)


def test_several_releases_in_a_folder(tmp_path: Path) -> None:
    """One is to be named; parts of a set are joined."""
    for name in ("HumanEvalPlus-v0.1.9.jsonl", "HumanEvalPlus-v0.1.10.jsonl"):
        jsonl(tmp_path / name, [HUMAN_EVAL])
    with pytest.raises(ValueError) as raised:
        opened("humaneval-plus", tmp_path)
    assert "HumanEvalPlus-v0.1.10.jsonl, HumanEvalPlus-v0.1.9.jsonl; name one" in str(raised.value)
    assert len(opened("humaneval-plus", tmp_path / "HumanEvalPlus-v0.1.10.jsonl")) == 1
    aime = [{"problem": "1 + 1?", "answer": "2"}]
    for half in ("I", "II"):
        jsonl(tmp_path / f"aime/aime2025-{half}.jsonl", aime)
    assert len(opened("aime-2025", tmp_path / "aime")) == 2


def test_some_rows_may_be_skipped(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*ROWS, {"question": "?", "answer": "none"}])
    assert len(opened("gsm8k", path, skip_bad_rows=1)) == 6
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "x"}, MBPP_SANITIZED]))
    source = open_standard(
        EvalSet("x", str(tmp_path / "a.json"), set="mbpp"),
        check=lambda row: None,
        flag="--eval-sets",
        skip_bad_rows=1,
    )
    assert len(source) == 1 and source.where(0).endswith("row 1")
    assert "skipped 1 bad rows" in source.notes[0]


def test_prompts_of_an_evaluation(chat_tokenizer: Any, tmp_path: Path) -> None:  # noqa: F811
    """The keys of the run are for its own files, and the chat template is the run's."""
    path = jsonl(tmp_path / "test.jsonl", ROWS)
    data = DataConfig(
        input_key="other", label_key="some", metadata_key="x", apply_chat_template=True
    )
    own = "{{ question }} Number only."
    sets = [
        EvalSet("gsm8k", str(path), set="gsm8k", rm_type="gsm8k"),
        EvalSet("short", f"{path}@[0:2]", set="gsm8k", rm_type="gsm8k", prompt_template=own),
    ]
    prompts, notes = load_eval_sets(sets, data, chat_tokenizer)
    assert not notes and [len(prompts[name]) for name in ("gsm8k", "short")] == [6, 2]
    first = prompts["short"][0]
    assert first.text == "<user>0 + 1? Number only.</user><assistant>"
    assert first.label == ROWS[0]["answer"] and first.metadata == {"rm_type": "gsm8k"}
    assert first.group_id == 6


@pytest.mark.skipif(sandbox.problem() is not None, reason="the host has no sandbox")
def test_tests_of_programs_reach_the_reward(tokenizer: Any, tmp_path: Path) -> None:  # noqa: F811
    path = jsonl(tmp_path / "HumanEval.jsonl", [HUMAN_EVAL])
    each = EvalSet("humaneval", str(path), set="humaneval", rm_type="code")
    prompts, _ = load_eval_sets([each], DataConfig(), tokenizer)
    (prompt,) = prompts["humaneval"]
    assert prompt.metadata["prelude"] == HUMAN_EVAL["prompt"]
    assert "check(total)" in prompt.metadata["tests"][0]["code"]

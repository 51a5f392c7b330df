"""GSM8K-shaped rows through train.py: tokenise, roll out, grade with --rm-type gsm8k. The rows are
hand-made in the public form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer, torchrun_once

ROWS = [
    {
        "question": "Ann has 40 pens and buys 2 more. How many has she?",
        "answer": "She has 40 + 2 = <<40+2=42>>42 pens.\n#### 42",
    },
    {
        "question": "A box weighs 1,250 g. What do two weigh?",
        "answer": "2 * 1,250 = <<2*1250=2500>>2,500 g.\n#### 2,500",
    },
    {
        "question": "It was 3 degrees and fell by 7. What is it now?",
        "answer": "3 - 7 = <<3-7=-4>>-4.\n#### -4",
    },
    {"question": "Half of 9 dollars is how much?", "answer": "9 / 2 = <<9/2=4.5>>4.50.\n#### 4.5"},
]
# an answer that a random model gives now and then, so that grading is seen to give both 0 and 1
DIGITS = [{"question": f"Say {i}", "answer": f"Well.\n#### {i % 10}"} for i in range(12)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(
    work: Workspace, out: Path, data: Path | str, **changes: str | int | float | Path | None
) -> list[str]:
    gsm8k = dict(
        prompt_data=data,
        input_key="question",
        label_key="answer",
        rm_type="gsm8k",
        custom_rm_path=None,
        rollout_shuffle=None,
    )
    rollout = dict(
        debug_rollout_only="", save_debug_rollout_data=out / "rollout_{rollout_id}", num_rollout=1
    )
    return work.flags(out, **{**gsm8k, **rollout, **changes})


def test_roll_out_and_grade(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    data = write(tmp_path / "train.jsonl", [*ROWS, *DIGITS])
    argv = flags(
        work,
        tmp_path,
        data,
        rollout_batch_size=16,
        n_samples_per_prompt=16,
        rollout_max_response_len=2,
    )
    server.train(argv, tmp_path / "log").ok()
    groups = load_rollout(str(tmp_path / "rollout_{rollout_id}"), 0)
    assert [group.samples[0].label for group in groups] == [
        row["answer"] for row in (*ROWS, *DIGITS)
    ]
    assert [group.samples[0].text for group in groups] == [
        f"<|user|>{row['question']}<|assistant|>" for row in (*ROWS, *DIGITS)
    ]
    samples = [sample for group in groups for sample in group.samples]
    plain = [
        sample for sample in samples if not set("-.") & set(sample.response)
    ]  # signs and points are for tests/unit
    for sample in plain:
        found, answer = re.findall(r"\d+", sample.response), sample.label.rpartition("#### ")[2]
        assert sample.reward == float(found[-1:] == [answer]), (sample.response, sample.label)
    assert {sample.reward for sample in plain} == {0.0, 1.0}
    row = rows_of(tmp_path)[0]
    assert row["rollout/reward_mean"] == pytest.approx(
        sum(s.reward or 0.0 for s in samples) / len(samples)
    )
    assert not any(name.startswith("train/") for name in row)


def test_the_right_answer_earns_one() -> None:
    from slime_like.rewards.gsm8k import score

    for row in ROWS:
        solution = row["answer"]
        number = solution.rpartition("#### ")[2]
        for response in (solution, f"The answer is {number}.", f"\\boxed{{{number}}}"):
            assert score(response, solution, {}) == 1.0
        assert score(f"#### {number}1", solution, {}) == 0.0


BAD_FILES = {
    "bad line": ('{"question": "a", "answer": "#### 1"}\n{"question": "b", \n', ":2: bad JSON"),
    "missing key": (
        '{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n',
        ":2: missing key 'answer' (--label-key)",
    ),
    "not an object": ('["a"]\n', ":1: the row is a JSON array"),
    "empty": ("", ": the file holds no rows"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_error(
    server: TrainServer, work: Workspace, tmp_path: Path, kind: str
) -> None:
    text, words = BAD_FILES[kind]
    data = tmp_path / "train.jsonl"
    data.write_text(text)
    error = server.train(flags(work, tmp_path, data), tmp_path / "log").error()
    assert f"{data}{words}" in error


@pytest.mark.extended
def test_two_ranks_report_it_once(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(BAD_FILES["missing key"][0])
    done = server.train(flags(work, tmp_path, data), tmp_path / "log", ranks=2)
    assert f"{data}:2: missing key 'answer'" in done.error()
    status, output = torchrun_once(flags(work, tmp_path, data), ranks=2, timeout_s=300)
    assert status != 0
    assert output.count("missing key 'answer'") == 1, output


def test_a_label_without_a_number_names_its_row(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    data = write(tmp_path / "train.jsonl", [*ROWS[:3], {"question": "Why?", "answer": "because"}])
    error = server.train(flags(work, tmp_path, data), tmp_path / "log").error()
    assert f"{data}:4: the label holds no number: 'because'" in error


def test_a_file_that_is_not_there(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    done = server.train(flags(work, tmp_path, tmp_path / "none.jsonl"), tmp_path / "log")
    assert done.status == 2
    assert done.err.count("--prompt-data") == 1 and "no such file" in done.err
    done = server.train(
        flags(work, tmp_path, write(tmp_path / "train.csv", ROWS)), tmp_path / "log"
    )
    assert done.error().endswith(
        "unknown format; legal: .jsonl, .parquet files, reasoning_gym:<task>"
    )

"""What rows hold: Parquet's rows are those of JSONL, labels are what graders read, and no row is
accepted that ends the run later."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arguments.schema.data import DataConfig
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.data.prompts import PromptSource
from slime_like.data.tasks import TaskSource
from slime_like.data.values import plain
from slime_like.rewards.registry import answer_check
from slime_like.rollout.recording import decode, encode
from slime_like.types import Prompt

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, YES = {"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}  # fmt: skip


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# Every row has its own keys, in calls, schemas and metadata, which Parquet adds to the others.
ROWS: list[dict[str, Any]] = [
    {
        "input": [USER, called("look", city="Paris"), {"role": "tool", "content": "sun"}],
        "tools": [tool("look", city={"type": "string"})],
        "metadata": {"tests": [{"stdin": "1"}], "nested": {"a": 1}},
    },
    {
        "input": [{**USER, "name": "Ann"}, called("add", a=1, b=2.5), {"role": "tool", "content": "3", "tool_call_id": "7"}],
        "tools": [tool("add", a={"type": "number"}, b={"type": "number", "minimum": 0})],
        "metadata": {"tests": [{"function": "f", "arguments": [1]}], "nested": {"b": [{"c": "d"}, {"e": "f"}]}},
    },
]  # fmt: skip


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRITE = {"parquet": write_parquet, "jsonl": write_jsonl}


def tokenizer() -> Any:
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def prompts(path: Path, *, rm_type: str | None = None, **how: Any) -> list[Prompt]:
    options = {key: how.pop(key) for key in ("conversations", "pairs") if key in how}
    check = None if rm_type is None else answer_check(rm_type, None)
    chat = bool(how.pop("chat", True))
    config = DataConfig(prompt_data=str(path), apply_chat_template=chat, **how)
    source = PromptSource(config, tokenizer(), answer_check=check, **options)
    return source.next_prompts(len(source))


@pytest.mark.parametrize("how", ["prompts", "conversations"])
def test_rows_of_parquet_are_those_of_jsonl(tmp_path: Path, how: str) -> None:
    rows, options = ROWS, {}
    if how == "conversations":
        rows = [{**row, "input": [*row["input"], YES]} for row in ROWS]
        options = {"conversations": True}
    found = {kind: prompts(write(tmp_path / f"a.{kind}", rows), **options) for kind, write in WRITE.items()}  # fmt: skip
    assert found["parquet"] == found["jsonl"]
    written = found["parquet"][0].text + str(found["parquet"][0].turns)
    assert "null" not in written and "Paris" in written
    assert found["jsonl"][1].metadata["tools"] == rows[1]["tools"]
    assert {k: found["parquet"][0].metadata[k] for k in rows[0]["metadata"]} == rows[0]["metadata"]


def test_fields_of_the_metadata_itself_stay_null(tmp_path: Path) -> None:
    """They are columns of the table: a reward may read metadata["a"]."""
    rows = [{"input": "x", "metadata": {"a": 1}}, {"input": "y", "metadata": {"b": {"c": 2}}}]
    first, second = prompts(write_parquet(tmp_path / "a.parquet", rows))
    assert first.metadata == {"a": 1, "b": None} and second.metadata == {"a": None, "b": {"c": 2}}


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pa.array([{"m": [("a", 1), ("b", 2)]}], pa.struct([("m", pa.map_(pa.string(), pa.int64()))]))  # fmt: skip
    pq.write_table(pa.table({"input": ["x"], "metadata": metadata}), tmp_path / "a.parquet")
    (prompt,) = prompts(tmp_path / "a.parquet")
    assert prompt.metadata == {"m": {"a": 1, "b": 2}}


DAPO = {"input": "1 + 1?", "reward_model": {"ground_truth": "2", "style": "rule"}, "x.y": "3"}


@pytest.mark.parametrize("kind", WRITE)
def test_a_label_in_an_object_is_named_by_its_path(tmp_path: Path, kind: str) -> None:
    path = WRITE[kind](tmp_path / f"a.{kind}", [DAPO])
    for key, label in (("reward_model.ground_truth", "2"), ("x.y", "3")):
        assert prompts(path, label_key=key, rm_type="dapo")[0].label == label
    with pytest.raises(ValueError, match=r"missing key 'reward_model.truth' \(--label-key\); 'reward_model' has: ground_truth, style"):  # fmt: skip
        prompts(path, label_key="reward_model.truth", rm_type="dapo")


@pytest.mark.parametrize("rm_type", ["dapo", "math", "deepscaler", "gsm8k", "f1", "exact_match", "gpqa"])  # fmt: skip
@pytest.mark.parametrize("kind", WRITE)
def test_labels_that_no_grader_can_read_are_refused(
    tmp_path: Path, kind: str, rm_type: str
) -> None:
    """DAPO-Math's reward_model as the label graded a right answer 0 and a wrong one 1."""
    path = WRITE[kind](tmp_path / f"a.{kind}", [{**DAPO, "answers": ["2"]}])
    words = r"the label is an object with ground_truth, style, .* --label-key KEY.ground_truth"
    with pytest.raises(ValueError, match=words):
        prompts(path, label_key="reward_model", rm_type=rm_type)
    with pytest.raises(ValueError, match="the label is a list, and must be text or a number"):
        prompts(path, label_key="answers", rm_type=rm_type)


def test_a_label_that_is_not_a_number_is_missing(tmp_path: Path) -> None:
    """As pandas writes missing ones."""
    rows = [{"input": "x", "label": 1.0}, {"input": "y", "label": float("nan")}]
    with pytest.raises(ValueError, match="row 1: the label is missing or null"):
        prompts(write_parquet(tmp_path / "a.parquet", rows), label_key="label", rm_type="math")


VALUES = [datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), decimal.Decimal("1.5"), b"ab"]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["label", "metadata"])
def test_what_no_recording_can_hold_is_refused_when_the_file_is_opened(
    tmp_path: Path, place: str, value: Any
) -> None:
    row = {"input": "x", place: value if place == "label" else {"when": [{"at": value}]}}
    where = "'label'" if place == "label" else r"'metadata'\['when'\]\[0\]\['at'\]"
    words = rf"a.parquet: row 0: {where} is a {type(value).__name__}, which no recording"
    with pytest.raises(ValueError, match=words):
        prompts(write_parquet(tmp_path / "a.parquet", [row]), label_key="label" if place == "label" else None)  # fmt: skip


def test_tasks_with_types_of_numpy_can_be_recorded() -> None:
    """knights_knaves has names of numpy's text type, with which a recording ended the run."""
    source = TaskSource("reasoning_gym:knights_knaves?size=2")
    (row,) = source.rows([1])
    assert decode(json.loads(json.dumps(encode(row, "row")))) == row
    value = {np.str_("a"): [np.float64(1.5), (np.int64(2), None)]}
    assert encode(plain(value), "value") == encode({"a": [1.5, (2, None)]}, "value")

"""Rows with a chosen and a rejected answer: texts and conversations, as TRL's data sets have them,
and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.schema.data import DataConfig
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.data.pairs import pair_samples
from slime_like.data.prompts import PromptSource
from slime_like.types import Sample, SampleStatus

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "one more"}
YES, NO = ({"role": "assistant", "content": word} for word in ("yes", "no"))


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = make_tokenizer()
    made.chat_template = template
    return made


def source(folder: Path, *rows: dict[str, Any], made: Any = None, **config: Any) -> PromptSource:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(
        DataConfig(prompt_data=str(path), **config), made or tokenizer(), pairs=True
    )


def samples(
    folder: Path, *rows: dict[str, Any], limit: int | None = None, **config: Any
) -> list[Sample]:
    made = tokenizer()
    prompts = source(folder, *rows, made=made, **config).next_prompts(len(rows))
    return pair_samples(prompts, made, max_response_len=limit)


def words(sample: Sample) -> tuple[str, str, str]:
    """Prompt, and what of the response is learnt and is not."""
    made = tokenizer()
    ids = sample.tokens.tolist()
    split = sample.prompt_length
    learnt, read = (
        [t for t, m in zip(ids[split:], sample.loss_mask.tolist()) if m == wanted]
        for wanted in (True, False)
    )
    return made.decode(ids[:split]), made.decode(learnt), made.decode(read)


def test_texts_are_answers_with_an_end(tmp_path: Path) -> None:
    row = {"prompt": "is it?", "chosen": "yes", "rejected": "no", "metadata": {"id": 7}}
    chosen, rejected = samples(tmp_path, row, input_key="prompt")
    end = tokenizer().eos_token
    assert words(chosen) == ("is it?", f"yes{end}", "")
    assert words(rejected) == ("is it?", f"no{end}", "")
    assert chosen.metadata == rejected.metadata == {"id": 7}


def test_the_chat_template_opens_the_answer(tmp_path: Path) -> None:
    row = {"input": "is it?", "good": "yes", "bad": "no"}
    chosen, _ = samples(
        tmp_path, row, chosen_key="good", rejected_key="bad", apply_chat_template=True
    )
    assert words(chosen)[0] == "<user>is it?;<assistant>"


@pytest.mark.parametrize("form", ["explicit", "explicit, a text", "implicit", "both"])
def test_conversations_of_every_form_are_the_same_pair(tmp_path: Path, form: str) -> None:
    """TRL's explicit and implicit prompts, and UltraFeedback's, which has it twice."""
    answers = {"chosen": [YES], "rejected": [NO]}
    row = {
        "explicit": {"input": [USER], **answers},
        "explicit, a text": {"input": USER["content"], **answers},
        "implicit": {key: [USER, *value] for key, value in answers.items()},
        "both": {"input": "not read", **{key: [USER, *value] for key, value in answers.items()}},
    }[form]
    chosen, rejected = samples(tmp_path, row)
    assert words(chosen) == ("<user>one more;<assistant>", "yes;", "")
    assert words(rejected) == ("<user>one more;<assistant>", "no;", "")


def test_turns_that_both_share_are_read_and_later_ones_learnt(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "quite"}]
    row = {"chosen": [USER, YES, USER, YES, *more], "rejected": [USER, YES, USER, NO, *more]}
    chosen, rejected = samples(tmp_path, row)
    assert words(chosen)[0] == "<user>one more;<assistant>yes;<user>one more;<assistant>"
    assert words(chosen)[1:] == ("yes;quite;", "<user>sure?;<assistant>")
    assert words(rejected)[1:] == ("no;quite;", "<user>sure?;<assistant>")


@pytest.mark.parametrize("mask", ["weight", "step_loss_mask"])
def test_shared_turns_are_not_learnt_whatever_mask_they_have(tmp_path: Path, mask: str) -> None:
    row = {
        "chosen": [USER, YES | {mask: 1}, USER, YES],
        "rejected": [USER, YES | {mask: 1}, USER, NO],
    }
    chosen, rejected = samples(tmp_path, row)
    assert words(chosen)[1:] == ("yes;", "") and words(rejected)[1:] == ("no;", "")


def test_pairs_are_neighbours_with_ids_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"input": "a", "chosen": "x", "rejected": "y"},
        {"input": "b", "chosen": [USER, YES], "rejected": [USER, NO]},
    ]
    found = samples(tmp_path, *rows)
    assert [(s.group_id, s.sample_id) for s in found] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_what_is_too_long_is_cut_and_reported(tmp_path: Path) -> None:
    row = {"input": "a", "chosen": "a very long answer", "rejected": "n"}
    chosen, rejected = samples(tmp_path, row, limit=3)
    assert chosen.response_length == 3 and chosen.status == SampleStatus.TRUNCATED
    assert rejected.response_length == 2 and rejected.status == SampleStatus.COMPLETED


def test_of_a_scored_answer_the_last_token_is_active(tmp_path: Path) -> None:
    row = {"input": "a", "chosen": "xyz", "rejected": "y", "by": 2}
    made = tokenizer()
    (prompt,) = source(tmp_path, row, made=made, margin_key="by").next_prompts(1)
    for sample in pair_samples([prompt], made, scored=True):
        assert sample.loss_mask.tolist() == [False] * (sample.response_length - 1) + [True]
        assert int(sample.tokens[-1]) == made.eos_token_id and sample.reward == 2.0


@pytest.mark.parametrize("margin", ["2", None, True, float("nan"), 10**400, -(10**400), 1e39])
def test_a_margin_is_a_number(tmp_path: Path, margin: Any) -> None:
    row = {"input": "a", "chosen": "x", "rejected": "y", "by": margin}
    with pytest.raises(ValueError, match=r"'by' \(--margin-key\) must be a finite number"):
        source(tmp_path, row, margin_key="by")


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "no answer": ({"input": "a", "chosen": "x"}, r"missing key 'rejected' \(--rejected-key\)"),
    "an empty answer": ({"input": "a", "chosen": "x", "rejected": ""}, "must both be texts"),
    "two kinds": ({"input": "a", "chosen": "x", "rejected": [NO]}, "must both be texts"),
    "a number": ({"input": "a", "chosen": 1, "rejected": 2}, "must both be texts"),
    "a prompt that is none": ({"input": None, "chosen": [YES], "rejected": [NO]}, "must be a string or a list"),
    "messages that are none": ({"input": [None], "chosen": [YES], "rejected": [NO]}, "must be a string or a list"),
    "the same": ({"input": "a", "chosen": "x", "rejected": "x"}, "are the same"),
    "no prompt": ({"chosen": "x", "rejected": "y"}, r"missing key 'input' \(--input-key\)"),
    "no prompt of messages": ({"chosen": [YES], "rejected": [NO]}, r"missing key 'input' \(--input-key\)"),
    "no message": ({"chosen": ["x"], "rejected": ["y"]}, "must be a list of messages"),
    "no content": (
        {"chosen": [USER, {"role": "assistant"}], "rejected": [USER, NO]},
        r"'chosen' \(--chosen-key\): message 1 \(assistant\): 'content' is missing",
    ),
    "nobody answers": ({"chosen": [USER, USER], "rejected": [USER, NO]}, "there is no turn of an assistant"),
    "two prompts": (
        {"chosen": [USER, YES], "rejected": [{"role": "user", "content": "z"}, NO]},
        "answers to different prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_bad_row_is_named(tmp_path: Path, name: str) -> None:
    row, message = PROBLEMS[name]
    good = {"input": "a", "chosen": "x", "rejected": "y"}
    with pytest.raises(ValueError, match=rf"pairs\.jsonl:2: .*{message}"):
        source(tmp_path, good, row)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    row = {"chosen": [USER, YES], "rejected": [USER, NO]}
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        source(tmp_path, row, made=tokenizer(None))
    text = {"input": "a", "chosen": "x", "rejected": "y"}
    assert len(source(tmp_path, text, made=tokenizer(None))) == 1

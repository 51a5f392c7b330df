"""Rewards of reasoning-gym's tasks."""

from __future__ import annotations

import pytest

from slime_like.rewards import task


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 12\n", "12"),
        ("<think>3</think><answer> 12 </answer>", "12"),
        ("<answer>1</answer> no <answer>2</answer> end", "2"),
        ("<answer>12", "<answer>12"),
        ("12</answer>", "12</answer>"),
        ("<answer>\n1\n2\n</answer>", "1\n2"),
    ],
)
def test_answer_tags(response, answer):
    assert task.extract_answer(response) == answer


def test_task_scorers_accept_their_own_answers():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "countdown", "leg_counting", "word_sorting", "rearc"):
        options = {"size": 2, "seed": 1}
        entry = reasoning_gym.create_dataset(name, **options)[1]
        metadata = {"task": {"name": name, "options": options}, "entry": entry}
        answer = entry["answer"] if name != "countdown" else entry["metadata"]["expression"]
        assert task.score(f"<answer>{answer}</answer>", None, metadata) == 1
        assert task.score("<answer>?</answer>", None, metadata) < 0.5


def test_task_needs_a_task_source():
    with pytest.raises(ValueError, match="reasoning_gym:<task> source"):
        task.score("x", None, {})

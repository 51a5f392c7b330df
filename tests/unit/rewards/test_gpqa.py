"""slime's reward gpqa, on slime's own test cases."""

from __future__ import annotations

import pytest

from slime_like.rewards import gpqa


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("The answer is C.", "C", {}, 1),
        ("The answer is C.", "D", {}, 0),
        ("Of the answer choices, the correct answer is D.", "D", {}, 1),
        ("Answer: C", 2, {"choices": ["alpha", "beta", "gamma", "delta"]}, 1),
        ("Answer: B", 1, {"choices": {"a": "first", "b": "second", "c": "third"}}, 1),
        (
            "I think the answer is B.",
            "capital of france",
            {"choices": ["London", "Capital of France"]},
            1,
        ),
        ("Definitely paris.", "Paris", {"choices": ["London", "Paris", "Berlin"]}, 1),
        ("Answer: A", "anything", {"correct_letter": "a"}, 1),
        ("Answer: A is wrong.</think>The answer is B.", "B", {}, 1),
        ("we ruled out A, then B, settled on C", "C", {}, 1),
        ("Answer: C, but A was right, no wait B.", "B", {"valid_letters": ["a", "b"]}, 1),
        ("E is the correct option", "E", {}, 1),
        ("the final option is C", "C", {}, 1),
        ("random text", "some answer", {}, 0),
        ("", "A", {}, 0),
    ],
)
def test_gpqa(response, label, metadata, expected):
    assert gpqa.score(response, label, metadata) == expected

"""slime's rewards: what its own test cases expect of each."""

import pytest

from slime_like.rewards import dapo, deepscaler, f1, gpqa


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Let me see. \\boxed{99}</think>Final: \\boxed{42}", "42", 1),
        ("Scratch \\boxed{9}###Response\\boxed{42}", "42", 1),
        ("\\boxed{42}", "42", 0),
        ("plain</think>no box", "42", 0),
        ("</think>\\boxed{42}", "", 0),
        ("</think>\\boxed{42}", 42, 1),
        ("</think>\\boxed{42}", 42.0, 1),
        ("</think>\\boxed{42}", "\\boxed{42}", 1),
        ("</think>\\boxed{43}", "42", 0),
        ("</think>\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("</think>\\boxed{1,000}", "1000", 1),
        ("</think>\\boxed{\\text{blue}}", "\\text{blue}", 1),
    ],
)
def test_deepscaler(response, label, expected):
    assert deepscaler.score(response, label, {}) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Long solution. Answer: 42", "42", 1),
        ("Answer: 41 was wrong.\nAnswer: 42", "42", 1),
        ("just a number 42", "42", -1),
        ("answer : $42$", "42.0", 1),
        ("Answer: x = 42 square", "42", 1),
        ("Answer: \\boxed{1,234,567}", "1234567", 1),
        ("Answer: 100 dollars<|im_end|>", 100, 1),
        ("Answer: \\text{43}", "42", -1),
        ("Answer: 42" + " " * 400, "42", -1),
    ],
)
def test_dapo(response, label, expected):
    assert dapo.score(response, label, {}) == expected


def test_dapo_of_a_label_without_a_number():
    assert dapo.problem("blue", {}) is not None and dapo.problem("12", {}) is None
    with pytest.raises(ValueError, match="no number"):
        dapo.score("Answer: 1", "blue", {})


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Paris is the capital", "Paris is the capital", 1),
        ("the brown fox", "a quick brown fox", 0.8),
        ("apple banana", "carrot date", 0),
        ("yes", "yes sir", 0),
        ("he said no", "no", 0),
        ("noanswer", "noanswer", 1),
        ("An apple, a day", "the apple day!", 1),
    ],
)
def test_f1(response, label, expected):
    assert f1.score(response, label, {}) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("The answer is C.", "C", {}, 1),
        ("The answer is C.", "D", {}, 0),
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

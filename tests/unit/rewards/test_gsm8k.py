"""The reward of GSM8K: the last number of a response."""

from __future__ import annotations

import time

import pytest

from slime_like.rewards import gsm8k


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("2 + 2 = 4\n#### 4", "He has 4.\n#### 4", 1),
        ("#### 4", "#### 5", 0),
        ("so 18 dollars", "#### 18", 1),
        ("the total is $70,000.", "#### 70000", 1),
        ("#### $1,234.50", "1234.5", 1),
        ("#### 40,000", "#### 40,000", 1),
        ("1{,}000 and \\$1{,}000", "#### 1,000", 1),
        ("#### 18.", "#### 18", 1),
        ("#### Step 1: add\n#### Step 2: halve\nIt is \\boxed{18}", "#### 18", 1),
        ("#### 1. Addition\nso 18", "#### 18", 1),
        ("#### The final answer is -18", "#### -18", 1),
        ("#### x = -18", "#### -18", 1),
        ("#### Step 1: add\n#### 18 (not 20)", "#### 18", 1),
        ("#### 18.0", "#### 18", 1),
        ("#### -3", "#### -3", 1),
        ("it is \u22123 degrees", "#### -3", 1),
        ("it is 3 degrees", "#### -3", 0),
        ("16-3", "#### 3", 1),
        ("x=-3", "#### -3", 1),
        ("costs -$5", "-5", 1),
        ("#### 5\nno, wait\n#### 7", "#### 7", 1),
        ("#### 7\nnow 99 bottles", "#### 7", 1),
        ("first \\boxed{5}, no: \\boxed{7} as 3+4", "#### 7", 1),
        ("#### 7 and \\boxed{5}", "#### 7", 1),
        ("\\boxed{\\text{about } 1,500}", "#### 1500", 1),
        ("\\boxed{\\frac{1}{2}} then 8", "#### 2", 1),
        ("\\boxed{unknown} 8", "#### 8", 0),
        ("8 \\boxed{7", "#### 7", 1),
        ("\\boxed{8} \\boxed{7", "#### 8", 1),
        ("\\boxed{\\boxed{7}}", "#### 7", 1),
        ("\\boxed{7\\}} 9", "#### 7", 1),
        ("#### none, but 7", "#### 7", 1),
        ("####\n7", "#### 7", 1),
        ("a list: 1,2,3", "#### 3", 1),
        ("1,234,567", "#### 1234567", 1),
        ("no number", "#### 7", 0),
        ("", "#### 7", 0),
        (".5", "0.50", 1),
        ("#### 7", 7, 1),
        ("1" * 10_000, "1" * 10_000, 1),
    ],
)
def test_gsm8k(response, label, expected):
    assert gsm8k.score(response, label, {}) == expected


@pytest.mark.parametrize("label", ["", "no number here", None])
def test_gsm8k_label_without_a_number(label):
    with pytest.raises(ValueError, match="the label holds no number"):
        gsm8k.score("7", label, {})


@pytest.mark.parametrize(
    "piece", ["1", ",111", "1,", "####", "#### x\n", "\\boxed{", "{}", "-", "$", ".1", "1,111"]
)
def test_gsm8k_is_linear_in_the_text(piece):
    """It has no deadline, so nothing a model writes may make it slow: what is quadratic takes
    hours here."""
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    gsm8k.score(text + " 7", "#### 7", {})
    assert time.process_time() - start < 100

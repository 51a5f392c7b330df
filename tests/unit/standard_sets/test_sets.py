"""Standard evaluation sets: rows in the form of their published files become prompts that the set's
reward grades."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from slime_like.rewards import sandbox
from slime_like.rewards.registry import rewards
from slime_like.standard_sets import standard_sets
from slime_like.standard_sets.base import NotThisSet

needs_sandbox = pytest.mark.skipif(sandbox.problem() is not None, reason="the host has no sandbox")


def packed(cases: list[dict[str, str]]) -> str:
    """As LiveCodeBench's files have private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


GPQA = {
    "Question": "Which planet is the largest?\n",
    "Correct Answer": "Jupiter\n",
    **{f"Incorrect Answer {i}": name for i, name in enumerate(("Mars", "Venus", "Saturn"), 1)},
    "Subdomain": "Astrophysics",
}
MMLU_PRO = {
    "question_id": 70,
    "question": "What is 2 + 2?",
    "options": ["3", "5", "4", "22"],
    "answer": "C",
    "answer_index": 2,
    "category": "math",
}
HUMAN_EVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ The sum.\n    >>> total([1, 2])\n    3\n    """\n',
    "canonical_solution": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
PLUS_HEAD = """\
import numpy as np

def is_floats(x):
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact and atol != 0:
        {close}
    else:
        assert exact
"""
CLOSE = (
    "assert np.allclose(out, exp, rtol=1e-07, atol=atol)",
    "np.testing.assert_allclose(out, exp, atol=atol)",
)
HALF = {
    "task_id": "HumanEval/901",
    "prompt": 'def half(x: float) -> float:\n    """ Half of it. """\n',
    "canonical_solution": "    return x / 2\n",
    "entry_point": "half",
}


def plus(close: str) -> dict[str, Any]:
    test = PLUS_HEAD.format(close=close) + (
        "\ndef check(candidate):\n    for inp, exp in zip([[1.0], [3.0]], [0.5, 1.50000001]):\n"
        "        assertion(candidate(*inp), exp, 0)\n"
    )
    return {**HALF, "test": test}


MBPP = {
    "task_id": 602,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, LIMIT) == LIMIT"],
    "test_setup_code": "LIMIT = 10",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "charlessutton@: Benchmark Questions Verification V2.ipynb",
    "task_id": 603,
    "prompt": "Write a function to find the root of a number.",
    "code": "import math\ndef root(a):\n    return math.sqrt(a)",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(4), 2)"],
}
MBPP_PLUS = {
    **MBPP_SANITIZED,
    "test": PLUS_HEAD.format(close=CLOSE[0])
    + "\nfor inp, exp in zip([[4], [9]], [2.0, 3.0]):\n    assertion(root(*inp), exp, 0)\n",
}
LCB_INPUT = {
    "question_title": "A. Sum",
    "question_content": "Print the mean of two integers.",
    "platform": "atcoder",
    "question_id": "abc900_a",
    "contest_date": "2025-01-04T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([case("1 2\n", "1.50\n")]),
    "private_test_cases": packed([case("4 5\n", "4.5\n"), case("2 2\n", "2\n")]),
    "metadata": "{}",
}
LCB_METHOD = {
    **LCB_INPUT,
    "platform": "leetcode",
    "question_content": "Return the pairs of equal numbers.",
    "starter_code": "class Solution:\n    def pairs(self, xs: List[int], k: int) -> List[int]:\n        ",
    "public_test_cases": json.dumps([case("[1, 2, 1]\n1", "[1, 1]", "functional")]),
    "private_test_cases": packed([case("[3]\n9", "[]", "functional")]),
    "metadata": json.dumps({"func_name": "pairs"}),
}
PAIRS = (
    "class Solution:\n    def pairs(self, xs: List[int], k: int) -> List[int]:\n        return {}"
)
MEAN = "from __future__ import annotations\na, b = map(int, input().split())\nprint({})"


def fenced(program: str) -> str:
    return f"<think>```python\nno\n```</think>So:\n\n```python\n{program}\n```\nDone."


# set, row, what the prompt shows, an answer that is right, one that is wrong
CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("gsm8k", {"question": "Tom has 3 apples and buys 4.", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
     "buys 4.", "So 7.\n#### 7", "#### 8"),
    ("math-500", {"problem": "Half of 1?", "solution": "...", "answer": "\\frac{1}{2}", "subject": "Algebra",
                  "level": 1, "unique_id": "test/algebra/1.json"}, "Half of 1?", "\\boxed{0.5}", "\\boxed{2}"),
    ("math-500", {"problem": "The price?", "answer": "\\$32,\\!348"}, "price", "\\boxed{32348}", "\\boxed{32349}"),
    ("aime-2024", {"id": 60, "problem": "Find m.", "solution": "... \\boxed{033}", "answer": "033"},
     "Find m.", "\\boxed{33}", "\\boxed{3}"),
    ("aime-2024", {"ID": "2024-I-1", "Problem": "Find n.", "Solution": "It is 204.", "Answer": 204},
     "Find n.", "\\boxed{204}", "\\boxed{24}"),
    ("aime-2024", {"id": 0, "problem": "Find k.", "solution": "\\boxed{25}", "url": "x"},
     "Find k.", "\\boxed{25}", "\\boxed{52}"),
    ("aime-2025", {"question": "Find the angle.", "answer": "336^\\circ"},
     "angle", "\\boxed{336^\\circ}", "\\boxed{33}"),
    ("mmlu-pro", MMLU_PRO, "C) 4", "A or C?\n**Answer: C**", "Answer: A"),
    ("humaneval", HUMAN_EVAL, "The sum.", fenced("def total(xs):\n    return sum(xs)"), fenced("def total(xs):\n    return 3")),
    ("humaneval", HUMAN_EVAL, "def total", "    return sum(xs)", "    return len(xs)"),
    *(("humaneval-plus", plus(close), "Half of it.", fenced("def half(x):\n    return x / 2"),
       fenced("def half(x):\n    return x / 2 + 1e-4")) for close in CLOSE),
    ("mbpp", MBPP, "assert add(1, 2) == 3", fenced("add = lambda a, b: a + b"), fenced("add = max")),
    ("mbpp", MBPP_SANITIZED, "root of a number", fenced("def root(a):\n    return a ** 0.5"), fenced("root = abs")),
    ("mbpp-plus", MBPP_PLUS, "root of a number", fenced("def root(a):\n    return a ** 0.5"), fenced("root = lambda a: 2.0")),
    ("livecodebench", LCB_INPUT, "standard input", fenced(MEAN.format("(a + b) / 2")), fenced(MEAN.format("(a + b) // 2"))),
    ("livecodebench", LCB_METHOD, "def pairs", fenced(PAIRS.format("[x for x in xs if Counter(xs)[x] > 1]")),
     fenced(PAIRS.format("[1, 1]"))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_published_row_is_asked_and_graded(number: int) -> None:
    name, row, shown, right, wrong = CASES[number]
    standard = standard_sets.get(name)
    made = standard.convert(row)
    assert shown in made["prompt"] and json.dumps(made)
    reward = rewards.get(standard.reward)
    if standard.reward == "code" and sandbox.problem() is not None:
        pytest.skip("the host has no sandbox")
    if reward.missing_library() is not None:
        pytest.skip(f"needs {reward.missing_library()}")
    assert reward.problem(made["label"], made["metadata"]) is None
    grades = [reward.score(text, made["label"], made["metadata"]) for text in (right, wrong, "")]
    assert grades == [1.0, 0.0, 0.0]
    if made["solution"] is not None:
        assert reward.score(made["solution"], made["label"], made["metadata"]) == 1.0


def test_every_set_says_how_its_prompts_are_made() -> None:
    for name, standard in standard_sets.items():
        assert standard.reward in rewards.names(), name
        assert standard.hub and standard.files and standard.about, name
        shown = dict.fromkeys(standard.names, "")
        assert all(f"{{{{ {n} }}}}" in standard.template for n in shown if n != "options"), name


def test_the_order_of_choices_depends_on_the_question_alone() -> None:
    gpqa = standard_sets.get("gpqa-diamond")
    letters = []
    for i in range(40):
        row = {**GPQA, "Question": f"Question {i}?"}
        first, again = gpqa.convert(row), gpqa.convert(dict(reversed(row.items())))
        assert first == again
        assert f"{first['label']}) Jupiter" in first["prompt"].split("\n")
        letters.append(first["label"])
    assert all(letters.count(letter) >= 3 for letter in "ABCD"), letters


def test_instructions_are_for_their_reward_and_have_no_null_settings() -> None:
    kwargs = [{"num_words": None, "relation": None}, {"relation": "at least", "num_words": 3}]
    row = {"key": 1000, "prompt": "Write.", "instruction_id_list": ["a:b", "c:d"], "kwargs": kwargs}
    made = standard_sets.get("ifeval").convert(row)
    assert made["prompt"] == "Write." and made["metadata"] == {
        "instruction_id_list": ["a:b", "c:d"],
        "kwargs": [{}, {"relation": "at least", "num_words": 3}],
        "prompt_text": "Write.",
    }
    assert standard_sets.get("ifbench").convert(row)["metadata"]["loose"] is True


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gsm8k", {"problem": "x", "answer": "#### 7"}, "has no 'question'; its columns: answer, problem"),
    ("gsm8k", {"question": "x", "answer": "7"}, "no number after '####'"),
    ("gsm8k", {"question": 7, "answer": "#### 7"}, "'question' is a int, must be str"),
    ("aime-2025", {"problem": "x", "solution": "none"}, "neither an 'answer' nor"),
    ("mmlu-pro", {**MMLU_PRO, "answer": "E"}, "'E', must be one of the letters ABCD"),
    ("mmlu-pro", {**MMLU_PRO, "options": "3, 5"}, "'options' is a str"),
    ("gpqa-diamond", {"question": "x", "answer": "A"}, "has no 'Question'"),
    ("humaneval", {**HUMAN_EVAL, "entry_point": "other"}, "'prompt' other"),
    ("mbpp", {**MBPP, "test_list": []}, "'test_list' is empty"),
    ("mbpp", {**MBPP, "test_list": [1]}, "list of texts"),
    ("ifeval", {"prompt": "x", "instruction_id_list": ["a"], "kwargs": []}, "1 instructions and 0"),
    ("livecodebench", {**LCB_INPUT, "private_test_cases": "?"}, "neither JSON nor packed"),
    ("livecodebench", {**LCB_INPUT, "private_test_cases": '[{"input": 1}]'}, "texts under 'input'"),
    ("livecodebench", {**LCB_INPUT, "public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
    ("livecodebench", {**LCB_METHOD, "metadata": "{}", "starter_code": "class X: pass"}, "no method"),
    ("livecodebench", {**LCB_METHOD, "metadata": "[1]"}, "no JSON object"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_row_of_something_else_says_what_it_lacks(number: int) -> None:
    name, row, message = WRONG[number]
    with pytest.raises(NotThisSet) as raised:
        standard_sets.get(name).convert(row)
    assert message in str(raised.value)


def test_a_template_of_ones_own() -> None:
    gsm8k = standard_sets.get("gsm8k")
    row = {"question": "1 + 1?", "answer": "#### 2"}
    made = gsm8k.convert(row, r"Q: {{ question }} in \boxed{}")
    assert made["prompt"] == r"Q: 1 + 1? in \boxed{}"
    with pytest.raises(ValueError, match="unknown name 'problem'; legal names: question"):
        gsm8k.convert(row, "{{ problem }}")
    with pytest.raises(ValueError, match="no Jinja template: line 1"):
        gsm8k.convert(row, "{% if %}")
    for fails in ("{{ question.text }}", "{{ question[99] }}", "{{ question | int / 0 }}"):
        with pytest.raises(ValueError, match="prompt_template fails: ") as raised:
            gsm8k.convert(row, fails)
        assert not isinstance(raised.value, NotThisSet)

"""The rewards themselves, on tables of strings."""

import sys
import time

import pytest

from slime_like.rewards import exact_match, gsm8k, math, task
from slime_like.rewards.custom import RewardArgs, load_function
from slime_like.rewards.registry import rewards
from slime_like.rewards.worker_protocol import to_answer


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("yes", "yes", 1),
        (" yes\n", "yes ", 1),
        ("Yes", "yes", 0),
        ("7", 7, 1),
        ("7.0", 7, 0),
        ("", "", 1),
        ("yes yes", "yes", 0),
    ],
)
def test_exact_match(response, label, expected):
    assert exact_match.score(response, label, {}) == expected


def test_exact_match_without_a_label():
    with pytest.raises(ValueError, match="--label-key"):
        exact_match.score("x", None, {})


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


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1),
        ("\\boxed{\\frac{1}{2}}", "\\frac12", 1),
        ("\\boxed{0.5}", "$\\frac{1}{2}$", 1),
        ("so $x^2+2x+1$", "(x+1)^2", 1),
        ("\\boxed{x+1}", "1+x", 1),
        ("\\boxed{3}", "\\boxed{3}", 1),
        ("\\boxed{3}, and 4 is wrong", "4", 0),
        ("I first got \\boxed{99}. But checking again, the answer is \\boxed{42}.", "42", 1),
        ("I first got \\boxed{99}. But checking again, the answer is \\boxed{42}.", "99", 0),
        ("\\boxed{1} and \\boxed{2}", "2", 1),
        ("\\boxed{7} or \\boxed{8", "7", 1),
        ("\\boxed{\\boxed{7}}", "7", 1),
        ("\\boxed{\\frac{1}{\\sqrt{2}}} not \\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt3}2", 1),
        ("<think>\\boxed{1}</think> It is \\boxed{2}.", "2", 1),
        ("<think>\\boxed{1}</think> It is 2.", "2", 1),
        ("<think>\\boxed{1}</think> It is 2.", "1", 0),
        ("<think>so \\boxed{2}", "2", 1),
        ("\\boxed{} then \\boxed{ 5 }", "5", 1),
        ("the answer is 1,234", "1234", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
        ("\\boxed{7}", 7, 1),
        ("\\boxed{7}", 8, 0),
        ("I do not know", "7", 0),
        ("", "7", 0),
    ],
)
def test_math(response, label, expected):
    pytest.importorskip("math_verify")
    assert math.score(response, label, {}) == expected


def test_math_label_that_cannot_be_read():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the label is no mathematical expression"):
        math.score("7", "", {})


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


def test_registry_names():
    assert rewards.names() == [
        *("code", "dapo", "deepscaler", "exact_match", "f1", "gpqa"),
        *("gsm8k", "ifbench", "math", "remote_rm", "task", "zero"),
    ]
    bounded = [name for name, reward in rewards.items() if reward.bounded]
    assert bounded == ["dapo", "exact_match", "f1", "gsm8k"]
    assert [name for name, reward in rewards.items() if reward.inline] == ["zero"]
    assert [name for name, reward in rewards.items() if reward.evaluates] == ["task"]


def test_function_from_a_file_and_a_module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("value = 3\ndef score(args, sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("mine.score")(None, None) == 1.0
    by_file = load_function(f"{tmp_path}/mine.py:score")
    assert by_file(None, None) == 1.0
    assert load_function(f"{tmp_path}/mine.py:score") is by_file
    sys.modules.pop("mine")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("score", "must be module.function or path/to/file.py:function"),
        ("no_such_module.score", "cannot import 'no_such_module'"),
        ("json.scores", "'json' has no 'scores'; its functions: .*loads"),
        ("{tmp}/none.py:score", "no such file"),
        ("{tmp}/broken.py:score", "cannot import .*broken.py.*SyntaxError"),
        ("{tmp}/raises.py:score", "ZeroDivisionError"),
        ("{tmp}/fine.py:number", "'number' is a int, not a function"),
        ("{tmp}/fine.py:missing", "has no 'missing'; its functions: score"),
    ],
)
def test_paths_that_are_no_function(tmp_path, path, words):
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "fine.py").write_text("number = 3\ndef score(args, sample):\n    return 1.0\n")
    with pytest.raises(ValueError, match=f"--custom-rm-path .*{words}"):
        load_function(path.format(tmp=tmp_path))


def test_args_are_read_only():
    with pytest.raises(AttributeError):
        RewardArgs().reward_key = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (1, {"value": 1.0}),
        (True, {"value": 1.0}),
        (None, {"value": None}),
        ({"score": 0.5, "format": 1, "note": "x"}, {"value": 0.5, "details": {"format": 1.0}}),
        ({"other": 1}, {"wrong_type": "a dict with the keys 'other'"}),
        ("0.5", {"wrong_type": "str"}),
        ([1.0, "x"], {"wrong_type": "list"}),
        (1j, {"wrong_type": "complex"}),
    ],
)
def test_values_as_answers(value, answer):
    assert to_answer(value, "score") == answer


def test_array_values_as_answers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for scalar in (numpy.float32(0.5), numpy.array([0.5]), torch.tensor(0.5)):
        assert to_answer(scalar, None) == {"value": 0.5}
    assert to_answer(numpy.bool_(True), None) == {"value": 1.0}
    for many in (numpy.zeros((3, 1)), torch.zeros(1, 3)):
        assert "of more than one dimension" in to_answer(many, None)["wrong_type"]

"""What the model wrote has a score, and never fails: only faults of the row, of a user's function and
of the machine do."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil
import pytest

from slime_like.rewards import big_numbers, math, sandbox
from slime_like.rewards import grader as grader_module
from slime_like.rewards.grader import UNFIT, Grader
from slime_like.rewards.math import is_too_long
from slime_like.types import Sample, SampleStatus
from tests.unit.rewards.test_grader import make

pytestmark = pytest.mark.timeout(300)
needs_sandbox = pytest.mark.skipif(sandbox.problem() is not None, reason="the host has no sandbox")
HUGE = (
    *(
        "9^{9^{9^9}}",
        "2^{10000000000}",
        "99999999!",
        "(9^9)!",
        r"\sin(10^{10^{8}})",
        r"\Gamma(10^9)",
    ),
    *(r"\binom{1000000000}{500000000}", "7^{123456789123456789}", "0.1^{-999999999}"),
)
DEEP = ("(" * 5000 + "1" + ")" * 5000, r"\frac{1}{" * 800 + "2" + "}" * 800, ",".join("1" * 20000))


@pytest.fixture(scope="module")
def mathematics() -> None:
    pytest.importorskip("math_verify")
    math.prepare()


@pytest.mark.parametrize("answer", [*HUGE, *DEEP])
def test_no_answer_keeps_the_mathematician_busy(mathematics: None, answer: str) -> None:
    """In seconds of this process, without any deadline."""
    start = time.process_time()
    assert math.score(f"\\boxed{{{answer}}}", "x^2 + 1", {}) == 0.0
    assert time.process_time() - start < 5


def test_what_is_meant_is_within_the_limits(mathematics: None) -> None:
    for answer in ("2^{100000}", "100!", r"\binom{100}{50}", "10^{-300}", "1.5^{20}"):
        assert math.score(f"\\boxed{{{answer}}}", answer, {}) == 1.0
    assert math.score("So x = 3. " * 5000 + "The answer is $7$", "7", {}) == 1.0
    assert not is_too_long("[" * 50 + "]" * 50) and is_too_long("[" * 51)
    with pytest.raises(big_numbers.TooLarge, match="too large"):
        __import__("sympy").factorial(10**6)


def graded(rm_type: str, *samples: Sample, seconds: float = 2.0) -> tuple[list[Sample], Grader]:
    with Grader(rm_type=rm_type, rm_num_workers=1, rm_timeout_s=seconds) as grader:
        return grader.grade(samples), grader


def test_slow_answers_score_like_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(grader_module, "_BUSY", 0.05)  # also on a machine that has little time
    slow = make(0, r"\boxed{(x+y+z+1)^{300}}", "x^2+1")
    (sample, right), grader = graded("math", slow, make(1, r"\boxed{x}", "x"))
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0), sample.metadata
    assert sample.metadata[UNFIT] == "the reward took longer than --rm-timeout-s 2"
    assert right.reward == 1.0 and UNFIT not in right.metadata
    assert grader.last_counts["unfit"] == 1 and grader.last_failure is None


@needs_sandbox
def test_slow_programs_score_like_an_empty_one() -> None:
    """Each test ends in its time, and all of them do not."""
    tests = {"tests": [{"stdin": "", "stdout": "1"}] * 5}
    slow = make(0, "```python\nimport time\ntime.sleep(0.7)\nprint(1)\n```", metadata=tests)
    (sample, right), _ = graded("code", slow, make(1, "print(1)", metadata=tests))
    assert (sample.status, sample.reward) == (
        SampleStatus.COMPLETED,
        0.0,
    ) and UNFIT in sample.metadata
    assert right.reward == 1.0


@pytest.mark.parametrize("text", ["answer" + " " * 20000 + "1", "A " * 50000, "answer is " * 5000])
def test_a_choice_is_found_in_linear_time(text: str) -> None:
    (sample,), _ = graded("gpqa", make(0, text, "B"), seconds=1.0)
    assert sample.reward == 0.0 and UNFIT not in sample.metadata


def task_row(name: str) -> dict[str, Any]:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"size": 1, "seed": 1}
    entry = reasoning_gym.create_dataset(name, **options)[0]
    return {"task": {"name": name, "options": options}, "entry": entry}


EVALUATING = ("puzzle24", "countdown", "polynomial_multiplication", "simple_integration")
# writes a verdict into every pipe that it finds, then ends the process
FORGER = (
    "[__import__('os').write(f, b'{\"value\": 1.0}') for f in range(3, 64) "
    "if not __import__('contextlib').suppress(OSError)] or __import__('os')._exit(0)"
)


@needs_sandbox
@pytest.mark.parametrize("name", EVALUATING)
def test_no_answer_writes_its_own_score(name: str) -> None:
    metadata = task_row(name)
    answers = (FORGER, "__import__('os')._exit(0)", "9**9**9**9", "[" * 9000, "1" * 10001)
    samples = [make(i, text, metadata=metadata) for i, text in enumerate(answers)]
    found, _ = graded("task", make(9, "", metadata=metadata), *samples, seconds=5.0)
    nothing, *scores = (sample.reward for sample in found)
    assert nothing is not None and nothing < 0.5
    assert all(score is not None and score < 0.5 for score in scores)


def test_a_fault_of_the_row_fails() -> None:
    """The empty answer cannot be scored either."""
    pytest.importorskip("math_verify")
    samples = (make(0, r"\boxed{1}", "$$"), make(1, "5", "no number"))
    (sample, right), grader = graded("gsm8k", samples[1], make(2, "5", "5"))
    assert sample.status == SampleStatus.FAILED and right.reward == 1.0
    assert "the label holds no number" in sample.metadata["failure"]
    (sample,), grader = graded("math", samples[0])
    assert sample.status == SampleStatus.FAILED and grader.last_counts["raised"] == 1
    assert grader.last_counts["unfit"] == 0


def test_a_machine_without_time_fails_the_sample() -> None:
    """The worker is stopped: its answer is not at fault, as it used no time."""
    pytest.importorskip("math_verify")
    with Grader(rm_type="math", rm_num_workers=1, rm_timeout_s=3.0) as grader:
        assert grader.grade([make(0, r"\boxed{x}", "x")])[0].reward == 1.0
        assert grader._pool is not None
        worker = psutil.Process(grader._pool.workers[0].process.pid)
        stop = threading.Timer(0.3, worker.suspend)
        stop.start()
        (sample,) = grader.grade([make(1, r"\boxed{(x+y+z+1)^{300}}", "x^2+1")])
        stop.join()
    assert sample.status == SampleStatus.FAILED and "--rm-timeout-s" in sample.metadata["failure"]


def test_a_users_own_mistake_fails_the_sample(tmp_path: Any) -> None:
    """A registered reward that raises on some texts."""
    module = tmp_path / "own_reward.py"
    module.write_text(
        "from slime_like.rewards.registry import register_reward\n"
        "@register_reward('own_unfit_test')\n"
        "def score(response, label, metadata):\n    return float(int(response or 0))\n"
    )
    from slime_like.import_utils import load_module
    from slime_like.rewards.registry import rewards

    load_module(str(module), "--import-modules")
    try:
        assert rewards.source("own_unfit_test") is not None
        (bad, good), _ = graded("own_unfit_test", make(0, "x"), make(1, "2"), seconds=20.0)
    finally:
        rewards.remove("own_unfit_test")
    assert bad.status == SampleStatus.FAILED and "invalid literal" in bad.metadata["failure"]
    assert good.reward == 2.0

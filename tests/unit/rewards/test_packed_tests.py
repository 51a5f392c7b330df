"""LiveCodeBench's tests: plain and packed, and a packed one that would run code."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from slime_like.rewards import packed_tests
from slime_like.rewards.packed_tests import NoTests

CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def pack(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_plain_and_packed_are_the_same() -> None:
    text = json.dumps(CASES)
    plain = packed_tests.tests_of(text, None)
    assert plain == [{"stdin": "1\n", "stdout": "2\n"}] == packed_tests.tests_of(pack(text), None)


def test_a_method_is_called_with_the_lines() -> None:
    cases = [{"input": '[1, 2]\n"a"', "output": "[[1]]"}]
    (test,) = packed_tests.tests_of(json.dumps(cases), "go")
    seen = []

    class Solution:
        def go(self, *arguments: object) -> tuple[list[int]]:
            seen.append(arguments)
            return ([1],)

    exec(test["code"], {"Solution": Solution})
    assert seen == [([1, 2], "a")]
    Solution.go = lambda self, *arguments: [[2]]  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(AssertionError):
        exec(test["code"], {"Solution": Solution})


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/harm",)


@pytest.mark.parametrize(
    "text",
    [
        *("", "no", "e30=", base64.b64encode(b"x").decode(), pack(Harmful()), pack({"a": 1})),
        *(pack("no JSON"), "7", '[{"input": "1"}]', "[3]", base64.b64encode(zlib.compress(b"")).decode()),
    ],
)  # fmt: skip
def test_what_holds_no_tests(text: str) -> None:
    with pytest.raises(NoTests):
        packed_tests.tests_of(text, None)


def test_a_pickle_runs_nothing() -> None:
    with pytest.raises(NoTests, match=r"it names (posix|nt|os)\.system"):
        packed_tests.tests_of(pack(Harmful()), None)


def test_arguments_that_are_no_json() -> None:
    with pytest.raises(NoTests, match="a test of go has a value that is no JSON"):
        packed_tests.tests_of(json.dumps([{"input": "[1", "output": "1"}]), "go")

"""LiveCodeBench's form of tests (Jain et al. 2024, arXiv 2403.07974): a JSON list of ``{"input",
"output", "testtype"}``, as text or packed: the text pickled, compressed by zlib, in base64.

A pickle can run code, and this one is a text alone, so anything else in it is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any

_CALL = """\
import json
result = Solution().{function}(*json.loads({arguments!r}))
result = list(result) if isinstance(result, tuple) else result
assert result == json.loads({expected!r})
"""


class NoTests(ValueError):
    """A text that holds no tests; the message says why."""


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def tests_of(text: str, function: str | None) -> list[dict[str, str]]:
    """The tests as the reward `code` takes them.

    Args:
        text: A JSON list, or a packed one.
        function: The method of the class Solution that tests call with their input's lines, each a
            JSON value; None: programs that read standard input.

    Raises:
        NoTests: The text is neither.
    """
    try:
        cases = json.loads(text)
    except ValueError:
        cases = _unpacked(text)
    if not isinstance(cases, list):
        raise NoTests("the tests are no list")
    return [_test(case, function) for case in cases]


def _unpacked(text: str) -> Any:
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        return json.loads(_TextOnly(io.BytesIO(data)).load())
    except (
        *(binascii.Error, zlib.error, pickle.UnpicklingError, EOFError),
        *(ValueError, TypeError, IndexError, KeyError, AttributeError),
    ) as error:
        raise NoTests(f"the tests are neither JSON nor packed JSON: {error}") from error


def _test(case: Any, function: str | None) -> dict[str, str]:
    given, expected = (case.get(k) if isinstance(case, dict) else None for k in ("input", "output"))
    if not isinstance(given, str) or not isinstance(expected, str):
        raise NoTests("a test must have texts under 'input' and 'output'")
    if function is None:
        return {"stdin": given, "stdout": expected}
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        json.loads(expected)
    except ValueError as error:
        raise NoTests(f"a test of {function} has a value that is no JSON: {error}") from error
    packed = json.dumps(arguments)
    return {"code": _CALL.format(function=function, arguments=packed, expected=expected)}

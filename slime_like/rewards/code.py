"""Code reward: 1 if the response's program passes all tests of the sample, otherwise 0. Programs
run in `sandbox.py`.

Tests are a list under ``tests`` in the row's metadata (--metadata-key). A test is ``{"stdin": text,
"stdout": text}`` (standard output is compared line by line, ignoring trailing white space) or
``{"code": text}``, statements that use the program's names and raise if it is wrong. Metadata may
set ``timeout_s`` (of each test, default 5), ``memory_mb`` (default 512), ``prelude`` (statements
before every program), ``compare`` ("numbers": lines of standard output are also equal if their
words are, as decimal numbers), and ``packed_tests`` with ``function``, more tests in another form
(`packed_tests.py`). All tests of a sample must end within --rm-timeout-s.

The expected output of ``stdin`` tests never enters the sandbox. The statements of ``code`` tests
run in a process of their own, which calls the program and gets plain data (`sandbox_calls.py`): the
program sees its arguments, and neither the statements nor what they expect. Functions of the
program that a test gives its expected values to, such as a comparison, decide themselves.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from slime_like.rewards import packed_tests, sandbox

# code within a line, which is passed over, or a block, with its label
_FENCED = re.compile(r"```[^\n`]+```|```[ \t]*([^\n`]*)\n(.*?)```", re.DOTALL)
_LABELS = ("", "py", "python", "python3")
_FUTURE = re.compile(
    r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^()]*\))?"
    r"(?:\\\r?\n|[^\n])*(?:\n|\Z)",
    re.MULTILINE,
)
# the grading worker has no more memory itself
MAX_SECONDS = 600.0
MAX_MEMORY_MB = 4096
NUMBERS = "numbers"
DEFAULT = sandbox.SandboxLimits()


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    tests = metadata.get("tests")
    if not isinstance(tests, list) or not (tests or metadata.get("packed_tests")):
        return (
            "the reward code needs 'tests' in the row's metadata (--metadata-key): a list of "
            "{stdin, stdout} or {code}"
        )
    for number, test in enumerate(tests):
        if not _is_test(test):
            return (
                f"test {number} of the row's metadata must hold strings under 'stdin' and "
                "'stdout', or under 'code'"
            )
    for name, most in (("timeout_s", MAX_SECONDS), ("memory_mb", MAX_MEMORY_MB)):
        value = metadata.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            return (
                f"{name!r} of the row's metadata is {value!r}, must be a number above 0 and at "
                f"most {most:g}"
            )
    for name in ("prelude", "packed_tests", "function"):
        if not isinstance(metadata.get(name) or "", str):
            return f"{name!r} of the row's metadata must be text"
    if metadata.get("compare") not in (None, NUMBERS):
        return f"'compare' of the row's metadata must be {NUMBERS!r}, if it is there"
    return None


def _is_test(test: object) -> bool:
    if not isinstance(test, Mapping) or set(test) not in ({"stdin", "stdout"}, {"code"}):
        return False
    return all(isinstance(text, str) for text in test.values())


def prepare() -> None:
    """Start the sandbox. Raises SandboxError if programs cannot be run safely."""
    sandbox.warm_up()


def score(response: str, label: object, metadata: Mapping[str, Any]) -> float:
    """1 if the program passes all tests, otherwise 0. Raises ValueError for missing or invalid
    tests, SandboxError if the sandbox failed."""
    if reason := problem(label, metadata):
        raise ValueError(reason)
    timeout = float(metadata.get("timeout_s", DEFAULT.wall_s))
    limits = sandbox.SandboxLimits(
        wall_s=timeout,
        cpu_s=int(timeout) + 1,
        memory_mb=int(metadata.get("memory_mb", DEFAULT.memory_mb)),
    )
    program = _after(metadata.get("prelude") or "", program_of(response))
    tests = list(metadata["tests"])
    if packed := metadata.get("packed_tests"):
        tests += packed_tests.tests_of(packed, metadata.get("function"))
    numbers = metadata.get("compare") == NUMBERS
    return float(all(passes(program, test, limits, numbers) for test in tests))


def passes(
    program: str, test: Mapping[str, str], limits: sandbox.SandboxLimits, numbers: bool = False
) -> bool:
    if "code" in test:
        return sandbox.run(program, check=test["code"], limits=limits).status == "ok"
    outcome = sandbox.run(program, stdin=test["stdin"], limits=limits)
    return outcome.status == "ok" and _same_output(outcome.stdout, test["stdout"], numbers)


def _after(prelude: str, program: str) -> str:
    """The program with statements before it, but after its imports from __future__."""
    if not prelude:
        return program
    before = [*_FUTURE.findall(program), prelude]
    lines = (text if text.endswith("\n") else f"{text}\n" for text in before)
    return "".join(lines) + _FUTURE.sub("", program)


def _same_output(found: str, expected: str, numbers: bool) -> bool:
    """numbers: words that differ may be equal decimal numbers."""
    pairs = list(itertools.zip_longest(_lines(found), _lines(expected)))
    return all(a == b or (numbers and _same_numbers(a, b)) for a, b in pairs)


def _same_numbers(found: str | None, expected: str | None) -> bool:
    if found is None or expected is None:
        return False
    try:
        sides = [[Decimal(word) for word in line.split()] for line in (found, expected)]
        return sides[0] == sides[1]
    except InvalidOperation:  # no number, or one that cannot be compared: sNaN
        return False


def program_of(response: str) -> str:
    """The last fenced block of the response that is Python or has no label, without the indentation
    of a list around it; without such a block, the full response."""
    blocks = [
        block
        for label, block in _FENCED.findall(response)
        if block and label.strip().lower().partition(" ")[0] in _LABELS
    ]
    return textwrap.dedent(blocks[-1]) if blocks else response


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

"""A user's function, imported."""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from pathlib import Path

import pytest

from slime_like.import_utils import ExitCalled, load_function


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 7\n")
    file = tmp_path / "reward.py"
    file.write_text(
        "from neighbour_of_reward import VALUE\ndef score(args, sample): return VALUE\n"
    )
    assert load_function(f"{file}:score", "--custom-rm-path")(None, None) == 7


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0 \(.*reward\.py:2\)"),
        ("x = 1\n\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*reward\.py:3\)"),
        ("raise ValueError('\\x1b[2Ja\\nb \\ud800')\n", r"ValueError: \\x1b\[2Ja b \\ud800"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_a_module_that_fails(tmp_path: Path, source: str, words: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=rf"--custom-rm-path '.*': cannot import '.*': {words}"):
        load_function(f"{file}:score", "--custom-rm-path")


def test_a_module_that_sleeps(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    start = time.monotonic()
    before = signal.getitimer(signal.ITIMER_REAL)[0]  # of the test's own deadline
    with pytest.raises(ValueError, match=r"the import takes longer than 0\.2 s \(.*reward\.py:2\)"):
        load_function(f"{file}:score", "--custom-rm-path", limit_s=0.2)
    assert time.monotonic() - start < 500
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0.2) == (before > 0.2)


LEAVING = """
import sys
def now(a, *, b=2):
    sys.exit(0)
async def later(a):
    sys.exit("over")
def fine(a):
    return a + 1
class Source:
    pass
"""


def test_an_exit_of_a_function_is_an_error_with_its_line(tmp_path: Path) -> None:
    """With status 0 it would end a run as if all were well."""
    file = tmp_path / "leaving.py"
    file.write_text(LEAVING)
    now, later, fine, source = (
        load_function(f"{file}:{name}", "--x") for name in ("now", "later", "fine", "Source")
    )
    with pytest.raises(ExitCalled, match=r"sys\.exit\(0\) was called \(.*leaving\.py:4\)"):
        now(1)
    assert inspect.iscoroutinefunction(later)
    with pytest.raises(ExitCalled, match=r"sys\.exit\('over'\) was called \(.*leaving\.py:6\)"):
        asyncio.run(later(1))
    assert list(inspect.signature(now).parameters) == ["a", "b"]
    assert fine(1) == 2 and isinstance(source, type)

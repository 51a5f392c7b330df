"""The fault table of the documents and the tests of faults are the same: every row has its tests,
every test of a fault has a row, in both languages."""

from __future__ import annotations

import ast
import functools
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"
# Every test in these is of a fault.
NAMED_AS_FAULTS = (
    "fuzz/test_*.py",
    "*fault*",
    "*hostile*",
    "*harm*",
    "*sandbox_*",
    "*watchdog*",
    "*safe_*",
)
FILES_OF_FAULTS = (
    "unit/distributed/test_signals.py", "unit/distributed/test_signed_store.py", "unit/checkpoints/test_lock.py",
    "unit/guards/test_finite.py", "unit/guards/test_update.py",
    "unit/checkpoints/test_written_files.py", "unit/distributed/test_rendezvous.py", "unit/losses/test_refusals.py",
    "unit/checkpoints/test_replicas.py",
    "unit/data/test_tokenizer.py", "unit/test_import_utils.py", "unit/tinker/test_journal.py",
    "e2e/test_elastic.py",
    "e2e/test_resume_identity.py", "e2e/test_wrong_command_lines.py", "e2e/test_user_exits.py",
)  # fmt: skip
# But these, which are there to show what is right where nothing is wrong.
NO_FAULT = {
    "unit/sglang/test_faults.py": "what_servers_answer_is_what_the_local_engine_samples "
                                  "end_tokens_are_ignored_where_that_is_asked_for"
    " weights_in_requests memory_is_given_back_where_it_was_taken",
    "unit/agents/test_harm.py": "answers_of_anthropics_form "
                               "a_template_that_knows_no_developer_is_given_a_system_message",
    "unit/checkpoints/test_written_files.py": "a_line_is_amended",
    "unit/distributed/test_rendezvous.py": "the_environment_says_where_to_meet",
    "unit/losses/test_refusals.py": "what_an_alias_stands_for_is_taken",
    "unit/checkpoints/test_replicas.py": "a_part_is_what_was_written_and_nothing_else "
                             "each_file_is_copied_once_by_nodes_in_turn"
    " a_file_is_copied_byte_by_byte",
    "e2e/test_wrong_command_lines.py": "help_of_the_program",
}  # fmt: skip
_CELL = re.compile(r"`((?:\w+/)+test_\w+\.py): ([\w ]+)`")
Test = tuple[str, str]  # file below tests/, name without test_


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's tests, without test_."""
    path = TESTS / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name.removeprefix("test_") for name in names if name.startswith("test_"))


def files_of_faults() -> list[str]:
    """By their names, and those of the list."""
    every = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]
    by_name = {
        file
        for file in every
        if any(fnmatch(file, pattern) for pattern in NAMED_AS_FAULTS)
        and file != str(Path(__file__).relative_to(TESTS))
    }
    return sorted(by_name | set(FILES_OF_FAULTS))


@functools.cache
def rows(language: str) -> dict[str, list[Test]]:
    """Fault -> its tests, of the tables before those of fuzzing and escapes."""
    page = (DOCS / language / "faults.md").read_text(encoding="utf-8").split("<!-- seeds")[0]
    found = {}
    for line in page.splitlines():
        if not line.startswith("| ") or line.startswith(("| fault |", "| 故障 |")):
            continue
        fault, _, cell = re.split(r"(?<!\\) \| ", line.strip("| "))
        named = [(file, name) for file, names in _CELL.findall(cell) for name in names.split()]
        assert _CELL.sub("", cell).strip(" ,") == "", (
            f"{fault}: not of the form `file: tests`: {cell}"
        )
        assert fault not in found, f"two rows of one fault: {fault}"
        found[fault] = named
    return found


def without_a_row(file: str) -> set[str]:
    named = {test for tests in rows("en").values() for test in tests}
    exempt = set(NO_FAULT.get(file, "").split())
    return {name for name in names_in(file) if (file, name) not in named} - exempt


@pytest.mark.parametrize("fault", rows("en"))
def test_the_tests_of_a_row_are_there(fault: str) -> None:
    tests = rows("en")[fault]
    assert tests, "no test of this row"
    assert [(file, name) for file, name in tests if name not in names_in(file)] == []


@pytest.mark.parametrize("file", files_of_faults())
def test_every_test_of_a_fault_has_a_row(file: str) -> None:
    assert names_in(file), "no such file, or no tests in it"
    assert without_a_row(file) == set()


@pytest.mark.parametrize("file", NO_FAULT)
def test_what_is_left_out_is_there_and_has_no_row(file: str) -> None:
    exempt = set(NO_FAULT[file].split())
    assert exempt <= names_in(file)
    assert not {(file, name) for name in exempt} & {
        t for tests in rows("en").values() for t in tests
    }


def test_both_languages_have_the_same_rows() -> None:
    assert list(rows("en").values()) == list(rows("zh").values())


def test_a_test_without_a_row_and_a_row_without_a_test_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two checks above see what they are for."""
    file = "unit/checkpoints/test_lock.py"
    fewer = {f: [t for t in tests if t[0] != file] for f, tests in rows("en").items()}
    monkeypatch.setattr(f"{__name__}.rows", lambda language: {**fewer, "new": [(file, "no_such")]})
    assert without_a_row(file) == names_in(file)
    with pytest.raises(AssertionError, match="no_such"):
        test_the_tests_of_a_row_are_there("new")

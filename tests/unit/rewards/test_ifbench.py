"""The reward of verifiable instructions: what is handed to the verifiers of the package
``ifbench``, and how their verdicts are read. A package with the same protocol is in its place,
unless that is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_like.rewards import ifbench
from slime_like.rewards.registry import rewards

VERIFIERS = """
class Verifier:
    def __init__(self, name):
        self.name, self.settings = name, {}

    def build_description(self, **settings):
        self.settings |= settings

    def get_instruction_args(self):
        return None

class Words(Verifier):
    def check_following(self, response):
        return len(response.split()) >= self.settings["at_least"]

class NoComma(Verifier):
    def check_following(self, response):
        assert not self.settings
        return "," not in response

class Repeats(Verifier):
    def get_instruction_args(self):
        return {"prompt": None}

    def check_following(self, response):
        return response.startswith(self.settings["prompt"])

INSTRUCTION_DICT = {"count:words": Words, "punctuation:no_comma": NoComma, "repeat:prompt": Repeats}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "ifbench"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "instructions_registry.py").write_text(VERIFIERS)
    for name in [name for name in sys.modules if name.split(".")[0] == "ifbench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    ifbench._verifiers.cache_clear()
    yield
    ifbench._verifiers.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "ifbench"]:
        del sys.modules[name]


def row(*ids: Any, **more: Any) -> dict[str, Any]:
    return {"instruction_id_list": list(ids), **more}


CASES: list[tuple[dict[str, Any], str, float]] = [
    (row("punctuation:no_comma"), "no comma here", 1.0),
    (row("punctuation:no_comma"), "one, two", 0.0),
    (row("punctuation:no_comma"), "  \n", 0.0),
    (row(" punctuation:no_comma ", None, ""), "names are stripped, none is left out", 0.0),
    (row("count:words", kwargs=[{"at_least": 3, "other": None}]), "one two three", 1.0),
    (row("count:words", kwargs={"at_least": 3}), "one two", 0.0),
    (row("count:words", "punctuation:no_comma", kwargs=[{"at_least": 2}, {}]), "one two", 1.0),
    (row("count:words", "punctuation:no_comma", kwargs=[{"at_least": 2}, {}]), "one, two", 0.0),
    (row("count:words", "count:words", kwargs=[{"at_least": 2}]), "one two", 1.0),
    (row("punctuation:no_comma", kwargs=[{}, {"at_least": 9}]), "one", 1.0),
    (row("repeat:prompt", prompt_text="say it"), "say it again", 1.0),
    (row("repeat:prompt"), "anything", 1.0),
    (row("punctuation:no_comma"), "<think>one, two</think>\n\nthree", 1.0),
    (row("repeat:prompt", prompt_text="say"), "<think>so</think>\n\nsay it", 1.0),
    (row("punctuation:no_comma"), "<think>one</think>", 0.0),
    (row("punctuation:no_comma", loose=True), "Sure, here:\nno comma", 1.0),
    (row("punctuation:no_comma", loose=True), "no comma\nBye, all", 1.0),
    (row("punctuation:no_comma", loose=True), "Sure, a\nno comma\nBye, all", 1.0),
    (row("punctuation:no_comma", loose=True), "Sure,\none,\nBye", 0.0),
    (row("repeat:prompt", prompt_text="say it", loose=True), "*say* it", 1.0),
    (row("repeat:prompt", prompt_text="say it"), "*say* it", 0.0),
    (row("punctuation:no_comma", loose=True), " \n ", 0.0),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_instruction_must_be_followed(number: int, package: None) -> None:
    metadata, response, verdict = CASES[number]
    assert ifbench.problem(None, metadata) is None
    assert ifbench.score(response, None, metadata) == verdict


def test_an_instruction_that_there_is_not(package: None) -> None:
    with pytest.raises(ValueError, match="ifbench has no instruction 'count:wrods'"):
        ifbench.score("one", None, row("count:wrods"))


def test_rows_that_cannot_be_verified() -> None:
    for metadata in ({}, row(), row(None, " "), row("count:words", kwargs="{}")):
        assert ifbench.problem("a label", metadata) is not None


def test_the_package_is_asked_for_by_name() -> None:
    missing = rewards.get("ifbench").missing_library()
    if not (importlib.util.find_spec("ifbench") or importlib.util.find_spec("if_verifiable")):
        assert missing == "ifbench; install it with: pip install ifbench"
    else:
        assert missing is None


def test_verifiers_of_both_sets_where_only_the_other_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ifbench") or importlib.util.find_spec("if_verifiable"):
        pytest.skip("a package is installed")
    assert rewards.get("ifbench").missing_library() is not None
    for name, known in (("ifeval", "'punctuation:no_comma': NoComma"), ("ifbench", "'a:b': Words")):
        folder = tmp_path / "if_verifiable" / name
        folder.mkdir(parents=True)
        verifiers = VERIFIERS.rpartition("INSTRUCTION_DICT")[0]
        text = f"{verifiers}INSTRUCTION_DICT = {{{known}}}"
        (folder / "instructions_registry.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    ifbench._verifiers.cache_clear()
    try:
        assert rewards.get("ifbench").missing_library() is None
        assert sorted(ifbench._verifiers()) == ["a:b", "punctuation:no_comma"]
    finally:
        ifbench._verifiers.cache_clear()
        for name in [name for name in sys.modules if name.startswith("if_verifiable")]:
            del sys.modules[name]


def test_verifiers_of_the_package_itself() -> None:
    if not (importlib.util.find_spec("ifbench") or importlib.util.find_spec("if_verifiable")):
        pytest.skip("needs ifbench or if-verifiable")
    ifbench._verifiers.cache_clear()
    words = {"keywords": ["nebula"], "other": None}
    metadata = row("keywords:existence", "punctuation:no_comma", kwargs=[words, {}])
    assert ifbench.score("A nebula glows.", None, metadata) == 1.0
    assert ifbench.score("A nebula, glowing.", None, metadata) == 0.0

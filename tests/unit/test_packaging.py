"""What pyproject.toml promises: names, versions and extras, without building anything."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import slime_like
from slime_like import extras
from slime_like.extras import pip_install
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
SOURCES = [
    path
    for folder in ("slime_like", "arguments", "megatron_patches")
    for path in (ROOT / folder).rglob("*.py")
]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~;, ]", requirement)[0].lower() for requirement in requirements}


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "slime_like.__version__"}
    assert f"## {slime_like.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == slime_like.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_apex_is_never_a_dependency_and_transformer_engine_is_optional() -> None:
    base = names(PROJECT["project"]["dependencies"])
    extras = {name for requirements in EXTRAS.values() for name in names(requirements)}
    assert "apex" not in base | extras
    assert [
        extra
        for extra, requirements in EXTRAS.items()
        if "transformer-engine" in names(requirements)
    ] == ["gpu"]
    assert "sglang" not in extras, "the server pins its own torch"


def test_what_errors_say_to_install_exists() -> None:
    reported = {
        extra
        for path in SOURCES
        for extra in re.findall(r"pip_install\(['\"](\w+)['\"]\)", path.read_text(encoding="utf-8"))
    }
    assert len(reported) > 3 and reported <= set(EXTRAS)
    assert {
        extra for text in EXTRAS["dev"] for extra in re.findall(r"slime_like\[(\w+)\]", text)
    } <= set(EXTRAS)


def test_what_messages_say_to_install_works_in_a_clone() -> None:
    """No index has slime_like: neither a page nor a message may say that pip finds it there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = re.compile(r"pip install (-\S+ )*['\"]?slime[_-]like\b")
    assert not [p for p in (*pages, *SOURCES) if named.search(p.read_text(encoding="utf-8"))]
    assert pip_install("tasks") == f"pip install -e '{ROOT}[tasks]'"
    assert pip_install() == f"pip install -e '{ROOT}'"


def test_without_a_clone_the_command_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    assert pip_install("server") == "pip install -e '.[server]' in a clone of slime_like"


def test_every_package_is_found_and_typed() -> None:
    found = [
        pattern.rstrip("*")
        for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    for package in found:
        assert (ROOT / package / "py.typed").is_file()
    folders = {path.parent for path in SOURCES}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_constraint_is_a_torch_that_the_project_takes() -> None:
    pins = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)$",
            (ROOT / "constraints.txt").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert list(pins) == ["torch"]
    least = next(
        re.search(r">=([\d.]+)", text)
        for text in PROJECT["project"]["dependencies"]
        if text.startswith("torch")
    )
    assert least is not None
    assert tuple(map(int, pins["torch"].split(".")[:2])) >= tuple(map(int, least[1].split(".")))


def test_no_folder_of_tests_is_left_out() -> None:
    """pytest and ruff both pass over folders called dist unless configured otherwise."""
    folders = [
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ]
    skipped = (
        PROJECT["tool"]["pytest"]["ini_options"]["norecursedirs"]
        + PROJECT["tool"]["ruff"]["exclude"]
    )
    assert "dist" in folders
    assert not [
        name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in skipped)
    ]

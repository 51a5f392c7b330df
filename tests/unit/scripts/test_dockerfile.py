"""The image's file, read as far as that goes without Docker."""

from __future__ import annotations

import re
import shlex
import tomllib

from tests.paths import ROOT

FILE = ROOT / "scripts" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def installs() -> list[list[str]]:
    """Words of each pip install."""
    runs = [shlex.split(words) for name, words in instructions() if name == "RUN"]
    return [words[2:] for words in runs if words[:2] == ["pip", "install"]]


def test_it_starts_from_an_image_and_copies_what_is_there() -> None:
    names = [name for name, _ in instructions()]
    assert names[:2] == ["ARG", "FROM"]
    assert set(names) <= {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY"}
    sources = [words.split()[0] for name, words in instructions() if name == "COPY"]
    assert sources == ["constraints-gpu.txt", "."] and all((ROOT / s).exists() for s in sources)


def test_every_install_has_the_versions_of_the_constraints() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints-gpu.txt").read_text().splitlines()
        if "==" in line
    )
    assert len(installs()) == 3
    build_tools = {"ninja", "packaging", "setuptools", "wheel"}
    for words in installs():
        assert words[words.index("-c") + 1] == "constraints-gpu.txt"
        named = {re.match(r"[\w.-]+", word)[0] for word in words if word[0].isalpha()}  # type: ignore[index]
        assert named - {"constraints-gpu.txt"} - build_tools <= pinned.keys()


def test_the_extras_of_the_clone_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (clone,) = (word for words in installs() for word in words if word.startswith("."))
    extras = clone[2:-1].split(",")
    assert extras and set(extras) <= project["optional-dependencies"].keys()


def test_what_a_clone_does_not_need_stays_outside() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ".git" in ignored and ".venv*" in ignored

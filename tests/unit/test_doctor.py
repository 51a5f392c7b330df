"""python -m slime_like.doctor reports what is here and what is not."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from slime_like import doctor
from slime_like.cli import self_test
from slime_like.cli.self_test import finish, start
from slime_like.doctor import DEPENDENCIES, EXTRAS, Dependency, ports, report
from tests.paths import ROOT


def test_this_environment_can_run() -> None:
    """The versions are those that the packages themselves report; of torch without its build (+cpu),
    which its package index may leave out of the metadata."""
    import torch
    import transformers

    done = subprocess.run(
        [sys.executable, "-m", "slime_like.doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[1]: line.split()[:3] for line in done.stdout.splitlines()[1:]}
    assert (
        rows["torch"][:2] == ["has", "torch"]
        and rows["torch"][2].split("+")[0] == torch.__version__.split("+")[0]
        and rows["transformers"][2] == transformers.__version__
    )
    assert "every run needs" not in done.stdout and re.search(
        r"^(has|lacks) +CUDA", done.stdout, re.MULTILINE
    )


@pytest.mark.extended
def test_the_self_test(tmp_path: Path) -> None:
    """As JSON, from another folder, inside a launcher's environment; the ranks really meet."""
    words = [sys.executable, "-m", "slime_like.doctor", "--self-test", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "8"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [check["name"] for check in found["self_test"]] == ["collectives", "training step"]
    assert all(check["good"] for check in found["self_test"]) and found["packages"]["torch"]


def test_a_self_test_that_fails_says_why(tmp_path: Path) -> None:
    """A rank that does not get what it should; the first that failed is shown."""
    ends = (None, "boom", "x")
    ranks = [start(partial(sys.exit, end), tmp_path, f"rank {end}") for end in ends]
    assert finish(ranks) == "boom"
    (silent,) = [start(partial(os._exit, 3), tmp_path, "silent")]
    assert finish([silent]) == "exit status 3"


def test_a_process_of_the_self_test_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its folder, without a launcher's variables, and ended when it takes too long."""
    monkeypatch.setenv("RANK", "3")

    def look_around() -> None:
        print(os.getcwd(), os.environ.get("RANK"), flush=True)

    done = start(look_around, tmp_path, "around")
    assert finish([done]) == "" and done.log.read_text() == f"{tmp_path} None\n"
    monkeypatch.setattr(self_test, "LIMIT_S", 0.1)
    assert finish([start(partial(time.sleep, 600), tmp_path, "late")]) == "no end after 0.1 s"


def test_remedies_are_extras_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra])
        assert all(re.search(rf"(^| ){package}\b", listed) for package in packages), extra
    assert Dependency("sglang", "sglang", "x").remedy == "pip install sglang"
    assert Dependency("httpx", "httpx", "x").remedy == f"pip install -e '{ROOT}[sglang]'"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "PORTS", {taken.getsockname()[1]: "x"})
        assert "unavailable" in ports()[0]


def test_what_is_missing_is_reported() -> None:
    things = [
        Dependency("json", "no-such-package", "x"),
        Dependency("no_such_module.inner", "outer", "y"),
        Dependency("no_such", "needed", "z", required=True),
    ]
    lines, status = report(things, device=lambda: "not asked")
    assert status == 1
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["has", "no-such-package"],
        ["lacks", "outer"],
        ["LACKS", "needed"],
    ]
    assert lines[-1] == "every run needs: needed"


def test_a_missing_program_is_no_obstacle() -> None:
    lines, status = report([Dependency("", "no-such-program", "jobs")], device=lambda: "a device")
    assert status == 0 and lines[1].startswith("lacks  no-such-program") and lines[-1] == "a device"


def test_every_dependency_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0].lower() for line in project["dependencies"]}  # type: ignore[index]
    assert needed == {thing.package for thing in DEPENDENCIES if thing.required}


def test_advice_names_the_right_project() -> None:
    advice = {each.package: each.remedy for each in DEPENDENCIES}
    assert "github.com/NVIDIA/apex" in advice["apex"] and "pip install" not in advice["apex"]
    assert "environment of its own" in advice["sglang"]


@pytest.mark.parametrize("command", ["doctor", "doctor --json"])
def test_a_reader_that_leaves_is_no_error(command: str) -> None:
    line = f"{sys.executable} -m slime_like.cli {command} | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode in (0, 141) and done.stderr == ""

"""python -m slime_like.doctor tells what is here and what is not."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from slime_like.doctor import THINGS, Dependency, report

ROOT = Path(__file__).resolve().parents[2]


def test_this_environment_can_run() -> None:
    """The versions are those that the packages themselves tell."""
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
        rows["torch"] == ["has", "torch", torch.__version__]
        and rows["transformers"][2] == transformers.__version__
    )
    assert "every run needs" not in done.stdout and re.search(
        r"^(has|lacks) +CUDA", done.stdout, re.MULTILINE
    )


def test_what_is_missing_is_told() -> None:
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
    assert needed == {thing.package for thing in THINGS if thing.required}

"""The escape list: everything in `sandbox_attempts.py`, with all layers of the confinement and with
each of them missing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.escape_table import BEGIN, END, MISSING, WORDS
from slime_like.rewards import confinement, sandbox
from slime_like.rewards.grader import Grader
from slime_like.types import SampleStatus
from tests.paths import ROOT
from tests.unit.rewards.sandbox_surroundings import ATTEMPTS, outcomes, surroundings
from tests.unit.rewards.test_grader import make

pytestmark = [
    pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem())),
    pytest.mark.timeout(300),
]
# what the kernel itself, the file system or the user may refuse outside the sandbox as well
UNSURE = {
    "setxattr", "anonymous file", "shared memory", "raw socket", "packet socket", "TCP 6",
    "write to the installation",
    "oom score of another", "memory of another", "chown", "name_to_handle_at", "clone3", "os.fork",
    "double fork with a session", "setsid", "vfork", "core pattern",
}  # fmt: skip


@pytest.fixture
def around(tmp_path: Path) -> Iterator[str]:
    """The first lines of the script."""
    with surroundings(tmp_path) as lines:
        yield lines


def state(folder: Path) -> list[tuple[str, int, int, int]]:
    """Names, modes, sizes and times of all that is in a folder."""
    found = [(p.name, p.lstat()) for p in sorted(folder.iterdir())]
    return [(name, s.st_mode, s.st_size, s.st_mtime_ns) for name, s in found]


def test_every_attempt_works_outside(around: str) -> None:
    """Else the list would show nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "OUTSIDE = True\n" + around + ATTEMPTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        start_new_session=True,
    )
    refused = {name for name, how in outcomes(done.stdout).items() if how == "refused"}
    if os.geteuid() == 0:
        assert refused <= UNSURE
    assert len(refused) < 60


@pytest.mark.parametrize("without", ["", "namespaces", "landlock", "landlock_scopes"])
def test_every_attempt_is_refused(
    around: str, without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = confinement.missing()
    off = {without, "landlock_scopes"} if without == "landlock" else {without} - {""}
    lacking = {**there, **dict.fromkeys(off, "left out by a test")}
    monkeypatch.setattr(confinement, "_missing", lacking)
    if confinement.refusal():
        pytest.skip(str(confinement.refusal()))
    assert [words.split(" ")[0] for words in confinement.unenforced()] == list(lacking)
    before = state(tmp_path)
    zygote = sandbox.Zygote()
    try:
        outcome = zygote.run(
            "OUTSIDE = False\n" + around + ATTEMPTS,
            "",
            None,
            sandbox.SandboxLimits(wall_s=60, cpu_s=60),
        )
    finally:
        zygote.close()
    assert outcome.status == "ok", outcome
    left = {name: how for name, how in outcomes(outcome.stdout).items() if how != "refused"}
    assert left == {}
    assert state(tmp_path) == before


def names_of_attempts() -> list[str]:
    """As the script has them, without running it."""
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(ATTEMPTS).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [ast.literal_eval(key) for name in ("CALLS", "STEPS") for key in tables[name].keys]  # type: ignore[attr-defined]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_lists_every_attempt_with_what_refuses_it(language: str) -> None:
    page = (ROOT / "docs" / language / "faults.md").read_text(encoding="utf-8")
    words = WORDS[language][2]
    missing, alone = page.split(BEGIN)[1].split(END)[0].split("\n\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in alone.split("\n")[2:-1]]
    names = names_of_attempts()
    assert [name for name, *_ in rows] == names
    assert all(words["yes"] in cells and set(cells) <= {"", words["yes"]} for _, *cells in rows)
    none = words["none"].format(total=len(names))
    lines = missing.split("\n")[2:]
    assert len(lines) == len(MISSING)
    for lacking, line in zip(MISSING, lines):
        starts = "seccomp" not in lacking and not {"namespaces", "landlock"} <= set(lacking)
        cells = [words["runs"], none] if starts else [words["stops"]]
        assert f"| {', '.join(lacking) or words['nothing']} | {' | '.join(cells)} |" in line
        assert str(len(names)) in line


@pytest.mark.parametrize("lacking", [["seccomp"], ["landlock", "namespaces"]])
def test_too_little_is_no_sandbox(lacking: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample fails and is not scored 0; the run says what is missing before it starts."""
    monkeypatch.setattr(confinement, "_missing", dict.fromkeys(lacking, "left out by a test"))
    with pytest.raises(
        sandbox.SandboxError, match=f"cannot be set up here: {lacking[0]}: left out"
    ):
        sandbox.Zygote()
    sample = make(0, "print(1)", metadata={"tests": [{"stdin": "", "stdout": "1"}]})
    for name in ("code", "task"):
        with (
            Grader(rm_type=name) as grader,
            pytest.raises(
                ValueError, match=rf"the reward {name} executes text of the model, .*left out"
            ),
        ):
            grader.grade([sample])


def test_the_environment_names_layers_to_leave_out() -> None:
    code = "from slime_like.rewards import confinement as c; print(*c.unenforced(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, confinement.DISABLE: "landlock,namespaces"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for name in ("landlock (left out by", "namespaces (left out by", "landlock_scopes (needs"):
        assert name in done.stdout


def test_a_sandbox_that_breaks_fails_the_sample() -> None:
    """Its zygote is killed, as where memory runs out: the sample has no reward, and the next one is
    graded."""
    import psutil

    tests: dict[str, Any] = {"tests": [{"stdin": "", "stdout": "1"}]}
    with Grader(rm_type="code", rm_num_workers=1, rm_timeout_s=60) as grader:
        assert grader.grade([make(0, "print(1)", metadata=tests)])[0].reward == 1.0
        assert grader._pool is not None
        (zygote,) = psutil.Process(grader._pool.workers[0].process.pid).children()
        zygote.kill()
        lost, again = grader.grade([make(i, "print(1)", metadata=tests) for i in (1, 2)])
    assert (lost.status, lost.reward) == (SampleStatus.FAILED, None)
    assert "the sandbox" in lost.metadata["failure"]
    assert again.reward == 1.0


def test_threads_are_counted() -> None:
    if "namespaces" in confinement.missing():
        pytest.skip("needs namespaces")
    bomb = (
        "import threading, time, os\nthreading.stack_size(65536)\nmade = 0\ntry:\n"
        "    while made < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "        made += 1\n"
        "except RuntimeError:\n    pass\nprint(made, flush=True)\nos._exit(0)"
    )
    assert int(sandbox.run(bomb, limits=sandbox.SandboxLimits(wall_s=120)).stdout) < 64


EVALUATING = ("puzzle24", "countdown", "polynomial_multiplication", "simple_integration")


def test_an_answer_that_could_run_something_scores_like_none() -> None:
    """It calls a method. Where code of an answer runs, it can write its own score."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"size": 1, "seed": 1}
    entry = reasoning_gym.create_dataset("polynomial_multiplication", **options)[0]
    metadata = {
        "task": {"name": "polynomial_multiplication", "options": options},
        "entry": entry,
    }
    right = f"({entry['answer']}).expand()"
    with Grader(rm_type="task", rm_num_workers=1, rm_timeout_s=100) as grader:
        graded = grader.grade([make(0, right, metadata=metadata), make(1, "", metadata=metadata)])
    assert graded[0].reward == graded[1].reward == 0.0
    assert graded[0].metadata["scored_as_empty"] == "the answer is not scored: it would run code"


def test_an_answer_runs_nothing(tmp_path: Path) -> None:
    """Answers to tasks whose scorers evaluate them: outside they write a file, in the grader they
    do not, nor do they reach other samples."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    samples = []
    for i, name in enumerate(EVALUATING):
        options = {"size": 1, "seed": 1}
        entry = reasoning_gym.create_dataset(name, **options)[0]
        metadata = {"task": {"name": name, "options": options}, "entry": entry}
        target = tmp_path / name
        attack = f"__import__('os').mkdir({str(target)!r})"
        patch = (
            "setattr(__import__('slime_like.rewards.task', fromlist=['x']), 'score', lambda *a: "
            "1.0)"
        )
        samples.append(make(3 * i, attack, metadata=metadata))
        samples.append(make(3 * i + 1, patch, metadata=metadata))
        samples.append(make(3 * i + 2, "nothing", metadata=metadata))
    program = (
        "import json, sys\nfrom slime_like.rewards import task\n"
        "for response, metadata in json.load(sys.stdin):\n"
        "    try: task.score(response, None, metadata)\n    except Exception: pass\n"
    )
    asked = [(s.response, s.metadata) for s in samples[::3]]
    subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(asked, default=str), text=True,
        check=True, timeout=120
    )  # fmt: skip
    written = {path.name for path in tmp_path.iterdir()}
    assert written, "outside the grader an answer does run"
    for path in tmp_path.iterdir():
        path.rmdir()
    with Grader(rm_type="task", rm_num_workers=1, rm_timeout_s=60) as grader:
        graded = grader.grade(samples)
    assert list(tmp_path.iterdir()) == []
    assert all(s.reward is not None and s.reward < 0.5 for s in graded)

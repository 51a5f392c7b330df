"""examples/coding_agent: the model's calls change files in the sandbox, and the checks decide."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.agents.rollouts import Task
from slime_like.import_utils import load_function
from slime_like.rewards import confinement, shell
from slime_like.types import Sample, SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import Engine, episodes

pytestmark = pytest.mark.skipif(shell.problem() is not None, reason=str(shell.problem()))
AGENT = ROOT / "examples" / "coding_agent" / "agent.py"
METADATA = {
    "files": {"src/half.py": "import sys\nprint(int(sys.argv[1]) / 3)\n"},
    "checks": [
        {"command": "python src/half.py 8", "stdout": "4.0"},
        {"command": "python src/half.py 0", "stdout": "0.0"},
    ],
}


def call(name: str, **arguments: Any) -> str:
    return call_text(FAMILIES["qwen3"], [(name, arguments)])


def played(*answers: str) -> tuple[Sample, Engine]:
    play = load_function(f"{AGENT}:play", "--agent-function-path")

    async def with_files(task: Task) -> Any:
        task.metadata.update(METADATA)
        return await play(task)

    engine = Engine(*answers)
    (sample,) = episodes(with_files, engine, 1, timeout_s=300)
    return sample, engine


def test_it_looks_edits_and_is_done() -> None:
    sample, engine = played(
        "<think>\nlook\n</think>\n\n" + call("shell", command="cat src/half.py; ls"),
        call("shell", command="sed -i 's|/ 3|/ 2|' src/half.py && python src/half.py 8"),
        "Done.",
    )
    assert (sample.metadata.get("failure"), sample.reward) == (None, 1.0)
    assert "/ 3)" in engine.prompts[1] and "4.0" in engine.prompts[2]
    assert trained(sample) == [t for tokens in engine.written for t in tokens]


def test_wrong_calls_are_answered() -> None:
    function = load_function(f"{AGENT}:use", "--agent-function-path")
    work = shell.Workspace()

    def use(name: str, arguments: str) -> str:
        return str(function(work, {"name": name, "arguments": arguments}))

    assert use("shell", '{"line": "ls"}') == "error: KeyError: 'command'"
    assert use("shell", "[]").startswith("error: TypeError")
    assert use("shell", "no JSON").startswith("error: JSONDecodeError")
    assert use("shell", "[" * 100000).startswith("error: RecursionError")
    assert use("shell", '{"command": "kill -INT 1; echo \\ud800"}').startswith(
        "sh: the command has"
    )
    assert use("write_file", '{"path": "\\ud800", "text": "x"}').startswith("error: ValueError")
    assert use("delete", "{}") == "error: there is no tool 'delete'"
    assert "is no path in the workspace" in use("write_file", '{"path": "../x", "text": "x"}')
    assert use("write_file", '{"path": "a/b", "text": "x"}') == "written"
    assert use("shell", '{"command": "cat a/b; false"}') == "x[exit status 1]"


def test_the_checks_decide_and_expect_in_secret() -> None:
    text = "print('0.0')\n"
    sample, _ = played(call("write_file", path="src/half.py", text=text), "I am done.")
    assert (sample.metadata.get("failure"), sample.reward) == (None, 0.5)


def test_a_machine_without_a_sandbox_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(confinement.DISABLE, "seccomp")
    monkeypatch.setattr(confinement, "_missing", None)
    sample, engine = played("x")
    assert sample.status == SampleStatus.ABORTED and not engine.written
    assert "the shell's sandbox cannot be set up here: seccomp" in sample.metadata["failure"]

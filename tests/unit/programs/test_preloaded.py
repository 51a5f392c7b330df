"""Programs of episodes that are forked from a process with their imports (--agent-preload)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from arguments.parse import parse_args
from slime_like.agents.command import run_command
from slime_like.agents.task import Task
from slime_like.config import ConfigError
from slime_like.programs import preloaded as preloaded_module
from slime_like.programs.environment import environment_without_keys
from slime_like.programs.preloaded import Preloaded, python_program
from tests.unit.agents.test_harm import SPY, needs_namespaces
from tests.unit.command_lines import complete

APART = [False, pytest.param(True, marks=needs_namespaces)]
SLOW = "open({count!r}, 'a').write('x')\n"
Start = Callable[..., tuple[list[str], Preloaded]]


def task_with(key: str = "k") -> Task:
    return Task(0, "p", None, {"a": 1}, False, "http://127.0.0.1:1", key)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(source, *words) -> the command of a program that imports `slow`, which writes an x into
    the file `count` each time, and the process that has imported it."""
    (tmp_path / "slow.py").write_text(SLOW.format(count=str(tmp_path / "count")))
    started = []

    def begin(source: str, *words: str, modules: Sequence[str] = ("slow",)) -> tuple[list[str], Preloaded]:  # fmt: skip
        file = tmp_path / "program.py"
        file.write_text("import slow\n" + textwrap.dedent(source))
        command = [sys.executable, str(file), *words]
        program = python_program(command)
        started.append(Preloaded(program, modules, environment_without_keys()))
        return command, started[-1]

    yield begin
    for process in started:
        process.close()


def run(
    command: list[str], preloaded: Preloaded | None, *, apart: bool = False, key: str = "k"
) -> float | None:
    return asyncio.run(run_command(command, task_with(key), apart=apart, preloaded=preloaded))


@pytest.mark.parametrize("apart", APART)
def test_imports_are_made_once(tmp_path: Path, start: Start, apart: bool) -> None:
    """And the program runs as it does when it is started: arguments, environment, folder, task."""
    command, preloaded = start(
        """
        import json, os, sys
        task = json.load(open("task.json"))
        assert task["prompt"] == "p" and task["metadata"] == {"a": 1}, task
        assert __name__ == "__main__" and __file__ == sys.argv[0], __file__
        assert sys.path[0] == os.path.dirname(__file__), sys.path
        assert os.environ["OPENAI_API_KEY"] == "k" and "slime_like" not in sys.modules
        print(json.dumps([sys.argv, sorted(os.environ), sorted(os.listdir())]))
        open("reward", "w").write(sys.argv[2])
        """,
        "--reward",
        "0.25",
    )
    for _ in range(3):
        assert run(command, preloaded, apart=apart) == 0.25
    assert (tmp_path / "count").read_text() == "x"
    assert run(command, None, apart=apart) == 0.25
    assert (tmp_path / "count").read_text() == "xx", "as a program of its own"


def test_how_a_program_ends(start: Start) -> None:
    command, preloaded = start(
        """
        import os, sys, atexit, threading, time
        atexit.register(print, "at exit")
        match sys.argv[1]:
            case "exit": sys.exit(3)
            case "words": sys.exit("a reason")
            case "raise": raise ValueError("wrong")
            case "signal": os.kill(os.getpid(), 15)
            case "thread": threading.Thread(target=lambda: (time.sleep(0.2), open("reward", "w").write("1"))).start()
        """
    )
    for word, reason in {
        "exit": "exit status 3: at exit$",
        "words": "exit status 1: a reason\nat exit$",
        "raise": "exit status 1: (?s:.*)ValueError: wrong\nat exit$",
        "signal": "exit status 143: $",
    }.items():
        one = Preloaded(python_program([*command, word]), ["slow"], environment_without_keys())
        with contextlib.closing(one), pytest.raises(RuntimeError, match=reason):
            run([], one)
    one = Preloaded(python_program([*command, "thread"]), ["slow"], environment_without_keys())
    with contextlib.closing(one):
        assert run([], one) == 1.0
    preloaded.close()


def test_generators_of_random_numbers_are_not_shared(start: Start) -> None:
    command, preloaded = start(
        """
        import random, numpy
        open("reward", "w").write(str(random.random() + numpy.random.rand()))
        """,
        modules=("slow", "random", "numpy"),
    )
    assert len({run(command, preloaded) for _ in range(4)}) == 4


@pytest.mark.parametrize("apart", APART)
def test_nothing_is_left_of_a_program_that_takes_too_long(
    tmp_path: Path, start: Start, apart: bool
) -> None:
    """With what has left its session and its environment."""
    beats = tmp_path / "beats"
    line = f"while :; do date >> {beats}; sleep 0.05; done"
    command, preloaded = start(
        f"""
        import subprocess, time
        subprocess.Popen(["env", "-i", "setsid", "sh", "-c", {line!r}])
        time.sleep(60)
        """
    )
    preloaded.start()

    async def work() -> None:
        one = run_command(command, task_with(), apart=apart, preloaded=preloaded)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one, 2.0)

    began = time.monotonic()
    asyncio.run(work())
    assert time.monotonic() - began < 30
    size = beats.stat().st_size
    time.sleep(0.5)
    assert beats.stat().st_size == size > 0
    assert run(start('open("reward", "w").write("1")')[0], None) == 1.0


@needs_namespaces
def test_a_program_sees_nothing_of_the_others(tmp_path: Path, start: Start) -> None:
    """Their keys are not in the process from which all are forked either."""
    waits = "import os, time\nif os.environ['OPENAI_API_KEY'] == 'another': time.sleep(60)\n"
    command, preloaded = start(waits + SPY, str(tmp_path), "apart", str(os.getpid()))

    async def work() -> None:
        another = asyncio.create_task(
            run_command(command, task_with("another"), preloaded=preloaded)
        )
        await asyncio.sleep(1.0)
        await run_command(command, task_with("mine"), preloaded=preloaded)
        another.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await another

    asyncio.run(work())
    assert (tmp_path / "mine").read_text() == f"[] 0 0 {os.getuid()}"


def test_a_lost_process_is_started_again(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has forked is lost with it, and the episodes say so."""
    command, preloaded = start(
        f"""
        import os, time
        if os.environ["OPENAI_API_KEY"] == "waits": open({str(tmp_path / "begun")!r}, "w"); time.sleep(60)
        open("reward", "w").write("1")
        """
    )

    async def lose() -> None:
        waits = asyncio.create_task(run_command(command, task_with("waits"), preloaded=preloaded))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        assert preloaded._process is not None
        preloaded._process.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the process of --agent-preload has ended"):
            await waits

    asyncio.run(lose())
    with caplog.at_level(logging.WARNING):
        assert run(command, preloaded) == 1.0
    assert "--agent-preload is lost" in caplog.text


def test_programs_may_be_modules_with_an_environment(tmp_path: Path, start: Start) -> None:
    line = f"env PYTHONPATH={tmp_path} SOME_KEY=1 {sys.executable} -W error -m program 0.5"
    start('import os, sys\nassert os.environ["SOME_KEY"]\nopen("reward", "w").write(sys.argv[1])')
    program = python_program(shlex.split(line))
    one = Preloaded(program, ["slow"], environment_without_keys())
    with contextlib.closing(one):
        assert run([], one) == run([], one) == 0.5
    assert (tmp_path / "count").read_text() == "x"


@pytest.mark.parametrize(
    ("line", "modules", "message"),
    [
        ("sh agent.sh", ["json"], "must be python with a script or -m MODULE"),
        ("uv run agent.py", ["json"], "must be python with a script or -m MODULE"),
        ("{python} -c pass", ["json"], "not python -c"),
        ("{python} -u", ["json"], "must name a script"),
        ("{python} -m", ["json"], "must name a script or -m MODULE"),
        ("{python} agent.py", ["no_such_module"], "no_such_module: ModuleNotFoundError"),
        ("{python} {folder}/agent.py", ["bad"], "bad: SystemExit: 3"),
        ("{python} {folder}/agent.py", ["threads"], "threads starts threads (a thread), which"),
        ("{python} {folder}/agent.py", ["killed"], "it ended without a word"),
        ("/nowhere/python agent.py", ["json"], "/nowhere/python: No such file or directory"),
    ],
)
def test_what_cannot_be_preloaded_is_refused(
    tmp_path: Path, line: str, modules: list[str], message: str
) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "killed.py").write_text("import os; os._exit(1)")
    (tmp_path / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='a thread', daemon=True).start()\n"
    )
    line = line.format(python=sys.executable, folder=tmp_path)
    budget = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"]
    argv = complete(tmp_path, *budget, "--agent-command", line, "--agent-preload", *modules)
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, 1)
    (problem,) = caught.value.problems
    assert message in str(problem)


def test_imports_have_a_time_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded_module, "START_LIMIT_S", 0.5)
    (Path(start("")[0][1]).parent / "endless.py").write_text("import time; time.sleep(60)")
    _, preloaded = start("", modules=("endless",))
    with pytest.raises(RuntimeError, match=r"imports took longer than 0\.5 s"):
        preloaded.start()

"""The sandbox of code rewards: what a hostile program tries, and what comes of it; and the reward
over it.

Every attack is shown to succeed outside the sandbox, where that is harmless: a check that would
pass on an idle program shows nothing.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.rewards import code, confinement, sandbox
from slime_like.rewards.grader import UNFIT, Grader
from slime_like.rewards.sandbox import SandboxLimits
from slime_like.types import SampleStatus
from tests.unit.rewards.test_grader import make

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))

# A deadline that a busy machine meets too; tests of the deadline set one of their own.
run = functools.partial(sandbox.run, limits=SandboxLimits(wall_s=120))


def outside(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    ).stdout


def test_a_program_runs_with_its_input() -> None:
    outcome = run(
        "import sys, math\nprint(math.factorial(int(input())))\nprint('oh', file=sys.stderr)",
        stdin="5\n",
    )
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", "120\n", "oh\n")
    assert run("print(open(0).read())", stdin="a\nb").stdout == "a\nb\n"
    assert run("print('å' * 3)").stdout == "ååå\n"
    assert run("print(len(input()))", stdin="x" * 2**20).stdout == f"{2**20}\n"
    assert (
        run(
            "import threading\nt = threading.Thread(target=print, args=('in a thread',))\n"
            "t.start()\nt.join()"
        ).stdout
        == "in a thread\n"
    )


@pytest.mark.parametrize(
    ("program", "check", "status"),
    [
        ("x = 2", "assert x == 2", "ok"),
        ("x = 3", "assert x == 2", "error"),
        ("x = (", None, "error"),
        ("raise SystemExit(0)", None, "ok"),
        ("raise SystemExit(0)", "assert False", "error"),
        ("import os; os._exit(0)", "assert False", "error"),
        ("raise SystemExit(3)", None, "error"),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", None, "timeout"),
        ("import time; time.sleep(60)", None, "timeout"),
        (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
            None,
            "timeout",
        ),
        ("while True: print('x' * 1000)", None, "output"),
        ("import ctypes; ctypes.string_at(0)", None, "killed"),
    ],
)
def test_how_it_ends(program: str, check: str | None, status: str) -> None:
    outcome = run(
        program, check=check, limits=SandboxLimits(wall_s=0.7 if status == "timeout" else 120)
    )
    assert outcome.status == status, outcome
    assert outcome.seconds < 0.7 + 100


def test_processor_time_ends_a_program_before_its_deadline() -> None:
    outcome = run("while True: pass", limits=SandboxLimits(wall_s=30, cpu_s=1))
    assert outcome.status == "killed" and outcome.seconds < 29


ESCAPES = (
    "os.system('echo escaped')",
    "print(subprocess.run(['/bin/sh', '-c', 'echo escaped'], capture_output=True, "
    "text=True).stdout)",
    "print('escaped' if os.fork() == 0 else '')",
    "pid = os.posix_spawn('/bin/echo', ['echo', 'escaped'], {}); os.waitpid(pid, 0)",
    "os.execv('/bin/echo', ['echo', 'escaped'])",
    "print(os.popen('echo escaped').read())",
    "import ctypes; ctypes.CDLL(None).system(b'echo escaped')",
    "os.kill(os.getppid(), 0); print('escaped')",
)


@pytest.mark.parametrize("attack", ESCAPES)
def test_no_shell_and_no_other_process(attack: str) -> None:
    program = f"import os, subprocess, sys\n{attack}"
    assert "escaped" in outside(program)
    outcome = run(program)
    assert "escaped" not in outcome.stdout, outcome


def test_a_fork_bomb_makes_no_process() -> None:
    bomb = (
        "import os\nmade = 0\nfor i in range(200):\n    try:\n        made += os.fork() > 0\n"
        "    except OSError:\n        pass\nprint('made', made)"
    )
    assert run(bomb).stdout == "made 0\n"
    before = len(os.listdir("/proc"))
    assert (
        run(
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            limits=SandboxLimits(wall_s=0.5),
        ).status
        == "timeout"
    )
    assert len(os.listdir("/proc")) < before + 50


def test_ten_gigabytes_are_refused() -> None:
    for program in (
        "x = bytearray(10 * 2**30)",
        "import mmap; mmap.mmap(-1, 10 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**26))",
    ):
        outcome = run(program)
        assert outcome.status == "error" and (
            "MemoryError" in outcome.stderr or "Cannot allocate" in outcome.stderr
        ), outcome
    raised = run("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert raised.status == "error"
    lowered = run("import resource\nprint(resource.getrlimit(resource.RLIMIT_AS)[0])")
    assert lowered.stdout == f"{512 * 2**20}\n", "limits can be read"


def test_files_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("the secret")
    key.chmod(0o644)
    monkeypatch.setenv("SECRET_TOKEN", "the secret")
    target = tmp_path / "written"
    for attack in (
        f"print(open({str(key)!r}).read())",
        f"print(os.listdir({str(key.parent)!r}))",
        "print(open('/etc/passwd').read())",
        "print(os.environ['SECRET_TOKEN'])",
        "print(open('/proc/self/environ').read())",
        "print(open(f'/proc/{os.getppid()}/environ').read())",
        f"open({str(target)!r}, 'w').write('x'); print('done')",
        "open('/dev/shm/written', 'w').write('x'); print('done')",
        "import tempfile; print(tempfile.NamedTemporaryFile().write(b'x'))",
        f"os.symlink('/etc', {str(target)!r}); print('done')",
        f"os.unlink({str(key)!r}); print('done')",
    ):
        outcome = run(f"import os\n{attack}")
        assert outcome.status == "error" and outcome.stdout == "", (attack, outcome)
    assert key.read_text() == "the secret" and not target.exists()


@pytest.fixture
def listener() -> Iterator[tuple[int, list[str]]]:
    """A port of this machine, and what came there."""
    came: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    continue
                came.append("somebody")
                peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], came
        done.set()
        thread.join()


@pytest.mark.parametrize("without", [(), ("namespaces",), ("namespaces", "landlock_scopes")])
def test_nobody_is_reached(
    listener: tuple[int, list[str]], without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where unprivileged namespaces are forbidden."""
    port, came = listener
    lacking = {**confinement.missing(), **dict.fromkeys(without, "left out by a test")}
    monkeypatch.setattr(confinement, "_missing", lacking)
    monkeypatch.setattr(sandbox, "_idle", [])
    connect = (
        f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\n"
        "print('connected')"
    )
    assert outside(connect) == "connected\n"
    deadline = time.monotonic() + 60
    while not came and time.monotonic() < deadline:
        time.sleep(0.01)
    assert came.pop() == "somebody"
    for attack in (connect, "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                            "print('connected')",
                   "import socket\nsocket.socket(socket.AF_UNIX)\nprint('connected')",
                   "import socket\nsocket.socketpair()\nprint('connected')"):  # fmt: skip
        outcome = run(attack)
        assert outcome.status == "error" and "connected" not in outcome.stdout, outcome
    assert came == []


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """The process that asked is killed; the program, which would run for a minute, is gone soon."""
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from slime_like.rewards.sandbox import *; run('while True: pass', "
            "limits=SandboxLimits(wall_s=60, cpu_s=60))",
        ]
    )
    children: list[str] = []
    deadline = time.monotonic() + 30
    while not children and time.monotonic() < deadline:
        time.sleep(0.1)
        children = Path(f"/proc/{asker.pid}/task/{asker.pid}/children").read_text().split()
    time.sleep(1.0)  # until it has set itself up
    asker.kill()
    asker.wait()
    deadline = time.monotonic() + 120
    while (
        any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


ADD = [{"code": "assert add(1, 2) == 3"}, {"code": "assert add(-1, 1) == 0"}]
ECHO = [{"stdin": "3\n4\n", "stdout": "7\n"}, {"stdin": "0\n0", "stdout": "0"}]


@pytest.mark.parametrize(
    ("response", "tests", "expected"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", ADD, 1),
        ("```py\ndef add(a, b): return 3\n```", ADD, 0),
        ("```\nbad\n```\nno:\n```python\ndef add(a, b): return a + b\n```", ADD, 1),
        ("def add(a, b): return a + b", ADD, 1),
        ("import sys; sys.exit(0)", ADD, 0),
        ("I cannot do that.", ADD, 0),
        ("print(int(input()) + int(input()))  ", ECHO, 1),
        ("print(7)", ECHO, 0),
    ],
)
def test_the_reward(response: str, tests: list[dict[str, str]], expected: float) -> None:
    assert code.score(response, None, {"tests": tests}) == expected


NUMBERS = [{"stdin": "", "stdout": "1.50 x\n2\n"}]


@pytest.mark.parametrize(
    ("response", "metadata", "expected"),
    [
        ("    return a + b", {"tests": ADD, "prelude": "def add(a, b):\n"}, 1),
        ("def add(a, b): return total((a, b))", {"tests": ADD, "prelude": "total = sum\n"}, 1),
        ("from __future__ import annotations\ndef add(a: no, b): return a + b",
         {"tests": ADD, "prelude": "x = 1\n"}, 1),
        ("print('1.5 x'); print(2)", {"tests": NUMBERS, "compare": "numbers"}, 0),
        ("print(1.0, 2)", {"tests": [{"stdin": "", "stdout": "1 2.00"}]}, 0),
        ("print(1.0, 2)", {"tests": [{"stdin": "", "stdout": "1 2.00"}], "compare": "numbers"}, 1),
        ("print(1.0, 2)", {"tests": [{"stdin": "", "stdout": "1 2 3"}], "compare": "numbers"}, 0),
        ("print(1.0)", {"tests": [{"stdin": "", "stdout": "1\n2"}], "compare": "numbers"}, 0),
        ("print(int(input()) + 1)",
         {"tests": [], "packed_tests": '[{"input": "1", "output": "2"}, {"input": "2", "output": "3"}]'}, 1),
        ("print(2)",
         {"tests": [], "packed_tests": '[{"input": "1", "output": "2"}, {"input": "2", "output": "3"}]'}, 0),
    ],
)  # fmt: skip
def test_what_a_row_may_add(response: str, metadata: dict[str, object], expected: float) -> None:
    assert code.score(response, None, metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "needs 'tests'"),
        ({"tests": ADD, "prelude": 3}, "'prelude' .* must be text"),
        ({"tests": ADD, "compare": "words"}, "'compare' .* must be 'numbers'"),
        ({"tests": []}, "needs 'tests'"),
        ({"tests": [{"code": "x"}, {"stdin": "x"}]}, "test 1 of the row's metadata"),
        ({"tests": ADD, "timeout_s": 0}, "'timeout_s' .* is 0"),
        ({"tests": ADD, "memory_mb": "many"}, "'memory_mb' .* is 'many'"),
    ],
)
def test_wrong_tests_are_reported(metadata: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        code.score("", None, metadata)


def test_the_grader_runs_programs() -> None:
    with Grader(rm_type="code", rm_num_workers=1, rm_timeout_s=2) as grader:
        good = make(0, "def add(a, b): return a + b", metadata={"tests": ADD})
        slow = make(1, "import time; time.sleep(60)", metadata={"tests": ADD, "timeout_s": 30})
        first, second = grader.grade([good, slow])
    assert (
        first.reward == 1
        and (second.status, second.reward) == (SampleStatus.COMPLETED, 0.0)
        and "--rm-timeout-s 2" in second.metadata[UNFIT]
    )

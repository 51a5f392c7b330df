"""Nothing that a program does to its process reaches the next one, and what it does to its zygote
costs its own sample alone."""

from __future__ import annotations

import pytest

from slime_like.rewards import sandbox
from slime_like.rewards.grader import Grader
from slime_like.types import Sample, SampleStatus
from tests.unit.rewards.test_grader import make

pytestmark = [
    pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem())),
    pytest.mark.timeout(300),
]

# what a program leaves behind -> what the next one prints where nothing of it is there
TRACES = {
    "builtins.print = lambda text: os.write(1, b'left')": "True",
    "builtins.left = 1": "not hasattr(builtins, 'left')",
    "json.loads = lambda text: 'left'": "json.loads('1') == 1",
    "sys.modules['left'] = sys": "'left' not in sys.modules",
    "sys.path.append('left')": "'left' not in sys.path",
    "sys.setrecursionlimit(77)": "sys.getrecursionlimit() > 500",
    "sys.stdout = open(1, 'w', closefd=False, encoding='ascii')": "sys.stdout.encoding == 'utf-8'",
    "os.environ['LEFT'] = '1'": "'LEFT' not in os.environ",
    "os.dup(1)": "files() == 3",
    "os.dup2(os.open('/dev/null', os.O_RDONLY), 9)": "files() == 3",
    "os.set_blocking(1, False)": "os.get_blocking(1)",
    "os.close(2)": "os.fstat(2) is not None",
    "threading.Thread(target=time.sleep, args=(999,), daemon=True).start()":
        "threading.active_count() == 1",
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": "signal.getsignal(signal.SIGINT) is not "
    "signal.SIG_IGN",
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})":
        "not signal.pthread_sigmask(signal.SIG_BLOCK, [])",
    "signal.alarm(1)": "signal.alarm(0) == 0",
    "atexit.register(print, 'left')": "True",
    "random.seed(1)": "random.random() != random.Random(1).random()",
    "gc.disable()": "gc.isenabled()",
    "attempt(os.chdir, '/usr')": "os.getcwd() == '/'",
    "attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (9, 9))":
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64",
    "attempt(resource.setrlimit, resource.RLIMIT_AS, (2**27, 2**27))":
        "resource.getrlimit(resource.RLIMIT_AS)[0] == 2**29",
    "attempt(lambda: open('/tmp/left', 'w').write('left'))": "not os.path.exists('/tmp/left')",
    "attempt(os.mkdir, '/tmp/folder')": "not os.path.exists('/tmp/folder')",
}  # fmt: skip
IMPORTS = "import atexit, builtins, gc, json, os, random, resource, signal, sys, threading, time\n"
HELP = """
def attempt(function, *arguments):
    try: function(*arguments)
    except OSError: pass
    except ValueError: pass
def files():
    count = 0
    for number in range(64):
        try: os.fstat(number); count += 1
        except OSError: pass
    return count
"""


def test_nothing_is_left_for_the_next_program() -> None:
    """Each program leaves a trace in the same zygote, and the one after it looks for it."""
    zygote = sandbox.Zygote()
    try:
        for leave, look in TRACES.items():
            zygote.run(
                IMPORTS + HELP + leave + "\nos._exit(0)", "", None, sandbox.SandboxLimits(wall_s=60)
            )
            there = zygote.run(
                f"{IMPORTS}{HELP}print({look})", "", None, sandbox.SandboxLimits(wall_s=60)
            )
            assert (there.status, there.stdout) == ("ok", "True\n"), (leave, there)
    finally:
        zygote.close()


def test_input_and_output_are_of_their_own_program() -> None:
    """What one does not read, and what it writes last, the next one does not get."""
    first = sandbox.run("print('x' * 60000, end='')", stdin="unread")
    second = sandbox.run("import sys\nprint(repr(sys.stdin.read()))", stdin="mine")
    assert (len(first.stdout), second.stdout, second.stderr) == (60000, "'mine'\n", "")


KILL = (
    "import os, signal\nfor who in (os.getppid(), -1, 0):\n    try: os.kill(who, signal.SIGKILL)\n"
    "    except OSError: pass\n"
)
ATTACKS = {
    "kill": KILL + "os.kill(os.getpid(), signal.SIGKILL)",
    "stop": KILL.replace("SIGKILL", "SIGSTOP") + "os.kill(os.getpid(), signal.SIGSTOP)",
    "memory": "rows = []\nwhile True: rows.append(bytearray(2**24))",
    "files": "import os\nwhile True: os.dup(0)",
    "output": "while True: print('x' * 9999)",
    "threads": "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "forged report": "import os\nfor file in range(3, 64):\n"
    "    try: os.write(file, b'E\\x04\\0\\0\\0\\0\\0')\n"
    "    except OSError: pass\nos._exit(1)",
    "sleep": "import time\ntime.sleep(999)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_its_own_sample_alone(attack: str) -> None:
    """On its zygote: those before and behind it, with the same worker, have their rewards, and the
    worker and the zygote continue."""
    tests = {"tests": [{"stdin": "2", "stdout": "4"}], "timeout_s": 3}
    right = "print(2 * int(input()))"
    samples: list[Sample] = [
        make(i, text, metadata=tests) for i, text in enumerate((right, ATTACKS[attack], right))
    ]
    with Grader(rm_type="code", rm_num_workers=1, rm_timeout_s=90) as grader:
        first = grader.grade(samples[:1])
        assert grader._pool is not None
        worker = grader._pool.workers[0].process.pid
        graded = first + grader.grade(samples[1:])
        assert [one.process.pid for one in grader._pool.workers] == [worker]
    assert [s.reward for s in graded] == [1.0, 0.0, 1.0]
    assert all(s.status == SampleStatus.COMPLETED for s in graded)

"""The shell that a coding agent works in: what it can do, what it keeps, and what a hostile command
tries. Where an attack could be refused by the machine anyway, it is shown to succeed outside."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime_like.rewards import confinement, shell
from slime_like.rewards.sandbox import SandboxError
from slime_like.rewards.shell import ShellLimits, Workspace

pytestmark = pytest.mark.skipif(shell.problem() is not None, reason=str(shell.problem()))

# A deadline that a busy machine meets too; tests of the deadline set one of their own.
LIMITS = ShellLimits(wall_s=120, cpu_s=60)


def run(command: str, limits: ShellLimits = LIMITS, **files: str) -> tuple[int, str]:
    outcome = Workspace(limits).run(command, files)
    assert outcome.status == "ok", outcome
    return outcome.exit_status, outcome.output


def test_files_stay_and_commands_have_the_systems_programs() -> None:
    work = Workspace(LIMITS)
    work.write("src/half.py", "def half(x):\n    return x / 3\n")
    listing = work.run("ls -l src | wc -l; grep -rn 'x / 3' .").output
    assert listing == "2\n./src/half.py:2:    return x / 3\n"
    assert work.run("sed -i 's|/ 3|/ 2|' src/half.py && ln -s src/half.py link").output == ""
    check = work.run("cd src; python -c 'from half import half; print(half(4))'; exit 3")
    assert (check.status, check.exit_status, check.output) == ("ok", 3, "2.0\n")
    assert work.read("link") == "def half(x):\n    return x / 2\n"
    assert work.read("nothing") is None
    assert work.run("ls -a /tmp/work").output.split() == [".", "..", "link", "src"]


def test_a_pipeline_subprocesses_and_background() -> None:
    status, output = run(
        "seq 5 | sort -r | head -2 | tr '\\n' ' '; "
        'python -c \'import subprocess as s; print(s.check_output(["echo", "in"]).decode())\'; '
        "(sleep 0.1; echo late) & wait; cat < /dev/null; echo out > /dev/null; echo err >&2"
    )
    assert (status, output) == (0, "5 4 in\n\nlate\nerr\n")


def test_what_a_command_started_ends_with_it() -> None:
    work = Workspace(LIMITS)
    command = (
        "(setsid sh -c 'while :; do date >> beats; done') > /dev/null 2>&1 & while [ ! -s beats ]; "
        "do sleep 0.05; done"
    )
    assert work.run(command).exit_status == 0
    size = work.run("wc -c < beats").output
    assert int(size) > 0
    assert work.run("wc -c < beats").output == size


def test_a_deadline_keeps_the_files_until_then() -> None:
    work = Workspace(ShellLimits(wall_s=4))
    outcome = work.run("echo begun > a; trap '' TERM; while :; do sleep 100; done")
    assert (outcome.status, outcome.exit_status) == ("timeout", 124)
    assert Workspace.read(work, "a") == "begun\n"


def test_output_is_cut_in_the_middle() -> None:
    status, output = run("echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo last")
    assert status == 0 and output.startswith("first\nx") and output.endswith("xlast\n")
    assert len(output) < 9000 and "991819 bytes left out" in output


def test_too_many_files_leave_all_as_before() -> None:
    work = Workspace(ShellLimits(wall_s=120, files_mb=1))
    work.write("a", "kept")
    outcome = work.run("rm a; head -c 600000 /dev/zero > b; cp b c")
    assert outcome.status == "files"
    assert work.run("cat a; ls").output == "kepta\n"
    big = work.run("head -c 9000000 /dev/zero > b")
    assert big.exit_status != 0, "a file has a limit too"


def test_odd_files_spoil_nothing() -> None:
    work = Workspace(LIMITS)
    work.run(
        "echo x > a; ln a b; chmod 0 a; mkfifo p; ln -s /etc/passwd out; ln -s loop loop; mkdir "
        "-m 0 shut; "
        "python -c \"open(b'\\\\xff\\\\n', 'w').write('odd')\"; echo y > -n"
    )
    assert work.run("cat -- -n; cat out 2>&1 | grep -c No").output == "y\n1\n"
    assert work.run("ls | wc -l").exit_status == 0
    work.run("echo one > c; ln c d; echo two >> d")
    assert work.run("cat d; rm c; cat d").output == "one\ntwo\n" * 2


def test_what_lies_in_a_readable_folder_is_there_already() -> None:
    assert confinement.outermost(["/usr/bin/env", "/usr", "/nothing", "/usr/bin"]) == ["/usr"]


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "", "a\0b", "a\ud800", "d/" * 100 + "x"]
)
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is no path in the workspace"):
        Workspace(LIMITS).write(path, "x")


def test_a_file_in_place_of_a_folder() -> None:
    work = Workspace(LIMITS)
    work.write("a", "x")
    with pytest.raises(ValueError, match=r"Not a directory|File exists"):
        work.write("a/b", "x")


def test_nothing_of_this_machine_is_seen_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, variables, processes, ports."""
    (tmp_path / "secret").write_text("the secret")
    monkeypatch.setenv("A_KEY", "sk-of-the-user")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = (
            f"import socket; socket.create_connection(('127.0.0.1', {port})); print('CONNECTED')"
        )
        outside = subprocess.run([sys.executable, "-c", connect], capture_output=True, timeout=60)
        assert outside.stdout == b"CONNECTED\n"
        try:
            _, output = run(
                f"cat {tmp_path}/secret; ls {tmp_path}; ln -s {tmp_path}/secret s; cat s; env; "
                "cat /proc/1/environ; ls /proc;"
                f'kill -9 {victim.pid}; kill -9 {os.getpid()}; python -c "{connect}"; '
                "id -u; cat /etc/passwd"
            )
        finally:
            alive = victim.poll() is None
            victim.kill()
            victim.wait()
    assert (
        alive and "the secret" not in output and "sk-of" not in output and "CONNECTED" not in output
    )
    assert "root:" not in output


ATTEMPTS = {
    "write to the system": "open('/usr/bin/evil', 'w')",
    "write to the library": "open(os.__file__, 'a')",
    "unshare": "refused(libc.unshare(0x10000000))",
    "mount": "refused(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "ptrace": "refused(libc.ptrace(0, 0, 0, 0))",
    "a new session's parent": "os.kill(1, 9); os.kill(os.getppid(), 0); refused(-1)",
    "socket": "socket.socket()",
    "socket pair": "socket.socketpair()",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "device": "os.mknod('sda', 0o60600, os.makedev(8, 0))",
    "setuid": "os.setuid(0) or os.setresuid(0, 0, 0)",
    "chroot": "os.chroot('/tmp')",
    "chown": "os.chown('/tmp/work', 1, 1)",
    "attributes": "os.setxattr('/tmp/work', 'user.a', b'1')",
    "memory file": "os.memfd_create('a')",
    "keyrings": "refused(libc.syscall(248, b'user', b'a', b'b', 1, -3))",
    "bpf": "refused(libc.syscall(321, 0, 0, 0))",
    "io_uring": "refused(libc.syscall(425, 8, 0))",
    "userfaultfd": "refused(libc.syscall(323, 0))",
    "memory of another": "refused(libc.syscall(310, 1, 0, 0, 0, 0, 0))",
    "name spaces by clone": "refused(libc.syscall(56, 0x10000011, 0, 0, 0, 0))",
    "limits": "resource.setrlimit(resource.RLIMIT_FSIZE, (2**40, 2**40))",
}
SCRIPT = """
import ctypes, json, os, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    if result == -1:
        raise OSError("refused")
for name, attempt in json.load(open("attempts.json")).items():
    try:
        exec(attempt)
    except Exception:
        continue
    print("succeeded:", name)
print("the end")
"""


@pytest.mark.parametrize("without", ["", "landlock", "landlock_scopes"])
def test_what_is_not_allowed(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers, and without Landlock, of which a kernel may have none."""
    monkeypatch.setenv(confinement.DISABLE, without)
    monkeypatch.setattr(confinement, "_missing", None)
    work = Workspace(LIMITS)
    x86 = platform.machine() == "x86_64"  # of which the numbers of calls are
    attempts = {name: each for name, each in ATTEMPTS.items() if x86 or "syscall" not in each}
    files = {"attempts.json": json.dumps(attempts), "script.py": SCRIPT}
    assert work.run("python script.py", files).output == "the end\n"


def test_bombs_cost_themselves_alone() -> None:
    """Processes, memory and files without end."""
    limits = ShellLimits(wall_s=30, cpu_s=10, memory_mb=256)
    work = Workspace(limits)
    forks = work.run("python -c 'import os\nwhile True:\n    os.fork()' 2>&1 | tail -1; echo alive")
    assert "BlockingIOError" in forks.output or forks.status == "timeout", forks
    status, output = run("python -c 'x = bytearray(2**30)' 2>&1 | tail -1", limits)
    assert output == "MemoryError\n" and status == 0
    status, output = run("i=0; while head -c 9000000 /dev/zero > $i; do i=$((i+1)); done; rm *; "
                         "echo left $i", limits)  # fmt: skip
    assert 2 < int(output.split()[-1]) < 9, "of the 64 MB in memory"


DEEP = 'python -c \'import os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\''


@pytest.mark.parametrize(
    ("command", "status", "output"),
    [
        ("kill -INT 1; echo after", "ok", "after\n"),
        (
            "for s in HUP INT QUIT TERM USR1 CHLD PIPE ALRM; do kill -$s 1; done; echo after",
            "ok",
            "after\n",
        ),
        ("kill -9 -1; echo after", "ok", "after\n"),
        (DEEP + "; echo made", "files", "made\n"),
        ("echo a\0b", "ok", "NUL or a surrogate"),
        ("echo \ud800", "ok", "NUL or a surrogate"),
        ("x=" + "y" * 200000, "ok", "Argument list too long"),
    ],
)
def test_a_command_has_an_outcome_whatever_it_does(command: str, status: str, output: str) -> None:
    """And the next one finds the files."""
    work = Workspace(LIMITS)
    work.write("kept", "here")
    outcome = work.run(command)
    assert outcome.status == status and output in outcome.output
    assert work.run("cat kept").output == "here"


def test_files_of_any_size_reach_a_sandbox_that_starts_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than a pipe holds."""
    work = Workspace(LIMITS)
    work.write("kept", "x" * 2**20)
    monkeypatch.setattr(shell, "_BOOT", f"import time; time.sleep(0.5); {shell._BOOT}")
    assert work.run("wc -c < kept").output == f"{2**20}\n"


def test_a_sandbox_that_is_killed_within_a_command_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the machine's memory runs out."""
    work = Workspace(LIMITS)
    work.write("kept", "here")

    def kill(pid: int) -> int:
        running = psutil.Process(pid).children(recursive=True)
        if len(running) > 1:  # the first of the namespace, and the command
            running[0].kill()
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(shell, "_resident", kill)
        outcome = work.run("rm kept; sleep 60")
    assert (outcome.status, outcome.exit_status) == ("broken", 137)
    assert work.run("cat kept").output == "here"


def test_a_sandbox_that_does_not_start_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_BOOT", "import sys; sys.exit('no start')")
    with pytest.raises(SandboxError, match="cannot start: no start"):
        Workspace(LIMITS).run("true")


def test_the_memory_of_all_processes_is_limited() -> None:
    """Each of them is within its own limit."""
    grow = (
        'x = bytearray(100 * 2**20); x[::4096] = b"1" * len(x[::4096]); import time; time.sleep(60)'
    )
    work = Workspace(ShellLimits(wall_s=120, memory_mb=256, total_memory_mb=300))
    work.write("kept", "here")
    assert work.run(f"python -c '{grow.replace('60', '1')}'; rm kept; echo one").output == "one\n"
    work.write("kept", "here")
    outcome = work.run(f"rm kept; for i in 1 2 3 4 5 6; do python -c '{grow}' & done; wait")
    assert (outcome.status, outcome.exit_status) == ("memory", 137)
    assert "more than 300 MB" in outcome.output and work.run("cat kept").output == "here"


def test_it_is_refused_where_a_layer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(confinement.DISABLE, "namespaces")
    monkeypatch.setattr(confinement, "_missing", None)
    with pytest.raises(SandboxError, match="cannot be set up here: namespaces"):
        Workspace()

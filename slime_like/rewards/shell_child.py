"""The sandboxed side of `shell.py`: confines itself, unpacks the files, runs the command, packs the
files.

The first process enters the namespaces and waits for the second, which is the first of its PID
namespace: everything ends with it. Standard library only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any

from slime_like.rewards import confinement

READY = b"R"  # first byte of the answer: the sandbox has started, and the command decides the rest
HEADER = struct.Struct("<QQ")  # lengths of the JSON and of the archive that follow
MAX_DEPTH = 64  # folders in a path of the workspace
MAX_PATH = 1000  # bytes
# in the in-memory file system of the sandbox
WORKSPACE = "/tmp/work"
PROGRAMS = "/tmp/bin"
TIMEOUT_STATUS = 124
_SHELL = "/bin/sh"
_SYSTEM = ("/bin", "/usr/bin", "/dev/zero")


def main() -> None:
    """argv: [-c, folder, pid of the parent, missing layers]."""
    confinement.assume(json.loads(sys.argv[3]))
    size, archive_size = HEADER.unpack(_read(HEADER.size))
    request: dict[str, Any] = json.loads(_read(size))
    archive = _read(archive_size)
    readable = confinement.readable_paths(packages=False)
    paths = confinement.outermost([*readable, *_SYSTEM, request["python"]])
    confinement.own_namespaces(paths)
    confinement.die_with(int(sys.argv[2]))
    confinement.new_process_namespace()
    # the first process of a namespace gets only the signals that it handles
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        try:
            answer, files = _work(request, archive, paths)
            body = json.dumps(answer).encode()
            with open(1, "wb", closefd=False) as out:
                out.write(HEADER.pack(len(body), len(files)) + body + files)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}"[:500].encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os._exit(1 if status else 0)


def _read(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        raise EOFError("the request is incomplete")
    return data


def _work(
    request: dict[str, Any], archive: bytes, paths: list[str]
) -> tuple[dict[str, object], bytes]:
    """Run the command; returns its result, and the files after it."""
    limits = request["limits"]
    confinement.die_with(0)  # the parent is outside of this PID namespace, so its id is 0
    os.mkdir(WORKSPACE)
    os.mkdir(PROGRAMS)
    for name in ("python", "python3"):
        os.symlink(request["python"], f"{PROGRAMS}/{name}")
    os.chdir(WORKSPACE)
    most = limits["files_mb"] * 2**20
    confinement.limit(
        memory=limits["memory_mb"] * 2**20,
        open_files=limits["open_files"],
        cpu_s=limits["cpu_s"],
        threads=limits["processes"],
        file_bytes=most,
    )
    confinement.lock_shell(paths, "/tmp")
    os.write(1, READY)
    if archive:
        options: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # from 3.11.4 on
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(WORKSPACE, **options)
    try:
        _write(request["files"])
        answer = _run(request["command"], limits)
    except OSError as error:  # of a requested file
        answer = {"status": "ok", "exit_status": 1, "output": str(error)}
    files = _pack(most)
    if files is None:
        return answer | {"status": "files"}, b""
    return answer, files


def _write(files: dict[str, str]) -> None:
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)


def _run(command: str, limits: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile(dir="/tmp") as output:
        process = subprocess.Popen(
            [_SHELL, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": f"{PROGRAMS}:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8"}
            | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/tmp"},
            start_new_session=True,
        )
        status = _wait(process.pid, time.monotonic() + limits["wall_s"])
        _end_others()
        return {
            "status": "ok" if status is not None else "timeout",
            "exit_status": TIMEOUT_STATUS if status is None else status,
            "output": _shown(output.fileno(), limits["output_bytes"]),
        }


def _wait(shell: int, deadline: float) -> int | None:
    """Exit status as in a shell; None at the deadline. Reaps orphaned processes."""
    pause = 0.001
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == shell:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not pid:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
    return None


def _end_others() -> None:
    """Kill all processes except this one, the first of its namespace, and wait until they are
    gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _shown(file: int, most: int) -> str:
    """A file's text, shortened in the middle to `most` bytes."""
    size = os.fstat(file).st_size
    if size <= most:
        return os.pread(file, most, 0).decode("utf-8", "replace")
    first = os.pread(file, most // 2, 0)
    last = os.pread(file, most // 2, size - most // 2)
    left_out = f"\n... {size - len(first) - len(last)} bytes left out ...\n"
    return first.decode("utf-8", "replace") + left_out + last.decode("utf-8", "replace")


def _pack(most: int) -> bytes | None:
    """Archive the workspace; None if its files exceed `most` bytes or are nested too deeply.
    Unreadable files, pipes and the like are skipped."""
    packed = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder, folders, names in os.walk("."):
            if folder.count("/") >= MAX_DEPTH or len(os.fsencode(folder)) > MAX_PATH:
                return None
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    info = tar.gettarinfo(path)
                    if info.islnk():  # a hard link becomes a second file
                        info.type = tarfile.REGTYPE
                        info.linkname = ""
                        info.size = os.lstat(path).st_size
                    total += 512 + info.size
                    if total > most:
                        return None
                    if info.isreg():
                        with open(path, "rb") as file:
                            tar.addfile(info, file)
                    elif info.isdir() or info.issym():
                        tar.addfile(info)
    return packed.getvalue()

"""What a run needs of the process, the user and the machine around it. Checked before everything
else, because without it megatron-core, gloo and others fail with a traceback that names something
else."""

from __future__ import annotations

import locale
import os
import resource
import socket
import sys
from collections.abc import Iterator

from slime_like.errors import RunError

MIN_FILES = 256
_LOOPBACK = "127.0.0.1"


def missing_surroundings() -> list[str]:
    """One message for each thing that is missing. Raises the limit of open files, as far as the
    user may, where it is too low."""
    return list(_missing())


def require_surroundings() -> None:
    """Raise RunError with all that is missing."""
    if missing := missing_surroundings():
        raise RunError("slime_like cannot run here:\n  - " + "\n  - ".join(missing))


def _missing() -> Iterator[str]:
    if sys.flags.optimize:
        yield (
            "python -O (PYTHONOPTIMIZE) leaves out assertions of megatron-core that our patches "
            "check; run without it"
        )
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if encoding.upper().replace("-", "") != "UTF8":
        yield (
            f"text files are read as {encoding}, and those of packages are UTF-8; set PYTHONUTF8=1 "
            "or LC_ALL=C.UTF-8"
        )
    if (files := _open_files()) < MIN_FILES:
        yield f"this user may open {files} files, at least {MIN_FILES} are needed; raise ulimit -n"
    if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
        yield "/proc is not mounted; processes are watched through it"
    if os.environ.get("MASTER_ADDR", _LOOPBACK) in (_LOOPBACK, "localhost") and not _has_loopback():
        yield f"the loopback interface is down ({_LOOPBACK}); bring it up: ip link set lo up"


def _open_files() -> int:
    """The limit of open files, raised to `MIN_FILES` if the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MIN_FILES
    if soft < MIN_FILES and (hard == resource.RLIM_INFINITY or hard > soft):
        soft = MIN_FILES if hard == resource.RLIM_INFINITY else min(MIN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _has_loopback() -> bool:
    """Whether this process can connect to itself."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError:
        return False
    return True

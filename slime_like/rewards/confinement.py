"""Confine a process in several layers; every grader of model output runs under it.

- Namespaces: users, network, System V memory and host name of its own, and a root folder in which
  only the Python installation exists. If this user may create them.
- Landlock (Linux 5.13): the same files, read-only; from Linux 6.7 no TCP, from 6.12 no signal and
  no abstract socket outside.
- A seccomp filter with an allow-list (`seccomp.py`): no sockets, no exec, no signal to another
  process, no open for writing, no new attribute of any file or process.
- No capabilities, no new privileges, no core dumps, resource limits.

A layer that this host lacks is omitted; `unenforced` says what that means. Standard library only,
because a program's sandbox (`sandbox_child.py`) has nothing else. `DISABLE` names layers to omit,
for tests."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping

from slime_like.rewards import seccomp as seccomp_filter

DISABLE = "SLIME_LIKE_SANDBOX_WITHOUT"  # environment variable: comma-separated layers to disable
LAYERS = {
    "namespaces": "names and sizes of files outside the Python installation are visible, and "
    "System V memory is shared",
    "landlock": "the list of readable files rests on namespaces alone",
    "landlock_scopes": "signals and abstract sockets rest on the seccomp filter alone",
    "seccomp": "system calls are not filtered: signals, sockets and processes are possible",
}

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # USER NET IPC UTS NS
_SYSCALLS = {
    "x86_64": {"capset": 126, "pivot_root": 155, "seccomp": 317},
    "aarch64": {"capset": 91, "pivot_root": 41, "seccomp": 277},
}
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_IN_WORKSPACE = 0x75BF  # all rights except creating devices and sockets, and ioctl on devices
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # file rights per Landlock ABI; later 16
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS = 38
_NO_ROOT = 3  # SECBIT_NOROOT and its lock: programs started as root get no capabilities
_NEW_PID = 0x20000000
_NEW_USER = 0x10000000
_NEW_MOUNTS = 0x00020000
_NOBODY = 65534
_SYSTEM = [
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
]
_missing: dict[str, str] | None = None  # result of `missing`
_PROBE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.rewards import confinement as c; "
    "c.own_namespaces(c.readable_paths(packages=False))"
)


def package_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def disabled() -> set[str]:
    """Layers that a test disables."""
    return set(filter(None, os.environ.get(DISABLE, "").split(",")))


def missing() -> dict[str, str]:
    """Layers that this host does not support, with reasons. Evaluated once per process."""
    global _missing
    if _missing is None:
        _missing = _find_missing()
    return _missing


def assume(missing: dict[str, str]) -> None:
    """Adopt the result of `missing` from another process of this host."""
    global _missing
    _missing = missing


def _find_missing() -> dict[str, str]:
    out = dict.fromkeys(disabled() & LAYERS.keys(), f"left out by {DISABLE}")
    if sys.platform != "linux" or platform.machine() not in seccomp_filter.ARCHITECTURES:
        here = f"{sys.platform} on {platform.machine()}"
        return dict.fromkeys(LAYERS, f"needs Linux on x86_64 or aarch64, this is {here}")
    if "landlock" not in out and (abi := landlock_abi()) < 6:
        if abi < 1:
            out["landlock"] = "this kernel has no Landlock (Linux 5.13, among its security modules)"
        out["landlock_scopes"] = f"needs Landlock ABI 6 (Linux 6.12), this kernel has {max(abi, 0)}"
    if "landlock" in out:
        out.setdefault("landlock_scopes", "needs Landlock")
    action = struct.pack("I", 0x00050000)  # SECCOMP_RET_ERRNO
    if _LIBC.syscall(_SYSCALLS[platform.machine()]["seccomp"], 2, 0, action) != 0:
        out.setdefault("seccomp", f"the kernel refuses it: {os.strerror(ctypes.get_errno())}")
    if "namespaces" not in out:
        probe = [sys.executable, "-I", "-S", "-c", _PROBE, package_root()]
        done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["?"])[-1]
            out["namespaces"] = f"this user may not create them here: {reason[-200:]}"
    return out


def unenforced() -> list[str]:
    """One message for each layer that is missing on this host."""
    return [f"{name} ({why}): {LAYERS[name]}" for name, why in missing().items()]


def refusal() -> str | None:
    """Reason why model output must not be executed on this host, or None. Requires seccomp and at
    least one of the file-system layers."""
    out = missing()
    lacking = ["seccomp"] if "seccomp" in out else []
    if "landlock" in out and "namespaces" in out:
        lacking += ["landlock", "namespaces"]
    if not lacking:
        return None
    reasons = "; ".join(f"{name}: {out[name]}" for name in lacking)
    return f"the sandbox cannot be set up here: {reasons}"


def landlock_abi() -> int:
    return int(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Entering a namespace resets this."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def readable_paths(packages: bool) -> list[str]:
    """Paths that confined code may read: system libraries, the standard library, and optionally
    installed packages."""
    import sysconfig

    paths = [*_SYSTEM, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    paths.append(os.path.join(sys.base_exec_prefix, "lib"))
    if packages:
        paths += [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
        paths.append(os.path.join(package_root(), "slime_like"))
    return outermost([*paths, *map(os.path.realpath, paths)])


def outermost(paths: Iterable[str]) -> list[str]:
    """The existing paths, without those inside another one."""
    existing = set(filter(os.path.exists, paths))

    def is_inside(path: str) -> bool:
        return any(_holds(folder, path) for folder in existing)

    return sorted(path for path in existing if not is_inside(path))


def _holds(folder: str, path: str) -> bool:
    """Whether `path` is in `folder` without passing through a symbolic link there."""
    inside = path.startswith(folder + "/")
    return inside and os.path.realpath(path) == os.path.realpath(folder) + path[len(folder) :]


def own_namespaces(paths: Iterable[str]) -> None:
    """Enter new user, network, IPC, UTS and mount namespaces; only `paths` are mounted, read-only.

    Must be called before starting threads. Raises OSError if this user may not do it.
    """
    user = os.geteuid()
    group = os.getegid()
    if user == 0:  # process limits do not apply to the real root user
        os.setresuid(_NOBODY, 0, 0)
    _call("unshare", _NAMESPACES)
    _map_ids(user, group)
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    # open them now: some may be in /tmp, and mounts of another namespace cannot be bound
    kept = [(p, os.open(p, os.O_PATH | os.O_CLOEXEC)) for p in paths]
    _mount(b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV)
    os.mkdir("/tmp/tmp")
    # libraries want to write during import; `lock` forbids it
    _mount(b"tmpfs", b"/tmp/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=64m")
    for path, file_descriptor in kept:
        _bind(path, file_descriptor)
    _mount(b"tmpfs", b"/tmp", None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/tmp")
    if _LIBC.syscall(_SYSCALLS[platform.machine()]["pivot_root"], b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _map_ids(user: int, group: int) -> None:
    """Give this process the ids in its new user namespace that it has outside."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def own_episode(everyone: str, folder: str) -> None:
    """Enter new user and mount namespaces, in which `folder` is all that is in the folder
    `everyone`, and a new PID namespace for the next child. Everything else stays as it is. Raises
    OSError if this user may not do it.

    A process in another user namespace can be inspected by its owner alone: not its memory, and not
    the environment in /proc, which may still be that of the host.
    """
    user = os.geteuid()
    group = os.getegid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PID)
    _map_ids(user, group)
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    own = os.open(folder, os.O_PATH | os.O_CLOEXEC)  # before it is hidden
    _mount(b"tmpfs", everyone.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=700")
    os.mkdir(folder)
    _mount(f"/proc/self/fd/{own}".encode(), folder.encode(), None, _MS_BIND | _MS_REC)
    os.close(own)


def keep_no_capability() -> None:
    """Drop the capabilities of this process in its user namespace, also for programs that it starts
    as root: with them it could undo its mounts. Raises OSError."""
    _prctl(_PR_SET_SECUREBITS, _NO_ROOT)
    _drop_capabilities()


def _bind(path: str, file_descriptor: int) -> None:
    target = "/tmp" + path
    source = f"/proc/self/fd/{file_descriptor}"  # `path` itself may be hidden by the new /tmp
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source.encode(), target.encode(), None, _MS_BIND | _MS_REC)
    flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID
    # a user namespace cannot clear the existing flags of a mount
    for extra in (0, _MS_NODEV, _MS_NODEV | 8, _MS_NODEV | 1024, _MS_NODEV | 8 | 1024):
        if _LIBC.mount(None, target.encode(), None, ctypes.c_ulong(flags | extra), None) == 0:
            break
    os.close(file_descriptor)


def lock(paths: Iterable[str], *, seccomp: bool = True) -> None:
    """Irrevocably apply Landlock over `paths`, drop capabilities, and install the seccomp filter.
    Raises OSError.

    Args:
        seccomp: Install the filter. Without it, model output must only run in children after
            `lock_child`.
    """
    out = missing()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if "landlock" not in out:
        _landlock(dict.fromkeys(paths, _READ_FILE | _READ_DIR), scopes="landlock_scopes" not in out)
    _drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)
    if seccomp and "seccomp" not in out:
        seccomp_filter.install(fork=False)


def lock_shell(paths: Iterable[str], workspace: str) -> None:
    """Like `lock`, for a shell and the programs that it starts: those in `paths` may be executed,
    and files below `workspace` may be written. Requires new namespaces, including a PID namespace.
    Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECUREBITS, _NO_ROOT)
    if "landlock" not in (out := missing()):
        rights = {path: _EXECUTE | _READ_FILE | _READ_DIR for path in paths}
        rights |= {workspace: _IN_WORKSPACE, "/dev/null": _READ_FILE | _WRITE_FILE}
        _landlock(rights, scopes="landlock_scopes" not in out)
    _drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seccomp_filter.install(fork=True, shell=True)


def new_process_namespace() -> None:
    """Create a PID namespace for the next child and its descendants, which all end with that child.
    Raises OSError."""
    _call("unshare", _NEW_PID)


def lock_child() -> None:
    """In a child of a locked process: install the filter that forbids new processes. Raises
    OSError."""
    if "seccomp" not in missing():
        seccomp_filter.install(fork=False)


def limit(
    *,
    memory: int,
    open_files: int | None = None,
    cpu_s: int | None = None,
    threads: int = 64,
    file_bytes: int = 0,
) -> None:
    """Set resource limits of this process. Threads are counted per user, so the user must be alone
    in a user namespace.

    Args:
        memory: Address space in bytes.
        open_files: File descriptors; None: unchanged.
        cpu_s: CPU time in seconds; None: unlimited.
        threads: Of this sandbox.
        file_bytes: Maximum size of a written file.
    """
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        limits |= {resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_MEMLOCK: 0}
        if "namespaces" not in missing():
            limits[resource.RLIMIT_NPROC] = threads
    for name, value in limits.items():
        if value is not None:
            resource.setrlimit(name, (value, value))


def _landlock(rights: Mapping[str, int], *, scopes: bool) -> None:
    """Apply Landlock. rights: by path; rights that apply only to folders are dropped for files."""
    abi = landlock_abi()
    attributes = [(1 << _FILE_RIGHTS.get(abi, 16)) - 1]
    if abi >= 4:
        attributes.append(3)  # TCP bind and connect
    if scopes:
        attributes.append(3)  # abstract sockets, signals
    packed = struct.pack(f"{len(attributes)}Q", *attributes)
    rules = _LIBC.syscall(_LANDLOCK_CREATE, packed, ctypes.c_size_t(len(packed)), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, allowed in rights.items():
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        legal = attributes[0] if os.path.isdir(path) else _EXECUTE | _WRITE_FILE | _READ_FILE
        rule = struct.pack("=Qi", allowed & legal, file)
        if _LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(file)
    if _LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this thread
    if _LIBC.syscall(_SYSCALLS[platform.machine()]["capset"], header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None
) -> None:
    _call("mount", source, target, kind, ctypes.c_ulong(flags), options)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), zero, zero, zero)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, f"{name}: {os.strerror(number)}")

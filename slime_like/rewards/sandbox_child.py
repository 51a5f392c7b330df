"""The inside of `sandbox.py`: a script of the standard library alone that takes all its rights away and then runs what it is sent.

Every step that fails ends the process before the program starts, with the reason on standard error.
"""

import ctypes
import errno
import io
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x40000000, 0x00010000

# --- Landlock: linux/landlock.h ---
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many bits of file rights a kernel knows
_READABLE = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
)

# --- seccomp: linux/seccomp.h, linux/filter.h. Numbers of system calls by machine ---
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "x86_64": dict(
        socket=41, connect=42, accept=43, sendto=44, sendmsg=46, bind=49, listen=50, socketpair=53, fork=57, vfork=58, execve=59, kill=62,
        ptrace=101, syslog=103, chroot=161, mount=165, umount2=166, swapon=167, reboot=169, init_module=175, add_key=248, request_key=249,
        keyctl=250, unshare=272, perf_event_open=298, accept4=288, fanotify_init=300, open_by_handle_at=304, setns=308,
        process_vm_readv=310, process_vm_writev=311, finit_module=313, memfd_create=319, kexec_file_load=320, bpf=321, execveat=322,
        userfaultfd=323, pivot_root=155, tkill=200, tgkill=234, rt_sigqueueinfo=129, rt_tgsigqueueinfo=297, io_uring_setup=425,
        pidfd_send_signal=424, pidfd_open=434, pidfd_getfd=438, mq_open=240, setrlimit=160, shmget=29, msgget=68, semget=64, setpriority=141,
    ),
    "aarch64": dict(
        socket=198, connect=203, accept=202, sendto=206, sendmsg=211, bind=200, listen=201, socketpair=199, execve=221, kill=129,
        ptrace=117, syslog=116, chroot=51, mount=40, umount2=39, swapon=224, reboot=142, init_module=105, add_key=217, request_key=218,
        keyctl=219, unshare=97, perf_event_open=241, accept4=242, fanotify_init=262, open_by_handle_at=265, setns=268,
        process_vm_readv=270, process_vm_writev=271, finit_module=273, memfd_create=279, kexec_file_load=294, bpf=280, execveat=281,
        userfaultfd=282, pivot_root=41, tkill=130, tgkill=131, rt_sigqueueinfo=138, rt_tgsigqueueinfo=240, io_uring_setup=425,
        pidfd_send_signal=424, pidfd_open=434, pidfd_getfd=438, mq_open=180, setrlimit=164, shmget=194, msgget=186, semget=190, setpriority=140,
    ),
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE3 = 435  # its flags are in memory, where a filter cannot look: glibc takes clone instead
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    _own_stdin(request["stdin"])
    _die_with(request["parent"])
    _leave_the_network()
    _limit(request["limits"])
    _forbid_files()
    _forbid_system_calls()
    sys.stderr.buffer.write(b"\0")  # the deadline counts from here
    sys.stderr.buffer.flush()
    _run(request["program"], request["check"], request["proof"])


def _own_stdin(text: str) -> None:
    """As a file in memory, so that every way to read standard input works."""
    file = os.memfd_create("stdin")
    os.write(file, text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave_the_network() -> None:
    """Into an empty network, and among other users, whose root has no rights outside; where that is allowed. The filter of system calls
    refuses sockets in any case."""
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        _LIBC.unshare(_CLONE_NEWNET)


def _limit(limits: dict[str, int]) -> None:
    memory = limits["memory_mb"] * 2**20
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def _forbid_files() -> None:
    """Nothing can be written, executed or read, but for what the interpreter itself may import."""
    abi = _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        _give_up(
            "this kernel has no Landlock (it needs Linux 5.13, with landlock among its security modules)"
        )
    handled = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    rules = _checked(
        "landlock_create_ruleset",
        _LIBC.syscall(_LANDLOCK_CREATE, struct.pack("Q", handled), ctypes.c_size_t(8), 0),
    )
    for path in {*_READABLE, *_installation()}:
        if not os.path.exists(path):
            continue
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _checked(
            f"landlock_add_rule {path}",
            _LIBC.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, file), 0),
        )
        os.close(file)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _checked("landlock_restrict_self", _LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def _installation() -> list[str]:
    """Folders of the standard library, without those of a user or of a virtual environment."""
    import sysconfig

    return [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.join(sys.base_exec_prefix, "lib"),
    ]


def _forbid_system_calls() -> None:
    machine = platform.machine()
    refuse = _ERRNO | errno.EPERM
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # numbers of the x32 convention
        program += [(0x35, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in _REFUSED[machine].values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    # clone makes threads, and nothing else
    program += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refuse),
    ]
    # limits are read (the third argument is null), not set
    program += [
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 5, _PRLIMIT[machine]),
        (_LOAD, 0, 0, 32),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, 36),
    ]
    program += [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, refuse)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    )
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _prctl(option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(int(v)) for v in (*values, 0, 0, 0, 0)][:4]
    _checked(f"prctl {option}", _LIBC.prctl(option, *arguments))


def _checked(name: str, result: int) -> int:
    if result < 0:
        _give_up(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _give_up(reason: str) -> NoReturn:
    sys.stderr.write(f"sandbox: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _run(program: str, check: str | None, proof: str) -> None:
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(program, "program.py", "exec"), names)
    if check is not None:
        exec(compile(check, "check.py", "exec"), names)
        sys.stdout.flush()
        os.write(1, proof.encode())


main()

"""Seccomp filter for confined code: an allow-list of system calls as a classic BPF program.

All other calls fail with EPERM. Some calls are allowed for some arguments only; a filter cannot
follow pointers, so `clone3` fails with ENOSYS (the C library falls back to `clone`) and `openat2`
is not allowed. Sources: linux/seccomp.h, linux/filter.h, asm/unistd_64.h, asm-generic/unistd.h.
Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

Numbers = tuple[int | None, int | None]  # on x86_64 and on aarch64; None: no such call there


def _syscalls(table: str) -> dict[str, Numbers]:
    """Parse "name x86_64 aarch64, ...", with "-" where an architecture lacks the call."""

    def number(text: str) -> int | None:
        return None if text == "-" else int(text)

    rows = (row.split() for row in table.split(","))
    return {name: (number(x86_64), number(aarch64)) for name, x86_64, aarch64 in rows}


_ALLOWED = _syscalls(
    """
    read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62,
    mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65,
    writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
    msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -,
    nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, exit 60 93,
    uname 63 160, getcwd 79 17, readlink 89 -, gettimeofday 96 169, getrlimit 97 163,
    getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
    geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
    getresuid 118 148, getresgid 120 150, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    rt_sigsuspend 130 133, sigaltstack 131 132, arch_prctl 158 -, gettid 186 178, time 201 -,
    futex 202 98, sched_getaffinity 204 123, getdents64 217 61, set_tid_address 218 96,
    restart_syscall 219 128, fadvise64 221 223, clock_gettime 228 113, clock_getres 229 114,
    clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21,
    newfstatat 262 79, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73,
    set_robust_list 273 99, epoll_pwait 281 22, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
    getcpu 309 168, getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293,
    close_range 436 436, faccessat2 439 439
    """
)
_WAITING = _syscalls("wait4 61 260, waitid 247 95")  # for a process that may fork
# for a shell in a PID namespace, and for its programs
_SHELL = _syscalls(
    """
    open 2 -, creat 85 -, openat 257 56, execve 59 221, execveat 322 281, fork 57 -, vfork 58 -,
    kill 62 129, tgkill 234 131, setpgid 109 154, getpgid 121 155, getsid 124 156, setsid 112 157,
    umask 95 166, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -,
    unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37,
    symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52, fchmodat 268 53, truncate 76 45,
    ftruncate 77 46, fallocate 285 47, utimensat 280 88, fsync 74 82, fdatasync 75 83, flock 73 32,
    sendfile 40 71, copy_file_range 326 285, statfs 137 43, fstatfs 138 44, getpriority 140 141,
    getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
    flistxattr 196 13
    """
)
_CONDITIONAL = _syscalls(
    """
    ioctl 16 29, clone 56 220, kill 62 129, fcntl 72 25, prctl 157 167, tgkill 234 131,
    openat 257 56, prlimit64 302 261, clone3 435 435, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7
    """
)

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO
_F_SETFL = 4
_O_ASYNC = 0o20000
_FCNTLS = (0, 1, 2, 3, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_DUPFD_CLOEXEC
_OF_CHILDREN = (1, 22)  # PR_SET_PDEATHSIG, and PR_SET_SECCOMP for the filter of a forked child
_PRCTLS = (3, 15, 16, 0x53564D41)  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
# O_WRONLY O_RDWR O_CREAT O_TRUNC O_APPEND O_ASYNC, and O_TMPFILE without O_DIRECTORY
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | _O_ASYNC | 0o20000000
_CLONE_THREAD = 0x00010000
_OF_THREADS = 0x007D0F00  # flags that the C library uses for threads
_OF_FORKS = 0x01200011  # CHILD_SETTID, CHILD_CLEARTID, SIGCHLD
_OF_SPAWNS = 0x00004100  # VFORK, VM

_LOAD = 0x20
_EQUAL = 0x15
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_REFUSE = _ERRNO | errno.EPERM
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k


def install(*, fork: bool, shell: bool = False) -> None:
    """Install a filter for this thread and its children. PR_SET_NO_NEW_PRIVS must be set. Raises
    OSError.

    Args:
        fork: Processes may be forked and waited for; a second filter revokes this for a child.
        shell: Programs may also be started, and files written where Landlock and mounts allow it;
            requires a PID namespace, since signals may be sent to any process.
    """
    program = _program(fork=fork, shell=shell)
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_ulong(_MODE_FILTER)
    pointer = ctypes.create_string_buffer(header)
    if libc.prctl(_PR_SET_SECCOMP, mode, pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter")


def _program(*, fork: bool, shell: bool = False) -> list[Instruction]:
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    allowed = {**_ALLOWED, **(_WAITING if fork else {}), **(_SHELL if shell else {})}
    for numbers in allowed.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, body in _bodies(fork, shell).items():
        number = _CONDITIONAL[name][column]
        assert number is not None, name
        program += [(_EQUAL, 0, len(body), number), *body]
    return [*program, (_RETURN, 0, 0, _REFUSE)]


def _bodies(fork: bool, shell: bool) -> dict[str, list[Instruction]]:
    """Filters of calls that depend on arguments; every path through a body returns."""
    own_pid = os.getpid()
    setfl = _one_of(1, (_F_SETFL,), then=_without_bits(2, _O_ASYNC), other=_one_of(1, _FCNTLS))
    threads = _without_bits(0, ~_OF_THREADS & 0xFFFFFFFF)
    flags = _OF_FORKS | (_OF_SPAWNS if shell else 0)
    forks = _without_bits(0, ~flags & 0xFFFFFFFF) if fork else [(_RETURN, 0, 0, _REFUSE)]
    # programs that copy ACLs expect this error from a file system without them
    unsupported: list[Instruction] = [(_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP)]
    clone = [(_LOAD, 0, 0, _low(0)), (_ANY_BIT, 0, len(threads), _CLONE_THREAD), *threads, *forks]
    limits: list[Instruction] = [  # this process's limits may be read (new limits null)
        (_LOAD, 0, 0, _low(0)), (_EQUAL, 0, 5, 0),
        (_LOAD, 0, 0, _low(2)), (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _low(2) + 4), (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE),
    ]  # fmt: skip
    return {
        "ioctl": _one_of(1, _IOCTLS),
        "clone": clone,
        "kill": _one_of(0, (own_pid,)),
        "fcntl": setfl,
        "prctl": _one_of(0, (*_PRCTLS, *_OF_CHILDREN) if fork else _PRCTLS),
        "tgkill": _one_of(0, (own_pid,)),
        "openat": _without_bits(2, _WRITING),
        "prlimit64": limits,
        "clone3": [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)],
        **(dict.fromkeys(("setxattr", "lsetxattr", "fsetxattr"), unsupported) if shell else {}),
    }


def _low(argument: int) -> int:
    """Offset of an argument's low half (both architectures are little-endian). The kernel ignores
    the upper half of an int."""
    return 16 + 8 * argument


def _one_of(
    argument: int,
    values: tuple[int, ...],
    then: list[Instruction] | None = None,
    other: list[Instruction] | None = None,
) -> list[Instruction]:
    then = then or [(_RETURN, 0, 0, _ALLOW)]
    other = other or [(_RETURN, 0, 0, _REFUSE)]
    tests: list[Instruction] = [
        (_EQUAL, len(values) - 1 - i, 0 if i < len(values) - 1 else len(then), value)
        for i, value in enumerate(values)
    ]
    return [(_LOAD, 0, 0, _low(argument)), *tests, *then, *other]


def _without_bits(argument: int, bits: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _low(argument)),
        (_ANY_BIT, 0, 1, bits),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]

# mypy: disable-error-code="name-defined"
"""What a hostile program tries, as a script: prints a line of JSON, ``{attempt: outcome}``.

Runs in a sandbox, where every outcome has to be "refused", and outside, where it shows that the
attempt is a real one. Everything is harmless: signals 0, broken arguments that reach the kernel's
own checks, and files below FOLDER. The names OUTSIDE (whether), VICTIM (a process), FOLDER, PORT
and SHM (System V segment) are set in front of this text."""

# ruff: noqa: F821, SIM115, RUF059
import ctypes
import errno
import json
import os
import platform
import signal
import socket
import subprocess

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
OUT = {}
PID = os.getpid()


def call(x86, arm, *arguments):
    """A system call by number; returns the error, or 0."""
    number = x86 if X86 else arm
    if number is None or (OUTSIDE and number == 58):  # vfork would run on in this stack
        return errno.EPERM
    ctypes.set_errno(0)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    words += [ctypes.c_long(0)] * (6 - len(words))
    return ctypes.get_errno() if LIBC.syscall(ctypes.c_long(number), *words) == -1 else 0


# name: (number on x86_64, on aarch64, arguments)
CALLS = {
    "kill another": (62, 129, VICTIM, 0),
    "stop another": (62, 129, VICTIM, int(signal.SIGCONT)),
    "tkill another": (200, 130, VICTIM, 0),
    "tgkill another": (234, 131, VICTIM, VICTIM, 0),
    "rt_sigqueueinfo": (129, 138, VICTIM, 0, 0),
    "rt_tgsigqueueinfo": (297, 240, VICTIM, VICTIM, 0, 0),
    "pidfd_open": (434, 434, VICTIM, 0),
    "pidfd_send_signal": (424, 424, -1, 0, 0, 0),
    "pidfd_getfd": (438, 438, -1, 0, 0),
    "timer_create": (222, 107, -1, 0, 0),
    "mq_open": (240, 180, 0, 0, 0, 0),
    "fork": (57, 220, *(() if X86 else (99,))),
    "vfork": (58, 220, *(() if X86 else (99,))),
    "clone3": (435, 435, 0, 0),
    "execve": (59, 221, 0, 0, 0),
    "execveat": (322, 281, -1, 0, 0, 0, 0),
    "memfd_create": (319, 279, 0, 0),
    "memfd_secret": (447, 447, 99),
    "unshare": (272, 97, 1),
    "setns": (308, 268, -1, 0),
    "ptrace attach": (101, 117, 99, VICTIM, 0, 0),
    "process_vm_readv": (310, 270, VICTIM, 0, 1, 0, 1, 0),
    "process_vm_writev": (311, 271, VICTIM, 0, 1, 0, 1, 0),
    "process_madvise": (440, 440, -1, 0, 0, 0, 0),
    "kcmp": (312, 272, VICTIM, VICTIM, 99, 0, 0),
    "move_pages": (279, 239, VICTIM, 1, 0, 0, 0, 0),
    "migrate_pages": (256, 238, VICTIM, 0, 0, 0),
    "sched_setaffinity": (203, 122, VICTIM, 8, 0),
    "sched_setscheduler": (144, 119, VICTIM, 5, 0),
    "sched_setattr": (314, 274, VICTIM, 0, 0),
    "ioprio_set": (251, 30, 1, VICTIM, 0xFFFF),
    "setpriority": (141, 140, 99, VICTIM, 0),
    "prlimit another": (302, 261, VICTIM, 99, 0, 0),
    "setrlimit": (160, 164, 99, 0),
    "shmget": (29, 194, 0x1234, 0, 0),
    "shmat": (30, 196, -1, 0, 0),
    "shmctl": (31, 195, SHM, 2, 0),
    "semget": (64, 190, 0x1234, 0, 0),
    "semop": (65, 193, -1, 0, 0),
    "msgget": (68, 186, 0x1234, 0),
    "msgsnd": (69, 189, -1, 0, 0, 0),
    "inotify_init1": (294, 26, 0),
    "fanotify_init": (300, 262, 0xFFFFFF, 0),
    "io_uring_setup": (425, 425, 0, 0),
    "io_uring_enter": (426, 426, -1, 0, 0, 0),
    "bpf": (321, 280, 99, 0, 0),
    "userfaultfd": (323, 282, 1 << 20),
    "perf_event_open": (298, 241, 0, 0, 0, 0, 0),
    "keyctl": (250, 219, 99, 0, 0),
    "add_key": (248, 217, 0, 0, 0, 0, 0),
    "request_key": (249, 218, 0, 0, 0, 0),
    "mount": (165, 40, 0, 0, 0, 0, 0),
    "umount2": (166, 39, 0, 0xFF00),
    "pivot_root": (155, 41, 0, 0),
    "open_tree": (428, 428, -1, 0, 0),
    "move_mount": (429, 429, -1, 0, -1, 0, 0xFFFF),
    "fsopen": (430, 430, 0, 0),
    "mount_setattr": (442, 442, -1, 0, 0, 0, 0),
    "chroot": (161, 51, 0),
    "chdir": (80, 49, 0),
    "openat2": (437, 437, -1, 0, 0, 0),
    "open_by_handle_at": (304, 265, -1, 0, 0),
    "name_to_handle_at": (303, 264, -1, 0, 0, 0, 0),
    "setuid": (105, 146, -1),
    "setgid": (106, 144, -1),
    "setresuid": (117, 147, -1, -1, -1),
    "setgroups": (116, 159, -1, 0),
    "capset": (126, 91, 0, 0),
    "setsid": (112, 157),
    "setpgid": (109, 154, VICTIM, -1),
    "prctl that is dangerous": (157, 167, 22, 0, 0),  # PR_SET_SECCOMP
    "prctl of the parent's death": (157, 167, 1, 99),
    "prctl no dumps": (157, 167, 4, 99),
    "personality": (135, 92, -1),
    "syslog": (103, 116, 99, 0, 0),
    "init_module": (175, 105, 0, 0, 0),
    "finit_module": (313, 273, -1, 0, 0xFF),
    "delete_module": (176, 106, 0, 0),
    "kexec_load": (246, 104, 0, 99, 0, 0),
    "reboot": (169, 142, 0, 0, 0, 0),
    "swapon": (167, 224, 0, 0),
    "acct": (163, 89, 1),
    "quotactl": (179, 60, -1, 0, 0, 0),
    "sethostname": (170, 161, 0, -1),
    "settimeofday": (164, 170, 1, 0),
    "clock_settime": (227, 112, 99, 0),
    "adjtimex": (159, 171, 0),
    "ioperm": (173, None, 0xFFFFFF, 0, 0),
    "iopl": (172, None, 99),
    "vmsplice": (278, 75, -1, 0, 0, 0),
    "splice": (275, 76, -1, 0, -1, 0, 0, 0),
    "sendfile": (40, 71, -1, -1, 0, 0),
    "flock": (73, 32, -1, 0),
    "landlock": (444, 444, 0, 0, 99),
    "seccomp": (317, 277, 99, 0, 0),
    "mlockall": (151, 230, 0xFFFF),
    "remap_file_pages": (216, 234, 1, 0, 0, 0, 0),
    "set_mempolicy": (238, 237, 99, 0, 0),
    "bind": (49, 200, -1, 0, 0),
    "connect": (42, 203, -1, 0, 0),
    "sendto": (44, 206, -1, 0, 0, 0, 0, 0),
    "sendmsg": (46, 211, -1, 0, 0),
    "mknodat": (259, 33, -1, 0, 0, 0),
    "fchmodat2": (452, 452, -1, 0, 0, 0),
    "lsetxattr": (189, 6, 0, 0, 0, 0, 0),
    "utimensat": (280, 88, -1, 1, 0, 0),
    "fchown": (93, 55, -1, 0, 0),
    "fallocate": (285, 47, -1, 0, 0, 0),
    "ftruncate": (77, 46, -1, 0),
}


def socket_of(*kind):
    socket.socket(*kind).close()


def fcntl_of(command, value):
    import fcntl

    reader, writer = os.pipe()
    fcntl.fcntl(reader, command, value)


def owner_of_signals():
    """SIGKILL to any process of the user, when a pipe becomes readable."""
    fcntl_of(8, VICTIM)  # F_SETOWN


def nonblocking_signals():
    fcntl_of(4, 0o20000)  # F_SETFL, O_ASYNC


def ioctl_of(request, data=b"\0" * 8):
    import fcntl

    reader, writer = os.pipe()
    fcntl.ioctl(reader, request, data)


def open_path_beneath():
    folder = os.open("/", os.O_PATH)
    os.open(f"proc/{VICTIM}/environ", os.O_RDONLY, dir_fd=folder)


def anonymous_file():
    os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)


def copied_library():
    for name in ("/usr/lib/x", "/lib/x"):
        open(name, "w").close()
        os.unlink(name)


def system_call():
    if os.system("exit 0") != 0:
        raise OSError("refused")


SECRET = FOLDER + "/secret"
STEPS = {
    "read a secret": lambda: open(SECRET).read(),
    "open a secret by O_PATH, then read": lambda: open(
        f"/proc/self/fd/{os.open(SECRET, os.O_PATH)}"
    ).read(),
    "list a folder": lambda: os.listdir(FOLDER),
    "scan a folder": lambda: list(os.scandir(FOLDER)),
    "passwords": lambda: open("/etc/passwd").read(),
    "own environment": lambda: open("/proc/self/environ").read(),
    "environment of another": lambda: open(f"/proc/{VICTIM}/environ").read(),
    "memory of another": lambda: open(f"/proc/{VICTIM}/mem", "rb+").close(),
    "oom score of another": lambda: open(f"/proc/{VICTIM}/oom_score_adj", "w").close(),
    "core pattern": lambda: open("/proc/sys/kernel/core_pattern").read(),
    "list of processes": lambda: os.listdir("/proc"),
    "open beneath a folder": open_path_beneath,
    "write a file": lambda: open(FOLDER + "/new", "w").close(),
    "append to a file": lambda: open(SECRET, "a").close(),
    "truncate a file": lambda: os.truncate(SECRET, 10),
    "write to the installation": copied_library,
    "anonymous file": anonymous_file,
    "shared memory": lambda: open("/dev/shm/slime_like_attempt",
        "w").close() or os.unlink("/dev/shm/slime_like_attempt"),
    "chmod": lambda: os.chmod(SECRET, 0o644),
    "chown": lambda: os.chown(SECRET, os.getuid(), -1),
    "utime": lambda: os.utime(SECRET),
    "setxattr": lambda: os.setxattr(SECRET, "user.x", b"1"),
    "rename": lambda: os.rename(SECRET, SECRET + "2") or os.rename(SECRET + "2", SECRET),
    "hard link": lambda: os.link(SECRET, FOLDER + "/link"),
    "symbolic link": lambda: os.symlink(SECRET, FOLDER + "/soft"),
    "make a folder": lambda: os.mkdir(FOLDER + "/made"),
    "remove a folder": lambda: os.rmdir(FOLDER + "/empty"),
    "remove a file": lambda: os.unlink(FOLDER + "/spare"),
    "fifo": lambda: os.mkfifo(FOLDER + "/fifo"),
    "change folder": lambda: os.chdir(FOLDER),
    "F_SETOWN": owner_of_signals,
    "F_SETOWN_EX": lambda: fcntl_of(15, b"\1\0\0\0" + VICTIM.to_bytes(4, "little")),
    "F_SETSIG": lambda: fcntl_of(10, int(signal.SIGKILL)),
    "O_ASYNC": nonblocking_signals,
    "FIOASYNC": lambda: ioctl_of(0x5452, b"\0\0\0\0"),
    "F_SETPIPE_SZ": lambda: fcntl_of(1031, 4096),
    "F_GETOWN": lambda: fcntl_of(9, 0),
    "TCP": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5).close(),
    "TCP 6": lambda: socket_of(socket.AF_INET6, socket.SOCK_STREAM),
    "UDP": lambda: socket_of(socket.AF_INET, socket.SOCK_DGRAM),
    "raw socket": lambda: socket_of(socket.AF_INET, socket.SOCK_RAW, 1),
    "unix socket": lambda: socket_of(socket.AF_UNIX),
    "abstract socket": lambda: socket.socket(socket.AF_UNIX).bind("\0attempt" + FOLDER),
    "netlink": lambda: socket_of(socket.AF_NETLINK, socket.SOCK_RAW),
    "packet socket": lambda: socket_of(socket.AF_PACKET, socket.SOCK_RAW),
    "socket pair": lambda: socket.socketpair()[0].close(),
    "shell": lambda: subprocess.run(["/bin/true"], check=True),
    "os.system": system_call,
    "popen": lambda: os.popen("true").close(),
    "posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "os.fork": lambda: os.fork() or os._exit(0),
    "double fork with a session": lambda: os.fork() or (os.setsid(), os._exit(0)),
    "nice of another": lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 1),
    "affinity of another": lambda: os.sched_setaffinity(VICTIM, os.sched_getaffinity(0)),
    "SCHED_IDLE for another": lambda: os.sched_setscheduler(VICTIM, os.SCHED_IDLE,
        os.sched_param(0)),
}  # fmt: skip


for name, (x86, arm, *arguments) in CALLS.items():
    error = call(x86, arm, *arguments)
    if os.getpid() != PID:
        os._exit(0)
    refused = error == errno.EPERM or (name == "clone3" and error == errno.ENOSYS)
    OUT[name] = "refused" if refused else "missing" if error == errno.ENOSYS else f"errno {error}"
for name, step in STEPS.items():
    try:
        step()
        OUT[name] = "done"
    except Exception as error:
        OUT[name] = "refused" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
print("\n" + json.dumps(OUT), flush=True)
os._exit(0)

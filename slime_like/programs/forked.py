"""Forks the programs of episodes from one process that has imported their packages: the other end
of `preloaded.py`. Standard library only, since it runs in the Python of the programs.

On the control socket comes one byte per episode, with two descriptors: a socket, and the file that
takes the output. The answers on that socket are the process id of the fork, and later its exit
status, a line each; to the fork go the episode's settings, one line of JSON. This process never
sees those, so that no program finds the key of another one in its memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading

from slime_like.programs import apart


def serve() -> tuple[str, str]:
    """Import the packages, then fork a program for each episode. argv: [-c, folder of the package,
    descriptor of the control socket, JSON of `PythonProgram.words`, modules].

    Returns:
        In the process of a program alone, which is to run it as `__main__`: ``"run_path"`` and the
        script, or ``"run_module"`` and the module.
    """
    package, descriptor, words, *modules = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    program = json.loads(words)
    is_module = program[0] == "-m"
    sys.path[:] = [path for path in sys.path if path not in ("", package)]
    if not is_module:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))
    sys.argv[:] = program[1:] if is_module else program  # as imports of the program find it
    problem = _import(modules, program[1] if is_module else None)
    sys.stdout.flush()  # or every program would print what the imports have printed
    sys.stderr.flush()
    control.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    if problem is not None:
        raise SystemExit(1)
    gc.freeze()  # what is imported is shared by all forks, and not collected again in each
    _fork_programs(control)
    if not (is_module and program[1].startswith("slime_like.")):
        for name in [n for n in sys.modules if n.split(".")[0] == "slime_like"]:
            del sys.modules[name]  # the program may have one of its own
    _reseed()
    return ("run_module" if is_module else "run_path"), sys.argv[0]


def _import(modules: list[str], program: str | None) -> str | None:
    """Import the modules; why that cannot be, or None. program: the module that runs; if it is
    among them, its function `before_fork` is called, should it have one."""
    for name in modules:
        try:
            module = importlib.import_module(name)
            if name == program and hasattr(module, "before_fork"):
                module.before_fork()
        except BaseException as error:
            return f"{name}: {type(error).__name__}: {error}"
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if others:
            return f"{name} starts threads ({', '.join(others)}), which no fork has"
    return None


def _fork_programs(control: socket.socket) -> None:
    """Return in each program, and never otherwise."""
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if wakes in ready:
                wakes.recv(4096)
                _report_ended(children)
            if control not in ready:
                continue
            begins, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not begins:
                os._exit(0)  # the run has ended; the programs end with this process
            episode = socket.socket(fileno=descriptors[0])
            output = descriptors[1]
            pid = os.fork()
            if pid == 0:
                break
            os.close(output)
            children[pid] = episode
            with contextlib.suppress(OSError):
                episode.sendall(f"{pid}\n".encode())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (control, wakes, woken, *children.values()):
        other.close()
    _begin(episode, output)


def _wake(number: int, frame: object) -> None:
    """The number goes to the wakeup descriptor."""


def _report_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if (episode := children.pop(pid, None)) is not None:  # or what an import has started
            with episode, contextlib.suppress(OSError):
                episode.sendall(f"{apart.exit_status(status)}\n".encode())


def _begin(episode: socket.socket, output: int) -> None:
    """Become the program of an episode."""
    with episode, episode.makefile("rb") as lines:
        settings = json.loads(lines.readline() or b"null")
    if settings is None:
        os._exit(0)  # the run has ended meanwhile
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(settings["environment"])
    apart.separate(settings["everyone"], settings["folder"])


def _reseed() -> None:
    """Generators that a fork copies. Python's own does that by itself."""
    for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)()

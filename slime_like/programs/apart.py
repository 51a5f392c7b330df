"""Runs an agent's program apart from those of other episodes: the first process of a run_command.

Where users may create namespaces, the program gets user, process and mount namespaces of its own.
It keeps its user id and its files, but can neither signal nor inspect a process outside, whose
environment holds the keys of other episodes, nor see their folders. In any case whatever it starts
ends with it, also what has left its session and its environment. Standard library only, since it
starts with every episode, and in the Python of `forked.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from slime_like.rewards import confinement, reaper

CANNOT_START = "slime_like: cannot be started: "  # begins the output where there is no program
FAILED = 127


def main() -> None:
    """argv: [-c, folder of the package, `everyone` and `folder` of `separate`, program and
    arguments]."""
    everyone, folder, *command = sys.argv[2:]
    separate(everyone, folder)
    for number in (signal.SIGINT, signal.SIGPIPE):  # as Python found them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _give_up(f"{command[0]}: {error.strerror}")


def separate(everyone: str, folder: str) -> None:
    """Return in a new process, that of the program. The calling process waits for it, ends with its
    exit status, and ends the program when its own parent ends, or at `reaper.END`.

    Args:
        everyone: The folder of all episodes, hidden in the new namespaces; empty: no namespaces.
        folder: That of this one, which becomes the working folder.
    """
    if everyone:
        _enter_namespaces(everyone, folder)
    else:
        reaper.split(with_thread=False)
    if os.getpid() != os.getpgrp():  # a `kill 0` of the program ends nothing around it
        os.setsid()
    os.chdir(folder)


def _enter_namespaces(everyone: str, folder: str) -> None:
    parent = os.getppid()
    try:
        confinement.own_episode(everyone, folder)
    except OSError as error:
        _give_up(f"it cannot be separated from other episodes: {error}")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    first = os.fork()  # of the process namespace: all others end with it
    if first:
        _wait_for(first, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    confinement.die_with(0)  # the parent is outside of this namespace, so its id is 0
    confinement.keep_no_capability()
    program = os.fork()
    if program == 0:
        return
    ended = 0
    status = 0
    while ended != program:  # also reaps what others have left behind
        ended, status = os.waitpid(-1, 0)
    os._exit(exit_status(status))


def _wait_for(first: int, parent: int) -> NoReturn:
    """Wait for the first process of the namespace, which ends with this one, or for the end of the
    parent. (`confinement.die_with` would end it with the thread that has started this process, and
    an episode outlives the thread of its rollout.)"""
    while os.getppid() == parent:
        signal.sigtimedwait({signal.SIGCHLD}, reaper.WATCH_S)
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            os._exit(exit_status(status))
    os._exit(FAILED)


def exit_status(status: int) -> int:
    """As in a shell: 128 and the signal, where one ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _give_up(reason: str) -> None:
    os.write(2, f"{CANNOT_START}{reason}".encode(errors="replace"))
    os._exit(FAILED)

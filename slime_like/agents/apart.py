"""Runs an agent's program apart from those of other episodes: the first process of a run_command.

The program gets user, process and mount namespaces of its own. It keeps its user id and its files,
but can neither signal nor inspect a process outside, whose environment holds the keys of other
episodes, nor see their folders; whatever it starts ends with it, also what has left its session and
its environment. Standard library only, since it starts with every episode.
"""

from __future__ import annotations

import os
import signal
import sys

from slime_like.rewards import confinement

CANNOT_START = "slime_like: cannot be started: "  # begins the output where there is no program
FAILED = 127


def main() -> None:
    """argv: [-c, folder of the package, folder of all episodes, folder of this one, program and
    arguments]."""
    everyone, folder, *command = sys.argv[2:]
    try:
        confinement.own_episode(everyone, folder)
    except OSError as error:
        _give_up(f"it cannot be separated from other episodes: {error}")
    first = os.fork()  # of the process namespace: all others end with it
    if first == 0:
        _first_process(folder, command)
    _, status = os.waitpid(first, 0)
    os._exit(_exit_status(status))


def _first_process(folder: str, command: list[str]) -> None:
    confinement.die_with(0)  # the parent is outside of this namespace, so its id is 0
    confinement.keep_no_capability()
    os.chdir(folder)
    program = os.fork()
    if program == 0:
        for number in (signal.SIGINT, signal.SIGPIPE):  # as Python found them
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            _give_up(f"{command[0]}: {error.strerror}")
    ended = 0
    status = 0
    while ended != program:  # also reaps what others have left behind
        ended, status = os.waitpid(-1, 0)
    os._exit(_exit_status(status))


def _exit_status(status: int) -> int:
    """As in a shell: 128 and the signal, where one ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _give_up(reason: str) -> None:
    os.write(2, f"{CANNOT_START}{reason}".encode(errors="replace"))
    os._exit(FAILED)

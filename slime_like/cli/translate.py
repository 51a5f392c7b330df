"""Print a command line that was written for slime, SkyRL or verl in this project's own flags.

slime-like translate ARGUMENTS prints it, with the settings of its run file; the program before them
(python3 -m verl.trainer.main_ppo) may stay. Keys without a counterpart are listed on stderr, and
the exit status is then 1. Rules between settings are not checked: `slime-like preflight` does.
"""

from __future__ import annotations

import shlex
import sys

from arguments.parse import CONFIG_EXIT_STATUS, complete_shell, translate
from arguments.translate.hydra import NOT_TRANSLATED
from slime_like.config import ConfigError


def main() -> int:
    complete_shell()
    argv = sys.argv[1:]
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__.strip())
        return 0
    try:
        words, notes = translate(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_EXIT_STATUS
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    print(" \\\n".join(map(" ".join, lines)))
    return int(any(note.startswith(NOT_TRANSLATED) for note in notes))


if __name__ == "__main__":
    sys.exit(main())

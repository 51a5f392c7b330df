# PYTHON_ARGCOMPLETE_OK
"""slime-like COMMAND ...: entry point of all programs of the package. `slime-like COMMAND --help`
lists the flags of a command.

On several processes: torchrun --nproc-per-node N --no-python slime-like train ...
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import slime_like
from slime_like.text import did_you_mean


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    # has `main() -> int | None`, which reads sys.argv, and `parser()`, unless it handles shell
    # completion itself
    module: str
    help: str
    added: tuple[str, ...] = ()  # arguments appended to the user's
    runs: bool = False  # it does more than to print, and must survive the reader of its output


COMMANDS: Mapping[str, Command] = {
    "train": Command("train", "train a policy, as python train.py does", runs=True),
    "serve": Command("slime_like.tinker.__main__", "serve the Tinker API", runs=True),
    "reward-server": Command(
        "slime_like.reward_server.__main__",
        "serve a reward model that rm_loss has trained, for --rm-type reward_model",
        runs=True,
    ),
    "preflight": Command(
        "train", "check without a GPU whether a job starts and fits in memory", ("--preflight",)
    ),
    "certify": Command(
        "train",
        "compare trainer, transformers and engine layer by layer, and name what differs",
        ("--certify",),
        runs=True,
    ),
    "translate": Command(
        "slime_like.cli.translate", "print a command line of slime, SkyRL or verl in our own flags"
    ),
    "new": Command("slime_like.cli.new", "create a project: data, reward or tool, settings"),
    "eval-sets": Command(
        "slime_like.cli.eval_sets",
        "list the standard evaluation sets, or check a copy of one",
    ),
    "report": Command(
        "slime_like.report.__main__", "write one HTML page about a run: curves, times, rollouts"
    ),
    "dump": Command("slime_like.cli.dump", "print the stacks of all ranks of a running job"),
    "inspect": Command("slime_like.cli.inspect_checkpoint", "list the checkpoints of a folder"),
    "convert": Command(
        "slime_like.cli.convert", "convert checkpoints from and to the Hugging Face format"
    ),
    "quantize": Command(
        "slime_like.cli.quantize", "make a quantised copy of a Hugging Face folder, for servers"
    ),
    "pull-weights": Command(
        "slime_like.cli.pull_weights",
        "apply weight deltas of a remote trainer (--update-weight-mode delta) on a server node",
    ),
    "doctor": Command("slime_like.doctor", "list installed and missing dependencies"),
}


def parser(prog: str, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Parser of the subcommand's name only."""
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in commands.items()]
    result = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description="\n".join(["commands:", *lines]),
        epilog=f"{prog} COMMAND --help lists the flags of a command",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("command", choices=list(commands), metavar="COMMAND", help="see above")
    return result


def dispatch(prog: str, commands: Mapping[str, Command], argv: list[str]) -> int:
    """Run the subcommand that the first word names, with the others as its arguments; without any,
    print the help. Returns its exit status; raises SystemExit for --help and an unknown command."""
    if "_ARGCOMPLETE" in os.environ:
        return complete(prog, commands)
    if not argv:
        parser(prog, commands).print_help()
        return 2
    if not argv[0].startswith("-") and argv[0] not in commands:
        parser(prog, commands).error(f"{argv[0]}: no such command{did_you_mean(argv[0], commands)}")
    name = parser(prog, commands).parse_args(argv[:1]).command
    command = commands[name]
    if os.getcwd() not in sys.path:  # like python -m: --import-modules finds modules there
        sys.path.append(os.getcwd())
    sys.argv = [f"{prog} {name}", *argv[1:], *command.added]
    program: Callable[[], int | None] = importlib.import_module(command.module).main
    return (program() or 0) if command.runs else until_closed(program)


def until_closed(program: Callable[[], int | None]) -> int:
    """Run the program, which ends in silence when the reader of its output does (`| head`)."""
    try:
        status = program() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # otherwise Python flushes the rest at exit and fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def complete(prog: str, commands: Mapping[str, Command]) -> int:
    """Respond to argcomplete: complete the subcommand's name, or the arguments of the one already
    given."""
    start = int(os.environ["_ARGCOMPLETE"])  # 1-based index of the word with the program
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split()
    own = commands.get(words[start]) if len(words) > start else None
    try:
        import argcomplete
    except ImportError:
        return 0
    if own is None or (len(words) == start + 1 and not line.endswith(" ")):
        argcomplete.autocomplete(parser(prog, commands))
        return 0
    os.environ["_ARGCOMPLETE"] = str(start + 1)
    module = importlib.import_module(own.module)
    if hasattr(module, "parser"):
        argcomplete.autocomplete(module.parser())
        return 0
    sys.argv = sys.argv[:1]
    return module.main() or 0


def main() -> int:
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print(f"slime_like {slime_like.__version__}")
        return 0
    return dispatch("slime-like", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())

"""From a command line to the settings of a run. `get_parser` is what documentation and completion
tools ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from arguments.parser import LauncherParser

__all__ = ["get_parser"]


def get_parser(program: Literal["train", "server"] = "train") -> LauncherParser:
    """The `argparse.ArgumentParser` of train.py, or of the server, with every flag.

    It is the caller's own: flags may be added. Its `parse_args` reads and checks single values; the
    rules between settings, run files and checkpoints are `arguments.parse.parse_args`'s.
    """
    from arguments import parse

    return parse.launcher_parser({"train": parse.TRAIN, "server": parse.SERVER}[program])

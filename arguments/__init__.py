"""Parse a command line into the configuration of a run. `get_parser` is for documentation and
completion tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from arguments.parser import LauncherParser

__all__ = ["get_parser"]


def get_parser(program: Literal["train", "server"] = "train") -> LauncherParser:
    """A new `argparse.ArgumentParser` of train.py or the server, with every flag.

    Callers may add flags. Its `parse_args` reads and checks single values; rules between settings,
    run files and checkpoints are applied by `arguments.parse.parse_args`.
    """
    from arguments import parse

    return parse.launcher_parser({"train": parse.TRAIN, "server": parse.SERVER}[program])

"""Text of --help: all flags, or those that match a word."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from arguments.flag_registry import FlagTable
from arguments.flags import Flag

_WIDTH = 110
TRAIN_USAGE = """\
usage: python train.py --hf-checkpoint FOLDER --prompt-data FILE --lr X --num-rollout N [flags]
       torchrun --nproc-per-node N train.py ...         on several processes"""
SERVER_USAGE = """usage: python -m slime_like.tinker --hf-checkpoint FOLDER [flags]
       torchrun --nproc-per-node N -m slime_like.tinker ...         on several processes"""
_NOTES = """\
Dashes and underscores in flags are interchangeable. --config RUN.YAML reads flags from a file.
--help WORD shows the groups and flags with WORD in their names."""


def default_text(flag: Flag) -> str:
    """The default as shown in --help; empty if there is none."""
    if flag.default_text:
        return flag.default_text
    if flag.kind == "switch" and flag.default is not None:
        return "on" if flag.default else "off"
    return "" if flag.default in (None, {}, []) else str(flag.default)


def help_text(
    table: FlagTable, about: str = "", *, usage: str = TRAIN_USAGE, hidden: Collection[str] = ()
) -> str:
    """Format --help.

    Args:
        about: Part of a group title or flag name; empty: everything.
        hidden: Fields of settings that the program does not have.
    """
    word = about.lstrip("-").replace("_", "-").lower()
    groups: dict[str, list[Flag]] = {}
    for flag in table.flags:
        picked = word in flag.group.lower() or any(
            word in name.lower() for name in (*flag.on, *flag.off)
        )
        if picked and not flag.rejection and flag.dest not in hidden:
            groups.setdefault(flag.group, []).append(flag)
    rejected = table.rejected_like(about) if about else {}
    lines = [f"  {name}: not implemented: {reason}" for name, reason in rejected.items()]
    if not groups:
        if lines:
            return "\n".join([f"no supported group or flag matches {about!r}:", *lines])
        near = table.nearest(about)
        return f"no group or flag matches {about!r}" + (f"; did you mean {near}?" if near else "")
    parts = [usage, _NOTES]
    for title, flags in groups.items():
        parts.append(f"{title}:\n" + "\n".join(_entry(flag) for flag in flags))
    return "\n\n".join(parts)


def _entry(flag: Flag) -> str:
    head = ", ".join(dict.fromkeys((flag.name, *flag.on, *flag.off)))
    if flag.kind != "switch":
        head += " " + (flag.metavar or flag.type_name.upper())
    facts = []
    if flag.choices:
        facts.append(f"legal: {', '.join(map(str, flag.choices))}")
    elif flag.legal:
        facts.append(f"legal: {flag.legal.description}")
    default = default_text(flag)
    facts += [f"default: {default}"] if default else []
    body = flag.help + (f" [{'; '.join(facts)}]" if facts else "")
    return f"  {head}\n" + textwrap.fill(
        body, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )

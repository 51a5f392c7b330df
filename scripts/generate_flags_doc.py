"""Write docs/flags.md from the declarations of the flags: python scripts/generate_flags_doc.py
[--check].

The list depends neither on the machine nor on the release of megatron-core.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from arguments.aliases import ALIASES, IGNORED, NO_EFFECT, NOT_IMPLEMENTED_GROUPS, PRESETS  # noqa: E402
from arguments.flag_registry import FlagTable, flag_table  # noqa: E402
from arguments.flags import Flag  # noqa: E402
from arguments.help import default_text  # noqa: E402
from arguments.megatron import CONFIGS_OF_GROUP, RELEASE_DEPENDENT  # noqa: E402
from arguments.megatron_help import OPTIMIZER  # noqa: E402

TARGET = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Written by `scripts/generate_flags_doc.py`; a test compares. Dashes and underscores are interchangeable, prefixes are not completed,
`--flag=value` and `--flag value` are the same, and the last of several counts. A switch takes no value; `--no-x` takes `--x` back.
`--config run.yaml` reads flags from a file, sections of which may be nested; the command line wins over it. An unknown flag is an
error. `train.py --help WORD` shows what has WORD in its name.
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row(flag: Flag) -> str:
    names = [
        f"`{flag.name}`",
        *(
            f"`{n}`"
            for n in dict.fromkeys((*flag.on, *flag.off))
            if n != flag.name and not redundant(n, flag)
        ),
    ]
    legal = (
        ", ".join(f"`{choice}`" for choice in flag.choices)
        if flag.choices
        else flag.legal.description
        if flag.legal
        else ""
    )
    return (
        "| "
        + " | ".join(
            map(cell, (", ".join(names), flag.type_name, default_text(flag), legal, flag.help))
        )
        + " |"
    )


def redundant(name: str, flag: Flag) -> bool:
    """Whether this is the `--no-x` of a switch that is off by default, which is not listed; the
    head of the page mentions them."""
    return flag.kind == "switch" and flag.default is False and name in flag.off


def render(table: FlagTable) -> str:
    groups: dict[str, list[Flag]] = {}
    refused: dict[str, list[str]] = {}
    for flag in table.flags:
        if flag.rejection and flag.group in CONFIGS_OF_GROUP:
            continue  # these depend on the installed release
        if flag.dest in RELEASE_DEPENDENT:
            continue  # listed below, for all releases alike
        if flag.rejection:
            refused.setdefault(flag.rejection, []).append(flag.name)
        else:
            groups.setdefault(flag.group, []).append(flag)
    parts = [HEAD]
    for title, flags in groups.items():
        rows = "\n".join(row(flag) for flag in flags)
        parts.append(
            f"## {title}\n\n| flag | type | default | legal values | what "
            f"|\n|---|---|---|---|---|\n{rows}\n"
        )
    parts.append(
        "## Other spellings\n\n| typed | means |\n|---|---|\n" + "\n".join(spellings(table)) + "\n"
    )
    of_some = "\n".join(
        f"- `--{name.replace('_', '-')}`: {OPTIMIZER[name]}" for name in sorted(RELEASE_DEPENDENT)
    )
    parts.append(f"Further flags that only some releases of megatron-core have:\n\n{of_some}\n")
    for reason, names in NOT_IMPLEMENTED_GROUPS.items():
        known = ["--" + name.replace("_", "-") for name in names.split()]
        refused.setdefault(reason, []).extend(name for name in known if name not in table.spellings)
    lines = [
        f"- {reason}: {', '.join(f'`{n}`' for n in sorted(set(names)))}"
        for reason, names in sorted(refused.items())
        if names
    ]
    parts.append(
        "## Known and not implemented yet\n\nRefused by name, never ignored. So is every field of "
        f"megatron-core's {', '.join(CONFIGS_OF_GROUP.values())} that is not above, whichever "
        "release is\ninstalled: `train.py --help WORD` shows those with WORD in their names, with "
        "the "
        "reason.\n\n" + "\n".join(lines) + "\n"
    )
    return "\n".join(parts)


def spellings(table: FlagTable) -> list[str]:
    rows = [
        f"| `{typed}` | `{ours}` |"
        for typed, ours in ALIASES.items()
        if ours in table.spellings and not table.spellings[ours].flag.rejection
    ]
    for typed, values in PRESETS.items():
        rows.append(
            f"| `{typed}` | {', '.join(f'{name} = {value}' for name, value in values.items())} |"
        )
    return rows + [
        f"| `{typed}` | nothing: {why} |" for typed, why in {**NO_EFFECT, **IGNORED}.items()
    ]


def main() -> int:
    text = render(flag_table())
    if "--check" in sys.argv[1:]:
        current = TARGET.read_text(encoding="utf-8") if TARGET.is_file() else ""
        if current != text:
            print(
                f"{TARGET.relative_to(ROOT)} is out of date; run python "
                "scripts/generate_flags_doc.py",
                file=sys.stderr,
            )
        return int(current != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

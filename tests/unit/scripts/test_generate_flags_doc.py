"""docs/flags.md says what the program accepts."""

from __future__ import annotations

from arguments.flag_registry import flag_table
from arguments.megatron import CONFIGS_OF_GROUP
from scripts.generate_flags_doc import TARGET, render


def test_docs_are_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(flag_table()), (
        "run python scripts/generate_flags_doc.py"
    )


def test_every_usable_flag_is_in_the_docs() -> None:
    text = render(flag_table())
    missing = [
        flag.name
        for flag in flag_table().flags
        if not (flag.rejection and flag.group in CONFIGS_OF_GROUP) and f"`{flag.name}`" not in text
    ]
    assert not missing


def test_every_flag_says_what_it_does() -> None:
    silent = [flag.name for flag in flag_table().flags if not flag.help and not flag.rejection]
    assert not silent

"""The table of chat templates in docs/internals.md is what scripted dialogues give."""

from __future__ import annotations

import pytest

from tests.agent_templates import FAMILIES
from tests.paths import ROOT
from tests.unit.agents.test_tree import DIALOGUES, Talk

DOCS = ROOT / "docs"


def row_of(name: str) -> str:
    """Over all dialogues: answers, sequences, tokens that were written, tokens with mask 1. Each
    dialogue checks by itself that these are the same ones."""
    answers = sequences = written = trained = 0
    for dialogue in DIALOGUES:
        talk = Talk(name)
        dialogue(talk)
        branches = talk.session.tree.branches()
        answers += len(talk.writer.written)
        sequences += len(branches)
        written += sum(len(output.tokens) for _, output in talk.writer.written)
        trained += sum(sum(branch.loss_mask) for branch in branches)
    read_as = FAMILIES[name].format
    return f"| {name} | {read_as} | {answers} | {sequences} | {written} | {trained} |"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_row_of_a_template(name: str) -> None:
    row = row_of(name)
    *_, written, trained, _ = row.split("|")
    assert written == trained
    assert row in (DOCS / "internals.md").read_text().splitlines(), row

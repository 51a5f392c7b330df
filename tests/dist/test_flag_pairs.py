"""Layout, rows, recompute, head and memory together: a covering set of command lines, in which
every two features that go together occur at least once, trains on two ranks to the loss, gradients
and weights of one process, in float64. What does not go together: tests/unit/arguments/test_flag_pairs.py."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from benchmarks.parity.models import MODELS
from benchmarks.parity.ranks import run_ranks
from tests.dist.float64 import EXACT
from tests.unit.arguments.flag_pairs import APART, SAME_NUMBERS, SAME_NUMBERS_OF_EXPERTS

NONE = "nothing"
FLAGS = SAME_NUMBERS | SAME_NUMBERS_OF_EXPERTS | {NONE: ""}
HEAD = (NONE, "small blocks of the head", "one block of the head")
ROWS = ("micro-batch 2", "padded", "budgets", "budget of log-probs", "micro-batches of log-probs")
RECOMPUTE = (
    NONE,
    "full recompute",
    "recompute by block",
    "recompute attention",
    "recompute norms",
    "recompute networks",
)
REFERENCE = (NONE, "offloaded reference")
DENSE = (
    (NONE, "TP2", "TP2 SP", "PP2", "PP2 VP2", "CP2", "distributed optimizer", "overlap"),
    ROWS, (*RECOMPUTE, "distributed activations"), HEAD, REFERENCE,
)  # fmt: skip
EXPERTS = (
    (NONE, "TP2 SP", "PP2", "CP2", "distributed optimizer", "overlap"),
    (NONE, "EP2", "EP2 ETP1"), (NONE, "allgather"), ROWS[:3], (*RECOMPUTE[:2], RECOMPUTE[3], "recompute experts"), (NONE, "router in fp64"),
)  # fmt: skip


def go_together(names: tuple[str, ...]) -> bool:
    """Not refused, and of the size of two ranks."""
    if any(pair in APART or pair[::-1] in APART for pair in combinations(names, 2)):
        return False
    if "distributed activations" in names:
        return "TP2" in names
    if "EP2 ETP1" in names:
        return "TP2 SP" in names
    return "EP2" not in names or not {"PP2", "TP2 SP"} & set(
        names
    )  # without their own size experts are cut as TP cuts: four ranks


def covering(axes: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    """Greedily chosen rows, until every pair of values that occurs in an allowed row occurs in one
    that is chosen."""
    allowed = {
        names: {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(names), 2)}
        for names in product(*axes)
        if go_together(names)
    }
    missing, chosen = set().union(*allowed.values()), []
    while missing:
        best = max(allowed, key=lambda names: len(allowed[names] & missing))
        missing -= allowed[best]
        chosen.append(best)
    return chosen


def flags_of(names: tuple[str, ...]) -> str:
    return " ".join(FLAGS[name] for name in names if name != NONE)


def test_the_covering_set() -> None:
    """Every feature with the same numbers takes part, and every two that go together."""
    chosen = covering(DENSE)
    assert len(chosen) < 80 and all(map(go_together, chosen))
    for a, b in combinations([name for axis in DENSE for name in axis if name != NONE], 2):
        own = any({a, b} <= set(axis) for axis in DENSE)
        apart = (
            (a, b) in APART
            or (b, a) in APART
            or (b == "distributed activations" and a in DENSE[0] and a != "TP2")
        )
        assert own or apart or any({a, b} <= set(names) for names in chosen), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_features_together_give_the_same_numbers(tmp_path: Path, kind: str) -> None:
    MODELS[kind](tmp_path / kind)
    cases = [(kind, flags_of(names)) for names in covering(DENSE if kind == "dense" else EXPERTS)]
    arguments = {
        "models": {kind: str(tmp_path / kind)},
        "base": str(tmp_path / "base.pt"),
        "cases": cases,
    }
    run_ranks(
        "tests.dist.flag_pairs_worker:one_rank", 1, tmp_path / "one", arguments, timeout_s=120
    )
    for found in run_ranks(
        "tests.dist.flag_pairs_worker:on_ranks", 2, tmp_path / "two", arguments, timeout_s=900
    ):
        assert len(found) == len(set(cases))
        assert not {
            flags: apart
            for flags, apart in found.items()
            if not all(value <= EXACT for value in apart.values())
        }

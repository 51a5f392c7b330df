"""What the benchmarks of packing and balancing compute, at sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_attention, bench_balancing, bench_packing, bench_training_step
from scripts.bench_common import LENGTHS, fastest, write_json
from slime_like.balance import imbalance


def test_karmarkar_karp_gives_equal_counts_and_levels() -> None:
    """What ours is compared with is the real method: on continuous lengths it is nearly perfect, and every item is in one part."""
    costs = LENGTHS["lognormal"](512).astype(np.float64)
    parts = bench_balancing.karmarkar_karp(costs, 8)
    assert sorted(np.concatenate(parts).tolist()) == list(range(512)) and {len(part) for part in parts} == {64}
    loads = np.array([costs[part].sum() for part in parts])
    contiguous = np.array([costs[part].sum() for part in bench_balancing.contiguous(costs, 8)])
    assert imbalance(loads) < 1.001 < imbalance(contiguous)


def test_karmarkar_karp_by_hand() -> None:
    """8, 7, 6, 5, 4, 3 in two: tuples (8, 7), (6, 5), (4, 3) of difference 1 each leave 1, the best there is."""
    parts = bench_balancing.karmarkar_karp(np.array([8.0, 7, 6, 5, 4, 3]), 2)
    assert sorted(float(np.array([8, 7, 6, 5, 4, 3])[part].sum()) for part in parts) == [16, 17]


@pytest.mark.parametrize("method", bench_balancing.METHODS)
def test_every_method_is_measured(method: str) -> None:
    found = bench_balancing.measure(method, LENGTHS["bimodal"](256).astype(np.float64), 4, repeats=1)
    assert 1 <= found["max_over_mean"] < 2 and found["ms"] > 0


def test_packing_against_rows_of_a_number() -> None:
    lengths = LENGTHS["bimodal"](64)
    found = bench_packing.packed(lengths, repeats=1)
    assert found["bound"] <= found["rows"] <= found["bound"] + 1 and found["emptiest"] <= found["fullest"] <= bench_packing.BUDGET
    fixed = bench_packing.by_number(np.array([1, 9, 4, 4]), 2)
    assert fixed == {"rows": 2, "largest": 10, "padding_frac": pytest.approx(1 - 18 / 26)}


def test_samples_of_the_training_step() -> None:
    """Equal in every process, whole groups, one of about ten long."""
    sizes = bench_training_step.Sizes(64, 2, 100, 40, 20, 220, 8, 256, 1)
    samples, old, advantages = bench_training_step.make_samples(sizes)
    again = bench_training_step.make_samples(sizes)[0]
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in again]
    assert all(o.numel() == a.numel() == s.response_length for s, o, a in zip(samples, old, advantages, strict=True))
    assert 1 <= sum(s.response_length > 100 for s in samples) <= 10


def test_shares_of_attention_are_those_of_the_whole() -> None:
    """`shares` raises when a rank computes other rows than the whole attention has."""
    found = bench_attention.shares([16, 8, 32], 2, repeats=1)
    assert len(found["over_fair_share"]) == 2 and min(found["over_fair_share"]) > 0


@pytest.mark.slow
def test_methods_of_the_training_step_compute_the_same() -> None:
    """Packed, padded, two ranks, and the loop that is written by hand: `compare` raises when a loss or a gradient norm differs."""
    sizes = bench_training_step.Sizes(64, 2, 128, 16, 12, 130, 8, 128, 1)
    results = bench_training_step.compare([*bench_training_step.ONE_PROCESS, "DP2"], sizes, rounds=1)
    assert all(r["core_s"] > 0 and r["memory_mib"] > 0 for r in results.values())


def test_results_are_written_with_the_machine(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "results.json", {"a": 1})
    found = json.loads((tmp_path / "new" / "results.json").read_text())
    assert found["results"] == {"a": 1} and found["machine"]["cores"] >= 1
    calls: list[int] = []
    seconds, last = fastest(lambda: len(calls.append(1) or calls), repeats=3, warm_up=2)  # type: ignore[func-returns-value]
    assert last == 5 and seconds >= 0

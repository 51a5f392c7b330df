"""Sequences over ranks and into rows: nothing lost, nobody empty, loads near equal, budgets
kept."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from slime_like.distributed.seqlen_balancing import (
    even_rows,
    imbalance,
    linear_cost,
    pack_by_budget,
    partition,
    sequence_costs,
)

A = 24000.0  # of a model with a hidden size of 4096, roughly


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6.5, 1.0, count).clip(16, 32768).astype(np.int64)


def bimodal(count: int, seed: int = 0) -> np.ndarray:
    """A tenth of the sequences are sixteen times as long as the others."""
    rng = np.random.default_rng(seed)
    return (
        np.where(rng.random(count) < 0.1, rng.normal(8000, 500, count), rng.normal(500, 100, count))
        .clip(16)
        .astype(np.int64)
    )


def covers(parts: list[np.ndarray], count: int) -> bool:
    return sorted(i for part in parts for i in part.tolist()) == list(range(count))


def loads_of(costs: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([costs[part].sum() for part in parts])


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("lengths", [lognormal, bimodal])
@pytest.mark.parametrize(("count", "parts"), [(4096, 64), (16384, 128)])
def test_large_batches_are_level(
    lengths: object, count: int, parts: int, equal_counts: bool
) -> None:
    costs = sequence_costs(lengths(count), A)  # type: ignore[operator]
    found = partition(costs, parts, equal_counts=equal_counts)
    assert covers(found, count) and len(found) == parts
    assert imbalance(loads_of(costs, found)) <= 1.001
    if equal_counts:
        assert {part.size for part in found} == {count // parts}
    contiguous = np.array_split(np.arange(count), parts)
    assert imbalance(loads_of(costs, contiguous)) > 1.1, "there was something to do"


def test_a_large_batch_takes_little_time() -> None:
    """The target is 0.1 s on an idle machine; this bound holds on a loaded one, and no quadratic
    method would keep it."""
    costs = sequence_costs(lognormal(16384), A)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        partition(costs, 128)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


@pytest.mark.parametrize("equal_counts", [False, True])
def test_small_partitions_against_all_there_are(equal_counts: bool) -> None:
    """Six to eight items in two parts: never worse than 7/6 of the best, which is what greedy
    guarantees, and mostly the best."""
    rng = np.random.default_rng(3)
    best_found = 0
    for _ in range(60):
        count = 2 * int(rng.integers(3, 5))
        costs = rng.integers(1, 60, count).astype(np.float64)
        found = partition(costs, 2, equal_counts=equal_counts)
        assert covers(found, count) and min(p.size for p in found) > 0
        sizes = [count // 2] if equal_counts else range(1, count)
        best = min(
            max(costs[list(half)].sum(), costs.sum() - costs[list(half)].sum())
            for size in sizes for half in itertools.combinations(range(count), size)
        )  # fmt: skip
        heaviest = loads_of(costs, found).max()
        assert heaviest <= best * 7 / 6 + 1e-9 or equal_counts
        best_found += heaviest == best
    assert best_found > 40


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_no_part_is_empty_however_skewed(count: int) -> None:
    costs = sequence_costs([10000] + [1] * (count - 1), A)
    found = partition(costs, 3)
    assert covers(found, count) and min(part.size for part in found) == 1
    assert [part.tolist() for part in found if 0 in part] == [[0]]


def test_equal_costs_are_shared_equally() -> None:
    assert {part.size for part in partition(np.ones(60), 12)} == {5}
    assert [part.tolist() for part in partition(np.ones(3), 1)] == [[0, 1, 2]]


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences cannot be shared by 4 ranks"):
        partition(np.ones(3), 4)
    with pytest.raises(ValueError, match="cannot be shared equally"):
        partition(np.ones(7), 2, equal_counts=True)


@pytest.mark.parametrize("lengths", [lognormal, bimodal])
def test_rows_keep_the_budget_and_are_few(lengths: object) -> None:
    tokens = lengths(512).clip(max=16384)  # type: ignore[operator]
    rows = pack_by_budget(tokens, 16384)
    assert covers(rows, 512)
    assert max(tokens[row].sum() for row in rows) <= 16384
    assert len(rows) <= -(-tokens.sum() // 16384) + 2


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    rows = pack_by_budget([3, 20, 4, 11, 3], 10)
    assert covers(rows, 5)
    assert [1] in [row.tolist() for row in rows] and [3] in [row.tolist() for row in rows]
    assert len(rows) == 3


@pytest.mark.parametrize("more", [0, 1, 5, 40])
def test_any_number_of_rows_from_what_is_needed(more: int) -> None:
    tokens = bimodal(40, seed=2).clip(max=9000)
    needed = len(pack_by_budget(tokens, 9000))
    rows = even_rows(tokens, needed + more, 9000)
    assert len(rows) == needed + more and covers(rows, 40)
    assert max(tokens[row].sum() for row in rows) <= 9000
    filled = [row for row in rows if row.size]
    assert len(filled) == min(40, needed + more), (
        "padding only where there are fewer sequences than rows"
    )
    assert all(row.size for row in rows[: len(filled)]), "empty rows come last"


def test_rows_that_only_a_tight_packing_fits() -> None:
    """Levelling breaks the budget of 10 here, though the packing keeps it; the rows then stay as
    they were packed, and split."""
    tokens = np.array([9, 9, 7, 6, 3, 2, 2, 1])
    assert len(pack_by_budget(tokens, 10)) == 4
    assert max(tokens[part].sum() for part in partition(tokens, 4)) > 10
    for count in (4, 5, 6):
        rows = even_rows(tokens, count, 10)
        assert (
            covers(rows, 8) and len(rows) == count and max(tokens[row].sum() for row in rows) <= 10
        )


def test_the_same_on_every_rank() -> None:
    costs = sequence_costs(lognormal(512), A)
    first, again = partition(costs, 16), partition(costs.copy(), 16)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_linear_cost_counts_the_multiplications() -> None:
    """Against FLOPs counted by hand for one sequence: matrices 2 * weights * L, causal attention 2
    products of L^2 / 2 pairs."""
    hidden, ffn, heads, groups, dim, layers, vocab, length = 64, 160, 4, 2, 24, 3, 500, 37
    query, key = heads * dim, groups * dim
    matrices = (
        2
        * length
        * (
            layers * (hidden * query + 2 * hidden * key + query * hidden + 3 * hidden * ffn)
            + hidden * vocab
        )
    )
    attention = layers * 2 * (2 * query * length * length / 2)
    a = linear_cost(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        attention_size=query,
        key_value_size=key,
        gated=True,
        num_layers=layers,
        vocab_size=vocab,
    )
    ours = sequence_costs([length, 2 * length], a)
    assert ours[0] * 2 * query * layers == pytest.approx(matrices + attention)
    assert ours[1] * 2 * query * layers == pytest.approx(2 * matrices + 4 * attention)

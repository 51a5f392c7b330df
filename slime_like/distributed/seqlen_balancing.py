"""Balance sequences over data-parallel ranks and pack them into micro-batches within a token
budget.

The cost of a sequence of L tokens is `a * L + L^2` (see `linear_cost`). `partition` balances costs
over ranks, `pack_by_budget` packs rows, and `even_rows` packs a given number of rows. Pure numpy on
the host and deterministic, so all ranks compute the same result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Indices = NDArray[np.int64]

TOLERANCE = 1e-4  # refinement ends when max / mean - 1 is below it
PARTNERS = 4  # number of lightest parts with which the heaviest part tries an exchange
ROUNDS = 64


def linear_cost(
    *,
    hidden_size: int,
    ffn_hidden_size: int,
    attention_size: int,
    key_value_size: int,
    gated: bool,
    num_layers: int,
    vocab_size: int,
) -> float:
    """The coefficient `a` of the cost `a * L + L^2`: number of context tokens for which attention
    costs as much as the matrix products of one token.

    A forward pass takes 2 FLOPs per weight and token. A layer has `hidden * (attention + 2 *
    key_value)` weights in the QKV projection, `attention * hidden` in the output projection and `(3
    if gated else 2) * hidden * ffn` in the MLP; the head has `hidden * vocab`. Causal attention
    takes `2 * attention * L^2` FLOPs per layer: two products over half a square. Dividing by
    `2 * attention` gives L^2 and

        a = (weights of a layer + hidden * vocab / layers) / attention

    Backward scales both terms by the same factor.

    Args:
        ffn_hidden_size: In an MoE layer, summed over the experts of one token.
        attention_size: Number of heads times head dimension.
        key_value_size: Number of query groups times head dimension.
    """
    layer = hidden_size * (2 * attention_size + 2 * key_value_size)
    layer += (3 if gated else 2) * hidden_size * ffn_hidden_size
    return (layer + hidden_size * vocab_size / num_layers) / attention_size


def sequence_costs(lengths: Sequence[int] | NDArray[np.int64], a: float) -> Costs:
    """[N] costs of sequences with these lengths, in units of the attention of one token pair."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return a * tokens + tokens * tokens


def imbalance(loads: Costs) -> float:
    """Largest over mean load; 1 if all are equal."""
    return float(loads.max() / loads.mean()) if loads.size and loads.mean() > 0 else 1.0


def unit_sums(values: Sequence[float] | NDArray[Any], size: int) -> NDArray[Any]:
    """[N / size] sums over units of `size` adjacent items, which stay together."""
    return np.asarray(values).reshape(-1, size).sum(1)


def members(units: Indices, size: int) -> Indices:
    """Indices of the items of these units, in order."""
    return (units[:, None] * size + np.arange(size)).reshape(-1)


def partition(
    costs: Sequence[float] | Costs, num_parts: int, *, equal_counts: bool = False
) -> list[Indices]:
    """Partition items into `num_parts` non-empty parts with balanced costs.

    Greedy: items, heaviest first, go to the lightest part. Then heavy parts swap an item with a
    light part, or give one away, until none is much heavier than the mean. O(N log N), plus a few
    exchanges per part, each linear in its items.

    Args:
        costs: [N], N >= num_parts, each > 0.
        equal_counts: Give every part N / num_parts items.

    Returns:
        Indices of each part, ascending.

    Raises:
        ValueError: There are too few items, or N is not a multiple of num_parts with
            `equal_counts`.
    """
    weights = np.asarray(costs, dtype=np.float64)
    count = weights.size
    if count < num_parts:
        raise ValueError(
            f"{count} sequences cannot be shared by {num_parts} ranks: none may be empty"
        )
    if equal_counts and count % num_parts:
        raise ValueError(f"{count} sequences cannot be shared equally by {num_parts} ranks")
    if num_parts == 1:
        return [np.arange(count)]
    parts = _greedy(weights, num_parts, count // num_parts if equal_counts else count)
    _refine(weights, parts, may_give=not equal_counts)
    return [np.sort(part) for part in parts]


def _greedy(weights: Costs, num_parts: int, most: int) -> list[Indices]:
    """Assign items, heaviest first, to the lightest part with fewer than `most` items."""
    order = np.argsort(-weights, kind="stable").tolist()
    values = weights.tolist()
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for item in order:
        load, part = heap[0]
        parts[part].append(item)
        if len(parts[part]) < most:
            heapq.heapreplace(heap, (load + values[item], part))
        else:
            heapq.heappop(heap)
    return [np.array(part, dtype=np.int64) for part in parts]


def _refine(weights: Costs, parts: list[Indices], *, may_give: bool) -> None:
    """Exchange items between heavy and light parts, in place, until the heaviest is near the mean
    or cannot be made lighter. In each round the i-th heaviest part is paired with the i-th
    lightest."""
    loads = np.array([weights[part].sum() for part in parts])
    target = loads.mean() * (1 + TOLERANCE)
    for _ in range(ROUNDS):
        order = np.argsort(loads, kind="stable")
        heavies = order[::-1][: int((loads > target).sum())].tolist()
        if not heavies:
            return
        moved = []
        for i, heavy in enumerate(heavies):
            partners = order[i : i + 1] if i else order[:PARTNERS]
            moved.append(
                any(
                    _exchange(weights, parts, loads, heavy, light, may_give=may_give)
                    for light in partners.tolist()
                )
            )
        if not moved[0]:
            return


def _exchange(
    weights: Costs, parts: list[Indices], loads: Costs, heavy: int, light: int, *, may_give: bool
) -> bool:
    """Move an item of the heavy part to the light part, possibly in exchange for one of its items,
    so that their loads become as close as possible. Returns False, without a change, if no move
    brings them closer."""
    gap = float(loads[heavy] - loads[light])
    if gap <= 0:
        return False
    heavy_items = parts[heavy]
    light_items = parts[light]
    light_items = light_items[np.argsort(weights[light_items], kind="stable")]
    gives = weights[heavy_items]
    takes = weights[light_items]
    if may_give and heavy_items.size > 1:
        takes = np.concatenate([[0.0], takes])  # position 0: nothing in exchange
    after = np.zeros(heavy_items.size, dtype=np.int64)
    if takes.size > 1:
        after = np.searchsorted(takes, gives - gap / 2).clip(1, takes.size - 1)
    # (2, items): the two that would come closest to equal loads
    choices = np.stack([np.maximum(after - 1, 0), after])
    off = np.abs(gives - takes[choices] - gap / 2)
    side, item = np.unravel_index(int(off.argmin()), off.shape)
    best = int(choices[side, item])
    moved = float(gives[item] - takes[best])
    if not 1e-12 * gap < moved < gap * (1 - 1e-12):
        return False
    position = best if takes.size == light_items.size else best - 1  # -1: nothing in exchange
    kept = np.delete(heavy_items, item)
    if position >= 0:
        kept = np.append(kept, light_items[position])
        light_items = np.delete(light_items, position)
    parts[heavy] = kept
    parts[light] = np.append(light_items, heavy_items[item])
    loads[heavy] -= moved
    loads[light] += moved
    return True


def pack_by_budget(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> list[Indices]:
    """Pack sequences into rows of at most `budget` tokens by best-fit decreasing. A longer sequence
    gets a row alone. O(N log N). Returns the indices of each row, ascending."""
    tokens = np.asarray(lengths, dtype=np.int64)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for item in np.argsort(-tokens, kind="stable").tolist():
        need = int(tokens[item])
        place = bisect_left(room, (need, -1))
        if place == len(room):
            rows.append([item])
            left = budget - need
            row = len(rows) - 1
        else:
            left, row = room.pop(place)
            rows[row].append(item)
            left -= need
        if left > 0:
            slot = (left, row)
            room.insert(bisect_left(room, slot), slot)
    return [np.array(sorted(row), dtype=np.int64) for row in rows]


def even_rows(
    lengths: Sequence[int] | NDArray[np.int64], num_rows: int, budget: int
) -> list[Indices]:
    """Pack sequences into exactly `num_rows` rows, of balanced length if they fit the budget. The
    last rows are empty if there are fewer sequences than rows. `num_rows` must be at least the
    number of rows of `pack_by_budget`. Returns the indices of each row."""
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.size <= num_rows:
        empty = [np.zeros(0, dtype=np.int64)] * (num_rows - tokens.size)
        return [np.array([i]) for i in range(tokens.size)] + empty
    level = partition(tokens.astype(np.float64), num_rows)
    if max(int(tokens[row].sum()) for row in level) <= max(budget, int(tokens.max())):
        return level
    rows = pack_by_budget(tokens, budget)
    assert len(rows) <= num_rows, (len(rows), num_rows)
    while len(rows) < num_rows:
        longest = max(
            (i for i, row in enumerate(rows) if row.size > 1),
            key=lambda i: int(tokens[rows[i]].sum()),
        )
        row = rows.pop(longest)
        first, second = partition(tokens[row].astype(np.float64), 2)
        rows += [row[first], row[second]]
    return rows

"""slime_like/distributed/collectives.py: values and errors of one rank, on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks
from slime_like.config import ConfigError, Problem
from slime_like.distributed import collectives
from slime_like.errors import RunError


class OfAUser(ValueError):
    """An error of a module that other ranks may not have."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)


def fail(error: Exception) -> Any:
    raise error


def told(call: Callable[[], Any]) -> list[str]:
    """The kind of an error, its words, and how its notes end."""
    try:
        call()
    except Exception as error:
        return [
            type(error).__name__,
            str(error),
            *(note.splitlines()[-1] for note in getattr(error, "__notes__", ())),
        ]
    return []


def two_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    collectives.POLL_S = 0.05
    zero, group = collectives.from_rank_zero, dist.new_group()
    one = collectives.together(lambda: rank + 1)
    errors = (
        ValueError("a setting"),
        OSError(28, "full"),
        RunError("a run"),
        ConfigError([Problem("--x", 1, "wrong")]),
        KeyError("ours"),
        OfAUser(1, "a user's"),
    )
    slow = partial(
        collectives.from_rank_zero_within,
        lambda: time.sleep(0.3) or rank,
        group,
        timeout_s=30,
        late="late",
    )
    late = partial(
        collectives.from_rank_zero_within,
        lambda: time.sleep(30),
        None,
        timeout_s=0.2,
        late="it took too long",
    )
    return {
        "values": [zero(lambda: ["of", rank]), zero(lambda: rank, group), collectives.share(rank),
            slow(), collectives.gather(rank)],
        "own": [one, collectives.on_rank_zero(lambda: (x for x in "stays")) is not None],
        "zero": [told(partial(zero, partial(fail, error))) for error in errors],
        "stays": told(lambda: collectives.on_rank_zero(lambda: fail(ValueError("not there")))),
        "second": told(
            lambda: collectives.together(lambda: fail(OSError("on rank 1")) if rank else None)
        ),
        "travels": told(lambda: zero(lambda: (x for x in "no pickle")))[:1],
        "late": told(late),
        "thread": told(partial(collectives.from_rank_zero_within,
            lambda: fail(ValueError("in a thread")), None, timeout_s=30, late="late")),
    }  # fmt: skip


def test_all_ranks_have_a_value_or_raise_the_same(tmp_path: Path) -> None:
    ranks = run_ranks("tests.dist.test_agreement:two_ranks", 2, tmp_path, {}, timeout_s=60)
    assert [found.pop("own") for found in ranks] == [[1, True], [2, False]]
    assert ranks[0] == ranks[1]
    assert ranks[1] == {
        "values": [["of", 0], 0, 0, 0, [0, 1]],
        "zero": [
            ["ValueError", "a setting"],
            ["OSError", "[Errno 28] full"],
            ["RunError", "a run"],
            ["ConfigError", str(ConfigError([Problem("--x", 1, "wrong")]))],
            ["RunError", "KeyError: 'ours'", "KeyError: 'ours'"],
            ["ValueError", "a user's"],
        ],
        "stays": ["ValueError", "not there"],
        "second": ["OSError", "on rank 1"],
        "travels": ["RunError"],
        "late": ["RunError", "it took too long"],
        "thread": ["ValueError", "in a thread"],
    }


def test_without_a_process_group_it_is_this_process() -> None:
    assert (
        collectives.from_rank_zero(lambda: 3)
        == collectives.together(lambda: 3)
        == collectives.share(3)
        == 3
    )
    assert collectives.gather(4) == [4] and collectives.on_rank_zero(lambda: 5) == 5
    with pytest.raises(RunError, match="ZeroDivisionError: ") as caught:
        collectives.from_rank_zero(lambda: 1 // 0)
    assert (
        isinstance(caught.value.__cause__, ZeroDivisionError)
        and "1 // 0" in caught.value.__notes__[0]
    )

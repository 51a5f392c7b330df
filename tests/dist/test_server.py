"""An error on one rank of the server is an error for the caller, and never a hang."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import ANY

from benchmarks.parity.ranks import run_ranks


def test_ranks_agree_on_errors_and_continue(tmp_path: Path) -> None:
    first, second = run_ranks(
        "tests.dist.server_worker:errors_are_agreed", 2, tmp_path, {}, timeout_s=150
    )
    assert first["answers"] == [
        {"id": "1", "ok": True, "total": 3, "data": 200_000},
        {
            "id": "2",
            "ok": False,
            "category": "user",
            "error": "it is bad",
            "broken": False,
            "common": False,
        },
        {
            "id": "3",
            "ok": False,
            "category": "server",
            "error": "rank 1: RuntimeError: it broke",
            "broken": False,
            "common": False,
        },
        {
            "id": "3b",
            "ok": False,
            "category": "server",
            "error": "RuntimeError: it broke",
            "broken": True,
            "common": False,
        },
        ANY,
        # a load that is refused once a rank has read into the model loses it, before it does not
        {
            "id": "3d",
            "ok": False,
            "category": "server",
            "error": "it is bad",
            "broken": True,
            "common": False,
        },
        {
            "id": "3e",
            "ok": False,
            "category": "user",
            "error": "it is bad",
            "broken": False,
            "common": False,
        },
        {"id": "5", "ok": True, "total": 3, "data": 0},
    ]
    exhausted = first["answers"][4]
    assert "out of memory" in exhausted["error"] and exhausted["broken"] is False
    assert "--max-tokens-per-gpu" in exhausted["error"]
    assert first["recovered"] == second["recovered"], "on all ranks alike"
    assert first["recovered"] == [["m", 1], ["m", 2], ["m", 0], ["m", 2], ["m", 0]]


def test_a_rank_that_is_alone_with_its_error_frees_the_others(tmp_path: Path) -> None:
    """From the collective in which they wait for it; the connections are made anew, and only what
    the command may have changed is lost."""
    first, second = run_ranks(
        "tests.dist.server_worker:a_rank_is_left_in_a_collective", 2, tmp_path, {}, timeout_s=150
    )
    assert first["recovered"] == second["recovered"]
    for rank in (first, second):
        exhausted, broke, _ = rank["answers"]
        for answer in rank["answers"]:
            assert not answer["ok"] and answer["category"] == "server"
            assert answer["seconds"] < 5
            assert answer["after"] == 3, "the next command works"
        assert exhausted["error"].startswith("rank 1: out of memory")
        assert "--max-tokens-per-gpu" in exhausted["error"]
        assert broke["error"] == "rank 0: RuntimeError: it broke"
        assert [answer["broken"] for answer in rank["answers"]] == [False, False, True]
        assert [stage for _, stage in rank["recovered"]] == [0, 1, 2]


def test_a_rank_that_cannot_free_the_others_ends(tmp_path: Path) -> None:
    _, second = run_ranks(
        "tests.dist.server_worker:a_rank_is_left_in_a_collective", 2, tmp_path, {}, timeout_s=150
    )
    assert "rank 1: RuntimeError: it broke; no answer from rank 0" in second["error"]

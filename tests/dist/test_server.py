"""An error on one rank of the server is an error for the caller, and never a hang."""

from __future__ import annotations

from pathlib import Path

from benchmarks.parity.ranks import run_ranks


def test_ranks_agree_on_errors_and_go_on(tmp_path: Path) -> None:
    first, second = run_ranks(
        "tests.dist.server_worker:errors_are_agreed", 2, tmp_path, {}, timeout_s=150
    )
    assert first["answers"] == [
        {"id": "1", "ok": True, "total": 3, "data": 200_000},
        {"id": "2", "ok": False, "category": "user", "error": "it is bad", "broken": False},
        {
            "id": "3",
            "ok": False,
            "category": "server",
            "error": "rank 1: RuntimeError: it broke",
            "broken": True,
        },
        {"id": "5", "ok": True, "total": 3, "data": 0},
    ]
    assert first["unloaded"] == second["unloaded"] == ["m"], (
        "a model whose state differs between ranks is gone on all of them"
    )


def test_a_rank_that_is_alone_with_its_error_ends(tmp_path: Path) -> None:
    _, second = run_ranks(
        "tests.dist.server_worker:a_rank_is_left_in_a_collective", 2, tmp_path, {}, timeout_s=150
    )
    assert (
        "RuntimeError: it broke; no word from rank 0" in second["error"] and second["seconds"] < 10
    )

"""Servers that fail under a whole run of two ranks: it survives what passes, and stops by name, in
bounded time, over what lasts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import Done, TrainServer
from tests.fake_sglang import (
    FakeServer,
    changed,
    death,
    death_in_the_middle,
    drip,
    fake_servers,
    silence,
    status,
    text,
)

TOTAL_S = 8  # for one answer; generous, since the machine may be busy


@pytest.fixture
def servers(work: Workspace) -> Iterator[list[FakeServer]]:
    with fake_servers(str(work.model), 2) as both:
        yield both


def train(
    server: TrainServer,
    work: Workspace,
    servers: list[FakeServer],
    out: Path,
    **changes: str | float,
) -> Done:
    """A run of two ranks; nothing of it is left behind."""
    settings: dict[str, str | float] = {
        "rollout_engine": "sglang", "no_sglang_router": "", "update_weight_transport": "disk", "rollout_request_attempts": 3,
        "rollout_external_engine_addrs": " ".join(s.address for s in servers), "rollout_request_timeout_s": TOTAL_S,
        "rollout_health_check_interval": 0.2,
    }  # fmt: skip
    done = server.train(work.flags(out, **(settings | changes)), out / "log", ranks=2, timeout_s=90)
    assert done.status != 124, f"it did not end by itself\n{done.out}\n{done.err}"
    family = psutil.Process(server.pid).children(recursive=True)
    assert not [p for p in family if p.status() != psutil.STATUS_ZOMBIE], "a process is left"
    return done


@pytest.mark.extended
def test_passing_faults_cost_time_and_wrong_answers_their_samples(
    server: TrainServer, work: Workspace, servers: list[FakeServer], tmp_path: Path
) -> None:
    """Of the 16 samples of the first rollout, 5 are asked for again and 2 are given up; the second
    rollout has all of its own."""
    no_number = changed(
        lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, float("nan"))
    )
    servers[0].faults = [
        status(500),
        text("<html>busy</html>"),
        silence(60),
        drip,
        death_in_the_middle,
        no_number,
        status(429),
    ]
    train(server, work, servers, tmp_path, max_failed_samples=0.2).ok()
    first, second = rows_of(tmp_path)
    assert first["rollout/failed_frac"] == 2 / 16 and second["rollout/failed_frac"] == 0
    assert first["engine/retries"] == 5 and (first["engine/dropped"], first["engine/rejected"]) == (
        0,
        2,
    )
    kinds = {
        "status_500": 1,
        "status_429": 1,
        "connection_lost": 1,
        "total_timeout": 2,
        "no_json": 1,
        "bad_answer": 1,
    }
    assert {name: first[f"engine/{name}"] for name in kinds} == kinds
    for row in (first, second):
        assert row["rollout/train_rollout_log_prob_diff_max"] < 1e-4 and row["train/grad_norm"] > 0
        assert row["engine/ready"] == 2 and row["engine/evictions"] == 0


def test_a_quota_of_dropped_samples_stops_the_run(
    server: TrainServer, work: Workspace, servers: list[FakeServer], tmp_path: Path
) -> None:
    """One server that always fails next to one that works costs nothing but time; when both fail,
    the run stops and reports what was met."""
    servers[0].faults = [status(500, "out of memory")] * 1000
    servers[1].faults = [None] * 20 + [
        status(403, "not you")
    ] * 1000  # enough for the first rollout
    done = train(server, work, servers, tmp_path, max_failed_samples=0.2, num_rollout=4)
    error = done.error()
    found = re.match(
        r"error: rollout (\d): [\d.]+% of the samples have no usable response or reward, more than --max-failed-samples 0.2",
        error,
    )
    assert found and int(found[1]) >= 2 and len(rows_of(tmp_path)) == int(found[1]) - 1, error
    assert (
        "aborted by the engine: request " in error
        and f"{servers[1].url}/generate: status 403: not you" in error
    )
    assert re.search(r"requests to the engines: .*status_403 \d+", error) and "dropped" in error
    assert (
        rows_of(tmp_path)[0]["rollout/failed_frac"] == 0
        and rows_of(tmp_path)[0]["engine/status_500"] > 0
    )


def test_a_run_without_servers_ends(
    server: TrainServer, work: Workspace, servers: list[FakeServer], tmp_path: Path
) -> None:
    """Both die in the second rollout."""
    for fake in servers:
        fake.faults = [None] * 9 + [death] * 1000
    error = train(server, work, servers, tmp_path, num_rollout=4).error()
    assert any(fake.address in error for fake in servers) or "no engine" in error, error
    assert 1 <= len(rows_of(tmp_path)) < 4

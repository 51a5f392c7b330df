"""Mixtures of experts on real servers: the trainer's experts arrive under the right names from
every layout, and the routed experts come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import TrainServer
from tests.sglang.conftest import Servers
from tests.sglang.test_real_servers import assert_the_servers_have_the_weights, command_line, rows

LAYOUTS = {
    "ep2": "--expert-model-parallel-size 2",
    "tp2-ep2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.mark.parametrize(
    ("layout", "transport"),
    [("ep2", "broadcast"), ("ep2", "disk"), ("tp2-ep2", "broadcast"), ("pp2", "disk")],
)
def test_experts_arrive_and_routes_come_back(
    expert_demo: Path,
    expert_servers: Servers,
    programs: TrainServer,
    tmp_path: Path,
    layout: str,
    transport: str,
) -> None:
    """Through a router, in small buckets. In each of three rollouts, with other weights each time,
    log-probs are the trainer's, and its routers choose what the servers' chose; in the second
    update on a rollout they would choose otherwise, and follow the servers."""
    line = command_line(
        expert_demo, expert_servers.flags, tmp_path / "out", *LAYOUTS[layout].split(), "--update-weight-transport", transport,
        "--update-weight-buffer-size", "10000", "--check-weight-update-equal", "--use-rollout-routing-replay", "--moe-router-dtype", "fp32", "--micro-batch-size", "8",
    )  # fmt: skip
    done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=300)
    assert_the_servers_have_the_weights(done, tmp_path / "out", engines=2)
    found = rows(tmp_path / "out")
    assert all(
        row["rollout/moe_routing_disagreement"] == 0 for row in found
    )  # NaN where no routed experts came
    assert any(row["train/moe_replay_disagreement"] > 0 for row in found)


def test_routes_of_requests_that_new_weights_met(
    expert_demo: Path, expert_servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Asynchronous: weights change under requests, which are put back and computed again, and still
    bring as many routed experts as tokens."""
    out = tmp_path / "out"
    line = command_line(
        expert_demo, expert_servers.flags, out, "--async-rollout", "--max-staleness", "1", "--num-rollout", "4", "--rollout-max-response-len", "64",
        "--use-rollout-routing-replay", "--moe-router-dtype", "fp32", "--micro-batch-size", "8",
    )  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=1, timeout_s=300).ok()
    found = rows(out)
    assert len(found) == 4 and all(row["rollout/failed_frac"] == 0 for row in found)
    assert any(0 < row["rollout/staleness_mean"] < 1 for row in found)
    assert all(0 <= row["rollout/moe_routing_disagreement"] < 0.5 for row in found)


def test_experts_in_each_others_place_are_caught(
    expert_demo: Path, expert_servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Names, shapes and counts are right."""
    line = command_line(expert_demo, expert_servers.flags_without_router, tmp_path / "out")
    done = programs.train(
        line, tmp_path / "run", ranks=1, timeout_s=240, hook="tests.sglang.spoil:two_experts"
    )
    assert "does not have the weights of version 1: its log-probs of" in done.error()


def test_servers_that_report_no_routes_are_named(
    demo: Path, expert_demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    line = command_line(
        expert_demo, servers.flags_without_router, tmp_path / "out", "--use-rollout-routing-replay"
    )
    done = programs.train(line, tmp_path / "run", ranks=1, timeout_s=240)
    assert (
        f"the engine {servers.urls[0]} does not report routed experts; start it with"
        in done.error()
    )

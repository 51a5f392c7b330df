"""`--colocate` on two nodes with real servers: two agents of torchrun on this host stand for the
nodes. One is lost, and the run continues alone."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.e2e.nodes import goes_on, logs, rollouts, two_nodes, wait_until
from tests.sglang.conftest import START_S
from tests.sglang.test_real_servers import EXACT, command_line, rows


def test_a_node_with_its_server_is_lost(demo: Path, tmp_path: Path) -> None:
    """Each node's first rank starts its own server and hands it the weights. What both say to
    a token is compared in every rollout, before the loss and after it."""
    out, ck = tmp_path / "out", tmp_path / "ck"
    argv = command_line(
        demo, ["--colocate", "--no-sglang-router", "--sglang-dtype", "float32"], out, "--num-rollout", "1000", "--micro-batch-size", "8",
        "--save", str(ck), "--load", str(ck), "--save-interval", "1",
    )  # fmt: skip
    with two_nodes(tmp_path, argv) as agents:
        wait_until(lambda: rollouts(out) >= 2, tmp_path, START_S)
        assert {row["engine/ready"] for row in rows(out)} == {2.0}
        everything = psutil.Process(agents[1].pid).children(recursive=True)
        names = ["".join(process.cmdline()[:1]) for process in everything]
        assert any(name.startswith("sglang::schedul") for name in names), names
        for process in (psutil.Process(agents[1].pid), *everything):
            process.kill()
        wait_until(lambda: "resumed on 1 of 2 ranks" in logs(tmp_path), tmp_path, START_S)
        goes_on(out, tmp_path, START_S)
        agents[0].send_signal(signal.SIGTERM)
        agents[0].wait(120)
    found = rows(out)
    assert found[-1]["engine/ready"] == 1
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < EXACT for row in found)
    assert [row["rollout/weight_version_min"] for row in found[:2]] == [1, 2]
    assert not [p for p in everything if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

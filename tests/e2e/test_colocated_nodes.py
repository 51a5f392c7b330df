"""`--colocate` on several nodes: two agents of torchrun on this host stand for two nodes, and small
servers with SGLang's interface for SGLang."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.nodes import (
    goes_on,
    logs,
    python_with_servers,
    rollouts,
    two_nodes,
    wait_until,
)
from tests.e2e.programs import TrainServer
from tests.fake_sglang import fake_servers


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of the servers."""
    return python_with_servers(tmp_path)


FLAGS = dict(
    rollout_engine="sglang", no_sglang_router="", n_samples_per_prompt=2, micro_batch_size=2
)


@pytest.mark.extended
def test_a_server_on_each_node(
    server: TrainServer, work: Workspace, tmp_path: Path, python: Path
) -> None:
    """The same, to the last bit, as with servers that somebody else has started, and nobody's
    memory in turn. They end with the run."""
    out, hf = tmp_path / "out", tmp_path / "hf"
    argv = work.flags(out, **FLAGS, colocate="", sglang_python=python, num_rollout=3, save_hf=hf)
    with two_nodes(tmp_path, argv) as agents:
        statuses = [agent.wait(300) for agent in agents]
    assert statuses == [0, 0], logs(tmp_path)[-6000:]
    for number in range(2):
        printed = (out / "engines" / f"engine-{number}.log").read_text()
        assert printed.count("released") == 3, printed
    assert not list((out / "engines").glob("engine-2*"))
    other, other_hf = tmp_path / "other", tmp_path / "other_hf"
    with fake_servers(str(work.model), 2) as both:
        flags = work.flags(
            other, **FLAGS, num_rollout=3, save_hf=other_hf, update_weight_transport="tensor",
            rollout_external_engine_addrs=" ".join(fake.address for fake in both),
        )  # fmt: skip
        server.train(flags, tmp_path / "log", ranks=2).ok()
    train = [
        [{n: v for n, v in row.items() if n.startswith("train/")} for row in rows_of(f)]
        for f in (out, other)
    ]
    assert train[0] == train[1] and len(train[0]) == 3
    ours, theirs = load_file(hf / "model.safetensors"), load_file(other_hf / "model.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_server_and_then_a_node_are_lost(work: Workspace, tmp_path: Path, python: Path) -> None:
    """The server on the other node is started again there; without the node the run continues with
    the one that is left."""
    out, ck = tmp_path / "out", tmp_path / "ck"
    argv = work.flags(
        out, **FLAGS, colocate="", sglang_python=python, num_rollout=1000, save=ck, load=ck, save_interval=1,
        rollout_health_check_interval=0.5,
    )  # fmt: skip
    with two_nodes(tmp_path, argv) as agents:
        wait_until(lambda: rollouts(out) >= 1, tmp_path)
        trainer = psutil.Process(agents[1].pid).children()[0]
        (lost,) = [
            process
            for process in trainer.children(recursive=True)
            if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]
        ]
        lost.send_signal(signal.SIGKILL)
        wait_until(lambda: "is restarted (1 of 3)" in logs(tmp_path), tmp_path)
        wait_until(lambda: "gets requests after the next update" in logs(tmp_path), tmp_path)
        goes_on(out, tmp_path)
        for process in (psutil.Process(agents[1].pid), trainer, *trainer.children(recursive=True)):
            process.kill()
        wait_until(lambda: "resumed on 1 of 2 ranks" in logs(tmp_path), tmp_path)
        goes_on(out, tmp_path)
        agents[0].send_signal(signal.SIGTERM)
        agents[0].wait(120)
    assert (out / "engines" / "engine-1.log").read_text().count("listens") == 2

"""`--colocate` on several nodes: two agents of torchrun on this host stand for two nodes, and small
servers with SGLang's interface for SGLang."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.nodes import goes_on, logs, rollouts, two_nodes, wait_until
from tests.e2e.programs import ROOT, TrainServer
from tests.fake_sglang import fake_servers

# what the launcher looks for, and what it starts, in place of SGLang
SITE = {
    "sglang/__init__.py": "",
    "sglang/srt/server_args.py": "class ServerArgs: ...\n",
    "sglang/launch_server.py": """
import argparse, time
from tests.fake_sglang import FakeServer
parser = argparse.ArgumentParser()
for name in ("--model-path", "--host"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
args, _ = parser.parse_known_args()
with FakeServer(args.model_path, args.port, args.host) as fake:
    print("listens", flush=True)
    released = 0
    while True:
        time.sleep(0.05)
        if fake.count("/release_memory_occupation") > released:
            released += 1
            print("released", flush=True)
""",
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of the servers."""
    for file, source in SITE.items():
        path = tmp_path / "site" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"}:{ROOT} exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


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
    """The server on the other node is started again there; without the node the run goes on with
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

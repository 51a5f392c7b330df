"""Jobs on a real SLURM of two nodes on this host: make test-slurm."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime_like.servers.processes import CPU_SETTINGS, command_line_of
from tests.e2e.helpers import Workspace, make_workspace, rows_of, weights_of
from tests.e2e.programs import ENVIRONMENT, ROOT, free_port, make_demo
from tests.slurm.cluster import Cluster, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
TRAIN, SPLIT = (ROOT / "scripts" / "slurm" / f"{name}.sbatch" for name in ("train", "split"))
SGLANG = Path(os.environ.get("SGLANG_ENV", ROOT / ".venv-sglang"))
ROLLOUTS = 40
STARTED_S, ENDED_S = 120, 240  # of a job on a machine with other work


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


def variables(**more: str) -> dict[str, str]:
    found = {
        "REPOSITORY": str(ROOT),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
    }
    return ENVIRONMENT | found | more


def submit(
    cluster: Cluster, work: Workspace, out: Path, *, nodes: int = 1, **changes: str | int | float
) -> tuple[int, Path]:
    """A job of two processes on one or two nodes, and its log."""
    out.mkdir()
    log = out / "job.log"
    flags = work.flags(
        out, num_rollout=ROLLOUTS, save_hf=out / "hf", save=out / "ck", load=out / "ck", **changes
    )
    job = cluster.submit(
        TRAIN,
        *flags,
        options=(f"--nodes={nodes}", f"--output={log}"),
        variables=variables(PROCESSES_PER_NODE=str(2 // nodes)),
    )
    return job, log


@pytest.fixture(scope="module")
def full_run(cluster: Cluster, work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job on one node that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    job, log = submit(cluster, work, out)
    state = cluster.ended(job, ENDED_S, log)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), log.read_text()
    return out


def test_a_preempted_job_continues_to_the_same_weights(
    cluster: Cluster, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """SIGTERM to the ranks, after which the job requeues itself; then SLURM requeues it; over two
    nodes, so that the ranks of both agree when to stop. The uninterrupted run had its processes on
    one."""
    out = tmp_path / "run"
    job, log = submit(cluster, work, out, nodes=2, save_interval=10)
    cluster.wait_for_line(log, f"rollout  3/{ROLLOUTS}", STARTED_S)
    cluster.signal(job, "--signal=TERM")
    cluster.wait_for_line(log, "stopped by SIGTERM: requeued", 60)
    cluster.wait_for_line(log, "start 1\n", STARTED_S)
    assert "stopped by SIGTERM after rollout " in log.read_text()
    first = sorted(path.name for path in (out / "ck").glob("iter_*"))[-1]
    cluster.wait_for_line(log, "rollout 20/", STARTED_S)
    cluster.requeue(job)
    state = cluster.ended(job, ENDED_S, log)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "2", "0:0"), (
        log.read_text()
    )
    assert 3 <= int(first.removeprefix("iter_")) < 20, "it stopped where it should"
    starts = log.read_text().split("start ")
    assert len(starts) == 4 and all("rollout  1/" not in start for start in starts[2:]), (
        "no start began at the first rollout again"
    )
    theirs, actual = weights_of(full_run / "hf"), weights_of(out / "hf")
    assert theirs.keys() == actual.keys()
    different = [name for name in theirs if not torch.equal(theirs[name], actual[name])]
    assert not different
    start = weights_of(work.model)
    assert any(not torch.equal(start[name], actual[name]) for name in start), (
        "the runs trained nothing"
    )


def test_a_signal_to_the_batch_script_ends_the_run_with_a_checkpoint(
    cluster: Cluster, work: Workspace, tmp_path: Path
) -> None:
    """As before the time limit. A job that may not be requeued ends with status 75."""
    out = tmp_path / "run"
    out.mkdir()
    log = out / "job.log"
    flags = work.flags(out, num_rollout=2000, save=out / "ck", load=out / "ck")
    job = cluster.submit(
        TRAIN, *flags, options=("--no-requeue", f"--output={log}"), variables=variables()
    )
    cluster.wait_for_line(log, "rollout    2/2000", STARTED_S)
    cluster.signal(job, "--signal=TERM", "--batch")
    state = cluster.ended(job, 90, log)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "75:0"), log.read_text()
    assert "SIGTERM: the ranks save after this rollout" in log.read_text()
    assert "SLURM does not requeue this job: submit it again" in log.read_text()
    assert len(list((out / "ck").glob("iter_*"))) == 1


def test_a_dead_rank_ends_the_job_on_both_nodes(
    cluster: Cluster, work: Workspace, tmp_path: Path
) -> None:
    job, log = submit(cluster, work, tmp_path / "run", nodes=2)
    cluster.wait_for_line(log, f"rollout  2/{ROLLOUTS}", STARTED_S)
    victim = cluster.ranks(job)[1]
    pid = victim.pid
    start = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    state = cluster.ended(job, 90, log)
    assert time.monotonic() - start < 90
    assert state["JobState"] == "FAILED" and state["Restarts"] == "0", log.read_text()
    text = log.read_text()
    assert "error: no answer from rank 1 (host " in text and f"process {pid})" in text


def test_a_stopped_rank_ends_the_job_on_both_nodes(
    cluster: Cluster, work: Workspace, tmp_path: Path
) -> None:
    """The rank on the second node; the first holds the store. torchrun kills it, or srun."""
    job, log = submit(cluster, work, tmp_path / "run", nodes=2, heartbeat_timeout_s=5)
    cluster.wait_for_line(log, f"rollout  2/{ROLLOUTS}", STARTED_S)
    victim = cluster.ranks(job)[1]
    pid = victim.pid
    victim.suspend()
    state = cluster.ended(job, 120, log)
    text = log.read_text()
    assert state["JobState"] == "FAILED" and state["Restarts"] == "0", text
    assert (
        "error: no sign of life from rank 1 (host " in text
        and f"process {pid}), last heard of in phase " in text
    )
    assert "rank 0 on host " in text and "Stacks of its threads:" in text and "trainer.py" in text


def test_a_port_in_use_is_named(cluster: Cluster, work: Workspace, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        log = tmp_path / "job.log"
        job = cluster.submit(
            TRAIN, options=(f"--output={log}",), variables=variables(MASTER_PORT=str(port))
        )
        state = cluster.ended(job, 60, log)
    assert state["JobState"] == "FAILED"
    assert (
        f"error: node 0 of 1 on host {socket.gethostname()}: port {port} of localhost is in use by another program"
        in log.read_text()
    )


ENGINE = """#!{python}
import http.server, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / "engine.txt").write_text(" ".join(sys.argv[1:]))
time.sleep(1.0)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), type("Health", (http.server.BaseHTTPRequestHandler,),
    {{"do_GET": lambda self: (self.send_response(200), self.end_headers())}})).serve_forever()
"""
TRAINER = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "-c":
    exec(sys.argv[2], {{}}) if sys.argv.pop(0) else None
else:
    (pathlib.Path(__file__).parent / "trainer.json").write_text(json.dumps(sys.argv[1:]))
"""


def test_trainer_and_engines_on_nodes_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    """With stand-ins for both programs: who is started where, with which addresses, and that the
    engines end with the trainer."""
    programs = {}
    for name, text in (("engine", ENGINE), ("trainer", TRAINER)):
        programs[name] = tmp_path / name
        programs[name].write_text(text.format(python=sys.executable))
        programs[name].chmod(0o755)
    port, log = free_port(), tmp_path / "job.log"
    names = {
        "MODEL": "/models/small",
        "ENGINE_PORT": str(port),
        "PYTHON": str(programs["trainer"]),
        "ENGINE_PYTHON": str(programs["engine"]),
    }
    job = cluster.submit(
        SPLIT,
        "--lr",
        "1e-6",
        options=("--nodes=2", f"--output={log}"),
        variables=variables() | names | {"ENGINE_FLAGS": "--tp-size 2 --device cpu"},
    )
    state = cluster.ended(job, 60, log)
    assert state["JobState"] == "COMPLETED", log.read_text()
    nodes = state["NodeList"]
    assert "localhost" in nodes
    engine = (tmp_path / "engine.txt").read_text()
    assert (
        engine
        == f"-m sglang.launch_server --model-path /models/small --host 0.0.0.0 --port {port} --tp-size 2 --device cpu"
    )
    argv = json.loads((tmp_path / "trainer.json").read_text())
    last = cluster._run("scontrol", "show", "hostnames", nodes).split()[-1]
    assert argv[argv.index("train.py") + 1 :] == [
        "--lr", "1e-6", "--hf-checkpoint", "/models/small", "--rollout-engine", "sglang", "--rollout-external-engine-addrs", f"{last}:{port}",
    ]  # fmt: skip
    assert argv[argv.index("--nnodes") + 1] == "1"


@pytest.mark.skipif(not SGLANG.exists(), reason="no SGLang: make sglang-env")
def test_trainer_and_a_real_engine_on_nodes_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    """The split job with SGLang on the second node: weights over a process group between the nodes,
    log-probs that agree, and nothing that the job leaves behind."""
    demo, out, log = make_demo(tmp_path / "demo"), tmp_path / "run", tmp_path / "job.log"
    names = {
        "MODEL": str(demo / "model"),
        "ENGINE_PYTHON": str(ROOT / "scripts" / "sglang_cpu" / "python"),
        "PROCESSES_PER_NODE": "2",
    }
    engine = " ".join(
        command_line_of({**CPU_SETTINGS, "dtype": "float32", "max_running_requests": 16})
    )
    flags = [
        "--prompt-data", str(demo / "train.jsonl"), "--input-key", "messages", "--label-key", "answer", "--apply-chat-template",
        "--custom-rm-path", "scripts/demo_reward.py:score", "--rollout-max-response-len", "8", "--num-rollout", "3", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4", "--lr", "1e-3", "--tensor-model-parallel-size", "2", "--no-tensorboard", "--no-progress", "--no-plot",
        "--no-sglang-router", "--update-weight-transport", "broadcast", "--output-dir", str(out),
    ]  # fmt: skip
    job = cluster.submit(
        SPLIT,
        *flags,
        options=("--nodes=2", f"--output={log}"),
        variables=variables(
            ENGINE_PORT=str(free_port()), ENGINE_FLAGS=engine, SGLANG_ENV=str(SGLANG), **names
        ),
    )
    state = cluster.ended(job, 500, log)
    assert state["JobState"] == "COMPLETED", log.read_text()
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(
        row["rollout/failed_frac"] == 0 for row in rows
    )
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < 1e-4 for row in rows), (
        "the engine has the trainer's weights"
    )
    assert sum(row["train/grad_norm"] for row in rows) > 0

"""train.py against real SGLang servers: weights arrive however they travel and whatever the
trainer's layout, and a wrong one is caught."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.programs import Done, TrainServer
from tests.sglang.conftest import PYTHON, Servers, running, schedulers_below

EXACT = 1e-4  # largest difference between a log-prob of a server and the trainer's


def command_line(demo: Path, engines: Sequence[str], out: Path, *more: str) -> list[str]:
    return [
        "--hf-checkpoint", str(demo / "model"), "--prompt-data", str(demo / "train.jsonl"), "--input-key", "messages", "--label-key", "answer",
        "--apply-chat-template", "--rollout-shuffle", "--custom-rm-path", "scripts/demo_reward.py:score", "--rollout-max-response-len", "8",
        "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2", "--micro-batch-size", "16",
        # a gradient where a rollout's rewards happen to be equal, too
        "--lr", "1e-2", "--entropy-coef", "0.01",
        "--output-dir", str(out), "--no-tensorboard", "--no-progress", "--no-plot", "--rollout-engine", "sglang", "--sglang-python", PYTHON,
        *engines, *more,
    ]  # fmt: skip


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_the_servers_have_the_weights(done: Done, out: Path, engines: int) -> None:
    """In each of three rollouts, with other weights each time, trainer and servers agree on every
    token."""
    done.ok()
    found = rows(out)
    assert [row["rollout/weight_version_min"] for row in found] == [1, 2, 3]
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < EXACT for row in found)
    assert all(row["rollout/failed_frac"] == 0 and row["engine/ready"] == engines for row in found)
    assert found[0]["train/grad_norm"] > 0  # so that the second weights are others
    assert found[-1]["engine/weight_update_gb_per_s"] > 0


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor", "disk delta"])
@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"], ids=["tp2", "pp2"]
)
def test_every_way_to_update_weights(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path, transport: str, layout: str
) -> None:
    """Through a router, from trainers that are tensor- and pipeline-parallel. The servers' weights
    are noise before the first update, small buckets make the broadcast several messages, and after
    every update checksums and probes are compared."""
    transport, *mode = transport.split()
    line = command_line(
        demo, servers.flags, tmp_path / "out", layout, "2", "--update-weight-transport", transport, "--update-weight-buffer-size", "40000",
        "--check-weight-update-equal", "--update-weight-mode", *(mode or ["full"]),
    )  # fmt: skip
    done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=240)
    assert_the_servers_have_the_weights(done, tmp_path / "out", engines=2)


def test_a_wrong_weight_is_caught(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """The negative control: one weight is changed on its way."""
    line = command_line(demo, servers.flags_without_router, tmp_path / "out")
    done = programs.train(
        line, tmp_path / "run", ranks=1, timeout_s=240, hook="tests.sglang.spoil:one_weight"
    )
    assert "does not have the weights of version 1: its log-probs of" in done.error()


def test_servers_that_the_run_starts_and_one_that_is_killed(
    demo: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """Servers and a router of the run's own. One is killed while it works on requests: every sample
    still arrives, the server is started again and gets weights before requests, and at the end
    nothing is left running."""
    out = tmp_path / "out"
    line = command_line(
        demo, [], out, "--rollout-num-gpus", "2", "--num-rollout", "8", "--rollout-max-response-len", "48", "--update-weight-transport", "disk",
        "--sglang-max-running-requests", "16", "--rollout-health-check-interval", "1",
    )  # fmt: skip
    killed: list[int] = []
    over = threading.Event()
    thread = threading.Thread(target=kill_a_busy_server, args=(programs.pid, out, killed, over))
    thread.start()
    try:
        done = programs.train(line, tmp_path / "run", ranks=1, timeout_s=600).ok()
    finally:
        over.set()
        thread.join()
    found = rows(out)
    assert killed and found[-1]["engine/evictions"] >= 1, done.out[-2000:]
    assert all(row["rollout/failed_frac"] == 0 for row in found)
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < EXACT for row in found)
    wait_until_gone(out)


def kill_a_busy_server(family: int, out: Path, killed: list[int], over: threading.Event) -> None:
    """In a thread: one of the servers that the process `family` started, in a rollout after the
    first."""
    while not over.wait(0.02):
        if not (out / "metrics.jsonl").exists():
            continue
        with contextlib.suppress(httpx.HTTPError, psutil.Error):  # processes come and go
            for pid in schedulers_below(family):
                words = psutil.Process(psutil.Process(pid).ppid()).cmdline()
                if running(f"http://127.0.0.1:{words[words.index('--port') + 1]}"):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return


def writes_to(process: Path, inode: int) -> bool:
    try:
        return (process / "fd" / "1").stat().st_ino == inode
    except OSError:
        return False


def wait_until_gone(out: Path) -> None:
    deadline = time.monotonic() + 20
    inodes = {log.stat().st_ino for log in (out / "engines").iterdir()}
    while left := [
        p.name
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and any(writes_to(p, i) for i in inodes)
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def test_scores_of_given_tokens(servers: Servers) -> None:
    """The log-probs of a prompt's own tokens, which a teacher is asked for."""
    from slime_like.sglang.protocol import read_scores, scoring_body

    tokens = [7, 20, 30, 40, 8, 21]
    answer = httpx.post(
        f"{servers.urls[0]}/generate", json=scoring_body(tokens, "scores-1"), timeout=60
    ).content
    scores = read_scores(answer, tokens, "scores-1")
    assert len(scores) == 5 and all(-20 < score < 0 for score in scores)

"""train.py against real vLLM servers: weights arrive whatever the trainer's layout, a wrong one is
caught, agents are served, and a server that is killed comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.samples.episodes import complete
from tests.e2e.programs import TrainServer
from tests.e2e.test_agent_packages import AGENT, check_histories
from tests.e2e.test_agents import prompts
from tests.sglang.test_real_servers import (
    EXACT,
    assert_the_servers_have_the_weights,
    rows,
    wait_until_gone,
)
from tests.vllm.conftest import PYTHON


def command_line(demo: Path, engines: Sequence[str], out: Path, *more: str) -> list[str]:
    return [
        "--hf-checkpoint", str(demo / "model"), "--prompt-data", str(demo / "train.jsonl"), "--input-key", "messages", "--label-key", "answer",
        "--apply-chat-template", "--rollout-shuffle", "--custom-rm-path", "scripts/demo_reward.py:score", "--rollout-max-response-len", "8",
        "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2", "--micro-batch-size", "16",
        "--lr", "1e-2", "--entropy-coef", "0.01", "--output-dir", str(out), "--no-tensorboard", "--no-progress", "--no-plot",
        "--rollout-engine", "vllm", "--vllm-python", PYTHON, *engines, *more,
    ]  # fmt: skip


def external(addresses: Sequence[str]) -> list[str]:
    return ["--rollout-external-engine-addrs", *addresses]


@pytest.mark.parametrize("transport", ["broadcast", "disk delta"])
def test_weights_of_a_tensor_parallel_trainer(
    wide_demo: Path, servers: list[str], programs: TrainServer, tmp_path: Path, transport: str
) -> None:
    transport, *mode = transport.split()
    line = command_line(
        wide_demo, external(servers), tmp_path / "out", "--tensor-model-parallel-size", "2", "--update-weight-transport", transport,
        "--update-weight-buffer-size", "40000", "--check-weight-update-equal", "--update-weight-mode", *(mode or ["full"]),
    )  # fmt: skip
    done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=400)
    assert_the_servers_have_the_weights(done, tmp_path / "out", engines=2)


def test_experts(
    expert_demo: Path, expert_server: list[str], programs: TrainServer, tmp_path: Path
) -> None:
    line = command_line(
        expert_demo, external(expert_server), tmp_path / "out", "--expert-model-parallel-size", "2", "--moe-router-dtype", "fp32",
        "--micro-batch-size", "8",
        "--check-weight-update-equal",
    )  # fmt: skip
    done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=400)
    assert_the_servers_have_the_weights(done, tmp_path / "out", engines=1)


def test_a_wrong_weight_is_caught(
    wide_demo: Path, servers: list[str], programs: TrainServer, tmp_path: Path
) -> None:
    """The negative control: one weight is changed on its way."""
    line = command_line(wide_demo, external(servers), tmp_path / "out")
    done = programs.train(
        line, tmp_path / "run", ranks=1, timeout_s=400, hook="tests.sglang.spoil:one_weight"
    )
    assert "does not have the weights of version 1: its log-probs of" in done.error()


def test_a_server_of_another_dtype_is_refused(
    wide_demo: Path, servers: list[str], programs: TrainServer, tmp_path: Path
) -> None:
    line = command_line(wide_demo, external(servers), tmp_path / "out", "--bf16")
    done = programs.train(line, tmp_path / "run", ranks=1, timeout_s=400)
    assert "--dtype is float32, must be bfloat16" in done.error()


def test_unmodified_packages_train_with_servers(
    wide_demo: Path, servers: list[str], programs: TrainServer, tmp_path: Path
) -> None:
    """Agents of two turns, the second of which continues the first one's tokens."""
    for package in ("openai", "anthropic", "pydantic_ai"):
        pytest.importorskip(package, reason=f"pip install {package}")
    (tmp_path / "agent.py").write_text(AGENT)
    out, recorded = tmp_path / "out", tmp_path / "r_{rollout_id}"
    line = [
        "--hf-checkpoint", str(wide_demo / "model"), "--prompt-data", str(prompts(tmp_path)), "--input-key", "text", "--label-key", "answer",
        "--agent-function-path", f"{tmp_path}/agent.py:play", "--rm-type", "zero", "--rollout-max-response-len", "64",
        "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "3", "--num-steps-per-rollout", "1",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512", "--lr", "1e-2", "--output-dir", str(out), "--no-tensorboard",
        "--no-progress", "--no-plot", "--save-debug-rollout-data", str(recorded), "--rollout-engine", "vllm", *external(servers),
    ]  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=1, timeout_s=400).ok()
    found = rows(out)
    for step, row in enumerate(found):
        assert row["agent/lost"] == row["rollout/failed_frac"] == 0
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < EXACT
        samples = [s for g in load_rollout(str(recorded), step) for s in complete(g.samples)]
        check_histories(samples)
    assert len(found) == 2 and found[0]["train/grad_norm"] > 0


def test_servers_that_the_run_starts_and_one_that_is_killed(
    wide_demo: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """One is killed in the first update or rollout: the other takes its work, every sample arrives,
    the log-probs are right, and at the end nothing is left running."""
    out = tmp_path / "out"
    line = command_line(
        wide_demo, [], out, "--rollout-num-gpus", "2", "--num-rollout", "6", "--rollout-max-response-len", "48", "--update-weight-transport",
        "disk", "--vllm-max-num-seqs", "16", "--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "60",
    )  # fmt: skip
    killed: list[int] = []
    over = threading.Event()
    thread = threading.Thread(target=kill_a_server, args=(programs.pid, out, killed, over))
    thread.start()
    try:
        programs.train(line, tmp_path / "run", ranks=1, timeout_s=850).ok()
    finally:
        over.set()
        thread.join()
    found = rows(out)
    assert killed and found[-1]["engine/evictions"] >= 1
    assert all(row["rollout/failed_frac"] == 0 for row in found)
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < EXACT for row in found)
    wait_until_gone(out)


def kill_a_server(family: int, out: Path, killed: list[int], over: threading.Event) -> None:
    """In a thread: the worker of one of the servers that the process `family` started, once the run
    has its file of metrics, which is when its first rollout begins."""
    while not over.wait(0.05):
        if not (out / "metrics.jsonl").exists():
            continue
        for child in psutil.Process(family).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # processes come and go
                if "".join(child.cmdline()[:1]).startswith("VLLM::Worker"):
                    os.kill(child.pid, signal.SIGKILL)
                    killed.append(child.pid)
                    return

"""Agents in front of real servers: what the vendors' packages and an agent package were answered is
what is trained on, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.sample_index import complete
from tests.e2e.programs import TrainServer
from tests.e2e.test_agent_packages import AGENT, check_histories
from tests.e2e.test_agents import prompts
from tests.sglang.conftest import PYTHON, Servers
from tests.sglang.test_real_servers import EXACT, rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_unmodified_packages_train_with_servers(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path, ranks: int
) -> None:
    """Two turns each, the second of which continues the first one's tokens; trainer and servers agree
    on every token, under other weights in each rollout."""
    for package in ("openai", "anthropic", "pydantic_ai"):
        pytest.importorskip(package, reason=f"pip install {package}")
    (tmp_path / "agent.py").write_text(AGENT)
    out, recorded = tmp_path / "out", tmp_path / "r_{rollout_id}"
    line = [
        "--hf-checkpoint", str(demo / "model"), "--prompt-data", str(prompts(tmp_path)), "--input-key", "text", "--label-key", "answer",
        "--agent-function-path", f"{tmp_path}/agent.py:play", "--rm-type", "zero", "--rollout-max-response-len", "64",
        "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "3", "--num-steps-per-rollout", "1",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512", "--lr", "1e-2", "--output-dir", str(out), "--no-tensorboard",
        "--no-progress", "--no-plot", "--save-debug-rollout-data", str(recorded), "--rollout-engine", "sglang", "--sglang-python", PYTHON,
        *servers.flags,
    ]  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=ranks, timeout_s=300).ok()
    found: list[dict[str, Any]] = rows(out)
    for step, row in enumerate(found):
        assert row["agent/lost"] == row["rollout/failed_frac"] == 0
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < EXACT
        samples = [s for g in load_rollout(str(recorded), step) for s in complete(g.samples)]
        assert {s.reward for s in samples} == {0.1, 1.1, 2.1}  # one of each package
        check_histories(samples)
        for sample in samples:
            trained = {v for v, m in zip(sample.weight_versions, sample.loss_mask.tolist()) if m}
            assert trained == {step + 1}
    assert len(found) == 3 and found[0]["train/grad_norm"] > 0

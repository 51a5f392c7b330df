"""Agents in front of real servers: what the vendors' packages and an agent package were answered is
what is trained on, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.rollout.recording import load_rollout
from slime_like.samples.episodes import complete
from slime_like.types import Sample
from tests.e2e.programs import TrainServer
from tests.e2e.test_agent_packages import AGENT, check_histories
from tests.e2e.test_agents import BRANCHING, prompts
from tests.sglang.conftest import PYTHON, Servers, slowed
from tests.sglang.test_ahead import assert_versions_tell_the_weights
from tests.sglang.test_real_servers import EXACT, rows
from tests.sglang.test_stragglers import STEP_S


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


def agent_line(
    demo: Path, folder: Path, servers: Servers, agent: str, *more: object, length: int
) -> list[str]:
    (folder / "agent.py").write_text(agent)
    return [
        "--hf-checkpoint", str(demo / "model"), "--prompt-data", str(prompts(folder)), "--input-key", "text", "--label-key", "answer",
        "--agent-function-path", f"{folder}/agent.py:play", "--rm-type", "zero", "--rollout-max-response-len", str(length),
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1024", "--lr", "1e-2", "--output-dir", str(folder / "out"), "--no-tensorboard",
        "--no-progress", "--no-plot", "--save-debug-rollout-data", str(folder / "r_{rollout_id}"), "--rollout-engine", "sglang",
        "--sglang-python", PYTHON, *servers.flags, *map(str, more),
    ]  # fmt: skip


def test_routes_of_servers_are_replayed_over_the_tree(
    expert_demo: Path, expert_servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Two turns that fork, whose beginnings a server has in its cache: the trainer's routers choose
    what the servers' chose at every place, in two ranks that share the experts."""
    line = agent_line(
        expert_demo, tmp_path, expert_servers, BRANCHING, "--num-rollout", 3, "--rollout-batch-size", 4, "--n-samples-per-prompt", 3,
        "--num-steps-per-rollout", 2, "--use-rollout-routing-replay", "--moe-router-dtype", "fp32", "--expert-model-parallel-size", 2,
        length=64,
    )  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=2, timeout_s=300).ok()
    found: list[dict[str, Any]] = rows(tmp_path / "out")
    assert len(found) == 3
    for step, row in enumerate(found):
        assert row["agent/lost"] == 0 and row["agent/forks"] > 0
        assert row["rollout/moe_routing_disagreement"] == 0
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < EXACT
        for sample in recorded(tmp_path, step):
            for sequence in (sample, *sample.branches):
                assert sequence.routed_experts is not None
                assert (
                    int(sequence.routed_experts[:-1].min())
                    >= 0
                    > int(sequence.routed_experts[-1].max())
                )
    assert any(row["train/moe_replay_disagreement"] > 0 for row in found)


LONG = """
async def play(task):
    messages = [{"role": "user", "content": task.prompt}]
    for turn in range(1 + task.seed % 4):
        answer = (await task.chat(messages, max_tokens=24))["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "again"}]
    return len(answer["content"]) / 9
"""


def recorded(folder: Path, rollout: int) -> list[Sample]:
    groups = load_rollout(str(folder / "r_{rollout_id}"), rollout)
    return [s for g in groups for s in complete(g.samples)]


def networks_of(kept: Path, versions: int) -> dict[int, torch.nn.Module]:
    """The weights that the servers were sent, by their version."""
    return {
        version: AutoModelForCausalLM.from_pretrained(
            kept / f"version-{version}", dtype=torch.float32
        )
        for version in range(1, versions + 1)
    }


def test_agents_wait_while_real_servers_get_new_weights(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Of eight groups of episodes the first three that end are taken; the servers abort what the
    others are answered, in the middle, and continue under the next weights. Every token's log-prob is
    that of the weights that its version names."""
    kept, left = tmp_path / "weights", tmp_path / "left"
    line = agent_line(
        demo, tmp_path, servers, LONG, "--num-rollout", 3, "--rollout-batch-size", 3, "--n-samples-per-prompt", 2, "--num-steps-per-rollout", 1,
        "--over-sampling-batch-size", 8, "--partial-rollout", "--tis-ratio-type", "token", "--update-weight-transport", "disk",
        "--update-weight-disk-dir", kept, "--update-weight-disk-keep-files", length=150,
    )  # fmt: skip
    hook = f"tests.sglang.spoil:count_what_is_left {left} {' '.join(servers.urls)}"
    with slowed(servers, STEP_S):
        programs.train(line, tmp_path / "run", ranks=2, timeout_s=300, hook=hook).ok()
    assert [json.loads(line) for line in left.read_text().splitlines()] == [[0, 0]] * 3
    found = rows(tmp_path / "out")
    assert all(row["agent/lost"] == row["agent/restarted"] == 0 for row in found)
    assert sum(row["rollout/groups_resumed"] for row in found) > 0
    samples = [s for step in range(3) for s in recorded(tmp_path, step)]
    assert len({s.sample_id for s in samples}) == len(samples) == 18
    networks = networks_of(kept, 3)
    mixed = 0
    for sample in samples:
        written = sample.loss_mask
        versions = torch.tensor(sample.weight_versions)[written]
        assert versions.tolist() == sorted(versions.tolist())
        mixed += len(set(versions.tolist())) > 1
        assert_versions_tell_the_weights(sample, networks)
    assert mixed, "nobody continued with newer weights"


def test_agents_ahead_of_real_servers(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Asynchronous: weights change under the answers, between two tokens, and every token's log-prob
    is that of the weights that its version names, at most one behind."""
    kept = tmp_path / "weights"
    line = agent_line(
        demo, tmp_path, servers, LONG, "--num-rollout", 4, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--num-steps-per-rollout", 1,
        "--async-rollout", "--tis-ratio-type", "token", "--update-weight-transport", "disk", "--update-weight-disk-dir", kept,
        "--update-weight-disk-keep-files", length=150,
    )  # fmt: skip
    with slowed(servers, STEP_S):
        programs.train(line, tmp_path / "run", ranks=1, timeout_s=300).ok()
    networks = networks_of(kept, 4)
    mixed = 0
    for step, row in enumerate(rows(tmp_path / "out")):
        assert row["agent/lost"] == row["rollout/failed_frac"] == 0
        for sample in recorded(tmp_path, step):
            versions = torch.tensor(sample.weight_versions)[sample.loss_mask].tolist()
            assert {step + 1 - version for version in versions} <= {0, 1}
            mixed += len(set(versions)) > 1
            assert_versions_tell_the_weights(sample, networks)
    assert mixed, "no weights came within an episode"

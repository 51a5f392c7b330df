"""train.py on real servers whose responses take long: a rollout with enough groups, or out of time,
has the servers abort the rest."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slime_like.types import Sample, SampleStatus
from tests.e2e.programs import TrainServer
from tests.sglang.conftest import Servers, slowed
from tests.sglang.test_ahead import assert_versions_tell_the_weights, samples
from tests.sglang.test_real_servers import EXACT, command_line, rows

STEP_S = 0.04  # of every token, so that the longest response takes 6 s
LONGEST = 150
SETTINGS = (
    "--rollout-batch-size",
    "4",
    "--n-samples-per-prompt",
    "2",
    "--micro-batch-size",
    "4",
    "--rollout-max-response-len",
    str(LONGEST),
)


def test_stragglers_are_aborted_at_the_servers_and_continue_in_the_next_rollout(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """Over-sampling through a router: of ten groups the first four that end are taken, and the rest
    continues under the next weights. All weights that were sent are kept, and every token's log-prob
    is that of the ones that its version names."""
    out, kept, left = tmp_path / "out", tmp_path / "weights", tmp_path / "left"
    line = command_line(
        demo, servers.flags, out, *SETTINGS, "--tensor-model-parallel-size", "2", "--over-sampling-batch-size", "10", "--partial-rollout", "--tis-ratio-type", "token",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", str(kept), "--update-weight-disk-keep-files",
        "--save-debug-rollout-data", str(out / "r_{rollout_id}"),
    )  # fmt: skip
    hook = f"tests.sglang.spoil:count_what_is_left {left} {' '.join(servers.urls)}"
    with slowed(servers, STEP_S):
        programs.train(line, tmp_path / "run", ranks=2, timeout_s=240, hook=hook).ok()
    assert [json.loads(line) for line in left.read_text().splitlines()] == [[0, 0]] * 3, (
        "requests are left at the servers"
    )
    found = rows(out)
    assert all(row["rollout/groups_kept"] == 4 and row["rollout/failed_frac"] == 0 for row in found)
    assert found[0]["rollout/groups_drawn"] == 10 and found[0]["rollout/groups_waiting"] >= 1
    assert_late_ones_go_on(found, samples(out, 1) + samples(out, 2), kept)


def assert_late_ones_go_on(found: list[dict[str, float]], later: list[Sample], kept: Path) -> None:
    late = [sample for sample in later if "start_rollout_id" in sample.metadata]
    assert late and found[1]["rollout/groups_resumed"] >= 1, (
        "nothing was under way when there was enough"
    )
    assert any(len(set(sample.weight_versions)) > 1 for sample in late), (
        "nobody continued with newer weights"
    )
    networks: dict[int, torch.nn.Module] = {
        version: AutoModelForCausalLM.from_pretrained(
            kept / f"version-{version}", dtype=torch.float32
        )
        for version in (1, 2, 3)
    }
    for sample in later:
        assert len(sample.weight_versions) == sample.response_length and list(
            sample.weight_versions
        ) == sorted(sample.weight_versions)
        assert sample.weight_versions[0] >= sample.metadata.get("start_rollout_id", 0) + 1
        assert_versions_tell_the_weights(sample, networks)


def test_a_rollout_out_of_time_ends_its_responses_at_the_servers(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """They are graded and trained on as they are; all groups that are asked for are there."""
    out, left = tmp_path / "out", tmp_path / "left"
    line = command_line(
        demo, servers.flags, out, *SETTINGS, "--num-rollout", "2", "--rollout-time-limit-s", "3", "--save-debug-rollout-data", str(out / "r_{rollout_id}")
    )  # fmt: skip
    hook = f"tests.sglang.spoil:count_what_is_left {left} {' '.join(servers.urls)}"
    with slowed(servers, STEP_S):
        programs.train(line, tmp_path / "run", ranks=1, timeout_s=240, hook=hook).ok()
    assert [json.loads(line) for line in left.read_text().splitlines()] == [[0, 0]] * 2, (
        "requests are left at the servers"
    )
    first, second = rows(out)
    for rollout, row in enumerate((first, second)):
        assert row["rollout/groups_kept"] == 4 and row["rollout/failed_frac"] == 0
        assert row["rollout/train_rollout_log_prob_diff_max"] < EXACT
        assert len(samples(out, rollout)) == 8 and all(
            sample.reward is not None for sample in samples(out, rollout)
        )
    cut = [s for s in samples(out, 0) + samples(out, 1) if s.status is SampleStatus.TRUNCATED]
    assert cut and all(0 < s.response_length < LONGEST and s.loss_mask.all() for s in cut)
    assert first["rollout/groups_late"] + second["rollout/groups_late"] == len(
        {s.group_id for s in cut}
    )

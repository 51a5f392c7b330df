"""Whole runs against a server some of whose responses take long: a rollout with enough groups, or
without time, does not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.types import Sample, SampleStatus
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.fake_sglang import FakeServer

TOKEN_S = 8.0  # of a slow response, whose eight tokens take a minute
LONGEST_S = 30.0  # a rollout that waits for none, on a machine with other work


def slow_first(count: int) -> Callable[[Any], float]:
    """The responses to the first prompts; what continues after an abort is fast."""
    seen: dict[tuple[int, ...], int] = {}
    return lambda body: (
        TOKEN_S if seen.setdefault(tuple(body["input_ids"]), len(seen)) < count else 0.0
    )


def served(work: Workspace, server: FakeServer, out: Path, **changes: Any) -> list[str]:
    flags = dict(rollout_engine="sglang", rollout_external_engine_addrs=server.address, no_sglang_router="", update_weight_transport="disk",
                 n_samples_per_prompt=2, num_rollout=3, micro_batch_size=2, save_debug_rollout_data=out / "r_{rollout_id}", rollout_temperature=0.8)  # fmt: skip
    return work.flags(out, **flags | changes)


def samples_of(out: Path, rollout: int) -> list[Sample]:
    return [
        sample
        for group in load_rollout(str(out / "r_{rollout_id}"), rollout)
        for sample in group.samples
    ]


def test_stragglers_are_aborted_and_continue_in_the_next_rollout(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Over-sampling: two of six groups are slow; four are enough. What the slow ones have is kept,
    with the version that wrote it."""
    out = tmp_path / "out"
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = slow_first(2)
        flags = dict(
            over_sampling_batch_size=6,
            partial_rollout="",
            tis_ratio_type="token",
            token_tis_ratio_clip_high=2.0,
        )
        server.train(served(work, fake, out, **flags), tmp_path / "log", ranks=2).ok()
        assert fake.count("/abort_request") >= 4
    first, *others = rows_of(out)
    assert first["perf/generate_s"] < LONGEST_S
    assert (
        first["rollout/groups_drawn"],
        first["rollout/groups_kept"],
        first["rollout/groups_waiting"],
    ) == (6, 4, 2)
    assert max(row["rollout/staleness_max"] for row in others) >= 1
    # which four of the next six groups are the first is the machine's choice
    late = [s for i in (1, 2) for s in samples_of(out, i) if "start_rollout_id" in s.metadata]
    late = [s for s in late if s.metadata["start_rollout_id"] == 0]
    assert len({s.group_id for s in late}) == 2
    for sample in late:
        versions = list(sample.weight_versions)
        assert len(set(versions)) > 1 and versions == sorted(versions), "the old part comes first"
    for row in others:
        assert row["rollout/failed_frac"] == 0
        assert row["rollout/train_rollout_log_prob_diff_max"] < 1e-4, (
            "tokens of the newest weights have the trainer's log-probs"
        )


@pytest.mark.extended
def test_a_rollout_out_of_time_takes_what_there_is(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = slow_first(1)
        server.train(
            served(work, fake, out, rollout_time_limit_s=4, num_rollout=2), tmp_path / "log"
        ).ok()
    first, second = rows_of(out)
    assert first["perf/generate_s"] < LONGEST_S
    assert first["rollout/groups_late"] >= 1 and first["rollout/groups_kept"] == 4
    cut = [
        s
        for s in samples_of(out, 0)
        if s.status is SampleStatus.TRUNCATED and s.response_length < 8
    ]
    assert (
        len(cut) == 2
        and len({s.group_id for s in cut}) == 1
        and all(s.response_length for s in cut)
    )
    assert all(s.reward is not None and s.loss_mask.all() for s in cut), (
        "they are graded, and trained on"
    )
    assert second["rollout/groups_late"] == 0 or second["perf/generate_s"] >= 4

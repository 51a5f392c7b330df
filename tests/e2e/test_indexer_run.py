"""A run with sparse attention whose trainer attends to the keys that the rollout engine selected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.fake_sglang import fake_servers

REPLAY = {"use_rollout_indexer_replay": "", "lr": 5e-3, "micro_batch_size": None}
BUDGET = {"use_dynamic_batch_size": "", "max_tokens_per_gpu": 96}
CP2 = {"context_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of GLM-5.2's kind: the second layer takes the choice of the first."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model("GLM-5.2", folder, index_topk_freq=2, index_skip_topk_offset=1)
    return folder


def with_other_keys(sample: Sample) -> Sample:
    """Its first keys in place of those that were selected."""
    keys = sample.indexer_topk
    assert keys is not None and len(keys) > 3
    first = torch.arange(keys.size(2), dtype=keys.dtype).expand_as(keys)
    return dataclasses.replace(sample, indexer_topk=first.where(keys >= 0, keys))


@pytest.mark.slow
def test_the_engines_choice_is_replayed(
    server: TrainServer, work: Workspace, model: Path, tmp_path: Path
) -> None:
    """At the same weights the trainer selects what the engine selected, key by key; a recorded
    rollout with other keys is trained on those."""
    full_run, again = tmp_path / "whole", tmp_path / "again"
    record = str(tmp_path / "rollout_{rollout_id}")
    changes = {**REPLAY, **BUDGET, **CP2, "hf_checkpoint": model, "num_steps_per_rollout": 2}
    argv = work.flags(full_run, save_debug_rollout_data=record, num_rollout=2, **changes)
    server.train(argv, tmp_path / "log1", ranks=2).ok()
    for row in rows_of(full_run):
        assert row["rollout/indexer_disagreement"] == 0
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-5
    assert any(row["train/indexer_replay_disagreement"] > 0 for row in rows_of(full_run)), (
        "no update changed what an indexer would select"
    )
    groups = [
        SampleGroup(g.group_id, tuple(map(with_other_keys, complete(g.samples))))
        for g in load_rollout(record, 0)
    ]
    save_rollout(record, 0, groups)
    changes |= {"num_rollout": 1, "load_debug_rollout_data": record, "debug_train_only": ""}
    server.train(work.flags(again, **changes), tmp_path / "log2", ranks=2).ok()
    (row,) = rows_of(again)
    assert row["rollout/indexer_disagreement"] > 0.1
    assert row["rollout/train_rollout_log_prob_diff_mean"] > 1e-3


@pytest.mark.extended
def test_the_choice_of_servers_is_replayed(
    server: TrainServer, work: Workspace, model: Path, tmp_path: Path
) -> None:
    """It comes with the answers, whole and in slices."""
    for name, more in (("whole", {}), ("slices", {"rollout_slice_len": 3, "partial_rollout": ""})):
        out = tmp_path / name
        with fake_servers(str(model), 1) as (fake,):
            fake.info["enable_return_indexer_topk"] = True
            changes = {
                **{"rollout_engine": "sglang", "no_sglang_router": "", "num_rollout": 2},
                **{"update_weight_transport": "tensor", "update_weight_buffer_size": 10000},
            }
            argv = work.flags(
                out, hf_checkpoint=model, **REPLAY, **BUDGET, **changes, **more,
                rollout_external_engine_addrs=fake.address,
            )  # fmt: skip
            server.train(argv, tmp_path / f"log-{name}", ranks=2).ok()
        for row in rows_of(out):
            assert row["rollout/indexer_disagreement"] == 0
            assert row["rollout/train_rollout_log_prob_diff_max"] < 1e-4

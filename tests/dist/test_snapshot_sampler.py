"""The sampler of several ranks: a failure on one of them is an error on all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from arguments.schema import ModelConfig
from benchmarks.parity.ranks import run_ranks
from slime_like.distributed.collectives import gather
from slime_like.engines.base import GenerateOutput, GenerateRequest
from slime_like.tinker.sampler import SampleCommand, SnapshotSampler


class Diverged:
    """An engine whose logits are not finite; see `decoder`."""

    def generate(self, requests: Sequence[GenerateRequest], params: Any) -> list[GenerateOutput]:
        return [GenerateOutput(each.sample_id, (), (), "abort", ()) for each in requests]

    def prompt_log_probs(self, *arguments: Any) -> list[tuple[float, ...]]:
        return []


class SamplerOfDiverged(SnapshotSampler):
    def _engine(self, folder: str) -> Any:
        return Diverged()

    def _hold_adapters(self, engine: Any, used: Sequence[str]) -> None:
        assert not used


def sample_one(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """The error of a sample that only rank 0 has a place for, and what is gathered next."""
    layout: Any = SimpleNamespace(rank=rank, world_size=world_size)
    sampler = SamplerOfDiverged(
        ModelConfig(hf_checkpoint="/m"),
        layout,
        None,
        max_engines=1,
        max_adapters=1,
        local_batch_size=None,
        dtype=None,  # type: ignore[arg-type]
    )
    sampling = {"max_new_tokens": 4, "stop": [], "stop_token_ids": []}
    command = SampleCommand.from_plain(
        sampling, [np.array([1], "<i4").tobytes()], counts=[1], seeds=[1]
    )
    try:
        sampler.sample("/m", command)
    except ValueError as error:
        return [str(error), *gather(f"from {rank}")]
    return []


def test_weights_that_diverged_leave_no_rank_behind(tmp_path: Path) -> None:
    """Where it waits for the others, NCCL ends the server for all clients."""
    both = run_ranks("tests.dist.test_snapshot_sampler:sample_one", 2, tmp_path, {}, timeout_s=60)
    message = "the model's log-probs are not finite: its weights are corrupt"
    assert both == [[message, "from 0", "from 1"]] * 2

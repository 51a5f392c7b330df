"""Folders of runs, for tests of the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from slime_like.metrics.logger import MetricsLogger
from slime_like.report.alerts import alerts
from slime_like.report.read import read_run
from slime_like.rollout.recording import (
    save_rollout,
    save_token_texts,
    save_token_values,
)
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!--"


class Characters:
    """A tokenizer of one token a character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def sample(group: int, number: int, response: str, reward: float) -> Sample:
    prompt = "say it:"
    tokens = torch.tensor([ord(c) for c in prompt + response])
    length = len(response)
    return Sample(
        group_id=group,
        sample_id=number,
        tokens=tokens,
        response_length=length,
        loss_mask=torch.tensor([i != 1 for i in range(length)]),
        rollout_log_probs=torch.linspace(-2.0, -0.5, length),
        reward=reward,
        status=SampleStatus.COMPLETED,
        weight_versions=tuple(1 + i // 3 for i in range(length)),
        text=prompt,
        response=response,
        label="it",
        metadata={"turns": [{"tool": "<b>search</b>"}]},
    )


def write_run(folder: Path, *, rollouts: int = 2, wanted: int | None = None) -> Path:
    """Metrics and recorded rollouts, by the code that a run writes them with."""
    template = str(folder / "rollouts/{rollout_id}")
    with MetricsLogger(folder) as logger:
        for step in range(1, rollouts + 1):
            logger.log(step, {"rollout/reward_mean": 0.1 * step, "perf/step_s": 1.0})
    for rollout in range(rollouts):
        first = 10 * rollout
        samples = (
            sample(first, first, HOSTILE, 1.0),
            sample(first, first + 1, "wrong\nline", math.nan if rollout else 0.0),
        )
        groups = [SampleGroup(first, samples)]
        save_rollout(template, rollout, groups)
        save_token_texts(template, rollout, groups, Characters())
        for rank, each in enumerate(samples):
            size = each.response_length
            old = each.rollout_log_probs + 0.25
            values = {
                "advantages": torch.full((size,), 1.0 - 2 * rank),
                "old_log_probs": old,
                "ref_log_probs": old - torch.linspace(0, 1, size),
                "entropy": torch.rand(size),
            }
            save_token_values(template, rollout, rank, {str(each.sample_id): values})
    record = {"config": {"--num-rollout": wanted or rollouts, "--lr": 1e-3}, "changed": ["--lr"]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def run_with(folder: Path, rows: list[dict[str, float]], **record: Any) -> list[dict[str, str]]:
    with MetricsLogger(folder) as logger:
        for step, row in enumerate(rows, start=1):
            logger.log(step, row)
    (folder / "run.json").write_text(json.dumps(record))
    return alerts(read_run(folder))

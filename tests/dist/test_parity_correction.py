"""Corrections and token advantages through train.py: two data-parallel ranks give the numbers of
one process.

The recorded rollouts of benchmarks/parity_table.py come from another sampler, so that every mask of
the correction rejects something.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parity_table import (
    LAYOUTS,
    LIMIT,
    ONE_PROCESS,
    compare,
    make_model,
    make_rollouts,
    run_layout,
)

CORRECTION = (
    "--no-use-rollout-logprobs --tis-ratio-type token --token-tis-ratio-clip-high 1.2 --outlier-token-is-threshold-high 4.5 "
    "--token-mask-is-threshold-low 0.4 --token-mask-is-threshold-high 2.5 --sequence-mask-metric geometric --geo-mask-low 0.8 "
    "--geo-mask-high 1.15 --m2po-threshold 0.08"
)
REWARD_KL = "--no-use-kl-loss --kl-loss-coef 0 --kl-coef 0.1 --kl-ctrl-type adaptive --kl-target 0.01 --kl-horizon 100"
ESTIMATOR = "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.99 --policy-loss-type ppo"


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=3)
    make_model(tmp_path / "ref", seed=4)
    make_rollouts(str(tmp_path / "rollout_{rollout_id}"))
    flags = f"{CORRECTION} {REWARD_KL} {ESTIMATOR}".split()
    one, two = (run_layout(name, LAYOUTS[name], tmp_path, flags) for name in (ONE_PROCESS, "DP2"))
    assert min(one.grad_norms) > 1e-3, "a vanishing gradient would agree with anything"
    row = compare("DP2", one, two)
    assert row.holds, f"{row} exceeds {LIMIT:g}"
    logs = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("1_process", "DP2")
    ]
    for name in (
        "token_mask_ratio",
        "geo_sequence_mask_masked_ratio",
        "m2po_mask_ratio",
        "tis_token_clip_high_ratio",
    ):
        assert any(0 < r[f"train/{name}"] < 1 for r in logs[0]), (
            f"{name}: nothing was rejected, so nothing is shown"
        )
    for a, b in zip(*logs):
        for name in (
            n
            for n in a
            if n.startswith(("train/is_ratio", "rollout/kl"))
            or n.endswith(("mask_ratio", "masked_ratio", "_diff_std"))
        ):
            assert abs(a[name] - b[name]) <= 1e-5 * max(1.0, abs(a[name])), name
    coefficients = [r["rollout/kl_coef"] for r in logs[0]]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == len(coefficients), (
        "the controller moves it after every rollout"
    )

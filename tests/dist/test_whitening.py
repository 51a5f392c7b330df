"""Whitening, the KL in the reward and M2PO over data-parallel ranks: two ranks give the numbers of
one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks
from slime_like.advantages import AdvantageSettings, Outcomes, estimate_advantages
from slime_like.losses.off_policy import off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig

LENGTHS = (5, 9, 1, 7, 3, 12, 4, 2)
SETTINGS = {
    "reinforce_plus_plus": AdvantageSettings(
        "reinforce_plus_plus", normalize=True, gamma=0.9, kl_coef=0.2
    ),
    "reinforce_plus_plus_baseline": AdvantageSettings(
        "reinforce_plus_plus_baseline", normalize=True, kl_coef=0.2
    ),
    "grpo": AdvantageSettings("grpo", normalize=True, kl_coef=0.2),
    "rloo": AdvantageSettings("rloo", kl_coef=0.2),
    "otb": AdvantageSettings("otb", gamma=0.9, kl_coef=0.2),
    "grpo_token": AdvantageSettings("grpo_token", gamma=0.9, kl_coef=0.2),
}


def advantages(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By estimator, the advantages of this rank's samples; and the tokens that M2PO keeps of them.
    `shares`: the rank of each sample."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, generator=generator) > 0.3 for n in LENGTHS]
    kl = [
        torch.where(m, torch.randn(m.numel(), generator=generator, dtype=torch.float64), 0.0)
        for m in masks
    ]
    energies = [torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    local = [i for i, owner in enumerate(arguments["shares"]) if owner == rank]
    for i, owner in enumerate(arguments["shares"]):
        if owner == arguments["empty_rank"]:
            masks[i][:] = False
    batch = Outcomes(
        torch.arange(8.0) % 3,
        torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
        torch.tensor([int(m.sum()) for m in masks]),
    )
    result: dict[str, Any] = {"local": local}
    by_token = [reward * mask for reward, mask in zip(batch.rewards, masks)]
    for name, settings in SETTINGS.items():
        output = estimate_advantages(
            settings,
            replace(batch, token_rewards=by_token) if name == "grpo_token" else batch,
            local_indices=local,
            masks=[masks[i] for i in local],
            kl=[kl[i] for i in local],
            energies=[torch.where(masks[i], energies[i], 0.0) for i in local],
            group=dist.group.WORLD,
        )
        result[name] = [value.tolist() for value in output.values]
        result[name + "/kl"] = output.metrics["rollout/kl_in_reward"]
    own = [masks[i] for i in local]
    correction = off_policy_correction(
        OffPolicyConfig(m2po_threshold=0.3),
        old_log_probs=torch.cat([kl[i] for i in local]),
        rollout_log_probs=torch.zeros(sum(m.numel() for m in own)),
        loss_mask=torch.cat(own),
        seq_ids=torch.repeat_interleave(
            torch.arange(len(own)), torch.tensor([m.numel() for m in own])
        ),
        num_seqs=len(own),
        group=dist.group.WORLD,
    )
    assert correction.keep_mask is not None
    result["m2po"] = [
        part.tolist() for part in correction.keep_mask.split([m.numel() for m in own])
    ]
    for level in ("token", "sequence"):
        normal = off_policy_correction(
            OffPolicyConfig(tis_ratio_type=level, tis_batch_normalize=True, m2po_threshold=0.3),
            old_log_probs=torch.cat([kl[i] for i in local]),
            rollout_log_probs=torch.zeros(sum(m.numel() for m in own)),
            loss_mask=torch.cat(own),
            seq_ids=torch.repeat_interleave(
                torch.arange(len(own)), torch.tensor([m.numel() for m in own])
            ),
            num_seqs=len(own),
            group=dist.group.WORLD,
        )
        assert normal.importance_weights is not None
        result[f"normalised {level}"] = [
            part.tolist() for part in normal.importance_weights.split([m.numel() for m in own])
        ]
    return result


def collect(results: list[dict[str, Any]], name: str) -> list[list[float]]:
    """By sample, whoever has it."""
    by_sample = {
        i: values for result in results for i, values in zip(result["local"], result[name])
    }
    return [by_sample[i] for i in range(8)]


@pytest.mark.parametrize("empty_rank", [None, 1])
def test_two_ranks_give_the_numbers_of_one(tmp_path: Path, empty_rank: int | None) -> None:
    shares = [0, 1, 0, 0, 1, 0, 1, 1]
    two = run_ranks(
        "tests.dist.test_whitening:advantages",
        2,
        tmp_path / "two",
        {"shares": shares, "empty_rank": empty_rank},
        timeout_s=60,
    )
    if empty_rank is not None:
        assert all(not any(values) for values in two[1]["grpo"]), (
            "a rank without tokens joins, and gets nothing"
        )
        return
    one = run_ranks(
        "tests.dist.test_whitening:advantages",
        1,
        tmp_path / "one",
        {"shares": [0] * 8, "empty_rank": None},
        timeout_s=60,
    )
    for name in SETTINGS:
        for a, b in zip(collect(two, name), collect(one, name)):
            assert a == pytest.approx(b, rel=1e-6, abs=1e-7)
        assert (
            two[0][name + "/kl"]
            == two[1][name + "/kl"]
            == pytest.approx(one[0][name + "/kl"], rel=1e-12)
        )
    for name in ("normalised token", "normalised sequence"):
        for a, b in zip(collect(two, name), collect(one, name)):
            assert a == pytest.approx(b, rel=1e-12)
        assert len({w for part in collect(one, name) for w in part}) > 3
    kept = collect(one, "m2po")
    assert collect(two, "m2po") == kept
    assert 0 < sum(not k for part in kept for k in part) < sum(LENGTHS)

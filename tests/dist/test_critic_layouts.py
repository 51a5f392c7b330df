"""Policy and critic in their own layouts, against one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.models import make_moe_model
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity.steps import parallel
from benchmarks.parity_table import make_model, make_rollouts
from tests.dist import critic_layouts_worker as worker
from tests.dist.float64 import EXACT, WithoutFloat32
from tests.dist.test_critic import make_critic

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("critic")
    make_model(folder / "model", seed=3)
    make_critic(folder / "model")
    make_rollouts(str(folder / "model" / "rollout_{rollout_id}"))
    make_moe_model(folder / "experts")
    make_rollouts(str(folder / "experts" / "rollout_{rollout_id}"))
    (folder / "out").mkdir()
    return {name: str(folder / name) for name in ("model", "experts", "out")}


@pytest.fixture(scope="module")
def one(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    """On one process, where both share a layout, by model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    try:
        for model in ("model", "experts"):
            with WithoutFloat32(), parallel() as layout:
                found[model] = worker.train(files[model], layout, "", f"{files['out']}/{model}.pt")
    finally:
        dist.destroy_process_group()
    return found


def check(
    ranks: list[dict[str, Any]],
    ones: dict[str, dict[str, Any]],
    out: str,
    name: str,
    model: str = "model",
) -> None:
    """Values, losses, gradient norms of both networks, and each tensor of both after three steps."""
    one, expected = ones[model], torch.load(f"{out}/{model}.pt")
    found = torch.load(f"{out}/{name}.pt")
    for rank in ranks:
        seen = rank[name]
        assert seen["alike"] and not seen["shared"] and seen["layouts"][0] != seen["layouts"][1], (
            name
        )
        count = len(one["values"]) // seen["dp_size"]
        own = one["values"][seen["dp_rank"] * count : (seen["dp_rank"] + 1) * count]
        assert len(seen["values"]) == len(own)
        for a, b in zip(seen["values"], own, strict=True):
            assert a == pytest.approx(b, rel=EXACT, abs=EXACT), name
        for key in ("critic_norms", "policy_norms", "losses"):
            assert seen[key] == pytest.approx(one[key], rel=EXACT), (name, key)
        assert seen["policy_losses"] == pytest.approx(one["policy_losses"], rel=EXACT, abs=EXACT), (
            name
        )
    for network, tensors in expected.items():
        assert found[network].keys() == tensors.keys()
        apart = {
            key: float((found[network][key] - tensor).norm() / tensor.norm())
            for key, tensor in tensors.items()
        }
        assert max(apart.values()) < EXACT, (
            name,
            network,
            max(apart, key=lambda key: apart[key]),
            max(apart.values()),
        )


@pytest.mark.extended
def test_two_processes(
    files: dict[str, str], one: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for model in one.values():
        assert (
            model["shared"]
            and min(model["critic_norms"]) > 1e-2
            and min(model["policy_norms"]) > 1e-2
        )
    ranks = run_ranks("tests.dist.critic_layouts_worker:several", 2, tmp_path, files, timeout_s=300)
    for name in worker.PAIRS:
        check(ranks, one, files["out"], name)
    for name in worker.EXPERTS:
        check(ranks, one, files["out"], name, model="experts")
    assert [rank["apart"] for rank in ranks] == [0.0, 0.0]


@pytest.mark.slow
def test_four_processes(
    files: dict[str, str], one: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    ranks = run_ranks("tests.dist.critic_layouts_worker:several", 4, tmp_path, files, timeout_s=500)
    for name in worker.QUADS:
        check(ranks, one, files["out"], name)

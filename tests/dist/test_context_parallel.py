"""Context parallelism on two and four processes gives the numbers of one: attention, every loss,
and whole optimizer steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model
from tests.dist.float64 import EXACT

REDUCTION = "--loss-reduction sequence_mean"
SCALED = "scaled rotary embedding"
LOSSES = {
    "ppo": "--policy-loss-type ppo",
    "sapo": "--policy-loss-type sapo",
    "gspo": f"--policy-loss-type gspo --eps-clip 0.05 {REDUCTION}",
    "gmpo": f"--policy-loss-type gmpo {REDUCTION}",
    "cispo": "--policy-loss-type cispo",
    "vespo": "--policy-loss-type vespo",
    "opsm": "--policy-loss-type ppo --use-opsm --opsm-delta 0.01",
    SCALED: "--policy-loss-type sapo",
}
MIX = (
    "gspo",
    "gmpo",
    "opsm",
)  # a token loss with a sequence mask, a constant and a differentiated sequence quantity
CP = "--context-parallel-size"
TWO = {
    "CP2": (dict(cp=2), f"{CP} 2 --micro-batch-size 4", tuple(LOSSES)),
    "CP2 one sample": (dict(cp=2), f"{CP} 2", ("gmpo",)),
    "CP2 padded": (dict(cp=2), f"{CP} 2 --micro-batch-size 4 --qkv-format bshd", ("gmpo",)),
}
FOUR = {
    "CP4": (dict(cp=4), f"{CP} 4 --micro-batch-size 2", ("gspo", "gmpo", SCALED)),
    "CP4 one sample": (dict(cp=4), f"{CP} 4", ("vespo",)),  # ranks without a response token
    "TP2 CP2": (dict(tp=2, cp=2), f"{CP} 2 --tensor-model-parallel-size 2 --micro-batch-size 4", ("gmpo",)),
    "TP2 SP CP2": (dict(tp=2, cp=2), f"{CP} 2 --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4", MIX),
    "PP2 CP2": (dict(pp=2, cp=2), f"{CP} 2 --pipeline-model-parallel-size 2 --micro-batch-size 2", ("gmpo",)),
    "PP2 VP2 CP2": (
        dict(pp=2, vp=2, cp=2), f"{CP} 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2", ("gmpo",)
    ),
    "DP2 CP2": (dict(cp=2), f"{CP} 2 --micro-batch-size 2", ("gspo", "gmpo")),
    "DP2 CP2 budget": (dict(cp=2), f"{CP} 2 --use-dynamic-batch-size --max-tokens-per-gpu 20", ("gmpo",)),
    "CP4 recompute": (
        dict(cp=4), f"{CP} 4 --micro-batch-size 4 --recompute-granularity selective --recompute-modules core_attn", ("gmpo",)
    ),
}  # fmt: skip
EVERYTHING = {name: (sizes, flags, tuple(LOSSES)) for name, (sizes, flags, _) in FOUR.items()}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("context")
    make_model(folder / "model", seed=3)
    make_model(folder / "scaled", seed=3)
    config = json.loads((folder / "scaled" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    (folder / "scaled" / "config.json").write_text(json.dumps(config))
    models = {SCALED: str(folder / "scaled")}
    arguments = {
        "model": str(folder / "model"),
        "models": models,
        "losses": LOSSES,
        "base": str(folder / "base.pt"),
    }
    run_ranks("tests.dist.context_worker:save_runs", 1, folder / "one", arguments, timeout_s=240)
    return arguments


@pytest.fixture(scope="module")
def two(
    arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(
        "tests.dist.context_worker:several_ranks",
        2,
        folder,
        {**arguments, "layouts": TWO},
        timeout_s=300,
    )


@pytest.fixture(scope="module")
def four(
    arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(
        "tests.dist.context_worker:several_ranks",
        4,
        folder,
        {**arguments, "layouts": FOUR},
        timeout_s=400,
    )


@pytest.fixture(scope="module")
def everything(
    arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("everything")
    return run_ranks(
        "tests.dist.context_worker:several_ranks",
        4,
        folder,
        {**arguments, "layouts": EVERYTHING},
        timeout_s=900,
    )


def check_attention(ranks: list[dict[str, Any]]) -> None:
    """Every rank's outputs and gradients are those of the whole rows; a chunk is given no keys
    beyond its end."""
    for rank in ranks:
        for name, seen in rank["attention"].items():
            assert max(seen["apart"]) < EXACT, (name, seen)
            assert seen["padded"] == name.startswith("alike"), name
    assert [
        r["attention"]["one 2"]["keys"] < r["attention"]["one 2"]["longest"] for r in ranks
    ] == [False] + [True] * (len(ranks) - 1)


def check_losses(ranks: list[dict[str, Any]]) -> None:
    """In float64 the sum of the partial losses, its gradient and the metrics are exact, tokens or
    not."""
    for rank in ranks:
        for name, seen in rank["losses"].items():
            assert seen["loss"] < 1e-10, (name, seen)
            assert seen["gradients"] < 1e-12 * max(1.0, seen["size"]), (name, seen)
            assert seen["same_names"] and max(seen["metrics"].values(), default=0.0) < EXACT, (
                name,
                seen,
            )
            if "none active" not in name and "one active" not in name:
                assert seen["size"] > 1e-3, (
                    f"{name}: a vanishing gradient would agree with anything"
                )


def check_steps(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        seen = rank["steps"][name]
        assert (
            seen["loss"] <= EXACT
            and seen["gradients"] <= EXACT
            and seen["weights"] <= EXACT
            and seen["log_probs"] <= EXACT
        ), seen
        assert max(seen["metrics"].values()) <= EXACT, seen["metrics"]


def test_attention_of_two(two: list[dict[str, Any]]) -> None:
    check_attention(two)


@pytest.mark.extended
def test_attention_of_four(four: list[dict[str, Any]]) -> None:
    check_attention(four)


def test_losses_of_two(two: list[dict[str, Any]]) -> None:
    check_losses(two)


@pytest.mark.extended
def test_losses_of_four(four: list[dict[str, Any]]) -> None:
    check_losses(four)


@pytest.mark.parametrize(
    "name", [f"{layout}, {loss}" for layout, (_, _, losses) in TWO.items() for loss in losses]
)
def test_steps_of_two(two: list[dict[str, Any]], name: str) -> None:
    check_steps(two, name)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [f"{layout}, {loss}" for layout, (_, _, losses) in FOUR.items() for loss in losses]
)
def test_steps_of_four(four: list[dict[str, Any]], name: str) -> None:
    check_steps(four, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{layout}, {loss}" for layout in EVERYTHING for loss in LOSSES])
def test_every_loss_in_every_layout(everything: list[dict[str, Any]], name: str) -> None:
    check_steps(everything, name)

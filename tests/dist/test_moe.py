"""Experts in every layout: loss, every gradient, and the weights after three steps are those of one
process, in float64.

Aux coefficients are 0 and no token is dropped (what each micro-batch computes then depends on its
tokens alone); every data-parallel rank has other samples. The auxiliary losses have a test of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from tests.dist.float64 import EXACT
from tests.dist.test_convert_moe import make_models

EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ROLLOUT_REPLAY = "--use-rollout-routing-replay"
# by number of processes: name -> (model, flags)
CASES: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "one": ("qwen3-moe", ""),
        "one, dense layers": ("qwen3-moe-dense-layers", ""),
        "one, shared experts": ("qwen2-moe", ""),
        "one, replay": ("qwen3-moe", "--use-routing-replay"),
        "one, latent attention": ("deepseek-v3", ""),
        "one, latent attention with YaRN": ("deepseek-v3-yarn", ""),
        "one, sampler's routed_experts": ("qwen3-moe-dense-layers", ROLLOUT_REPLAY),
    },
    2: {
        "EP2": ("qwen3-moe", EP2),
        "EP2, token budgets": (
            "qwen3-moe",
            f"{EP2} --use-dynamic-batch-size --max-tokens-per-gpu 30",
        ),
        "EP2 distributed optimizer": ("qwen3-moe", f"{EP2} --use-distributed-optimizer"),
        "DP2": (
            "qwen3-moe",
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        "TP2 EP2": ("qwen3-moe", f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
        "ETP2": ("qwen3-moe", TP2),
        "EP2 allgather": ("qwen3-moe", f"{EP2} --moe-token-dispatcher-type allgather"),
        "EP2, dense layers": ("qwen3-moe-dense-layers", EP2),
        "EP2, shared experts": ("qwen2-moe", EP2),
        "ETP2, shared experts": ("qwen2-moe", TP2),
        "CP2 EP2": ("qwen3-moe", f"{EP2} --context-parallel-size 2"),
        "TP2 EP2, replay, recomputed": (
            "qwen3-moe",
            f"--use-routing-replay {TP2} {EP2} --expert-tensor-parallel-size 1 --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 3",
        ),
        "CP2 EP2, replay": ("qwen3-moe", f"--use-routing-replay {EP2} --context-parallel-size 2"),
        "CP2 EP2, sampler's routed_experts": (
            "qwen3-moe-dense-layers",
            f"{ROLLOUT_REPLAY} {EP2} --context-parallel-size 2",
        ),
        "TP2 EP2, sampler's routed_experts": (
            "qwen3-moe-dense-layers",
            f"{ROLLOUT_REPLAY} {TP2} {EP2} --expert-tensor-parallel-size 1",
        ),
        "EP2, recomputed": (
            "qwen3-moe",
            f"{EP2} --recompute-granularity selective --recompute-modules moe",
        ),
        "TP2 EP2, latent attention": (
            "deepseek-v3",
            f"{TP2} {EP2} --expert-tensor-parallel-size 1 --use-distributed-optimizer",
        ),
        "TP2, latent attention with YaRN": ("deepseek-v3-yarn", TP2),
        "CP2 EP2, latent attention": ("deepseek-v3", f"{EP2} --context-parallel-size 2"),
        "CP2, latent attention with YaRN": ("deepseek-v3-yarn", "--context-parallel-size 2"),
    },
    4: {
        "EP2 x ETP2": ("qwen3-moe", f"{TP2} {EP2}"),
        "EP2 x ETP2 allgather": ("qwen3-moe", f"{TP2} {EP2} --moe-token-dispatcher-type allgather"),
        "DP4 EP2 distributed optimizer": ("qwen3-moe", f"{EP2} --use-distributed-optimizer"),
        "PP2 EP2": ("qwen3-moe", f"{PP2} {EP2}"),
        "TP2 CP2 EP2 allgather": (
            "qwen3-moe",
            f"{TP2} {EP2} --context-parallel-size 2 --moe-token-dispatcher-type allgather",
        ),
        "PP2 EP2, replay": (
            "qwen3-moe",
            f"--use-routing-replay {PP2} {EP2} --recompute-granularity selective --recompute-modules moe",
        ),
        "PP2 VP2 EP2, dense layers": (
            "qwen3-moe-dense-layers",
            f"{PP2} {EP2} --num-virtual-stages-per-pipeline-rank 2",
        ),
        "PP2 VP2 EP2, sampler's routed_experts": (
            "qwen3-moe-dense-layers",
            f"{ROLLOUT_REPLAY} {PP2} {EP2} --num-virtual-stages-per-pipeline-rank 2",
        ),
        "PP2 EP2, latent attention": ("deepseek-v3", f"{PP2} {EP2}"),
        "TP2 PP2, latent attention": ("deepseek-v3", f"{TP2} {PP2}"),
        "TP2 CP2, latent attention": (
            "deepseek-v3",
            f"{TP2} {EP2} --context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        "EP2 x ETP2, shared experts": ("qwen2-moe", f"{TP2} {EP2} --use-distributed-optimizer"),
    },
}


# what `make test` runs; the others are slow tests
IN_MAKE_TEST = (
    *(
        "EP2 distributed optimizer",
        "TP2 EP2, replay, recomputed",
        "TP2 EP2, latent attention",
        "EP2 x ETP2 allgather",
        "PP2 VP2 EP2, sampler's routed_experts",
    ),
)
OTHERS = tuple(name for ranks in (2, 4) for name in CASES[ranks] if name not in IN_MAKE_TEST)


def run_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The cases in `names` and what they are compared with. One launch for each number of
    processes."""
    bases = {base_of(*(CASES[2] | CASES[4])[name]) for name in names}
    models = make_models(
        folder,
        ["qwen3-moe", "qwen3-moe-dense-layers", "qwen2-moe", "deepseek-v3", "deepseek-v3-yarn"],
    )
    found: dict[str, Any] = {}
    for ranks, cases in CASES.items():
        out = folder / f"{ranks}.pt"
        chosen = {
            name: (models[model], flags)
            for name, (model, flags) in cases.items()
            if name in (bases if ranks == 1 else names)
        }
        run_ranks(
            "tests.dist.moe_worker:run_cases",
            ranks,
            folder / f"run{ranks}",
            {"cases": chosen, "out": str(out)},
            timeout_s=240,
        )
        found.update(torch.load(out))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_all(tmp_path_factory.mktemp("moe"), IN_MAKE_TEST)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_all(tmp_path_factory.mktemp("more"), OTHERS)


def base_of(model: str, flags: str) -> str:
    def replays(words: str) -> list[bool]:
        return [flag in words for flag in ("--use-routing-replay", ROLLOUT_REPLAY)]

    return next(
        name
        for name, (other, own) in CASES[1].items()
        if other == model and replays(own) == replays(flags)
    )


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its norm, and which."""
    assert a.keys() == b.keys()
    each = {name: float((a[name] - b[name]).norm() / b[name].norm()) for name in b}
    worst = max(each, key=lambda name: each[name])
    return each[worst], worst


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_a_layout_gives_the_numbers_of_one_process(results: dict[str, Any], name: str) -> None:
    check(results, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_further_layouts(more_results: dict[str, Any], name: str) -> None:
    check(more_results, name)


def check(results: dict[str, Any], name: str) -> None:
    base, other = results[base_of(*(CASES[2] | CASES[4])[name])], results[name]
    assert all(float(gradient.norm()) > 0 for gradient in base["gradients"].values()), (
        "a vanishing gradient would agree with anything"
    )
    for what in ("gradients", "weights"):
        difference, tensor = apart(other[what], base[what])
        assert difference < EXACT, (what, difference, tensor)
    for what in ("losses", "grad_norms"):
        assert other[what] == pytest.approx(base[what], rel=EXACT)
    for local, its in zip(other["moe"], base["moe"], strict=True):
        assert local == pytest.approx(its, rel=EXACT)


def test_replay_is_of_other_choices(results: dict[str, Any]) -> None:
    """Nothing differs before the weights change; later the router would have chosen otherwise, and
    that matters."""
    first, *later = (step["moe_replay_disagreement"] for step in results["one, replay"]["moe"])
    assert first == 0 and all(0.01 < share < 1 for share in later)


def test_the_samplers_routes_are_taken(results: dict[str, Any]) -> None:
    """Random ones, which the routers would hardly choose: three of four experts, so that a quarter
    of the tokens agree by chance."""
    for step in results["one, sampler's routed_experts"]["moe"]:
        assert 0.6 < step["moe_replay_disagreement"] < 0.9

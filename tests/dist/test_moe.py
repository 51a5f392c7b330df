"""Experts in every layout: loss, every gradient, and the weights after three steps are those of one process.

Aux coefficients are 0 and no token is dropped (what each micro-batch computes then depends on its tokens alone); every data-parallel rank
has other samples. The auxiliary losses have a test of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.test_convert_moe import make_models

LIMIT = 1e-5
EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
# by number of processes: name -> (model, flags)
CASES: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "one": ("qwen3-moe", ""),
        "one, dense layers": ("qwen3-moe-dense-layers", ""),
        "one, shared experts": ("qwen2-moe", ""),
    },
    2: {
        "EP2": ("qwen3-moe", EP2),
        "EP2 distributed optimizer": ("qwen3-moe", f"{EP2} --use-distributed-optimizer"),
        "DP2": ("qwen3-moe", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        "TP2 EP2": ("qwen3-moe", f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
        "ETP2": ("qwen3-moe", TP2),
        "EP2 allgather": ("qwen3-moe", f"{EP2} --moe-token-dispatcher-type allgather"),
        "EP2, dense layers": ("qwen3-moe-dense-layers", EP2),
        "EP2, shared experts": ("qwen2-moe", EP2),
        "ETP2, shared experts": ("qwen2-moe", TP2),
        "CP2 EP2": ("qwen3-moe", f"{EP2} --context-parallel-size 2"),
        "EP2, recomputed": ("qwen3-moe", f"{EP2} --recompute-granularity selective --recompute-modules moe"),
    },
    4: {
        "EP2 x ETP2": ("qwen3-moe", f"{TP2} {EP2}"),
        "EP2 x ETP2 allgather": ("qwen3-moe", f"{TP2} {EP2} --moe-token-dispatcher-type allgather"),
        "DP4 EP2 distributed optimizer": ("qwen3-moe", f"{EP2} --use-distributed-optimizer"),
        "PP2 EP2": ("qwen3-moe", f"{PP2} {EP2}"),
        "TP2 CP2 EP2 allgather": ("qwen3-moe", f"{TP2} {EP2} --context-parallel-size 2 --moe-token-dispatcher-type allgather"),
        "PP2 VP2 EP2, dense layers": ("qwen3-moe-dense-layers", f"{PP2} {EP2} --num-virtual-stages-per-pipeline-rank 2"),
        "EP2 x ETP2, shared experts": ("qwen2-moe", f"{TP2} {EP2} --use-distributed-optimizer"),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("moe")
    models = make_models(folder, ["qwen3-moe", "qwen3-moe-dense-layers", "qwen2-moe"])
    found: dict[str, Any] = {}
    for ranks, cases in CASES.items():
        out = folder / f"{ranks}.pt"
        arguments = {"cases": {name: (models[model], flags) for name, (model, flags) in cases.items()}, "out": str(out)}
        run_ranks("tests.dist.moe_worker:run_cases", ranks, folder / f"run{ranks}", arguments, timeout_s=240)
        found.update(torch.load(out))
    return found


def base_of(model: str) -> str:
    return next(name for name, (other, _) in CASES[1].items() if other == model)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its norm, and which."""
    assert a.keys() == b.keys()
    each = {name: float((a[name] - b[name]).norm() / b[name].norm()) for name in b}
    worst = max(each, key=lambda name: each[name])
    return each[worst], worst


@pytest.mark.parametrize(("name", "model"), [(name, model) for n in (2, 4) for name, (model, _) in CASES[n].items()])
def test_a_layout_gives_the_numbers_of_one_process(results: dict[str, Any], name: str, model: str) -> None:
    base, other = results[base_of(model)], results[name]
    assert all(float(gradient.norm()) > 0 for gradient in base["gradients"].values()), "a vanishing gradient would agree with anything"
    assert other["loss"] == pytest.approx(base["loss"], rel=LIMIT)
    # a gradient is the difference of two weights of size 1: its last digits are lost
    assert apart(other["gradients"], base["gradients"])[0] < 1e-4, apart(other["gradients"], base["gradients"])
    assert other["losses"] == pytest.approx(base["losses"], rel=LIMIT)
    assert other["grad_norms"] == pytest.approx(base["grad_norms"], rel=LIMIT)
    assert apart(other["weights"], base["weights"])[0] < LIMIT, apart(other["weights"], base["weights"])

"""What rounding leaves of an adapter's update: against the weights that an engine gets, in every
layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parity.models import make_moe_model
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model

DENSE = "--lora-target-modules all-linear unembed "
LAYOUTS = {
    "one process": (1, DENSE),
    "TP2": (2, f"{DENSE}--tensor-model-parallel-size 2"),
    "PP2": (2, f"{DENSE}--pipeline-model-parallel-size 2"),
    "DP2": (2, DENSE),
    "experts": (1, ""),
    "experts EP2": (2, "--expert-model-parallel-size 2"),
    "experts TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


def by_hand(
    found: dict[str, Any], base: dict[str, Tensor], version: int
) -> tuple[float, float, float]:
    """From the exported weights and the factors of two versions."""
    stepped = changed = 0
    error = norm = whole_error = whole_norm = 0.0
    for name in found["factors"][0]:
        module, _, half = name.rpartition(".lora_")
        if half == "B":
            continue

        def product(at: int, module: str = module) -> Tensor:
            factors = found["factors"][at]
            return 2.0 * (factors[f"{module}.lora_B"].float() @ factors[f"{module}.lora_A"].float())

        sent = [w[f"{module}.weight"].float() for w in found["weights"]]
        step = product(version) - product(version - 1)
        seen = sent[version] - sent[version - 1]
        stepped += int((step != 0).sum())
        changed += int(((step != 0) & (seen != 0)).sum())
        error += float((seen - step).double().square().sum())
        norm += float(step.double().square().sum())
        weight = base.get(f"{module}.weight", base.get("model.embed_tokens.weight"))
        assert weight is not None
        exact = weight.bfloat16().float() + product(version)
        whole_error += float((sent[version] - exact).double().square().sum())
        whole_norm += float(product(version).double().square().sum())
    return changed / stepped, math.sqrt(error / norm), math.sqrt(whole_error / whole_norm)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rounding")
    make_model(folder / "dense", seed=3)
    make_moe_model(folder / "experts")
    for model in ("dense", "experts"):
        for ranks in (1, 2):
            layouts = {
                name: flags
                for name, (count, flags) in LAYOUTS.items()
                if count == ranks and name.startswith("experts") == (model == "experts")
            }
            arguments = {"model": str(folder / model), "layouts": layouts, "out": str(folder)}
            run_ranks(
                "tests.dist.merge_rounding_worker:layouts",
                ranks,
                folder / f"{model}-{ranks}",
                arguments,
                timeout_s=240,
            )
    results = {name: torch.load(folder / f"{name}.pt") for name in LAYOUTS}
    for name, result in results.items():
        model = "experts" if name.startswith("experts") else "dense"
        result["base"] = load_file(folder / model / "model.safetensors")
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_metrics_are_those_of_what_an_engine_gets(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    metrics = found[name]["metrics"]
    assert metrics[0] == {}, "there is nothing to compare the first version with"
    assert metrics[1] == metrics[3] == metrics[5] == {}, "nothing was to change"
    assert found[name]["seconds"] == [{}, metrics[2], {}], "with an interval of 2"
    for version in (1, 2):
        share, error, whole = by_hand(found[name], found[name]["base"], version)
        assert 0.01 < share < 0.9 and error > 0.3, "the step should be one that rounding hurts"
        measured = metrics[2 * version]
        assert measured["lora/merged_changed_frac"] == pytest.approx(share, abs=1e-4)
        assert measured["lora/merged_update_error"] == pytest.approx(error, rel=1e-4)
        assert 0 < whole < 1
        assert measured["lora/merged_adapter_error"] == pytest.approx(whole, rel=1e-4)

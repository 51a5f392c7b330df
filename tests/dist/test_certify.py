"""Certificates in layouts of several ranks: rank 0 sees the states of all, none of them differs from
transformers, and a fault of one rank's shard is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from tests.dist.family_layouts import CP2, EP2, PP2, TP2

WORKER = "tests.dist.certify_worker:examine"
FAMILIES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
# no expert parallelism without experts, and no tensor parallelism of experts with biases
MORE = {
    **dict.fromkeys(("LlamaForCausalLM", "Gemma3ForCausalLM"), (TP2, PP2, CP2)),
    "Qwen3NextForCausalLM": (TP2, PP2, CP2, EP2),
    **dict.fromkeys(("Qwen4ExpForCausalLM", "Qwen2MoeForCausalLM"), (TP2, PP2, CP2, EP2)),
    "GptOssForCausalLM": (PP2, CP2, EP2),
    "Glm4MoeForCausalLM": (TP2, PP2, EP2),
}
TP2_PP2 = f"{TP2} --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_tiny_model(family, folder / family, num_hidden_layers=4)
    return {family: str(folder / family) for family in FAMILIES}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_has_the_states_of_transformers(
    ranks: int, models: dict[str, str], tmp_path: Path
) -> None:
    layouts = {2: ("", TP2, PP2, CP2, EP2), 4: (TP2_PP2, f"{CP2} {PP2}")}[ranks]
    cells = [
        (models[family], layout)
        for family in FAMILIES
        for layout in layouts
        if layout != EP2 or family != "Qwen3ForCausalLM"
    ]
    results = run_ranks(WORKER, ranks, tmp_path, {"cells": cells, "faults": False}, timeout_s=500)
    assert len(results) == ranks
    for name, found in results[0].items():
        assert found["findings"] == [], name
        assert {"embedding", "layers.3.attention", "norm", "logits"} <= set(found["sites"]), name
        assert found["findings_of_engine"] == [], name


@pytest.mark.slow
def test_more_families_have_the_states_of_transformers_in_layouts(tmp_path: Path) -> None:
    """With the layouts above, 51 clean runs without a finding."""
    for family in MORE:
        make_tiny_model(family, tmp_path / family, num_hidden_layers=4)
    cells = [(str(tmp_path / family), layout) for family, own in MORE.items() for layout in own]
    arguments = {"cells": cells, "faults": False}
    (found, *_) = run_ranks(WORKER, 2, tmp_path / "run", arguments, timeout_s=900)
    for name, result in found.items():
        assert result["findings"] == result["findings_of_engine"] == [], name
    assert len(found) == len(cells)


def test_a_fault_in_the_shard_of_one_rank_is_named(models: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 has its part of layer 2's output projection with another sign, or the second stage
    another epsilon."""
    cells = [(models["Qwen3ForCausalLM"], layout) for layout in (TP2, PP2)]
    results = run_ranks(WORKER, 2, tmp_path, {"cells": cells, "faults": True}, timeout_s=300)
    found = results[0]
    (of_shard,) = found[f"{cells[0][0]} {TP2}"]["findings"]
    assert (of_shard["layer"], of_shard["site"]) == (2, "layers.2.attention")
    assert "o_proj" in of_shard["evidence"]
    (of_stage,) = found[f"{cells[0][0]} {PP2}"]["findings"]
    assert (of_stage["layer"], of_stage["cause"]) == (2, "norm epsilon")

"""Every family from Hugging Face's files to a checkpoint written in one layout, loaded in another,
and back: bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.hf.model import read_hf_model
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.families import model_families
from tests.dist.test_convert import SIZES

# tensor, pipeline, virtual, expert, expert-tensor: as written, as loaded
DENSE = [((2, 1), (1, 2)), ((1, 2), (2, 1))]
EXPERTS = [((1, 1, 1, 2, 1), (1, 2, 1, 1, 1)), ((1, 2, 1, 1, 1), (1, 1, 1, 2, 1))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers

    root = tmp_path_factory.mktemp("models")
    for name in model_families.names():
        make_tiny_model(name, root / name, num_hidden_layers=4)
    make_tiny_model("Qwen2ForCausalLM", root / "tied", tie_word_embeddings=True)
    critic = transformers.Qwen2ForTokenClassification(
        transformers.Qwen2Config(**SIZES, num_labels=1)
    )
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(root / "critic")
    return {name: str(root / name) for name in (*model_families.names(), "tied", "critic")}


@pytest.mark.slow
def test_round_trips_from_one_layout_to_another(folders: dict[str, str], tmp_path: Path) -> None:
    cases: list[Any] = [(folders["tied"], (2, 1), (1, 1))]
    for name, folder in folders.items():
        if name != "tied":
            hf = read_hf_model(folder, value_head=name == "critic")
            layouts = EXPERTS if "num_moe_experts" in hf.transformer else DENSE
            cases += [(folder, *both) for both in layouts]
    arguments = {"cases": cases, "out": str(tmp_path)}
    results = run_ranks(
        "tests.dist.convert_checkpoints_worker:round_trips", 2, tmp_path / "run", arguments, 900
    )
    assert all(len(result) == len(cases) for result in results)

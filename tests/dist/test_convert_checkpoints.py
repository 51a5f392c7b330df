"""Every family from Hugging Face's files to a checkpoint written in one layout, loaded in another,
and back: bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from slime_like.weights.families import model_families
from tests.dist.test_convert import MODELS, SIZES
from tests.dist.test_convert_moe import make_models

# tensor, pipeline, virtual, expert, expert-tensor: as written, as loaded
DENSE = [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (1, 1))]
EXPERTS = [((1, 1, 1, 2, 1), (1, 2, 1, 1, 1)), ((1, 2, 1, 1, 1), (1, 1, 1, 2, 1))]
DENSE_MODELS, EXPERT_MODELS = (
    ("llama-llama3-untied", "qwen2-tied", "qwen3-tied"),
    ("qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe-lite"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers

    root = tmp_path_factory.mktemp("models")
    made = make_models(root, list(EXPERT_MODELS))
    for name in DENSE_MODELS:
        family, settings = MODELS[name]
        torch.manual_seed(len(made))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(root / name)
        made[name] = str(root / name)
    critic = transformers.Qwen2ForTokenClassification(
        transformers.Qwen2Config(**SIZES, num_labels=1)
    )
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(root / "critic")
    return {**made, "critic": str(root / "critic")}


@pytest.mark.slow
def test_round_trips_from_one_layout_to_another(folders: dict[str, str], tmp_path: Path) -> None:
    architectures = {
        json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
        for folder in folders.values()
    }
    assert architectures - {"Qwen2ForTokenClassification"} == set(model_families.names()), (
        "a family without a round trip"
    )
    cases: list[Any] = []
    for name in (*DENSE_MODELS, "critic"):
        cases += [
            (folders[name], *layouts) for layouts in DENSE[: 3 if name == "qwen2-tied" else 2]
        ]
    cases += [(folders[name], *layouts) for name in EXPERT_MODELS for layouts in EXPERTS]
    arguments = {"cases": cases, "out": str(tmp_path)}
    results = run_ranks(
        "tests.dist.convert_checkpoints_worker:round_trips", 2, tmp_path / "run", arguments, 400
    )
    assert all(len(result) == len(cases) for result in results)

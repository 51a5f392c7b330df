"""A checkpoint of megatron-core's local layers continues in its Transformer Engine layers, and the
other way round: weights, Adam, and the next three steps. Transformer Engine itself is stood in for
by layers of plain torch with its names; megatron-core's own code for it says what they are called
in checkpoints. See transformer_engine_layers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from tests.dist.test_convert import MODELS, SIZES
from tests.dist.test_convert_moe import make_models

DENSE, TP2 = "qwen3-tied", "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2 --use-distributed-optimizer"
# by number of processes: name -> (model, flags)
CASES: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "dense": (DENSE, ""),
        "experts and dense layers": ("qwen3-moe-dense-layers", ""),
        "latent attention": ("deepseek-v3", "--use-distributed-optimizer"),
        "sparse attention": ("deepseek-v32", ""),
        "residual streams": ("glm5", ""),
        "gated streams": ("qwen4", ""),
    },
    2: {
        "DP2": (DENSE, "--use-distributed-optimizer"),
        "TP2": (DENSE, TP2),
        "TP2 half precision": (DENSE, f"{TP2} --bf16"),
        "EP2": ("qwen3-moe", EP2),
        "EP2 latent attention": ("deepseek-v3", EP2),
    },
}
LATENT = [
    "linear_fc1.layer_norm_weight",
    "up_proj.layer_norm_weight",
    "experts.linear_fc1.weight0",
]
FUSED = {
    DENSE: ["linear_qkv.layer_norm_weight", "linear_fc1.layer_norm_weight"],
    "qwen3-moe": ["linear_qkv.layer_norm_weight", "experts.linear_fc1.weight0"],
    "qwen3-moe-dense-layers": [
        "linear_qkv.layer_norm_weight",
        "linear_fc1.layer_norm_weight",
        "experts.linear_fc1.weight0",
    ],
    "deepseek-v3": LATENT,
    "deepseek-v32": LATENT,
    "glm5": LATENT,
    "qwen4": ["experts.linear_fc1.weight0"],  # its blocks begin with no norm
}
# of models of scripts/make_tiny_model.py
TINY = {"glm5": "Glm5NextForConditionalGeneration", "qwen4": "Qwen4ExpForConditionalGeneration"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers

    root = tmp_path_factory.mktemp("models")
    family, settings = MODELS[DENSE]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **settings, "num_key_value_heads": 2}
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(root / DENSE)
    for name, architecture in TINY.items():
        make_tiny_model(architecture, root / name)
    return {
        **make_models(root, [name for name in FUSED if name != DENSE and name not in TINY]),
        **{name: str(root / name) for name in (DENSE, *TINY)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back(folders: dict[str, str], tmp_path: Path, ranks: int) -> None:
    cases = {name: (folders[model], flags) for name, (model, flags) in CASES[ranks].items()}
    arguments: dict[str, Any] = {"cases": cases, "out": str(tmp_path / "checkpoints")}
    for results in run_ranks(
        "tests.dist.layer_specs_worker:there_and_back",
        ranks,
        tmp_path / "run",
        arguments,
        280,
        preloaded=False,
    ):
        assert results.keys() == cases.keys()
        for name, found in results.items():
            assert found["same"] == [True, True], name
            assert found["fused"] == FUSED[CASES[ranks][name][0]], (
                "Transformer Engine's layers were used"
            )
            went_on, fused, back = found["numbers"]
            assert back == went_on, name
            assert fused == ([] if "TP2" in name else pytest.approx(went_on, rel=1e-4, abs=1e-6)), (
                name
            )
            assert not [key for names in found["on_disk"] for key in names if "_extra_state" in key]

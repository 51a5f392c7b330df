"""Runs of the families that others do not train: sampling, two steps, and the saved model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.hf_class import class_for_text
from tests.e2e.helpers import Workspace, rows_of, weights_of
from tests.e2e.programs import TrainServer

VARIANTS = {
    "Gemma 4 with experts": (
        "Gemma4ForCausalLM",
        {
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2},
            "moe_intermediate_size": 20,
        },
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "family",
    [
        *("Glm4MoeForCausalLM", "Glm4ForCausalLM", "MiniMaxM2ForCausalLM"),
        *("Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        *("GptOssForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"),
        *("SeedOssForCausalLM", "SmolLM3ForCausalLM"),
        *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "KimiLinearForCausalLM"),
        *("Qwen3VLMoeForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        *("Olmo3ForCausalLM", "Exaone4ForCausalLM", "Phi3ForCausalLM"),
        *("Glm4vForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        *("GraniteMoeSharedForCausalLM", "MiMoV2FlashForCausalLM"),
        "Step3p7ForConditionalGeneration",
        *("Gemma4ForConditionalGeneration", "Lfm2MoeForCausalLM"),
        *("NemotronHForCausalLM", "Glm5NextForConditionalGeneration"),
        *("Qwen4ExpForConditionalGeneration", "DeepseekV4ForCausalLM"),
        *VARIANTS,
    ],
)
def test_it_trains(server: TrainServer, work: Workspace, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    model, out = tmp_path / "model", tmp_path / "out"
    like, changes = VARIANTS.get(family, (family, {}))
    make_tiny_model(like, model, **changes)
    argv = work.flags(out, hf_checkpoint=model, save_hf=out / "hf", lr=5e-3, num_rollout=2)
    server.train(argv, tmp_path / "log").ok()
    rows = rows_of(out)
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-5
        assert row["train/grad_norm"] > 1e-3
    before, after = weights_of(model), weights_of(out / "hf")
    assert before.keys() == after.keys()
    same = [name for name in before if torch.equal(before[name], after[name])]
    tower = r"\.visual\.|\b(vision_tower|vision_model|embed_vision)\.|projector\."
    memory = r"\.ple_embedding\.(layer|ngram_heads)_"
    frozen = re.compile(rf"{tower}|{memory}|^mtp\.|\.indexer\.|layer_scalar$|tid2eid$")
    router = re.compile(
        r"e_score_correction_bias|feed_forward\.expert_bias|moe\.router_bias|ffn\.gate\.bias"
    )
    untrained = {name for name in before if frozen.search(name)}
    assert untrained == {name for name in same if not router.search(name)}
    class_for_text(AutoConfig.from_pretrained(out / "hf")).from_pretrained(out / "hf")


def test_the_tables_of_a_memory_can_stay(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Those of n-grams, which have most of a model's parameters, while everything else learns."""
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny_model("Qwen4ExpForCausalLM", model)
    frozen = {"freeze_params_name_list": "ngram_memory.table"}
    argv = work.flags(
        out, hf_checkpoint=model, save_hf=out / "hf", lr=5e-3, num_rollout=2, **frozen
    )
    server.train(argv, tmp_path / "log").ok()
    before, after = weights_of(model), weights_of(out / "hf")
    same = {name for name in before if torch.equal(before[name], after[name])}
    tables = {name for name in before if ".ngram_embedding." in name}
    assert len(tables) == 6 and tables <= same
    assert not [n for n in same if ".ple." in n and ".ple_embedding." not in n]

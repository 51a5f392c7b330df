"""The two classes of megatron-core that a network can be built of, GPTModel and HybridModel: the same
numbers to the last bit, on releases with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.model_base import known_model_bases
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from slime_like.megatron.model.bases import base_class
from tests.dist.family_layouts import CP2, EP2, PP2, TP2
from tests.dist.float64 import WithoutFloat32
from tests.dist.test_families import CASES, LENGTHS, TIES, TP2_EP2, Ours, objective

pytestmark = pytest.mark.skipif(
    "hybrid" not in known_model_bases(), reason="this megatron-core has no HybridModel"
)
FAMILIES = CASES | TIES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, alone: Any, tmp_path: Path) -> None:
    """Logits of packed rows, gradients, and the weights written back."""
    like, changes = FAMILIES[name]
    reference = make_tiny_model(like, tmp_path / "model", **changes)
    vocab = reference.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(vocab, (n,), generator=generator) for n in LENGTHS]
    shares = [torch.randn(n, vocab, generator=generator, dtype=torch.float64) for n in LENGTHS]
    found = {}
    with WithoutFloat32():
        for base in ("gpt", "hybrid"):
            ours = Ours(tmp_path / "model", alone, torch.float64, base)
            assert isinstance(ours.chunks[0], base_class(base))
            logits = ours.logits(tokens)
            objective(logits, shares).backward()
            found[base] = {
                "logits": torch.cat(logits).detach(),
                **{f"gradient of {n}": t for n, t in ours.gradients().items()},
                **ours.exported(),
            }
    assert found["gpt"].keys() == found["hybrid"].keys()
    assert [n for n, t in found["gpt"].items() if not t.equal(found["hybrid"][n])] == []


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
WHOLE = "--recompute-granularity full --recompute-method"
VP2 = "--num-virtual-stages-per-pipeline-rank 2"
STAGES = "--pipeline-model-parallel-layout"
# by number of processes: (model, flags)
CELLS = {
    1: [
        ("Qwen3ForCausalLM", f"{WHOLE} uniform --recompute-num-layers 3"),
        ("Qwen3NextForCausalLM", f"{WHOLE} block --recompute-num-layers 1"),
        ("DeepseekV3ForCausalLM", "--mtp-num-layers 1"),
        ("Qwen3MoeForCausalLM", "--moe-aux-loss-coeff 0.01"),
    ],
    2: [
        ("Qwen3ForCausalLM", f"{TP2} {DROPOUT}"),
        ("Qwen3ForCausalLM", f"--tensor-model-parallel-size 2 {DROPOUT}"),
        ("Qwen3ForCausalLM", f"{PP2} --decoder-first-pipeline-num-layers 1"),
        ("Qwen3ForCausalLM", f"{PP2} {VP2}"),
        ("Qwen3MoeForCausalLM", f"{PP2} {STAGES} E|tt|t|tL"),
        ("Qwen3NextForCausalLM", f"{PP2} --decoder-last-pipeline-num-layers 1"),
        ("Qwen3NextForCausalLM", f"{CP2} {EP2}"),
        ("KimiLinearForCausalLM", f"{TP2_EP2} {WHOLE} uniform --recompute-num-layers 2"),
        ("Glm5NextForConditionalGeneration", f"{TP2_EP2} {WHOLE} uniform --recompute-num-layers 2"),
        ("Glm5NextForConditionalGeneration", f"{PP2} {VP2}"),
        ("Qwen4ExpForConditionalGeneration", f"{TP2_EP2} {WHOLE} uniform --recompute-num-layers 2"),
        ("Nemotron-3-Super", f"{TP2_EP2} {WHOLE} uniform --recompute-num-layers 2"),
        ("Nemotron-H without experts", f"{PP2} --decoder-last-pipeline-num-layers 1"),
        ("GLM-5.2", f"{TP2_EP2}"),
        ("Gemma3ForCausalLM", f"{CP2}"),
        ("DeepseekV3ForCausalLM", f"{PP2} --mtp-num-layers 1"),
        ("Qwen3MoeForCausalLM", f"{EP2} --use-distributed-optimizer"),
    ],
    4: [
        ("Qwen3MoeForCausalLM", f"{PP2} {TP2_EP2} {VP2}"),
        ("Qwen3NextForCausalLM", f"{PP2} {EP2} {WHOLE} uniform --recompute-num-layers 2"),
        ("GptOssForCausalLM", f"{TP2_EP2} {CP2}"),
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models with four layers, by name in `FAMILIES`."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name in {name for cells in CELLS.values() for name, _ in cells}:
        like, changes = FAMILIES[name]
        more = {"num_nextn_predict_layers": 1} if like == "DeepseekV3ForCausalLM" else {}
        found[name] = str(folder / name.replace(" ", "-"))
        changes = {**changes, **more, "num_hidden_layers": 4}
        if "layer_types" in changes:
            changes["layer_types"] = [*changes["layer_types"], "full_attention"]
        make_tiny_model(like, Path(found[name]), **changes)
    return found


@pytest.mark.parametrize("ranks", CELLS)
def test_three_optimizer_steps(models: dict[str, str], tmp_path: Path, ranks: int) -> None:
    """In the same layout: losses, gradients, weights and log-probs, also of dropout."""
    cells = {
        f"{name} {flags}": (models[name], f"--micro-batch-size 2 --clip-grad 0 {flags}")
        for name, flags in CELLS[ranks]
    }
    worker = "tests.dist.bases_worker:run_cells"
    for found in run_ranks(worker, ranks, tmp_path, {"cells": cells}, timeout_s=300):
        assert found == {name: [] for name in cells}


def test_more_kinds_of_layers_than_letters() -> None:
    """Of a model provider's own layer spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime_like.megatron.model.hybrid import _kinds

    layers = [ModuleSpec(torch.nn.Identity, params={"kind": kind}) for kind in (0, 1, 0, 2, 3, 1)]
    kinds, letters = _kinds(layers)
    assert letters == "*E*-GE" and kinds.gdn_layer == layers[4]
    more = ModuleSpec(torch.nn.Identity, params={"kind": 4})
    with pytest.raises(ValueError, match="has 5 kinds of layers; --model-base hybrid supports 4"):
        _kinds([*layers, more])

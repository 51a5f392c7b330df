"""Models with sparse attention beyond what tests/dist/test_families.py shows of every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.untrained import untrained_weights
from tests.dist.test_families import LENGTHS, Ours


def test_sparse_attention_to_all_keys_is_latent_attention(alone: Any, tmp_path: Path) -> None:
    """Where no sequence has more tokens than keys are chosen, to the last bit. With fewer it is not."""
    tokens = [torch.arange(n) % 50 for n in LENGTHS]
    sparse, dense = tmp_path / "sparse", tmp_path / "dense"
    for chosen, same in ((max(LENGTHS), True), (max(LENGTHS) - 1, False)):
        make_tiny_model("DeepSeek-V3.2", sparse, index_topk=chosen)
        shutil.copytree(sparse, dense, dirs_exist_ok=True)
        config = json.loads((sparse / "config.json").read_text())
        config = {
            k: v for k, v in config.items() if not k.startswith("index_") and k != "layer_types"
        }
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        (dense / "config.json").write_text(json.dumps(config))
        tensors = load_file(sparse / "model.safetensors")
        others = {name: x for name, x in tensors.items() if ".indexer." not in name}
        assert len(tensors) - len(others) == 5 * 3
        save_file(others, dense / "model.safetensors")
        found, expected = (
            torch.cat(Ours(folder, alone, torch.float32).logits(tokens))
            for folder in (sparse, dense)
        )
        assert torch.equal(found, expected) == same


def test_indexers_that_no_layer_uses(alone: Any, tmp_path: Path) -> None:
    """Of layers that share another's choice: written as they were, where a file has some."""
    folder = tmp_path / "model"
    make_tiny_model("GLM-5.2", folder, index_topk_freq=3)
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    layers = [n for n in range(3) if f"model.layers.{n}.self_attn.indexer.wk.weight" in tensors]
    assert layers == [0, 1]
    added = {
        name.replace("layers.1.", "layers.2."): 1 + x
        for name, x in tensors.items()
        if name.startswith("model.layers.1.self_attn.indexer.")
    }
    save_file(tensors | added, path)
    ours = Ours(folder, alone, torch.float32)
    assert ours.exported().keys() == tensors.keys()
    unused = dict(untrained_weights(ours.hf, str(folder)))
    assert unused.keys() == added.keys() and len(added) == 5
    assert all(torch.equal(unused[name], x) for name, x in added.items())

"""Our maps against those of mbridge, which were written by others: the same shards out of Hugging
Face's tensors, and the same tensors back.

mbridge is no dependency: `pip install --no-deps mbridge einops` (0.15.1 works without Transformer
Engine and CUDA), and this is skipped without it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from arguments.hf.model import read_hf_model  # noqa: E402
from arguments.megatron import merge_network  # noqa: E402
from arguments.megatron_configs import build_megatron_configs  # noqa: E402
from arguments.rules.network import ShardedNetwork, layout_problems  # noqa: E402
from arguments.schema import GPTModelConfig, ModelConfig  # noqa: E402
from slime_like.conversion.network import NO_ACCELERATOR, conversion_layout  # noqa: E402
from slime_like.weights.hf_import import _fill  # noqa: E402
from slime_like.weights.parameter_map import (  # noqa: E402
    canonical_name,
    expert_number,
    family_map,
    model_sizes,
)
from slime_like.weights.safetensors_reader import WeightFiles  # noqa: E402

mbridge = pytest.importorskip(
    "mbridge", reason="mbridge is not installed: pip install --no-deps mbridge einops"
)
pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, **EXPERTS},
    "Qwen2Moe": {"shared_expert_intermediate_size": 40, **EXPERTS},
    "Mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },  # mbridge does not derive it
}
TIED = {
    "Qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3 tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}
CASES = {name: (name, settings) for name, settings in MODELS.items()} | TIED


def names_of_transformer_engine(name: str, experts: bool) -> str:
    """mbridge knows the names of that layer specification only."""
    dense = not experts
    for plain, fused in (
        (".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
        (
            ".pre_mlp_layernorm.weight",
            ".mlp.linear_fc1.layer_norm_weight" if dense else ".pre_mlp_layernorm.weight",
        ),
    ):
        name = name.replace(plain, fused)
    if (number := expert_number(name)) is not None:
        name = (
            name.replace(f"local_experts.{number}.", "").removesuffix("weight") + f"weight{number}"
        )
    return name


@pytest.fixture
def bridge_of() -> Iterator[Any]:
    """Makes a bridge; takes back what it writes into the maps of its class for a tied model."""
    kept: list[tuple[Any, dict[str, Any]]] = []

    def make(folder: Path) -> Any:
        from mbridge.core.parallel_states import ParallelStates
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cls = mbridge.core.bridge._MODEL_REGISTRY[config.model_type]
            kept.append((cls, copy.deepcopy(cls._DIRECT_MAPPING)))
            return cls(config, dtype=torch.float32, parallel_states=ParallelStates())

    yield make
    for cls, mapping in kept:
        cls._DIRECT_MAPPING = mapping


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_same_shards_and_the_same_tensors_back(
    bridge_of: Any, tmp_path: Path, case: str, tp_size: int
) -> None:
    import transformers

    family_name, settings = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family_name}Config")(**{**COMMON, **settings})
    model = getattr(transformers, f"{family_name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    bridge = bridge_of(tmp_path)
    hf = read_hf_model(str(tmp_path))
    assert not layout_problems(
        ShardedNetwork(conversion_layout(hf, tensor=tp_size), hf.transformer, tp_size)
    )
    gpt = GPTModelConfig(**hf.gpt)
    core = merge_network({}, hf.transformer, {})
    built, problems = build_megatron_configs(
        core,
        model=ModelConfig(transformer_impl="local"),
        parallel=conversion_layout(hf),
        virtual_stages=None,
        machine=NO_ACCELERATOR,
    )
    assert built is not None, problems
    sizes = model_sizes(built.transformer, gpt)
    family = family_map(
        hf.architecture, built.transformer, tied=not gpt.untie_embeddings_and_output_weights
    )
    seen: set[str] = set()
    with WeightFiles(str(tmp_path)) as files:
        for name, mapping in family.items():
            theirs = names_of_transformer_engine(name, bool(sizes.experts))
            assert canonical_name(theirs) == name
            hf_names = list(mapping.hf_shapes(sizes))
            assert bridge._weight_name_mapping_mcore_to_hf(theirs) == hf_names, name
            tensors = [files.read(hf_name, 0, 0, files.shape(hf_name)[0]) for hf_name in hf_names]
            full_one = bridge._weight_to_mcore_format(theirs, tensors)
            shard_shape = list(full_one.shape)
            if mapping.sharded:
                shard_shape[mapping.dim] //= tp_size
            expected = bridge._weight_split_across_tp(
                theirs, full_one, torch.empty(shard_shape), tp_size
            )
            for rank in range(tp_size):
                shard = torch.full(shard_shape, float("nan"))
                _fill(
                    shard,
                    mapping.dim,
                    mapping.parts(sizes, rank, tp_size, rows=shard_shape[mapping.dim]),
                    files,
                )
                assert torch.equal(shard, expected[rank]), (name, rank)
            back_names, back = bridge._weight_to_hf_format(theirs, full_one)
            assert back_names == hf_names and all(
                torch.equal(a, b) for a, b in zip(back, tensors, strict=True)
            ), name
            seen |= set(hf_names)
        assert seen == files.names - {"lm_head.weight"} if "tied" in case else seen == files.names

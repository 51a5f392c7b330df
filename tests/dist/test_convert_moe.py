"""slime_like/weights with experts: logits against transformers and bit-equal round trips under
every layout of the experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.parity.models import TINY
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import randomize
from slime_like.megatron.model.gpt import to_model_precision
from slime_like.weights.parameter_map import any_expert, canonical_name, expert_number, family_map
from tests.dist import convert_worker

SIZES: dict[str, Any] = dict(**TINY, vocab_size=90, initializer_range=0.2)
DEEPSEEK: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    num_mtp_layers=0,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
    mscale=0.7, mscale_all_dim=0.9,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
    ),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
            decoder_sparse_step=1,
        ),
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
        ),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "rms_norm_eps": 1e-3,  # not that of the latents
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v32": (
        "DeepseekV32",
        {
            **{k: v for k, v in DEEPSEEK.items() if k != "num_mtp_layers"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **{"index_topk": 8, "index_n_heads": 8, "index_head_dim": 12},
        },
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN, "n_group": 1, "topk_group": 1},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **{
                k: v
                for k, v in DEEPSEEK.items()
                if k not in ("first_k_dense_replace", "num_mtp_layers")
            },
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * (SIZES["num_hidden_layers"] - 1),
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        dict(
            head_dim=16,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
            full_attention_interval=2,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=12,
            linear_value_head_dim=10,
            initializer_range=0.1,  # twice that, and rounding in the gradients is 10 times larger
        ),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
}
# weights that select experts and keys
SELECTING = (
    "gate.e_score_correction_bias",
    ".k_norm.weight",
    ".k_norm.bias",
    ".weights_proj.weight",
)
# tensor, pipeline, virtual, expert, expert-tensor
SOME_LAYOUTS = [(1, 2, 2, 2, 1)]
MORE_LAYOUTS = [(2, 1, 1, 2, 2), (1, 1, 1, 4, 1), (2, 2, 1, 1, 2)]
OTHER_LAYOUTS = [(1, 1, 1, 1, 1), (1, 1, 1, 2, 1), (2, 1, 1, 2, 1), (1, 2, 1, 2, 1)]


def make_models(
    folder: Path,
    names: list[str],
    among: dict[str, tuple[str, dict[str, Any]]] | None = None,
    **changes: Any,
) -> dict[str, str]:
    """Tiny models as transformers saves them, with what they answer to some tokens.

    Args:
        among: Other families than those of this file.
        changes: To their sizes.
    """
    import transformers

    made = {}
    for number, name in enumerate(names):
        family, settings = (among or MODELS)[name]
        torch.manual_seed(number)
        config = getattr(transformers, f"{family}Config")(
            **{**SIZES, **settings, **changes}, attn_implementation="eager"
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        randomize(model)
        with torch.no_grad():
            tokens = torch.randint(0, config.vocab_size, (24,))
            logits = model(tokens[None]).logits[0]
        model.save_pretrained(folder / name)
        torch.save({"tokens": tokens, "logits": logits}, folder / name / "expected.pt")
        made[name] = str(folder / name)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"), list(MODELS))


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(SOME_LAYOUTS, id="some"),
        pytest.param(MORE_LAYOUTS, id="more", marks=pytest.mark.extended),
        pytest.param(OTHER_LAYOUTS, id="others", marks=pytest.mark.slow),
    ],
)
def test_logits_and_round_trips_under_every_layout(
    folders: dict[str, str], tmp_path: Path, layouts: list[tuple[int, ...]]
) -> None:
    arguments = {"layouts": layouts, "folders": list(folders.values()), "grouped": "qwen3-moe"}
    ranks = run_ranks(
        "tests.dist.convert_worker:check_layouts", 4, tmp_path, arguments, timeout_s=240
    )
    assert not convert_worker.over_the_limit(ranks, len(layouts) * len(MODELS))


def test_experts_of_one_tensor_that_tensor_parallel_ranks_share(tmp_path: Path) -> None:
    """Their shards come from all ranks that have experts of a layer, and several have one."""
    granite = {"granite": ("GraniteMoe", dict(num_local_experts=4, num_experts_per_tok=2))}
    folders = list(make_models(tmp_path, ["granite"], granite).values())
    layouts = [(2, 1, 1, 2, 2), (2, 2, 1, 1, 2), (1, 1, 1, 4, 1)]
    arguments = {"layouts": layouts, "folders": folders}
    ranks = run_ranks(
        "tests.dist.convert_worker:check_layouts", 4, tmp_path, arguments, timeout_s=240
    )
    assert not convert_worker.over_the_limit(ranks, len(layouts))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32"])
def test_routers_and_indexers_of_a_bfloat16_model_keep_float32(
    alone: Any, tmp_path: Path, name: str
) -> None:
    """The biases of DeepSeek's experts differ in digits that bfloat16 does not have, as do the
    weights of its indexers; counts of tokens are integers."""
    folder = make_models(tmp_path, [name])[name]
    weights = convert_worker.stored_weights(folder)
    selecting = [n for n in weights if n.endswith(SELECTING)]
    assert {n.rpartition("mlp.")[2].rpartition("indexer.")[2] for n in selecting} == {
        tail.removeprefix(".") for tail in (SELECTING if name == "deepseek-v32" else SELECTING[:1])
    }
    for n in selecting:
        weights[n] = 3 + weights[n].sign() * torch.rand(weights[n].shape) * 1e-3
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    chunks, hf, gpt = convert_worker.build(folder, alone)
    chunks[0].config.bf16 = True
    to_model_precision(chunks, chunks[0].config)
    convert_worker.load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=alone)
    exported = dict(convert_worker.HfExport(chunks, hf=hf, gpt=gpt, layout=alone).stream())
    for n, tensor in exported.items():
        dtype = torch.float32 if n in selecting else torch.bfloat16
        assert tensor.dtype == dtype and torch.equal(tensor, weights[n].to(dtype)), n
    router = chunks[0].decoder.layers[-1].mlp.router
    for counts in (router.load, router.local_tokens_per_expert):
        counts += 256
        counts += 1
        assert counts.tolist() == [257.0] * 8


@pytest.mark.parametrize(("impl", "full"), [("local", False), ("transformer_engine", True)])
def test_latent_attention_of_the_transformer_engine_spec(impl: str, full: bool) -> None:
    """There the norms of the latents belong to the up-projections, and the down-projections are
    whole on every tensor-parallel rank."""
    layer = "decoder.layers.0.self_attention."
    for latent in ("q", "kv"):
        assert (
            canonical_name(f"{layer}linear_{latent}_up_proj.layer_norm_weight")
            == f"{layer}{latent}_layernorm.weight"
        )
    config = SimpleNamespace(
        multi_latent_attention=True,
        transformer_impl=impl,
        q_lora_rank=20,
        num_moe_experts=8,
        moe_layer_freq=[1],
        moe_latent_size=None,
        moe_shared_expert_intermediate_size=16,
        linear_attention_freq=None,
        num_layers=1,
    )
    family = family_map("DeepseekV3ForCausalLM", config, tied=False)
    assert [
        family[f"{layer}linear_{latent}_down_proj.weight"].sharded for latent in ("q", "kv")
    ] == [not full, not full]
    assert family[f"{layer}linear_q_up_proj.weight"].sharded


def test_grouped_experts_of_the_transformer_engine_spec() -> None:
    """There an expert's weight is a numbered parameter of one layer for all; the number is the
    rank's own until `global_parameters`."""
    assert (
        canonical_name("decoder.layers.3.mlp.experts.linear_fc1.weight5")
        == "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"
    )
    assert canonical_name("decoder.layers.3.mlp.experts.linear_fc2.weight11").endswith(
        "experts.local_experts.11.linear_fc2.weight"
    )
    assert (
        canonical_name("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
        == "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    )
    name = "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"
    assert (expert_number(name), any_expert(name)) == (5, any_expert(name.replace(".5.", ".7.")))
    assert expert_number("decoder.layers.3.mlp.linear_fc1.weight") is None

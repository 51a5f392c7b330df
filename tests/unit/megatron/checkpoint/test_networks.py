"""Names and shapes of a checkpoint against those of a model, and the fingerprint of a state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402

from slime_like.megatron.checkpoint.fingerprint import bit_sums, differences, fingerprint  # noqa: E402
from slime_like.megatron.checkpoint.networks import (  # noqa: E402
    SavedNetwork,
    adapt_names,
    available_name,
    leave_out_extra_state,
    shape_problems,
    tower_problem,
)

LAYERS = "decoder.layers."
# what a layer is called in checkpoints of Transformer Engine's specification
DENSE = [
    LAYERS + name
    for name in (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
    )
]
MOE = [
    LAYERS + name
    for name in (
        "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
    )
]
LATENT = [LAYERS + "self_attention.linear_kv_up_proj.layer_norm_weight"]


def tensor(key: str, *shape: int, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(*shape), **more)


@pytest.mark.parametrize(
    ("wanted", "available", "found"),
    [
        (DENSE[1], DENSE, DENSE[1]),
        # the local specification's name before a mixture of experts
        (LAYERS + "mlp.linear_fc1.layer_norm_weight", MOE, MOE[1]),
        (LAYERS + "pre_mlp_layernorm.weight", DENSE, DENSE[1]),
        (LAYERS + "input_layernorm.weight", DENSE, DENSE[0]),
        ("optimizer.state.exp_avg." + LAYERS + "pre_mlp_layernorm.weight", ["optimizer.state.exp_avg." + DENSE[1]], "optimizer.state.exp_avg." + DENSE[1]),
        (LAYERS + "self_attention.kv_layernorm.weight", LATENT, LATENT[0]),
        (LATENT[0], [LAYERS + "self_attention.kv_layernorm.weight"], LAYERS + "self_attention.kv_layernorm.weight"),
        (LAYERS + "self_attention.q_layernorm.weight", DENSE, LAYERS + "self_attention.q_layernorm.weight"),
        (LAYERS + "mlp.linear_fc9.weight", DENSE, LAYERS + "mlp.linear_fc9.weight"),
        # plain optimizer, half precision
        ("optimizer.state.param.a", ["a", "optimizer.state.fp32_param.a"], "optimizer.state.fp32_param.a"),
        ("optimizer.state.fp32_param.a", ["a", "optimizer.state.param.a"], "optimizer.state.param.a"),
        # plain optimizer, fp32
        ("optimizer.state.param.a", ["a", "optimizer.state.exp_avg.a"], "a"),
        ("optimizer.state.exp_avg.a", ["a"], "optimizer.state.exp_avg.a"),
    ],
)  # fmt: skip
def test_names_of_the_other_specification(wanted: str, available: list[str], found: str) -> None:
    assert available_name(wanted, available) == found


def test_a_state_asks_for_what_is_there() -> None:
    extra = ShardedObject(LAYERS + "mlp.linear_fc1._extra_state", None, (1,), (0,))
    kept = ShardedObject(LAYERS + "mlp.router.counts", None, (1,), (0,))
    wanted = {
        "model0": {
            "a": tensor(LAYERS + "mlp.linear_fc1.layer_norm_weight", 4),
            "b": extra,
            "c": kept,
        },
        "optimizer": {
            "param_state": [
                {"d": tensor("optimizer.state.param." + LAYERS + "input_layernorm.weight", 4)}
            ]
        },
    }
    leave_out_extra_state(wanted["model0"])
    adapt_names(wanted, [*MOE, "optimizer.state.param." + MOE[0], kept.unique_key])
    assert wanted["model0"]["a"].key == MOE[1]  # type: ignore[call-overload]
    assert list(wanted["model0"]) == ["a", "c"]
    assert wanted["optimizer"]["param_state"][0]["d"].key == "optimizer.state.param." + MOE[0]  # type: ignore[call-overload,index]


def test_a_local_model_saves_under_the_names_of_transformer_engine(tmp_path: Any) -> None:
    """megatron-core's own local specification does, for a dense layer; our checkpoints keep it so."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    renamed = get_gpt_layer_local_spec(
        normalization="RMSNorm"
    ).submodules.sharded_state_dict_keys_map
    assert renamed == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def test_shapes_that_differ_are_named() -> None:
    saved = {
        "a": SimpleNamespace(size=torch.Size([4, 2])),
        "b": SimpleNamespace(size=torch.Size([8])),
        "object": SimpleNamespace(),
    }
    wanted = {
        "model0": {
            "a": tensor("a", 4, 3),
            "b": tensor("b", 16, allow_shape_mismatch=True),
            "c": tensor("c", 1),
            "object": tensor("object", 1),
        }
    }
    assert shape_problems(wanted, saved) == [
        "a is [4, 2] there and [4, 3] here",
        "c is not in it",
        "object is not in it",
    ]


WEIGHT = "decoder.weight"
OF_TOWER = "vision.patch_embed.weight"
MOMENT = f"optimizer.state.exp_avg.{OF_TOWER}"


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({WEIGHT: (4,)}, "has no vision tower"),
        ({WEIGHT: (4,), OF_TOWER: (2,)}, "has no state of the optimizer for the vision tower"),
        ({WEIGHT: (4,), OF_TOWER: (3,), MOMENT: (3,)}, None),
        ({WEIGHT: (4,), OF_TOWER: (2,), MOMENT: (2,)}, None),
    ],
    ids=["none", "frozen", "another", "trained"],
)
def test_what_is_missing_of_a_tower(
    saved: dict[str, tuple[int, ...]], expected: str | None
) -> None:
    """A run that trains its tower: the checkpoint has none, a frozen one, another, or all of it.
    What is of another size has no remedy here but its names and sizes."""
    metadata = {name: SimpleNamespace(size=torch.Size(size)) for name, size in saved.items()}
    wanted = {
        "model0": {"a": tensor(WEIGHT, 4), "b": tensor(OF_TOWER, 2)},
        "optimizer": {"param_state": [tensor(MOMENT, 2)]},
    }
    model = torch.nn.Module()
    model.vision_settings = SimpleNamespace()  # type: ignore[assignment]
    problems = shape_problems(wanted, metadata)
    found = tower_problem([model], problems, metadata)
    assert found is None if expected is None else (found or "").startswith(expected)
    assert bool(problems) == (saved.get(MOMENT) != (2,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 4096, 10000])
def test_any_changed_bit_changes_the_sums(dtype: torch.dtype, size: int) -> None:
    values = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    sums = bit_sums(values)
    assert bit_sums(values.clone()) == sums
    for place in {0, size // 2, size - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[place * values.element_size()] ^= 1
        assert bit_sums(changed) != sums
    if size > 1:
        swapped = values.clone()
        swapped[0], swapped[size - 1] = values[size - 1].clone(), values[0].clone()
        assert bit_sums(swapped) != sums
        assert bit_sums(values.roll(1)) != sums


def test_the_fingerprint_sees_adam() -> None:
    module = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.ones(1, 3)).sum().backward()
    adam.step()
    network = SavedNetwork([module], SimpleNamespace(optimizer=adam), None, None)  # type: ignore[arg-type]
    before = fingerprint(network)
    assert before.keys() == {"weights", "main_params", "exp_avg", "exp_avg_sq", "step"}
    adam.state[module.weight]["step"] += 1
    assert differences(before, fingerprint(network)) == ["step"]
    with torch.no_grad():
        module.bias[1] += 1
    assert differences(before, fingerprint(network)) == ["main_params", "step", "weights"]
    network.chunks[0].to(torch.float64)
    assert differences(before, fingerprint(network)) == ["step"], "other precision: not comparable"

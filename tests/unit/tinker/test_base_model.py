"""Which adapters the server gives."""

from __future__ import annotations

import pytest

from arguments.hf.lora_modules import without_attention
from slime_like.tinker.api_process import EXPERTS, TIED_UNEMBED
from slime_like.tinker.base_model import BaseModel, adapter_of, check_optimizer, check_served
from slime_like.tinker.errors import Refused
from slime_like.tinker.schemas import LoraConfig, OptimizerConfig

LOCAL = BaseModel("folder", "name", "Qwen3ForCausalLM")
SGLANG = BaseModel("folder", "name", "Qwen3ForCausalLM", {"train_unembed": TIED_UNEMBED})
UNMERGED = BaseModel("folder", "name", "Qwen3MoeForCausalLM", {"train_mlp": EXPERTS})


def test_settings_of_an_optimizer_are_no_part_of_its_choice() -> None:
    """Nor ignored; the SDK's types of other optimizers have some."""
    check_optimizer(None)
    check_optimizer(OptimizerConfig(type="adamw"))
    with pytest.raises(Refused, match="beta1, eps is not supported; every optim_step brings"):
        check_optimizer(OptimizerConfig(type="adamw", eps=1e-8, beta1=0.9))  # type: ignore[call-arg]
    with pytest.raises(Refused, match="optimizer 'dimuon' is not supported, must be adamw"):
        check_optimizer(OptimizerConfig(type="dimuon", version=1))  # type: ignore[call-arg]


def test_rank_0_trains_all_weights() -> None:
    assert (
        adapter_of(None, "policy", LOCAL) is None
        and adapter_of(LoraConfig(rank=0), "critic", SGLANG) is None
    )


def test_the_sdks_defaults_are_taken() -> None:
    settings = adapter_of(LoraConfig(rank=32), "policy", LOCAL)
    assert settings == {
        "rank": 32,
        "seed": None,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }


def test_a_base_with_adapters_on_experts_alone() -> None:
    """DeepSeek-V4; train.py refuses other words, too."""
    reason = without_attention({"entry_rates": [0, 4]})
    base = BaseModel("folder", "name", "DeepseekV4ForCausalLM", without_attention=reason)
    for role in ("policy", "critic"):
        with pytest.raises(Refused, match=r"train_attn True is not supported with DeepSeek-V4: mo"):
            adapter_of(LoraConfig(rank=32), role, base)
        assert adapter_of(LoraConfig(rank=0), role, base) is None
    experts = LoraConfig(rank=32, train_attn=False)
    with pytest.raises(Refused, match="train_unembed True is not supported"):
        adapter_of(experts, "policy", base)
    assert adapter_of(experts, "critic", base)
    assert adapter_of(LoraConfig(rank=32, train_attn=False, train_unembed=False), "policy", base)
    assert not without_attention({"num_layers": 2})


def test_an_output_layer_that_samplers_cannot_take() -> None:
    with pytest.raises(
        Refused, match="train_unembed is not supported with --rollout-engine sglang"
    ):
        adapter_of(LoraConfig(rank=32), "policy", SGLANG)
    settings = adapter_of(LoraConfig(rank=32, train_unembed=False), "policy", SGLANG)
    assert settings is not None and not settings["train_unembed"]
    check_served(settings, "policy", SGLANG)
    check_served(None, "policy", SGLANG)


def test_ranks_that_servers_do_not_take() -> None:
    base = BaseModel("folder", "name", "Qwen3ForCausalLM", max_rank=16)
    with pytest.raises(Refused, match="rank 32 is above 16, the largest"):
        adapter_of(LoraConfig(rank=32), "policy", base)
    assert adapter_of(LoraConfig(rank=16), "policy", base) is not None
    assert adapter_of(LoraConfig(rank=32), "critic", base) is not None


def test_experts_that_engines_cannot_adapt() -> None:
    with pytest.raises(Refused, match="train_mlp is not supported with --lora-sync adapter"):
        adapter_of(LoraConfig(rank=32), "policy", UNMERGED)
    assert adapter_of(LoraConfig(rank=32, train_mlp=False), "policy", UNMERGED) is not None
    assert adapter_of(LoraConfig(rank=32), "critic", UNMERGED) is not None, "it is not sampled from"


@pytest.mark.parametrize("base", [LOCAL, SGLANG])
def test_a_critic_has_no_output_layer(base: BaseModel) -> None:
    """The SDK's default train_unembed=True says nothing there, so that samplers are no reason
    against it."""
    settings = adapter_of(LoraConfig(rank=32), "critic", base)
    assert settings == adapter_of(LoraConfig(rank=32, train_unembed=False), "critic", base)
    assert settings == {
        "rank": 32,
        "seed": None,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }

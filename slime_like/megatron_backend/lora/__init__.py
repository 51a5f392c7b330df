"""Low-rank adapters over megatron-core's parallel linear layers."""

from slime_like.megatron_backend.lora.base import LoraBase
from slime_like.megatron_backend.lora.network import LoraNetwork
from slime_like.megatron_backend.lora.peft import load_adapter, save_adapter
from slime_like.megatron_backend.lora.spec import LoraSpec, critic_lora_spec, lora_spec

__all__ = [
    "LoraBase",
    "LoraNetwork",
    "LoraSpec",
    "critic_lora_spec",
    "load_adapter",
    "lora_spec",
    "save_adapter",
]

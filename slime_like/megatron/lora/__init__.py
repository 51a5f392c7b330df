"""Low-rank adapters over megatron-core's parallel linear layers."""

from slime_like.megatron.lora.base import LoraBase
from slime_like.megatron.lora.config import LoraSpec, critic_lora_spec, lora_spec
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.megatron.lora.peft import load_adapter, save_adapter

__all__ = [
    "LoraBase",
    "LoraNetwork",
    "LoraSpec",
    "critic_lora_spec",
    "load_adapter",
    "lora_spec",
    "save_adapter",
]

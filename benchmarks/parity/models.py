"""The tiny models of the parity table, the parity matrix and tests/dist, with random weights."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
SIZES: dict[str, Any] = dict(**TINY, vocab_size=61, head_dim=8, initializer_range=0.1)


def make_model(folder: Path, seed: int) -> None:
    """A tiny Qwen3 model with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)
    save_tokenizer(folder)


def make_moe_model(folder: Path) -> None:
    """A tiny Qwen3-MoE. Its router logits are no larger than those of a trained model: at a size of
    5 the softmax saturates, which amplifies float32 rounding errors in gradients 200 times."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a character tokenizer; nothing is sampled, but the trainer requires one."""
    from slime_like.cli.tiny_model import character_tokenizer

    tokens = ["<end>", "<unknown>", *string.ascii_letters]
    tokenizer = character_tokenizer(tokens, unk_token="<unknown>", eos_token="<end>")
    tokenizer.save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    "dense": lambda folder: make_model(folder, seed=3),
    "experts": make_moe_model,
}

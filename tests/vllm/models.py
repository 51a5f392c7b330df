"""Models that vLLM serves on a CPU, whose attention kernel needs heads of 32 or more."""

from __future__ import annotations

from pathlib import Path

HEAD = 64


def save_model(folder: Path, tokenizer_of: Path, *, experts: bool = False) -> Path:
    """A model of two layers with the tokenizer of another folder; its folder. experts: four in
    each layer, of which a token takes two."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(1)
    common = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=HEAD, max_position_embeddings=512, initializer_range=0.1, pad_token_id=None, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    if experts:
        config = Qwen3MoeConfig(
            **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
        )  # fmt: skip
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

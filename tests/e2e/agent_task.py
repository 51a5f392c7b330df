"""A task of two turns that a model of random weights learns, and the agent that plays it: say the
digit that is asked for, and when nothing but a colon follows, the same one again."""

from __future__ import annotations

import json
from pathlib import Path

AGENT = """
async def play(task):
    messages = [{"role": "user", "content": task.prompt}]
    right = 0
    for turn in range(2):
        answer = await task.chat(messages, max_tokens=1)
        message = answer["choices"][0]["message"]
        right += message["content"] == task.label
        messages += [message, {"role": "user", "content": ":"}]
    return right / 2
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_task(folder: Path) -> None:
    """`model/`, `prompts.jsonl` and `agent.py`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.learning.tasks import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"text": f"{digit}:", "answer": digit} for digit in "0123"] * 4
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)

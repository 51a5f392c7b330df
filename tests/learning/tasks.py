"""Tasks that a model with random weights learns in a few minutes on a processor.

`digits` is the public one: the end-to-end task of verl's tests (digit completion, a 4-layer Llama
of random weights, passed with a mean reward above 0.2 within 200 steps). The other two are ours,
and ask for something else: `copy` for attention to a place in the prompt, `largest` for learning
from a reward of 0 or 1 alone.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime_like.cli.tiny_model import character_tokenizer
from tests.learning.rewards import VOCABULARY

END, PAD, UNKNOWN, SEPARATOR = "E", "P", "U", "S"

Pair = tuple[str, str]  # prompt, label


def digits() -> Iterator[Pair]:
    """Continue an arithmetic sequence modulo 9: `first,second:9,nS` asks for the next n numbers.

    Differences go from 0 to 9, and those of 0 and 9 make the same prompts: a fifth of all repeat
    one digit, and 100 of the 1,000 are there twice. A tenth asks for no number.
    """
    modulus = 9
    for first, step, count in itertools.product(range(10), range(10), range(10)):
        second = (first + step) % modulus
        numbers = [(second + k * step) % modulus for k in range(1, count + 1)]
        yield f"{first},{second}:{modulus},{count}{SEPARATOR}", ",".join(map(str, numbers))


def copy() -> Iterator[Pair]:
    """`123:` asks for `123`."""
    for triple in itertools.product("0123456789", repeat=3):
        text = "".join(triple)
        yield f"{text}:", text


def largest() -> Iterator[Pair]:
    """`3,7,2:` asks for `7`. Who always answers 9 is right in 27 % of all cases."""
    for triple in itertools.product("0123456789", repeat=3):
        yield ",".join(triple) + ":", max(triple)


TASKS: dict[str, Callable[[], Iterator[Pair]]] = {
    "digits": digits,
    "copy": copy,
    "largest": largest,
}


def write_task(folder: Path, task: str, seed: int, *, num_layers: int) -> None:
    """Write `model/`, a Llama of random weights with its tokenizer, `train.jsonl` (4 of 5 prompts)
    and `heldout.jsonl`.

    Args:
        folder: where to write; made if it is not there.
        task: a key of TASKS.
        seed: of the weights, and of which prompts are held out.
        num_layers: of the model; its hidden size is 128.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [{"prompt": prompt, "answer": label} for prompt, label in TASKS[task]()]
    random.Random(seed).shuffle(rows)
    held_out = len(rows) // 5
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[:held_out]), ("train", rows[held_out:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def make_tokenizer() -> Any:
    """One token for each of the 12 characters, and four for what is not text."""
    return character_tokenizer(
        VOCABULARY, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, sep_token=SEPARATOR
    )

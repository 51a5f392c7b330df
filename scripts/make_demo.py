"""Make what the demo needs: a tiny Qwen3 model with random weights, a character tokenizer, and
prompts.

    python scripts/make_demo.py --output-dir outputs/demo

writes `model/` (a Hugging Face folder), `train.jsonl` and `heldout.jsonl`: the reasoning-gym task
`spell_backward`, whose words are disjoint between the two files. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.cli.tiny_model import save_model


def make_rows(
    *, min_word_len: int, max_word_len: int, size: int, seed: int
) -> list[dict[str, Any]]:
    """Rows of `spell_backward` without repeated words, in the format of a reasoning_gym source."""
    from reasoning_gym import create_dataset

    options = {
        "min_word_len": min_word_len,
        "max_word_len": max_word_len,
        "size": size,
        "seed": seed,
    }
    by_word: dict[str, dict[str, Any]] = {}
    for entry in create_dataset("spell_backward", **options):
        metadata = {"task": {"name": "spell_backward", "options": options}, "entry": entry}
        messages = [{"role": "user", "content": entry["question"]}]
        row = {"messages": messages, "answer": entry["answer"], "metadata": metadata}
        by_word.setdefault(entry["metadata"]["word"].lower(), row)
    rows = [by_word[word] for word in sorted(by_word)]
    random.Random(seed).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--min-word-len", type=int, default=3)
    parser.add_argument("--max-word-len", type=int, default=5)
    parser.add_argument("--num-heldout", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = options.output_dir / "model"
    model = save_model(
        folder, hidden_size=options.hidden_size, num_layers=options.num_layers, seed=options.seed
    )

    rows = make_rows(
        min_word_len=options.min_word_len,
        max_word_len=options.max_word_len,
        size=8000,
        seed=options.seed,
    )
    parts = {"heldout": rows[: options.num_heldout], "train": rows[options.num_heldout :]}
    for name, part in parts.items():
        with (options.output_dir / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"made {folder} ({parameters:,} parameters), {len(parts['train'])} training and "
        f"{len(parts['heldout'])} held-out prompts"
    )


if __name__ == "__main__":
    main()

"""A small reward model with the tokenizer of the tests, its scores by transformers, and its server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from slime_like.cli.tiny_model import make_tokenizer


def save_reward_model(folder: Path, labels: int = 1) -> Path:
    """A folder as --save-hf of rm_loss writes it; scores differ by tenths."""
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, num_labels=labels,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores(folder: Path, texts: Sequence[Sequence[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [float(model(torch.tensor([list(text)])).logits) for text in texts]


@contextlib.contextmanager
def served(folder: Path, log: Path, *more: str) -> Iterator[str]:
    """`slime-like reward-server`; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "slime_like.cli", "reward-server", str(folder)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *more], stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 180
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False

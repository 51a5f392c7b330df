"""Size and time of delta weight updates, compared with full ones, while a bfloat16 policy is
trained at RL learning rates.

    python benchmarks/bench_delta.py --lr 1e-6 --updates 20 [--json delta.json]

A Qwen3 of transformers with weights as large as a trained model's (standard deviation 0.02) takes
Adam's steps in float32 on policy gradients of random tokens; each update writes what the steps
changed in bfloat16, and a copy of the weights applies it. The first steps of Adam move every weight
by the learning rate and are the worst; --warmup of them come before the first update.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.bench_common import write_json
from slime_like.weights.buckets import as_buckets, as_bytes
from slime_like.weights.delta_local import LocalCheckpoint
from slime_like.weights.delta_updates import Publication
from slime_like.weights.safetensors_reader import WeightFiles


def make_model(hidden: int, layers: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=hidden // 8, initializer_range=0.02,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on 8 sequences of 64 random tokens, each with a separate advantage."""
    tokens = torch.randint(8192, (8, 64))
    log_probs = model(tokens).logits[:, :-1].log_softmax(-1)
    chosen = log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1).mean(-1)
    (-torch.randn(8) * chosen).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().bfloat16()


def is_same(folder: Path, model: torch.nn.Module) -> bool:
    with WeightFiles(str(folder)) as files:
        return all(
            torch.equal(as_bytes(files.read_stored(name)), as_bytes(tensor))
            for name, tensor in weights_of(model)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps for each update")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    rows = [measure(words, lr) for lr in words.lr]
    write_json(words.json, rows)
    return 0


def measure(words: argparse.Namespace, lr: float) -> dict[str, float]:
    model = make_model(words.hidden, words.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    total = sum(2 * parameter.numel() for parameter in model.parameters())
    sizes = []
    writing = []
    applying = []
    with tempfile.TemporaryDirectory(prefix="bench_delta_") as folder:
        source = Path(folder) / "model"
        root = Path(folder) / "updates"
        model.config.save_pretrained(source)  # type: ignore[operator, union-attr]
        local = LocalCheckpoint(root, Path(folder) / "copy")
        for _ in range(words.warmup):
            train(model, optimizer)
        for number in range(1, words.updates + 2):
            first = number == 1
            order = Publication(
                str(root), str(source), "bench", number, number, fresh=first, full=first
            )
            start = time.perf_counter()
            update = order.write_alone(as_buckets(weights_of(model), 2**26))
            written = time.perf_counter()
            local.update_to(number)
            if not first:
                sizes.append(update.nbytes / total)
                writing.append(written - start)
                applying.append(time.perf_counter() - written)
            if not is_same(local.folder, model):
                raise SystemExit(f"the copy is not the model after update {number}")
            for _ in range(words.steps):
                train(model, optimizer)
    row = {
        "lr": lr,
        "full_mib": total / 2**20,
        "share_mean": statistics.mean(sizes),
        "share_max": max(sizes),
        "write_s": statistics.median(writing),
        "apply_s": statistics.median(applying),
    }
    print(
        f"lr {lr:g}: {row['full_mib']:.0f} MiB of weights; an update is {row['share_mean']:.2%} of "
        f"them (at most {row['share_max']:.2%}), {row['write_s']:.2f} s to write, "
        f"{row['apply_s']:.2f} s to apply"
    )
    return row


if __name__ == "__main__":
    sys.exit(main())

"""Reported loss values under each reduction: python benchmarks/reduction_table.py

The same recorded rollout (of parity_table.py: 8 responses of uneven lengths, with holes in their
masks and one without any active token), the same weights and one optimizer step under every
--loss-reduction, each a run of `train.py --debug-train-only`. Printed are the parts of the loss,
the gradient's norm, and the change of the weights under Adam, all as the run reports or leaves
them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.parity_table import GROUP_SIZE, GROUPS, make_model, make_rollouts  # noqa: E402
from scripts.warm_start import run  # noqa: E402
from slime_like.losses import LOSS_REDUCTIONS  # noqa: E402
from slime_like.metrics.logger import read_metrics  # noqa: E402
from slime_like.rollout.recording import load_rollout  # noqa: E402

NORM_LENGTH = 32
FLAGS = (
    f"--debug-train-only --num-rollout 1 --rollout-batch-size {GROUPS} --n-samples-per-prompt "
    f"{GROUP_SIZE} --micro-batch-size 2 --policy-loss-type ppo --use-rollout-logprobs "
    "--use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --lr 3e-4 --clip-grad 1.0 "
    "--no-tensorboard --no-progress --no-plot"
)
COLUMNS = (
    "train/loss",
    "train/policy_loss",
    "train/kl_loss",
    "train/entropy_loss",
    "train/grad_norm",
)


def change(before: Path, after: Path) -> float:
    """Norm of the difference of all weights over their norm."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    squares = [(float((new[k] - old[k]).square().sum()), float(old[k].square().sum())) for k in new]
    return float((sum(d for d, _ in squares) / sum(n for _, n in squares)) ** 0.5)


def measure(reduction: str, work: Path) -> list[float]:
    """One number per column of COLUMNS, and the relative change of the weights."""
    out = work / reduction
    flags = f"{FLAGS} --loss-reduction {reduction}"
    if reduction == "seq_mean_token_sum_norm":
        flags += f" --loss-norm-length {NORM_LENGTH}"
    files = ["--hf-checkpoint", str(work / "model"), "--ref-load", str(work / "ref")]
    files += ["--load-debug-rollout-data", str(work / "rollout_{rollout_id}")]
    files += ["--output-dir", str(out), "--save-hf", str(out / "hf")]
    run([sys.executable, "train.py", *flags.split(), *files], out / "log.txt")
    (row,) = read_metrics(out / "metrics.jsonl")
    return [*(row[name] for name in COLUMNS), change(work / "model", out / "hf")]


def describe(template: str) -> str:
    groups = load_rollout(template, 0)
    lengths = [s.active_tokens for group in groups for s in group.samples]
    return (
        f"active tokens of the {len(lengths)} responses: {', '.join(map(str, lengths))}; together "
        f"{sum(lengths)}"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model", seed=3)
        make_model(work / "ref", seed=4)
        make_rollouts(str(work / "rollout_{rollout_id}"))
        print(describe(str(work / "rollout_{rollout_id}")))
        heads = [name.removeprefix("train/") for name in COLUMNS] + ["weights move"]
        print(f"{'reduction':24}" + "".join(f"{head:>14}" for head in heads))
        for reduction in LOSS_REDUCTIONS:
            *numbers, moved = measure(reduction, work)
            print(
                f"{reduction:24}" + "".join(f"{x:14.4f}" for x in numbers) + f"{moved:14.2e}",
                flush=True,
            )


if __name__ == "__main__":
    main()

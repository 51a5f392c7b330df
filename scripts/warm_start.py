"""The demo's data and its supervised warm start, which the loss table and the example scripts begin
with: python scripts/warm_start.py --output-dir DIR.

Writes `data/model`, `data/train.jsonl`, `data/heldout.jsonl` (see make_demo.py), `sft/hf`, the
model after a minute of supervised fine-tuning with a score of about 0.37 on the held-out words, and
`logs/`. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800
SFT = (
    "--loss-type sft_loss --num-rollout 112 --rollout-batch-size 128 --micro-batch-size 64 --lr "
    "3e-3 --lr-decay-style linear --lr-warmup-iters 20 --eval-interval 112"
)
DATA = (
    "--input-key messages --label-key answer --apply-chat-template --rollout-shuffle "
    "--n-samples-per-eval-prompt 4 --custom-rm-path scripts/demo_reward.py:score "
    "--rollout-max-response-len 8 --no-tensorboard --no-progress --no-plot"
)


def run(command: Sequence[str], log: Path) -> None:
    """Run a command with its output in `log`. If it fails, raises RuntimeError with the end of the
    log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{log.read_text(encoding='utf-8')[-3000:]}")


def train_command(flags: str, model: Path, output: Path, work: Path) -> list[str]:
    """The command line of train.py on the demo's words in `work`."""
    command = [sys.executable, "train.py", *flags.split(), *DATA.split()]
    command += ["--prompt-data", str(work / "data/train.jsonl")]
    command += ["--eval-prompt-data", "heldout", str(work / "data/heldout.jsonl")]
    return [*command, "--hf-checkpoint", str(model), "--output-dir", str(output)]


def warm_start(work: Path) -> Path:
    """Make data and warm start if missing; returns the folder of the model. work: absolute path."""
    model = work / "sft/hf"
    if not (work / "sft/done").exists():
        make = [sys.executable, "scripts/make_demo.py", "--output-dir", str(work / "data")]
        make += ["--max-word-len", "4"]
        run(make, work / "logs/make_demo.txt")
        run(
            [*train_command(SFT, work / "data/model", work / "sft", work), "--save-hf", str(model)],
            work / "logs/sft.txt",
        )
        (work / "sft/done").touch()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    print(f"warm start: {warm_start(parser.parse_args().output_dir.resolve())}")


if __name__ == "__main__":
    main()

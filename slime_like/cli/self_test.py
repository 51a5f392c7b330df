"""Whether this environment trains: two processes exchange numbers over gloo, and a tiny model takes
one training step. `slime-like doctor --self-test` runs it; it needs no network and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from slime_like.doctor import Check

RANKS = 2
LIMIT_S = 300.0
LAST = 400  # characters of what a process that failed has written
EXCHANGE = """
import sys, torch, torch.distributed as dist
rank, size = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
mine = torch.arange(4.0) + rank
total = mine.clone()
dist.all_reduce(total)
assert torch.equal(total, size * torch.arange(4.0) + sum(range(size))), total
parts = [torch.empty(4) for _ in range(size)]
dist.all_gather(parts, mine)
assert all(torch.equal(part, torch.arange(4.0) + i) for i, part in enumerate(parts)), parts
dist.barrier()
dist.destroy_process_group()
"""
TRAIN = """
import sys
from pathlib import Path
from slime_like.cli.tiny_model import save_model
save_model(Path(sys.argv[1]), hidden_size=32, num_layers=1)
sys.argv = ["train.py", *sys.argv[2:]]
import train
sys.exit(train.main())
"""


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Without the variables of a launcher that may have started this process."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    environment = {name: value for name, value in os.environ.items() if name not in launchers}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> str:
    """What the first that failed has written last; "" where all ended well."""
    problem = ""
    for process in processes:
        try:
            output = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"{process.communicate()[0]}\nno end after {LIMIT_S:g} s"
        if process.returncode and not problem:
            problem = output.strip()[-LAST:] or f"exit status {process.returncode}"
    return problem


def train_flags(folder: Path) -> list[str]:
    """One rollout of two prompts on random weights, graded by --rm-type exact_match."""
    rows = [{"prompt": f"write {letter}:", "answer": letter} for letter in "ab"]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (
        f"--hf-checkpoint {folder}/model --prompt-data {data} --input-key prompt --label-key answer "
        "--rm-type exact_match --rm-num-workers 1 --lr 1e-4 --num-rollout 1 --rollout-batch-size 2 "
        "--n-samples-per-prompt 2 --rollout-max-response-len 4 --no-tensorboard --no-plot "
        f"--no-progress --output-dir {folder}/out"
    ).split()


def self_test() -> list[Check]:
    """Both at once: most of their time are imports."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = start([TRAIN, str(folder / "model"), *train_flags(folder)], folder)
        words = [EXCHANGE, str(folder / "meeting")]
        ranks = [start([*words, str(rank), str(RANKS)], folder) for rank in range(RANKS)]
        exchange = finish(ranks)
        exchanged_s = time.monotonic() - began
        trained = finish([training])
        if not trained and "train/loss" not in (folder / "out/metrics.jsonl").read_text():
            trained = "no optimizer step was taken"
    took = f"{exchanged_s:.1f} s, {RANKS} processes over gloo"
    return [
        Check("collectives", not exchange, exchange or took),
        Check("training step", not trained, trained or f"{time.monotonic() - began:.1f} s"),
    ]

"""Self-test of the environment: two processes communicate over gloo, and a tiny model takes one
training step. `slime-like doctor --self-test` runs it; it needs no network and no GPU.

Imports would take most of the time, so torch is imported once and the processes are forked, before
a GPU is initialised: CUDA cannot be used in forks of a process that has initialised it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

from slime_like.doctor import Check

RANKS = 2
LIMIT_S = 300.0
SHOWN = 400  # last characters of a failed process's output
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def exchange(rendezvous: Path, rank: int) -> None:
    """Body of one of `RANKS` communicating processes. rendezvous: path of a file that does not
    exist yet."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    local = torch.arange(4.0) + rank
    total = local.clone()
    dist.all_reduce(total)
    assert torch.equal(total, RANKS * torch.arange(4.0) + sum(range(RANKS))), total
    parts = [torch.empty(4) for _ in range(RANKS)]
    dist.all_gather(parts, local)
    assert all(torch.equal(part, torch.arange(4.0) + i) for i, part in enumerate(parts)), parts
    dist.barrier()
    dist.destroy_process_group()


def train_once(folder: Path) -> None:
    """Create a tiny model in `folder` and train it for one step."""
    from slime_like.cli.tiny_model import save_model

    save_model(folder / "model", hidden_size=32, num_layers=1)
    sys.argv = ["train.py", *train_flags(folder)]
    import train

    sys.exit(train.main())


@dataclass(frozen=True, slots=True)
class Started:
    """A process, and the file with its output."""

    process: ForkProcess
    log: Path


def start(body: Callable[[], None], folder: Path, name: str) -> Started:
    """Fork a process that runs `body` in `folder`, without environment variables of a launcher."""
    log = folder / f"{name}.log"

    def child() -> None:
        sys.stdout = sys.stderr = file = log.open("w", buffering=1, encoding="utf-8")
        for descriptor in (1, 2):  # also for output from outside of Python
            os.dup2(file.fileno(), descriptor)
        sys.path[:] = map(os.path.abspath, sys.path)
        for variable in LAUNCHERS:
            os.environ.pop(variable, None)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.chdir(folder)
        body()

    process = multiprocessing.get_context("fork").Process(target=child, name=name)
    process.start()
    return Started(process, log)


def finish(started: Sequence[Started]) -> str:
    """Wait for the processes; returns the end of the first failed one's output, "" if all
    succeeded."""
    problem = ""
    for one in started:
        one.process.join(LIMIT_S)
        late = one.process.is_alive()
        if late:
            one.process.kill()
            one.process.join()
        if one.process.exitcode and not problem:
            output = one.log.read_text(errors="replace") if one.log.exists() else ""
            output += f"\nno end after {LIMIT_S:g} s" if late else ""
            problem = output.strip()[-SHOWN:] or f"exit status {one.process.exitcode}"
    return problem


def train_flags(folder: Path) -> list[str]:
    """Flags of a training run with one rollout of two prompts on random weights, graded by
    --rm-type exact_match."""
    rows = [{"prompt": f"write {letter}:", "answer": letter} for letter in "ab"]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (
        f"--hf-checkpoint {folder}/model --prompt-data {data} --input-key prompt "
        "--label-key answer --rm-type exact_match --rm-num-workers 1 --lr 1e-4 --num-rollout 1 "
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 "
        f"--no-tensorboard --no-plot --no-progress --output-dir {folder}/out"
    ).split()


def self_test() -> list[Check]:
    """Run both tests concurrently. Must be called before this process initialises a GPU."""
    import torch  # noqa: F401  (for all of them)

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            start(partial(exchange, folder / "rendezvous", rank), folder, f"rank {rank}")
            for rank in range(RANKS)
        ]
        training = start(partial(train_once, folder), folder, "training")
        exchanged = finish(ranks)
        exchanged_s = time.monotonic() - began
        trained = finish([training])
        if not trained and "train/loss" not in (folder / "out/metrics.jsonl").read_text():
            trained = "no optimizer step was taken"
    took = f"{exchanged_s:.1f} s, {RANKS} processes over gloo"
    return [
        Check("collectives", not exchanged, exchanged or took),
        Check("training step", not trained, trained or f"{time.monotonic() - began:.1f} s"),
    ]

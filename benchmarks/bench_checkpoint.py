"""Seconds and GB/s of checkpoints on this machine, one process, one run: a synchronous save, an
asynchronous one (how long training is blocked, and until it is published), verification, a load;
and a plain copy of the same bytes, written and synced, for comparison.

    python benchmarks/bench_checkpoint.py --hidden-size 512 --num-layers 8 --folder
    outputs/bench_checkpoint
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench_checkpoint"))
    parser.add_argument("--repeat", type=int, default=3, help="the best of this many is shown")
    parser.add_argument("--json", type=Path, help="write the results here")
    chosen = parser.parse_args()
    shutil.rmtree(chosen.folder, ignore_errors=True)
    result = measure(chosen.folder, chosen.hidden_size, chosen.num_layers, chosen.repeat)
    print_table(result)
    write_json(chosen.json, {"gb": result[0], "seconds": result[1]})
    shutil.rmtree(chosen.folder)
    return 0


def measure(
    folder: Path, hidden_size: int, num_layers: int, repeat: int
) -> tuple[float, dict[str, float]]:
    """(GB of one checkpoint, seconds by operation)."""
    import megatron_patches
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    from arguments.parse import parse_args
    from slime_like.cli.tiny_model import save_model
    from slime_like.megatron.backend import MegatronBackend
    from slime_like.megatron.checkpoint import CheckpointSaver, SavePolicy
    from slime_like.megatron.init import process_groups
    from slime_like.megatron.run_state import save_state

    model = folder / "model"
    save_model(model, hidden_size=hidden_size, num_layers=num_layers)
    config = parse_args(
        f"--hf-checkpoint {model} --debug-train-only --load-debug-rollout-data "
        f"{folder}/none_{{rollout_id}} --lr 1e-3 --num-rollout 1 "
        "--rollout-batch-size 1 --n-samples-per-prompt 1 --loss-type policy_loss".split(),
        1,
    )
    state = {"data": None}
    seconds: dict[str, float] = {}
    final = folder / "checkpoints" / "iter_0000001"
    with process_groups(config.parallel, virtual_stages=None, seed=1) as layout:
        backend = MegatronBackend(config, layout, total_steps=1)
        sizes = []

        def save(asynchronous: bool) -> None:
            saver = CheckpointSaver(folder / "checkpoints", SavePolicy(asynchronous=asynchronous))
            report = save_state(backend, saver, 1, state, with_optimizer=True, with_rng=True)
            returned = time.perf_counter()
            if report is None:
                while (report := saver.poll()) is None:
                    time.sleep(0.001)
                waited = time.perf_counter() - returned
                keep_least(seconds, "asynchronous save: until published", report.seconds)
                keep_least(seconds, "asynchronous save: training blocked", report.seconds - waited)
            else:
                keep_least(seconds, "synchronous save: training blocked", report.blocked_s)
            sizes.append(report.bytes / 1e9)

        for _ in range(repeat):
            save(asynchronous=False)
            save(asynchronous=True)
            keep_least(
                seconds,
                "plain copy of the files, synced",
                timed(lambda: copy_synced(final, folder / "copy")),
            )
            keep_least(seconds, "load, verified", timed(lambda: load(backend, final, True)))
            keep_least(seconds, "load, not verified", timed(lambda: load(backend, final, False)))
        keep_least(
            seconds, "verification", seconds["load, verified"] - seconds["load, not verified"]
        )
    return sizes[-1], seconds


def load(backend: Any, folder: Path, verify: bool) -> None:
    from slime_like.megatron.run_state import load_state

    load_state(backend, folder, with_optimizer=True, with_rng=True, verify=verify)


def copy_synced(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def keep_least(seconds: dict[str, float], name: str, value: float) -> None:
    seconds[name] = min(value, seconds.get(name, value))


def print_table(result: tuple[float, dict[str, float]]) -> None:
    size, seconds = result
    print(f"| one checkpoint of {size:.3f} GB | seconds | GB/s |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value:.2f} | {size / value:.2f} |")


if __name__ == "__main__":
    raise SystemExit(main())

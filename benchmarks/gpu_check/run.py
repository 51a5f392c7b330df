"""Does everything that one GPU does work here, and how fast? At most ten minutes, no network.

    make gpu-check                                         outputs/gpu_check/gpu_check.json and .md
    python benchmarks/gpu_check/run.py --rehearse          every check on this CPU, at tiny sizes
    python benchmarks/gpu_check/run.py --only head mfu_1.7b_8k

Every check is a separate process: one that fails, hangs or leaves CUDA unusable is one row of the
page, and the others go on. The exit status is 1 where a check failed, missed its goal or had no
time left, and where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# in place of this folder, whose kernels.py transformers would take for the package of that name
_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != _HERE)]

MET = "met"
MISSED = "MISSED"
RAN = "ran"
REHEARSED = "rehearsed"
FAILED = "FAILED"
NO_GPU = "not run: no GPU"
NO_TIME = "not run: no time left"


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a check."""

    # name of a returned figure; a bool must be true, a number must be between `least` and `most`
    figure: str
    most: float | None = None
    least: float | None = None

    def __str__(self) -> str:
        bounds = [f"<= {self.most:g}"] if self.most is not None else []
        bounds += [f">= {self.least:g}"] if self.least is not None else []
        return " ".join([self.figure, *bounds])

    def met(self, figures: dict[str, Any]) -> bool:
        value = figures.get(self.figure)
        if value is None or value is False:
            return False
        within = self.most is None or value <= self.most
        return within and (self.least is None or value >= self.least)


@dataclass(frozen=True, slots=True)
class Check:
    """One check, run in a process of its own."""

    name: str
    function: str  # "module:name" in this folder, a function of `Sizes` that returns figures
    shows: str  # description
    goals: tuple[Goal, ...] = ()
    limit_s: int = 90  # time limit in seconds
    gpu_only: bool = False  # cannot run on a CPU


CHECKS = (
    Check("device", "machine:facts", "what the figures were measured on", limit_s=60),
    Check("world", "machine:world", "gloo and NCCL with one process", (Goal("right"),), 60),
    Check("train_fp32", "training:float32", "updates in float32 against the CPU's",
        (Goal("loss_difference", 1e-4), Goal("norm_difference", 1e-3), Goal("loss_change", 0.0)),
        120),
    Check("train_bf16", "training:bf16", "updates in bf16 against the CPU's",
        (Goal("loss_difference", 2e-2), Goal("norm_difference", 5e-2), Goal("loss_change", 0.0)),
        120),
    Check("attention", "kernels:attention", "packed rows, forward and backward",
        (Goal("share_of_peak_32768", least=0.2),)),
    Check("head", "kernels:head", "log-probs and entropy against versions that hold the logits",
        (Goal("time_ratio", 1.3), Goal("memory_ratio", 0.1)), 150),
    Check("mfu_1.7b_8k", "training:large_8k", "training of Qwen3-1.7B, rows of 8k tokens",
        (Goal("mfu", least=0.45),), 120),
    Check("mfu_0.6b_8k", "training:small_8k", "training of Qwen3-0.6B, rows of 8k tokens"),
    Check("mfu_1.7b_32k", "training:large_32k", "training of Qwen3-1.7B, rows of 32k tokens",
        limit_s=150),
    Check("mfu_0.6b_32k", "training:small_32k", "training of Qwen3-0.6B, rows of 32k tokens"),
    Check("offload", "training:offload", "a network that moves to host memory and back",
        (Goal("freed_share", least=0.95), Goal("same_bits"))),
    Check("handoff", "training:handoff", "weights to another process (cuda_ipc)", (Goal("right"),)),
    Check("snapshot", "machine:snapshot", "--record-memory-history", (Goal("bytes", least=1),), 60,
        gpu_only=True),
    Check("compiled", "kernels:compiled", "what torch.compile and CUDA graphs gain on a gated MLP"),
    Check("demo", "training:demo", "the demo's curve",
        (Goal("score_first", 0.4), Goal("score_last", least=0.8)), 240),
)  # fmt: skip


@dataclass(slots=True)
class Row:
    name: str
    shows: str
    goals: list[str]
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def bad(self) -> bool:
        return self.status in (FAILED, MISSED, NO_TIME)


def row_of(check: Check, status: str, **more: Any) -> Row:
    return Row(check.name, check.shows, [str(goal) for goal in check.goals], status, **more)


def run_here(check: Check, *, rehearse: bool) -> Row:
    """Run one check in this process."""
    from benchmarks.gpu_check.common import FULL, REHEARSAL, has_gpu

    if check.gpu_only and not has_gpu():
        return row_of(check, NO_GPU)
    module, _, name = check.function.partition(":")
    start = time.perf_counter()
    try:
        function = getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), name)
        figures = function(REHEARSAL if rehearse else FULL)
    except Exception:  # the other checks must continue
        error = traceback.format_exc()[-3000:]
        return row_of(check, FAILED, seconds=time.perf_counter() - start, error=error)
    met = all(goal.met(figures) for goal in check.goals)
    status = REHEARSED if rehearse else (MET if met else MISSED) if check.goals else RAN
    return row_of(check, status, seconds=time.perf_counter() - start, figures=figures)


def run_apart(check: Check, *, rehearse: bool, left_s: float) -> Row:
    """Run one check in a separate process, for at most its limit and the remaining time."""
    if left_s < 5:
        return row_of(check, NO_TIME)
    limit = min(check.limit_s, left_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        log = Path(folder) / "log"
        words = [sys.executable, __file__, "--row-to", str(path), "--only", check.name]
        words += ["--rehearse"] if rehearse else []
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
        with log.open("w") as output:
            child = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # including its children
                child.wait()
                told = f"{log.read_text()[-3000:]}\nnot done after {limit:g} s"
                return row_of(check, FAILED, seconds=limit, error=told)
        if not path.is_file():
            told = f"{log.read_text()[-3000:]}\nexit status {status}"
            return row_of(check, FAILED, error=told)
        return Row(**json.loads(path.read_text()))


def page(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| check | shows | status | s | figures |", "|---|---|---|---|---|"]
    for row in rows:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in row.figures.items())
        told = row.error.strip().splitlines()[-1:] if row.error else [figures]
        cell = told[0].replace("|", "\\|") if told else ""
        goals = f"; goal: {', '.join(row.goals)}" if row.goals else ""
        lines.append(
            f"| {row.name} | {row.shows}{goals} | {row.status} | {row.seconds:.1f} | {cell} |"
        )
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return " ".join(value) or "none" if isinstance(value, list) else str(value)


def parser() -> argparse.ArgumentParser:
    names = [check.name for check in CHECKS]
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, here; a GPU is not needed"
    )
    found.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CHECK", help=", ".join(names)
    )
    found.add_argument("--without", nargs="+", choices=names, default=[], metavar="CHECK")
    found.add_argument("--minutes", type=float, default=10.0, help="for all checks together")
    found.add_argument("--output-dir", type=Path, default=Path("outputs/gpu_check"))
    for hidden in ("--row-to", "--losses-to"):
        found.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    found.add_argument("--precision", help=argparse.SUPPRESS)
    return found


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    if options.losses_to:
        from benchmarks.gpu_check.common import FULL, REHEARSAL
        from benchmarks.gpu_check.training import write_losses

        sizes = REHEARSAL if options.rehearse else FULL
        write_losses(options.losses_to, options.precision, sizes)
        return 0
    chosen = [c for c in CHECKS if c.name in options.only and c.name not in options.without]
    if options.row_to:
        options.row_to.write_text(
            json.dumps(asdict(run_here(chosen[0], rehearse=options.rehearse)))
        )
        return 0
    from benchmarks.gpu_check.common import has_gpu

    end = time.monotonic() + 60 * options.minutes
    rows = []
    for check in chosen:
        if options.rehearse:
            row = run_here(check, rehearse=True)
        elif not has_gpu():
            row = row_of(check, NO_GPU)
        else:
            row = run_apart(check, rehearse=False, left_s=end - time.monotonic())
        rows.append(row)
        print(f"{row.status:24} {row.name:14} {row.seconds:6.1f} s", flush=True)
    from benchmarks.bench_common import machine

    options.output_dir.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "rehearsal": options.rehearse,
        "checks": [asdict(r) for r in rows],
    }
    (options.output_dir / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output_dir / "gpu_check.md").write_text(page(rows))
    print(f"\n{page(rows)}\nwritten: {options.output_dir}/gpu_check.json and gpu_check.md")
    return int(any(row.bad for row in rows) or not (options.rehearse or has_gpu()))


if __name__ == "__main__":
    sys.exit(main())

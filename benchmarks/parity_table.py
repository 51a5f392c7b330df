"""Promise 2, as a table: from the same recorded rollouts, three optimizer steps in every layout
give the numbers of one process.

    python benchmarks/parity_table.py                      # all layouts, a few minutes on 2 cores
    python benchmarks/parity_table.py --layouts TP2 DP2    # some

Every row is a run of `train.py --debug-train-only` (under torchrun where it has more than one rank)
on synthetic rollouts of uneven lengths with holes in their masks and one sample without any active
token. Compared with one process: loss and gradient norm of every step, and each tensor of the
exported weights (difference over norm). Adam's epsilon is 1e-6: at 1e-8 an element whose gradient
is rounding noise moves by a whole learning rate, and the table would measure Adam. Exit status 1
when anything exceeds 1e-5.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.parity.cells import CP2, PP2, VP2, Layout  # noqa: E402
from benchmarks.parity.cells import LAYOUTS as MATRIX  # noqa: E402
from benchmarks.parity.models import make_model  # noqa: E402
from slime_like.metrics.logger import read_metrics  # noqa: E402
from slime_like.rollout.recording import save_rollout  # noqa: E402
from slime_like.samples.groups import SampleGroup  # noqa: E402
from slime_like.servers.processes import free_ports  # noqa: E402
from slime_like.types import Sample  # noqa: E402

STEPS = 3
GROUPS = 2
GROUP_SIZE = 4
LIMIT = 1e-5


_OF_THE_MATRIX = (
    "TP2", "TP2 SP", "PP2", "PP2 VP2", "DP2", "DP2 distributed optimizer", "DP2 overlap", "CP2",
    "TP2 PP2", "CP4", "TP2 CP2", "TP2 SP CP2", "PP2 CP2",
)  # fmt: skip
ONE_PROCESS = "1 process"
LAYOUTS = {
    ONE_PROCESS: Layout(1, ""),
    "micro-batch 2": Layout(1, "--micro-batch-size 2"),
    "micro-batch 4": Layout(1, "--micro-batch-size 4"),
    **{name: MATRIX[name] for name in _OF_THE_MATRIX},
    "PP2, 3 and 1 layers": Layout(2, f"{PP2} --decoder-last-pipeline-num-layers 1"),
    "PP3, ends count as layers": Layout(
        3,
        "--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    ),
    "PP2 VP2, Et|tt|t|L": Layout(2, f"{PP2} --pipeline-model-parallel-layout Et|tt|t|L"),
    "CP2 micro-batch 4": Layout(2, f"{CP2} --micro-batch-size 4"),
    "PP2 VP2 CP2": Layout(4, f"{PP2} {VP2} {CP2}"),
    "DP2 CP2": Layout(4, f"{CP2} --micro-batch-size 2 --use-distributed-optimizer"),
}
COMMON = (
    "--debug-train-only --lr 3e-4 --adam-eps 1e-6 --clip-grad 1.0 --weight-decay 0.1 "
    "--rollout-batch-size {groups} --n-samples-per-prompt {size} "
    "--num-rollout {steps} --micro-batch-size 1 --use-rollout-logprobs --use-kl-loss "
    "--kl-loss-coef 0.3 --entropy-coef 0.01 "
    "--no-tensorboard --no-progress --no-plot"
)


def make_rollouts(template: str) -> None:
    """Write STEPS recorded rollouts with random tokens, rewards and sampler log-probs."""
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        groups = []
        for g in range(GROUPS):
            group_id = step * GROUPS + g
            prompt = torch.randint(
                61, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator
            )
            samples = tuple(make_sample(group_id, j, prompt, generator) for j in range(GROUP_SIZE))
            groups.append(SampleGroup(group_id, samples))
        save_rollout(template, step, groups)


def make_sample(group_id: int, j: int, prompt: torch.Tensor, generator: torch.Generator) -> Sample:
    length = int(torch.randint(1, 24, (), generator=generator))
    response = torch.randint(61, (length,), generator=generator)
    mask = torch.rand(length, generator=generator) > 0.2
    if group_id == 1 and j == 0:
        mask[:] = False
    return Sample(
        group_id=group_id,
        sample_id=group_id * GROUP_SIZE + j,
        tokens=torch.cat([prompt, response]),
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=-4.1 + 0.3 * torch.randn(length, generator=generator),
        reward=float(torch.rand((), generator=generator)),
    )


@dataclass(frozen=True)
class Result:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def run_layout(
    name: str, layout: Layout, work: Path, flags: list[str], python: str = sys.executable
) -> Result:
    """Train in `layout`, in the folder `name`. If the run fails, raises RuntimeError with its
    output."""
    out = work / name.replace(" ", "_")
    common = COMMON.format(groups=GROUPS, size=GROUP_SIZE, steps=STEPS).split()
    command = [python]
    if layout.ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={layout.ranks}"]
        command.append(f"--master-port={free_ports(1)[0]}")
    command += [str(ROOT / "train.py"), *common, *flags, *layout.flags.split()]
    command += ["--hf-checkpoint", str(work / "model"), "--ref-load", str(work / "ref")]
    command += ["--load-debug-rollout-data", str(work / "rollout_{rollout_id}")]
    command += ["--output-dir", str(out), "--save-hf", str(out / "hf")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{name}: {' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    rows = read_metrics(out / "metrics.jsonl")
    return Result(
        losses=[row["train/loss"] for row in rows],
        grad_norms=[row["train/grad_norm"] for row in rows],
        weights=load_file(str(out / "hf" / "model.safetensors")),
    )


@dataclass(frozen=True)
class Row:
    """Largest relative differences from one process."""

    name: str
    loss: float
    grad_norm: float
    weights: float
    tensor: str

    @property
    def holds(self) -> bool:
        return max(self.loss, self.grad_norm, self.weights) <= LIMIT


def compare(name: str, base: Result, other: Result) -> Row:
    assert base.weights.keys() == other.weights.keys()
    assert len(base.losses) == len(other.losses) == STEPS

    def apart(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(x) for x, y in zip(a, b))

    per_tensor = {
        k: float((v - other.weights[k]).norm() / v.norm()) for k, v in base.weights.items()
    }
    worst = max(per_tensor, key=lambda k: per_tensor[k])
    return Row(
        name,
        apart(base.losses, other.losses),
        apart(base.grad_norms, other.grad_norms),
        per_tensor[worst],
        worst,
    )


def parity(work: Path, names: Iterable[str], flags: list[str]) -> list[Row]:
    """One row per layout, compared with one process."""
    make_model(work / "model", seed=3)
    make_model(work / "ref", seed=4)
    make_rollouts(str(work / "rollout_{rollout_id}"))
    base = run_layout(ONE_PROCESS, LAYOUTS[ONE_PROCESS], work, flags)
    print(f"{ONE_PROCESS}: losses {base.losses}, gradient norms {base.grad_norms}", flush=True)
    print(f"{'layout':28} {'loss':>9} {'grad norm':>9} {'weights':>9}  worst tensor", flush=True)
    rows = []
    for name in names:
        row = compare(name, base, run_layout(name, LAYOUTS[name], work, flags))
        rows.append(row)
        verdict = "" if row.holds else "   EXCEEDS 1e-5"
        print(
            f"{row.name:28} {row.loss:9.1e} {row.grad_norm:9.1e} {row.weights:9.1e}  "
            f"{row.tensor}{verdict}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in LAYOUTS if name != ONE_PROCESS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names)
    parser.add_argument("--policy-loss-type", default="sapo")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = parity(Path(work), options.layouts, ["--policy-loss-type", options.policy_loss_type])
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

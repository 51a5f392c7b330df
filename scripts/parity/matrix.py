"""Promise 2, in full: every loss in every layout gives the numbers of one process. One command, one table.

    python scripts/parity/matrix.py                                        # everything: `make parity-full`
    python scripts/parity/matrix.py --layouts CP2 "TP2 PP2" --losses gspo  # some
    python scripts/parity/matrix.py --json matrix.json                     # every figure of every cell

A cell is one loss in one layout, with rows that are packed, padded (--qkv-format bshd) or cut by token budgets, with or without full
recompute: three optimizer steps (Adam, weight decay, clipping, KL and entropy terms) on samples of uneven lengths with holes in their masks,
other samples on every data-parallel rank. Compared with one process in float32 that takes one packed sample at a time: the loss and all
gradients of each step, log-probs before the first and parameters after the third. A gradient or parameter counts by tensor: norm of the
difference over norm. The figure of a cell is its largest, and its limit 1e-5.

The layouts of the experts run a Qwen3-MoE with auxiliary coefficients 0 (no token is ever dropped), the others a Qwen3 model. One set of
processes serves all cells of one world size.

Exit status 1 when a cell is over its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.parity.ranks import run_ranks  # noqa: E402
from scripts.parity.steps import differences, parallel, sizes_of, train  # noqa: E402
from scripts.parity_table import make_model  # noqa: E402
from slime_like.megatron_backend.layout import ParallelLayout  # noqa: E402

LIMIT = 1e-5
WORDS = ("loss", "gradients", "weights", "log_probs")  # what is compared

SEQUENCES = "--loss-reduction sequence_mean"
LOSSES = {
    "ppo": "--policy-loss-type ppo",
    "sapo": "--policy-loss-type sapo",
    "gspo": f"--policy-loss-type gspo --eps-clip 0.05 {SEQUENCES}",
    "gmpo": f"--policy-loss-type gmpo {SEQUENCES}",
    "cispo": "--policy-loss-type cispo",
}
ROWS = {
    "packed": "--micro-batch-size 2",
    "padded": "--micro-batch-size 2 --qkv-format bshd",
    "budgets": "--use-dynamic-batch-size --max-tokens-per-gpu 30",
}
RECOMPUTE = {"": "", "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"}
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SP, VP2, EP2 = "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank 2", "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Layout:
    """flags: added to the run's. ranks: processes. model: "dense", or "experts"."""

    ranks: int
    flags: str
    model: str = "dense"


LAYOUTS = {
    "1": Layout(1, ""),
    "TP2": Layout(2, TP2),
    "TP2 SP": Layout(2, f"{TP2} {SP}"),
    "PP2": Layout(2, PP2),
    "PP2 VP2": Layout(2, f"{PP2} {VP2}"),
    "DP2": Layout(2, ""),
    "DP2 distributed optimizer": Layout(2, SHARDED),
    "DP2 overlap": Layout(2, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "CP2": Layout(2, CP2),
    "CP4": Layout(4, "--context-parallel-size 4"),
    "TP2 CP2": Layout(4, f"{TP2} {CP2}"),
    "TP2 SP CP2": Layout(4, f"{TP2} {SP} {CP2}"),
    "TP2 PP2": Layout(4, f"{TP2} {PP2}"),
    "PP2 CP2": Layout(4, f"{PP2} {CP2}"),
    "DP2 CP2": Layout(4, f"{CP2} {SHARDED}"),
    "TP2 PP2 DP2": Layout(8, f"{TP2} {SP} {PP2} {SHARDED}"),
    "experts 1": Layout(1, "", "experts"),
    "experts EP2": Layout(2, EP2, "experts"),
    "experts ETP2": Layout(2, f"{TP2} {SP}", "experts"),
    "experts TP2 EP2": Layout(2, f"{TP2} {SP} {EP2} --expert-tensor-parallel-size 1", "experts"),
    "experts CP2 EP2": Layout(2, f"{EP2} {CP2}", "experts"),
    "experts EP2 ETP2": Layout(4, f"{TP2} {SP} {EP2}", "experts"),
    "experts PP2 EP2": Layout(4, f"{PP2} {EP2} {SHARDED}", "experts"),
}


@dataclass(frozen=True)
class Cell:
    layout: str
    loss: str
    rows: str
    recompute: str

    @property
    def name(self) -> str:
        return f"{self.layout} | {self.line} | {self.loss}"

    @property
    def line(self) -> str:
        return f"{self.rows} {self.recompute}".strip()

    @property
    def flags(self) -> str:
        return f"{LOSSES[self.loss]} {ROWS[self.rows]} {RECOMPUTE[self.recompute]} {LAYOUTS[self.layout].flags}"


@dataclass(frozen=True)
class Found:
    """A cell's largest differences, by what is compared, and the tensor of the largest gradient difference; seconds that it took."""

    cell: Cell
    apart: dict[str, float]
    tensor: str
    seconds: float

    @property
    def worst(self) -> float:
        return max(self.apart.values())


# --- on the ranks ------------------------------------------------------------------------------------------------------


def base_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """What everything is compared with, into arguments["base"]: by model and loss, one process that takes one packed sample at a time."""
    with parallel() as layout:
        runs = {
            model: {loss: train(folder, layout, f"{LOSSES[loss]} --micro-batch-size 1") for loss in arguments["losses"]}
            for model, folder in arguments["models"].items()
        }
    torch.save(runs, arguments["base"])


def run_cells(rank: int, world_size: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of one world size, in turn: what `Found` holds, largest over the ranks. Rank 0 prints each."""
    base = torch.load(arguments["base"])
    cells = [Cell(**cell) for cell in arguments["cells"]]
    results: dict[Cell, dict[str, Any]] = {}
    by_sizes: dict[tuple[tuple[str, int], ...], list[Cell]] = {}
    for cell in cells:
        by_sizes.setdefault(tuple(sizes_of(cell.flags).items()), []).append(cell)
    for sizes, chosen in by_sizes.items():
        with parallel(**dict(sizes)) as layout:
            for cell in chosen:
                found = results[cell] = run_cell(cell, layout, arguments["models"], base)
                if rank == 0:
                    print(f"  {cell.name:58} {max(found['apart'].values()):.1e}  {found['seconds']:.1f} s", flush=True)
    return [results[cell] for cell in cells]


def run_cell(cell: Cell, layout: ParallelLayout, models: dict[str, str], base: dict[str, Any]) -> dict[str, Any]:
    model = LAYOUTS[cell.layout].model
    start = time.perf_counter()
    seen = differences(train(models[model], layout, cell.flags), base[model][cell.loss])
    apart = torch.tensor([seen[word] for word in WORDS], dtype=torch.float64)
    torch.distributed.all_reduce(apart, op=torch.distributed.ReduceOp.MAX)
    return dict(
        cell=asdict(cell), apart=dict(zip(WORDS, apart.tolist())), tensor=seen["worst_gradient"], seconds=time.perf_counter() - start
    )  # fmt: skip


# --- the command -------------------------------------------------------------------------------------------------------


def make_moe_model(folder: Path) -> None:
    """A tiny Qwen3-MoE whose router's scores are far apart, so that rounding does not change who is chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)


def matrix(layouts: Sequence[str], losses: Sequence[str], rows: Sequence[str], recompute: Sequence[str]) -> list[Cell]:
    """All combinations."""
    return [Cell(*words) for words in product(layouts, losses, rows, recompute)]


def run_matrix(cells: Sequence[Cell], folder: Path, *, show: bool = False) -> list[Found]:
    """Run them, one launch for each number of processes."""
    losses = list(dict.fromkeys(cell.loss for cell in cells))
    models = {}
    for name, make in (("dense", lambda path: make_model(path, seed=3)), ("experts", make_moe_model)):
        if any(LAYOUTS[cell.layout].model == name for cell in cells):
            make(folder / name)
            models[name] = str(folder / name)
    arguments = {"models": models, "losses": losses, "base": str(folder / "base.pt")}
    run_ranks("scripts.parity.matrix:base_runs", 1, folder / "one", arguments, timeout_s=300, show=show)
    found: dict[Cell, Found] = {}
    for ranks in sorted({LAYOUTS[cell.layout].ranks for cell in cells}):
        chosen = [cell for cell in cells if LAYOUTS[cell.layout].ranks == ranks]
        limit_s = 60 + 10 * ranks * len(chosen)
        told = {**arguments, "cells": [asdict(cell) for cell in chosen]}
        results = run_ranks("scripts.parity.matrix:run_cells", ranks, folder / f"ranks{ranks}", told, timeout_s=limit_s, show=show)[0]
        found.update({cell: Found(**{**result, "cell": cell}) for cell, result in zip(chosen, results, strict=True)})
    return [found[cell] for cell in cells]


def over_limit(found: Sequence[Found]) -> list[Found]:
    """The cells that fail. A figure that is not a number fails."""
    return [f for f in found if not all(value <= LIMIT for value in f.apart.values())]


def table(found: Sequence[Found]) -> Iterator[str]:
    """A line for each layout and way of its rows, a column for each loss; then the largest of each thing compared."""
    losses = list(dict.fromkeys(f.cell.loss for f in found))
    lines: dict[tuple[str, str], dict[str, Found]] = {}
    for f in found:
        lines.setdefault((f.cell.layout, f.cell.line), {})[f.cell.loss] = f
    wrong = set(map(id, over_limit(found)))
    yield f"{'layout':30} {'rows':18}" + "".join(f"{loss:>9}" for loss in losses)
    for (layout, line), by_loss in lines.items():
        figures = "".join(f"{by_loss[loss].worst:9.1e}" for loss in losses)
        yield f"{layout:30} {line:18}{figures}" + ("   OVER THE LIMIT" if any(id(f) in wrong for f in by_loss.values()) else "")
    for word in WORDS:
        worst = max(found, key=lambda f: f.apart[word])
        yield f"largest difference of {word}: {worst.apart[word]:.1e} ({worst.cell.name})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("layouts", LAYOUTS), ("losses", LOSSES), ("rows", ROWS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices), metavar="NAME", help=", ".join(choices))
    parser.add_argument("--recompute", choices=("with", "without", "both"), default="both", help="full recompute (default: both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    options = parser.parse_args()
    recompute = {"with": ["recompute"], "without": [""], "both": list(RECOMPUTE)}[options.recompute]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = run_matrix(matrix(options.layouts, options.losses, options.rows, recompute), Path(folder), show=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in found], indent=1))
    print("\n".join(table(found)))
    wrong = over_limit(found)
    print(f"{len(found)} cells in {time.perf_counter() - start:.0f} s, {len(wrong)} over the limit")
    for f in wrong:
        print(f"OVER THE LIMIT {f.cell.name}: {f.apart}, gradient of {f.tensor}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

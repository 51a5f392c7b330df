"""Cells of the parity matrix: combinations of models, losses, layouts, rows and precisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from arguments.rules.pipeline import stages_of_layout

Run = tuple[str, str, str]  # a single-process run: precision, model, loss
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
RECOMPUTE = {
    "": "",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
SP = "--sequence-parallel"
VP2 = "--num-virtual-stages-per-pipeline-rank 2"
EP2 = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Layout:
    """A layout of several processes."""

    ranks: int  # number of processes
    flags: str  # additional flags
    model: str = "dense"  # "dense" or "experts"


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
class Precision:
    """A precision, and how close to its base it must be."""

    flags: str  # additional flags
    limit: float  # bound of a cell's figure
    base: str  # precision of the single-process run that a cell is compared with
    sharded: bool = True  # whether the distributed optimizer supports parameters of this precision


# In float32 and float64 the limit applies to relative differences. In bfloat16 it applies to their
# ratio to the differences of one bfloat16 process from float32: the rounding errors of a layout are
# of the same size, and the factor 2 allows for their being different ones. megatron-core clips and
# shards gradients in float32 only.
PRECISIONS = {
    "float32": Precision("", 1e-5, "float32"),
    "float64": Precision("--clip-grad 0", 1e-12, "float64", sharded=False),
    "bfloat16": Precision("--bf16", 2.0, "float32"),
}


@dataclass(frozen=True)
class Cell:
    layout: str
    loss: str
    rows: str
    recompute: str = ""
    precision: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.layout} | {self.line} | {self.loss}"

    @property
    def line(self) -> str:
        return " ".join(
            word
            for word in (self.rows, self.recompute, self.precision)
            if word not in ("", "float32")
        )

    @property
    def flags(self) -> str:
        words = (
            LOSSES[self.loss],
            ROWS[self.rows],
            RECOMPUTE[self.recompute],
            LAYOUTS[self.layout].flags,
            PRECISIONS[self.precision].flags,
        )
        return " ".join(words)


def matrix(
    layouts: Sequence[str],
    losses: Sequence[str],
    rows: Sequence[str],
    recompute: Sequence[str],
    precisions: Sequence[str] = ("float32",),
) -> list[Cell]:
    """All combinations in float32. Other precisions only test the arithmetic: with the first kind
    of rows and recompute only, and float64 not with a distributed optimizer."""
    cells = []
    for precision in precisions:
        lines = product(rows, recompute) if precision == "float32" else [(rows[0], recompute[0])]
        chosen = [
            layout
            for layout in layouts
            if PRECISIONS[precision].sharded or SHARDED not in LAYOUTS[layout].flags
        ]
        cells += [
            Cell(layout, loss, *line, precision)
            for layout, line, loss in product(chosen, list(lines), losses)
        ]
    return cells


def base_runs_of(cells: Iterable[Cell]) -> list[Run]:
    """Single-process runs that these cells need. bfloat16 is compared with the worst loss, so it
    needs all of them."""
    needed = []
    for cell in cells:
        model = LAYOUTS[cell.layout].model
        base = PRECISIONS[cell.precision].base
        if cell.precision == base:
            needed.append((base, model, cell.loss))
        else:
            needed += [
                (precision, model, loss) for precision in (base, cell.precision) for loss in LOSSES
            ]
    return list(dict.fromkeys(needed))


def sizes_of(flags: str) -> dict[str, int]:
    """The sizes of the groups that a run with these flags needs, by the parameters of
    `benchmarks.parity.steps.parallel`."""
    words = flags.split()
    names = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "vp": "--num-virtual-stages-per-pipeline-rank",
        "ep": "--expert-model-parallel-size",
        "cp": "--context-parallel-size",
        "etp": "--expert-tensor-parallel-size",
    }
    sizes = {
        short: int(words[words.index(name) + 1]) for short, name in names.items() if name in words
    }
    if (name := "--pipeline-model-parallel-layout") in words:
        sizes["vp"] = len(stages_of_layout(words[words.index(name) + 1])) // sizes["pp"]
    return sizes


def by_sizes(cells: Sequence[Cell]) -> list[tuple[dict[str, int], list[Cell]]]:
    """Group cells by the sizes of their process groups, which are then created once."""
    chosen: dict[tuple[tuple[str, int], ...], list[Cell]] = {}
    for cell in cells:
        chosen.setdefault(tuple(sizes_of(cell.flags).items()), []).append(cell)
    return [(dict(sizes), own) for sizes, own in chosen.items()]

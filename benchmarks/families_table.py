"""The figures of docs/en/models.md: every registered family on a tiny random model, against
transformers' class and over layouts.

    python benchmarks/families_table.py [--only Qwen3 Glm4] [--json out.json]

Prints the table as Markdown: the largest difference of any tensor, relative to its norm, of logits
and of gradients in float32 and float64, and of losses, log-probs, gradients and weights of three
steps in float64 over the layouts of `OF_EVERY_DENSE`, `OF_EVERY_EXPERTS` or `OF_EVERY_UNCUT` from
those of one process. That the exported weights are the file's to the last bit is asserted on the
way. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from arguments.hf.model import read_hf_model  # noqa: E402
from benchmarks.bench_common import write_json  # noqa: E402
from tests.dist.family_layouts import EXACT, PP2  # noqa: E402
from tests.dist.test_families import (  # noqa: E402
    CASES,
    LAST_TOGETHER,
    OF_EVERY_DENSE,
    OF_EVERY_EXPERTS,
    OF_EVERY_UNCUT,
    UNCUT,
    family_layouts,
    measure,
)

HEAD = (
    "family",
    "logits, fp32",
    "gradients, fp32",
    "logits, fp64",
    "gradients, fp64",
    "packed - alone, fp64",
    "layouts",
    "apart over layouts, fp64",
)


def of_one_process(case: str, folder: Path) -> list[float]:
    """Differences of logits and gradients in float32 and float64, and of packed from separate
    sequences."""
    from benchmarks.parity.steps import parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with parallel() as layout:
            found = measure(*CASES[case], layout, folder)
    finally:
        dist.destroy_process_group()
    figures = []
    for dtype in (torch.float32, torch.float64):
        differences = dict(found[dtype].of_transformers)
        figures += [differences.pop("logits"), max(differences.values())]
    return [*figures, found[torch.float64].of_alone["logits"]]


def over_layouts(case: str, folder: Path) -> tuple[int, float]:
    """(number of layouts, largest difference over their ranks). folder: has the model of
    `of_one_process`."""
    layouts = family_layouts(folder / "models")
    layouts.folder.mkdir(parents=True)
    experts = read_hf_model(str(folder / "model")).transformer.get("num_moe_experts")
    whole = OF_EVERY_EXPERTS if experts else OF_EVERY_DENSE
    count = 0
    largest = 0.0
    for ranks, flags in (OF_EVERY_UNCUT if case in UNCUT else whole).items():
        split = LAST_TOGETHER.get(case, "")
        cells = [(case, f"{words} {split}" if PP2 in words else words) for words in flags]
        for found in layouts.measure(ranks, cells, folder / f"ranks-{ranks}"):
            assert len(found) == len(cells)
            largest = max(largest, *(apart[k] for apart in found.values() for k in EXACT))
        count += len(cells)
    return count, largest


def markdown(rows: Iterable[list[Any]]) -> str:
    lines = [HEAD, ("---",) * len(HEAD)]
    for name, *figures in rows:
        lines.append(
            (f"`{name}`", *(f"{x:.0e}" if isinstance(x, float) else str(x) for x in figures))
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="families with these beginnings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        if case.startswith(tuple(args.only)):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                row = [case, *of_one_process(case, folder), *over_layouts(case, folder)]
            print(*row, file=sys.stderr, flush=True)
            rows.append(row)
    print(markdown(rows))
    write_json(args.json, {"head": HEAD, "rows": rows})


if __name__ == "__main__":
    main()

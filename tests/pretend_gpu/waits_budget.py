"""The waits of the host in one optimizer step, measured on the pretend GPU, and their table in
docs/*/performance.md.

    python -m tests.pretend_gpu.waits_budget     measure again, write waits.json and both tables
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.parity.models import MODELS
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from tests.pretend_gpu.build import ROOT
from tests.pretend_gpu.environment import pretend

FILE = Path(__file__).with_name("waits.json")
PAGES = {language: ROOT / "docs" / language / "performance.md" for language in ("en", "zh")}
BEGIN = "<!-- waits of the host: tests/pretend_gpu/waits_budget.py writes this table -->\n"
END = "<!-- end of the waits -->\n"
FORWARD = "forward only"  # phases of a step
TRAINING = "training"
STEP = "optimizer step"
MICRO_BATCHES = 4  # of each rank in each pass
NEXT = "Qwen3NextForCausalLM"
# name of a row: ranks, model, flags, (English, Chinese)
Cell = tuple[int, str, str, tuple[str, str]]
CELLS: dict[str, Cell] = {
    "dense": (1, "dense", "", ("dense", "稠密模型")),
    "data parallel": (2, "dense", "", ("dense, DP 2", "稠密模型，DP 2")),
    "tensor parallel": (
        2,
        "dense",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        ("dense, TP 2", "稠密模型，TP 2"),
    ),
    "context parallel": (
        2, "dense", "--context-parallel-size 2", ("dense, CP 2", "稠密模型，CP 2"),
    ),
    "pipeline parallel": (
        2, "dense", "--pipeline-model-parallel-size 2", ("dense, PP 2", "稠密模型，PP 2"),
    ),
    "interleaved": (
        2,
        "dense",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        ("dense, PP 2, VP 2", "稠密模型，PP 2、VP 2"),
    ),
    "Gemma": (1, "Gemma3ForCausalLM", "", ("Gemma 3", "Gemma 3")),
    "experts": (1, "experts", "", ("experts, 4 layers", "专家，4 层")),
    "expert parallel": (
        2, "experts", "--expert-model-parallel-size 2",
        ("experts, 4 layers, EP 2", "专家，4 层，EP 2"),
    ),
    "replay": (
        1, "experts", "--use-routing-replay",
        ("experts, 4 layers, replayed", "专家，4 层，重放路由"),
    ),
    "delta nets": (1, NEXT, "", ("delta nets, 3 layers of experts", "delta 网络，3 层专家")),
    "delta nets, CP 2": (
        2, NEXT, "--context-parallel-size 2",
        ("delta nets, 3 layers of experts, CP 2", "delta 网络，3 层专家，CP 2"),
    ),
    "prediction": (
        1, NEXT, "--mtp-num-layers 1",
        ("the same with a prediction layer", "同上，加一个预测层"),
    ),
    "sparse attention": (
        1, "GlmMoeDsaForCausalLM", "",
        ("sparse attention, 2 layers of experts", "稀疏注意力，2 层专家"),
    ),
}  # fmt: skip
Rows = dict[str, list[list[Any]]]  # by cell: [phase, kind, operator, where, caller, count]


def measure(
    folder: Path, environment: dict[str, str], cells: dict[str, Cell] | None = None
) -> Rows:
    """The most of any rank. cells: None for all."""
    cells = CELLS if cells is None else cells
    models = {}
    for _, model, _, _ in cells.values():
        models[model] = folder / model
        if not models[model].exists():
            make = MODELS.get(model)
            if make is None:
                make_tiny_model(model, models[model])
            else:
                make(models[model])
    found: Rows = {}
    for ranks in (1, 2):
        chosen = {
            name: (str(models[model]), f"--micro-batch-size {_size(name)} {flags}")
            for name, (needed, model, flags, _) in cells.items()
            if needed == ranks
        }
        if not chosen:
            continue
        results = run_ranks(
            "tests.pretend_gpu.waits_worker:count", ranks, folder / str(ranks),
            {"cells": chosen}, 300, environment=environment,
        )  # fmt: skip
        for name in chosen:
            most: Counter[tuple[Any, ...]] = Counter()
            for result in results:
                for *wait, count in result[name]:
                    most[tuple(wait)] = max(most[tuple(wait)], count)
            found[name] = [[*wait, count] for wait, count in sorted(most.items())]
    return found


def _size(name: str) -> int:
    """Samples of a micro-batch, so that each of one or two data-parallel ranks has 4 of 8."""
    return 1 if name in ("data parallel", "expert parallel") else 2


def table(rows: Rows, language: str) -> str:
    """Markdown: waits and copies by row, and the lines that still wait."""
    chinese = language == "zh"
    head = (
        "| 模型 | 每个微批次的等待：只前向 | 训练 | 每个微批次的非阻塞拷贝 | 每步的等待 |"
        if chinese
        else "| model | waits per micro-batch: forward only | training | copies per micro-batch "
        "that do not wait | waits per step |"
    )
    lines = [head, "|---|---|---|---|---|"]
    for name, own in rows.items():
        per_pass = {phase: _waits(own, phase) for phase in (FORWARD, TRAINING, STEP)}
        # what happens once in a pass is no multiple of the number of micro-batches
        once = sum(sum(n % MICRO_BATCHES for n in counts) for counts in per_pass.values())
        each = [sum(n // MICRO_BATCHES for n in per_pass[p]) for p in (FORWARD, TRAINING)]
        copies = sum(row[5] for row in own if row[:2] == [TRAINING, "H2D async (pinned)"])
        reported = CELLS[name][3][chinese]
        lines.append(f"| {reported} | {each[0]} | {each[1]} | {copies // MICRO_BATCHES} | {once} |")
    title = "| 仍在等待的代码行 | 原因 |" if chinese else "| line that still waits | how |"
    lines += ["", title, "|---|---|"]
    seen = sorted({(_line(row), row[1]) for own in rows.values() for row in own if blocks(row)})
    lines += [f"| `{line}` | {kind} |" for line, kind in seen]
    return "\n".join(lines) + "\n"


def blocks(row: list[Any]) -> bool:
    """Whether the host waits there."""
    return "async" not in row[1] or "pageable" in row[1]


def _waits(rows: list[list[Any]], phase: str) -> list[int]:
    return [row[5] for row in rows if row[0] == phase and blocks(row)]


def _line(row: list[Any]) -> str:
    """Innermost place: that of megatron-core where it is below ours."""
    return row[4] if "megatron/core" in row[4] else row[3]


def with_table(page: str, rows: Rows, language: str) -> str:
    block = f"{BEGIN}\n{table(rows, language)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, page, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), pretend(2))
    text = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in own) + "]"
        for name, own in rows.items()
    )
    FILE.write_text(f"{{{text}}}\n")
    for language, page in PAGES.items():
        page.write_text(with_table(page.read_text(), rows, language))


if __name__ == "__main__":
    main()

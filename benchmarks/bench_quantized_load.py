#!/usr/bin/env python
"""Memory and time of loading block-quantised fp8 weights as in a run: the shards of two
tensor-parallel ranks in turn, dequantised to bf16 and discarded.

    python benchmarks/bench_quantized_load.py --gb 1
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file

from benchmarks.bench_common import write_json
from slime_like.weights.safetensors_reader import WeightFiles, file_names

ROWS = 8192
COLUMNS = 7168
BLOCK = 128
PER_FILE = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """All in bytes."""

    stored: int  # size of the files
    tensor: int  # size of one weight in bf16
    peak: int  # peak memory of the process beyond its initial size and one shard
    seconds: float


def write_model(folder: Path, gigabytes: float) -> int:
    """Write weights of random bits to a folder; returns their number."""
    count = max(1, round(gigabytes * 1e9 / (ROWS * COLUMNS)))
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    weight_map: dict[str, str] = {}
    names = file_names(-(-count // PER_FILE))
    for number, file in enumerate(names):
        tensors = {}
        for n in range(number * PER_FILE, min(count, (number + 1) * PER_FILE)):
            codes = torch.randint(0, 0x77, (ROWS, COLUMNS), dtype=torch.uint8)
            tensors[f"{n}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{n}.weight_scale_inv"] = torch.rand(ROWS // BLOCK, COLUMNS // BLOCK)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(names) > 1:
        index = {"weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def measure(folder: Path, count: int) -> Measured:
    """Measure in this process; resets its memory peak (Linux)."""
    rows = torch.zeros(ROWS // 2, COLUMNS, dtype=torch.bfloat16)
    shards = rows, rows.view(ROWS, COLUMNS // 2)  # views of the same memory
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    started = time.perf_counter()
    with WeightFiles(str(folder)) as files:
        for n in range(count):
            dim = n % 2
            size = (ROWS, COLUMNS)[dim] // 2
            for rank in range(2):
                files.read_into(shards[dim], f"{n}.weight", dim, rank * size, (rank + 1) * size)
    seconds = time.perf_counter() - started
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Measured(stored, ROWS * COLUMNS * 2, _peak() - before, seconds)


def _peak() -> int:
    """Peak memory of this process in bytes since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="of the files; default 1")
    parser.add_argument("--json", type=Path, help="write the results here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_model(folder, chosen.gb)
        found = measure(folder, count)
    write_json(chosen.json, asdict(found))
    print(
        f"{found.stored / 1e9:.2f} GB of fp8 in {count} weights, one of which is "
        f"{found.tensor / 1e6:.0f} MB in bf16: {found.peak / 1e6:.0f} MB beside a shard, "
        f"{found.seconds:.1f} s for both ranks"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

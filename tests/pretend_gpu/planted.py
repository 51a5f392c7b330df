"""Faults planted by hand that no CPU run sees, and whether the pretend GPU finds them.

    python -m tests.pretend_gpu.planted [NUMBER ...]     plant them, in a copy of the checkout

Prints the table of docs/*/performance.md. tests/pretend_gpu/test_planted.py holds that every
place is still there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity.ranks import run_ranks
from megatron_patches.patch import release
from tests.pretend_gpu.build import FOLDER, ROOT, library
from tests.pretend_gpu.environment import pretend
from tests.pretend_gpu.test_settings import LIMITS, ONE, TWO, Numbers, Setting
from tests.pretend_gpu.waits_budget import CELLS, FILE, measure

LIMIT_S = 240.0
REPLAY = "replayed experts, CP2"
MORE = {REPLAY: Setting("experts", "--use-routing-replay", "--context-parallel-size 2")}
SETTINGS = ONE | TWO | MORE


@dataclass(frozen=True)
class Fault:
    """A replacement in one file, and the smallest check that should see it."""

    what: str
    file: str
    old: str  # stands there once
    new: str
    setting: str = ""  # of test_settings.py, or
    waits: str = ""  # of waits_budget.py


TRANSFER = "slime_like/megatron/transfer.py"
NETWORK = "slime_like/megatron/network.py"
FORWARD = "slime_like/megatron/forward_step.py"
ATTENTION = "slime_like/megatron/ops/attention.py"
FAULTS = (
    Fault("a host tensor in an operation of the device", "slime_like/megatron/ops/delta_rule.py", "dtype=torch.bool, device=key.device).triu(1)", "dtype=torch.bool).triu(1)", "delta nets in bf16"),
    Fault("the tables of a micro-batch left on the host", TRANSFER, "replace(value, **{name: _replaced(each, moved)", "replace(value, **{name: each if name == 'packed' else _replaced(each, moved)", "bf16"),
    Fault("micro-batches not moved to the device", "slime_like/megatron/packing.py", "return [to_device(batch, device) for batch in batches]", "return list(batches)", "bf16"),
    Fault("a tensor of the device where numpy reads", NETWORK, "table = self._gather_context_ranks(table, batches).cpu()", "table = self._gather_context_ranks(table, batches); table.numpy()", "bf16"),
    Fault("a copy to the host that is read before it has arrived", NETWORK, "self._gather_context_ranks(table, batches).cpu()", "self._gather_context_ranks(table, batches).to('cpu', non_blocking=True)", "bf16"),
    Fault("pinned memory that is written before its copy is done", TRANSFER, "    moved = {id(t)", "    on_host.zero_()\n    moved = {id(t)", "bf16"),
    Fault("padding that is left uninitialised", ATTENTION, "padded = rows.new_zeros(math.prod(batch), *rows.shape[1:])", "padded = rows.new_empty(math.prod(batch), *rows.shape[1:])", "adapters"),
    Fault("moments that start uninitialised", "megatron_patches/torch_adam_ckpt.py", '"exp_avg": torch.zeros_like(parameter),', '"exp_avg": torch.empty_like(parameter),', "bf16"),
    Fault("a device that this process has not", "slime_like/megatron/init.py", 'rank = int(os.environ.get("LOCAL_RANK", "0"))', 'rank = int(os.environ.get("LOCAL_RANK", "0")) + 1', "bf16"),
    Fault("a host tensor in NCCL", NETWORK, "table = torch.zeros(int(size), tokens, dtype=dtype, device=self.device)", "table = torch.zeros(int(size), tokens, dtype=dtype)", "PP2 bf16"),
    Fault("a non-contiguous tensor in a collective", NETWORK, "dist.all_gather_into_tensor(gathered, table.contiguous(), group=self.layout.cp_group)", "dist.all_gather_into_tensor(gathered, table, group=self.layout.cp_group)", REPLAY),
    Fault("a stale length: all micro-batches are as long as the first", FORWARD, "rows = [int(batch.tokens.numel()) for batch in micro_batches]", "rows = [int(micro_batches[0].tokens.numel()) for _ in micro_batches]", "PP2 bf16"),
    Fault("random numbers drawn on the host inside the device's generator", "slime_like/megatron/model/delta_net.py", 'like = {"dtype": self.config.params_dtype, "device": device}', 'like = {"dtype": self.config.params_dtype}', "delta nets in bf16"),
    Fault("an `.item()` in the schedule", FORWARD, "            loss = output.loss * scale\n", "            loss = output.loss * scale\n            loss.item()\n", waits="dense"),
    Fault("a copy from memory that is not pinned", TRANSFER, "dtype=torch.uint8, pin_memory=True)", "dtype=torch.uint8)", waits="dense"),
    Fault("a blocking copy", TRANSFER, "on_host.to(device, non_blocking=True)\n    moved", "on_host.to(device)\n    moved", waits="dense"),
    Fault("lengths read from the device in every layer", "slime_like/megatron/packed_batches.py", "def rows_of_pass(batch: MicroBatch) -> PackedRows:\n", "def rows_of_pass(batch: MicroBatch) -> PackedRows:\n    batch.cu_seqlens.tolist()\n", waits="dense"),
    Fault("rows counted on the device", "slime_like/megatron/model/policy.py", "    return batch.active_rows\n", "    return batch.loss_mask.nonzero().squeeze(1)\n", waits="dense"),
    Fault("a number read for each tensor of the gradient norm", "megatron_patches/torch_norms.py", "    clip_grads.l2_norm_impl = l2_norm\n", "", waits="dense"),
    Fault("a scalar copied to the device in every forward pass", "slime_like/megatron/model/gpt.py", "torch.tensor(scale, dtype=embedded.dtype)", "torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)", waits="Gemma"),
    Fault("the device stopped after every message between stages", "arguments/megatron_configs.py", '"batch_p2p_sync": False,', '"batch_p2p_sync": True,', waits="pipeline parallel"),
    Fault("counts of replayed experts read in every layer", "slime_like/megatron/ops/router.py", "current.disagreement += counts.double()", "current.disagreement += float(counts.double().sum()) * 0 + counts.double()", waits="replay"),
)  # fmt: skip


def base_numbers(folder: Path, settings: list[str]) -> None:
    """The numbers of one CPU process, in `folder`."""
    cells = Numbers(folder).cells({name: SETTINGS[name] for name in settings}, layout=False)
    arguments = {"base": str(folder), "folder": str(folder), "cells": cells}
    run_ranks("tests.pretend_gpu.worker:base_runs", 1, folder / "cpu", arguments, 600)


def symptoms(setting: str, base: Path, out: Path) -> str:
    """What one setting shows on the pretend GPU; empty if nothing."""
    chosen = {setting: SETTINGS[setting]}
    cells = Numbers(base).cells(chosen, layout=True)
    ranks = 1 if setting in ONE else 2
    arguments = {"base": str(base), "folder": str(out), "cells": cells}
    worker = "tests.pretend_gpu.worker:run_cells"
    try:
        results: list[dict[str, Any]] = run_ranks(
            worker, ranks, out / "gpu", arguments, LIMIT_S, environment=pretend(2)
        )
    except AssertionError as failed:
        return str(failed).strip().splitlines()[-1].strip()
    if "RNG state changed" in (out / "gpu" / "output.txt").read_text():
        return "CPU RNG state changed within GPU RNG context"
    limit = LIMITS[SETTINGS[setting].precision]
    wrong = {
        name: value
        for found in results
        for name, value in found[setting].items()
        if not (value if isinstance(value, bool) else value < limit)
    }
    return ", ".join(f"{name}: {value}" for name, value in wrong.items())


def new_waits(name: str, out: Path) -> str:
    """Waits of one cell beyond the budget; empty if none."""
    (rows,) = measure(out, pretend(2), {name: CELLS[name]}).values()
    allowed = {tuple(row[:5]): row[5] for row in json.loads(FILE.read_text())[name]}
    more = [row for row in rows if row[5] > allowed.get(tuple(row[:5]), 0)]
    return "; ".join(f"{row[0]}: {row[1]} {row[2]} at {row[3]}, {row[5]} times" for row in more)


def found_in(copy: Path, fault: Fault, base: Path, out: Path) -> str:
    """Plant a fault in a copy of the checkout and check it there."""
    path = copy / fault.file
    before = path.read_text()
    assert before.count(fault.old) == 1, f"{fault.what}: {fault.file} has changed"
    path.write_text(before.replace(fault.old, fault.new))
    try:
        command = [sys.executable, "-m", "tests.pretend_gpu.planted", "--check"]
        words = [fault.setting, fault.waits, str(base), str(out)]
        # the copy's modules, not those that are installed
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [*command, *words], cwd=copy, env=environment, capture_output=True, text=True,
            timeout=2 * LIMIT_S, check=False,
        )  # fmt: skip
    finally:
        path.write_text(before)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def plant(numbers: list[int]) -> None:
    library()  # built once, and used by the copy
    faults = [FAULTS[number - 1] for number in numbers] or list(FAULTS)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        copy.mkdir()
        tracked = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()  # fmt: skip
        for name in tracked:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        (copy / FOLDER.relative_to(ROOT)).parent.mkdir(parents=True)
        (copy / FOLDER.relative_to(ROOT)).symlink_to(FOLDER)
        base = Path(scratch, "base")
        base.mkdir()
        base_numbers(base, sorted({fault.setting for fault in faults} - {""}))
        found = 0
        for number, fault in enumerate(faults, 1):
            symptom = found_in(copy, fault, base, Path(scratch, str(number)))
            found += bool(symptom)
            print(f"| {fault.what} | {symptom[:150] or 'NOT FOUND'} |", flush=True)
        print(f"{found} of {len(faults)} found, megatron-core {release()}")


def main() -> None:
    if sys.argv[1:2] == ["--check"]:
        setting, waits, base, out = sys.argv[2:]
        Path(out).mkdir()
        if setting:
            print(symptoms(setting, Path(base), Path(out)))
        else:
            print(new_waits(waits, Path(out)))
    else:
        plant([int(word) for word in sys.argv[1:]])


if __name__ == "__main__":
    main()

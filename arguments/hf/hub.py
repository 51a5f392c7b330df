"""Names of models and data sets on the Hugging Face Hub in place of local files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODELS = ("model", "models")  # folders that people put models into
# no owners
FOLDERS = (*MODELS, "checkpoints", "ck", "data", "datasets", "output", "outputs", "sft")


def download_hint(name: str, kind: str = "model") -> str:
    """How to get what is missing, to append to "no such folder": the run file of the current
    folder that exports it, or how to download a repository; empty if `name` looks like a path that
    holds none.

    Args:
        kind: "model" or "dataset".
    """
    if kind == "model" and (file := _writer_of(name)) is not None:
        return f"; {file} writes it: run slime-like train --config {file} first"
    if _ID.fullmatch(name) is None or Path(name).suffix == ".jsonl":
        return ""
    owner, folder = name.split("/")
    if kind == "model" and owner in MODELS:
        return (
            "; to download one of the Hugging Face Hub into it: "
            f"hf download OWNER/{folder} --local-dir {name}"
        )
    if owner in FOLDERS or Path(owner).exists():
        return ""
    option = "" if kind == "model" else f" --repo-type {kind}"
    return (
        f"; if this is a {kind} of the Hugging Face Hub, download it first: "
        f"hf download {name}{option} --local-dir {name}"
    )


def _writer_of(folder: str) -> str | None:
    """A run file in the current folder whose save_hf is `folder`."""
    for path in sorted(Path().glob("*.y*ml")):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if os.path.normpath(folder) in map(os.path.normpath, _exports(content)):
            return path.name
    return None


def _exports(content: object) -> Iterator[str]:
    """The values of save_hf, at any depth."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if str(key).replace("-", "_") == "save_hf" and isinstance(value, str):
            yield value
        yield from _exports(value)

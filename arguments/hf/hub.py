"""Names of models and data sets on the Hugging Face Hub in place of local files."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODELS = ("model", "models")  # folders that people put models into
FOLDERS = (*MODELS, "checkpoints", "ck", "data", "datasets", "output", "outputs")  # no owners


def download_hint(name: str, kind: str = "model") -> str:
    """How to download a repository, to append to "no such folder"; empty if `name` looks like a
    path that holds none.

    Args:
        kind: "model" or "dataset".
    """
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

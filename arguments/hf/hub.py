"""Names of models and data sets on the Hugging Face Hub in place of local files."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download_hint(name: str, kind: str = "model") -> str:
    """How to download a repository, to append to "no such folder"; empty if `name` looks like a
    path.

    Args:
        kind: "model" or "dataset".
    """
    if _ID.fullmatch(name) is None or Path(name).parent.exists() or Path(name).suffix == ".jsonl":
        return ""
    option = "" if kind == "model" else f" --repo-type {kind}"
    folder = name.split("/")[1]
    return (
        f"; if this is a {kind} of the Hugging Face Hub, download it first: "
        f"hf download {name}{option} --local-dir {folder}"
    )

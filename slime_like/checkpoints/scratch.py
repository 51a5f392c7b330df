"""Temporary folders with the lifetime of a process; those of killed processes are removed by the
next one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from slime_like.checkpoints.lock import is_alive, this_process

OWNER = "owner.json"


def scratch_folder(prefix: str) -> str:
    """Create a temporary folder, after removing those left by this user's ended processes.

    Args:
        prefix: Prefix of its name, specific to its purpose.

    Returns:
        Its path; the caller removes it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError):
            owner = json.loads((folder / OWNER).read_text())
            of_user = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
            if of_user and isinstance(owner, dict) and is_alive(owner) is False:
                shutil.rmtree(folder, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=prefix)
    (Path(path) / OWNER).write_text(json.dumps(this_process()))
    return path

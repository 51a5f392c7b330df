"""Environment variables of programs that are not ours."""

from __future__ import annotations

import os

_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_ACCESS_KEY_ID")  # users' secrets
# the launcher's variables, which a program must not mistake for its own
_HIDDEN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL",
)


def environment_without_keys() -> dict[str, str]:
    """Ours, without secrets and the launcher's variables."""
    return {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(_HIDDEN) and not k.upper().endswith(_SECRETS)
    }

"""Parameters that modules of our own have beside megatron-core's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)


def parameter_device() -> torch.device:
    """Where parameters are made."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sharded_state(
    module: Any,
    sharded: Mapping[str, int],
    prefix: str,
    sharded_offsets: Sequence[tuple[int, int, int]],
    metadata: dict[str, object] | None,
) -> dict[str, object]:
    """`sharded_state_dict` of a module with a `tp_group`: its own parameters, and its children.

    Args:
        sharded: Of its own parameters that are sharded over tensor-parallel ranks, the dimension.
        prefix, sharded_offsets, metadata: As for megatron-core's modules.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    parameters: dict[str, object] = {}
    module._save_to_state_dict(parameters, "", keep_vars=True)
    state: dict[str, object] = make_sharded_tensors_for_checkpoint(
        parameters,
        prefix,
        dict(sharded),
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    for name, child in module.named_children():
        state |= sharded_state_dict_default(
            child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=module.tp_group
        )
    return state

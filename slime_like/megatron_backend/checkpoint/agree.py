"""All ranks go on, or all stop with the same words: what one rank finds out about a file must not leave the others in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: Any) -> list[Any]:
    """`value` of every rank, on every rank. Plain values only: they travel as pickles, inside the job."""
    if dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def from_rank_zero(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0; its ValueError or OSError is raised on every rank."""
    holder: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            holder[0] = make()
        except (ValueError, OSError) as error:
            holder[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    if holder[1] is not None:
        raise holder[1]
    return holder[0]


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank; the first rank's ValueError or OSError is raised on every rank. `action` must hold no collective that a
    failing rank would miss."""
    result, error = None, None
    try:
        result = action()
    except (ValueError, OSError) as raised:
        error = raised
    if (first := next((e for e in gather(error) if e is not None), None)) is not None:
        raise first
    return result  # type: ignore[return-value]

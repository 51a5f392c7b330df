"""What was made on the host, to the device in one copy that does not block.

A blocking copy from ordinary memory waits for all work that is queued on the device, and every copy
costs a launch. So the tensors of a micro-batch go together, through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNMENT = 256  # bytes, of every tensor in the buffer; as cudaMalloc's


def to_device(value: T, device: torch.device) -> T:
    """A copy of `value`, a dataclass, with all its tensors on `device`: views of one buffer. Looks
    into dataclasses, tuples and lists. Without a GPU it is `value` itself."""
    if device.type != "cuda":
        return value
    tensors = list({id(tensor): tensor for tensor in _tensors(value)}.values())
    starts = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    on_host = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(tensors, starts, strict=True):
        _part(on_host, start, tensor).copy_(tensor)
    # torch keeps the pinned memory until the copy is done
    buffer = on_host.to(device, non_blocking=True)
    moved = {id(t): _part(buffer, start, t) for t, start in zip(tensors, starts, strict=True)}
    return _replaced(value, moved)


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _replaced(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return moved[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_replaced(each, moved) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _replaced(each, moved) for name, each in own.items()})
    return value


def numbers_on_device(numbers: list[float], device: torch.device) -> tuple[Tensor, ...]:
    """0-d float64 tensors, in one copy that does not block."""
    on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True).unbind()

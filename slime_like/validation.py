"""Validation of arguments of public functions.

Each function raises ValueError naming the argument, its value and what is legal. They read values,
which synchronises with the device, so training bypasses them for tensors that it built itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slime_like.lazy import Tensor, torch


def require_tensor(name: str, value: object) -> Tensor:
    """Return `value`. Raises ValueError if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is {type(value).__name__}; it must be a torch.Tensor")
    return value


def require_shape(name: str, value: object, like: Tensor, like_name: str) -> Tensor:
    """Return `value`. Raises ValueError if it is not a tensor of the shape of `like`."""
    tensor = require_tensor(name, value)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {like_name} has {tuple(like.shape)}; "
            "they must be equal"
        )
    return tensor


def require_mask(name: str, value: object) -> Tensor:
    """Return `value` as bool. Raises ValueError for elements other than 0 and 1, including NaN."""
    tensor = require_tensor(name, value)
    if tensor.dtype == torch.bool:
        return tensor
    illegal = ~((tensor == 0) | (tensor == 1))
    if illegal.any():
        index, element = _first(tensor, illegal)
        raise ValueError(f"{name}{index} is {element:g}; it must be bool, or 0 and 1")
    return tensor.bool()


def require_finite(name: str, value: Tensor, where: Tensor) -> None:
    """Raises ValueError if `value` is NaN or infinite where `where`, a bool tensor of its shape, is
    True."""
    illegal = where & ~torch.isfinite(value)
    if illegal.any():
        index, element = _first(value, illegal)
        raise ValueError(f"{name}{index} is {element:g}; it must be finite at every active token")


def require_ids(
    name: str, value: object, count: int, *, below: int | None = None, index: bool = False
) -> Tensor:
    """Return `value`: [count] whole numbers, in [0, below) if that is given.

    Args:
        index: Require an integer dtype.

    Raises:
        ValueError: For anything else.
    """
    tensor = require_tensor(name, value)
    if tensor.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{count}]")
    inexact = tensor.is_floating_point() and index
    if tensor.dtype == torch.bool or tensor.is_complex() or inexact:
        raise ValueError(f"{name} is of {tensor.dtype}; it must hold whole numbers")
    if tensor.is_floating_point():
        illegal = (tensor != tensor.trunc()) | ~torch.isfinite(tensor)
        if illegal.any():
            where, element = _first(tensor, illegal)
            raise ValueError(f"{name}{where} is {element:g}; it must be a whole number")
    if count and below is not None and not 0 <= int(tensor.min()) <= int(tensor.max()) < below:
        bounds = f"{int(tensor.min())} to {int(tensor.max())}"
        raise ValueError(f"{name} runs from {bounds}; it must be in [0, {below})")
    return tensor


def require_choice(name: str, value: object, legal: Collection[str]) -> None:
    """Raise ValueError if `value` is not in `legal`."""
    if value not in legal:
        raise ValueError(f"unknown {name} {value!r}; legal values: {', '.join(legal)}")


def require_samples(masks: Sequence[Tensor], **lists: Sequence[object] | None) -> None:
    """Raise ValueError unless every given list has one entry per mask, tensors with the mask's
    shape.

    Args:
        masks: [R] bool per sample.
        lists: By argument name; None: not given.
    """
    for i, mask in enumerate(masks):
        if require_tensor(f"masks[{i}]", mask).dtype != torch.bool or mask.dim() != 1:
            raise ValueError(f"masks[{i}] is {mask.dtype} {tuple(mask.shape)}; it must be [R] bool")
    for name, values in lists.items():
        if values is None:
            continue
        if len(values) != len(masks):
            raise ValueError(f"{name} has {len(values)} samples, masks {len(masks)}")
        for i, (value, mask) in enumerate(zip(values, masks)):
            if isinstance(value, torch.Tensor) and value.dim():
                require_shape(f"{name}[{i}]", value, mask, f"masks[{i}]")


def _first(values: Tensor, flags: Tensor) -> tuple[str, float]:
    """Index and value of the first element where `flags` is True."""
    index = flags.nonzero()[0].tolist()
    return (str(index) if index else ""), float(values[tuple(index)])

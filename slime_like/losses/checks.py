"""What the public functions of losses and advantages ask of their tensors: one sentence for each
way of being wrong.

Every function raises ValueError that names the argument, what was given and what is legal. They
look at values, which waits for the device: training, which has made its tensors itself, calls the
functions below these checks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slime_like.lazy import Tensor, torch


def require_tensor(name: str, value: object) -> Tensor:
    """`value` as it is. Raises ValueError when it is None or no tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is {type(value).__name__}; it must be a torch.Tensor")
    return value


def require_shape(name: str, value: object, like: Tensor, like_name: str) -> Tensor:
    """`value` as it is. Raises ValueError when it is no tensor of the shape of `like`."""
    tensor = require_tensor(name, value)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {like_name} has {tuple(like.shape)}; they must be equal"
        )
    return tensor


def require_mask(name: str, value: object) -> Tensor:
    """`value` as bool. Raises ValueError for an element that is neither 0 nor 1, NaN included."""
    tensor = require_tensor(name, value)
    if tensor.dtype == torch.bool:
        return tensor
    strange = ~((tensor == 0) | (tensor == 1))
    if strange.any():
        where, what = _first(tensor, strange)
        raise ValueError(f"{name}{where} is {what:g}; it must be bool, or 0 and 1 alone")
    return tensor.bool()


def require_finite(name: str, value: Tensor, where: Tensor) -> None:
    """Raises ValueError when `value` is NaN or infinite where `where`, a bool tensor of its shape,
    is True."""
    bad = where & ~torch.isfinite(value)
    if bad.any():
        place, what = _first(value, bad)
        raise ValueError(f"{name}{place} is {what:g}; it must be finite at every active token")


def require_ids(
    name: str, value: object, count: int, *, below: int | None = None, index: bool = False
) -> Tensor:
    """`value` as it is: [count] whole numbers, in [0, below) where that is given.

    Args:
        index: of an integer type, as indices must be.

    Raises:
        ValueError: for anything else.
    """
    tensor = require_tensor(name, value)
    if tensor.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{count}]")
    inexact = tensor.is_floating_point() and index
    if tensor.dtype == torch.bool or tensor.is_complex() or inexact:
        raise ValueError(f"{name} is of {tensor.dtype}; it must hold whole numbers")
    if (
        tensor.is_floating_point()
        and (broken := (tensor != tensor.trunc()) | ~torch.isfinite(tensor)).any()
    ):
        place, what = _first(tensor, broken)
        raise ValueError(f"{name}{place} is {what:g}; it must be a whole number")
    if count and below is not None and not 0 <= int(tensor.min()) <= int(tensor.max()) < below:
        bounds = f"{int(tensor.min())} to {int(tensor.max())}"
        raise ValueError(f"{name} runs from {bounds}; it must be in [0, {below})")
    return tensor


def require_choice(name: str, value: object, legal: Collection[str]) -> None:
    """Raises ValueError when `value` is none of `legal`."""
    if value not in legal:
        raise ValueError(f"unknown {name} {value!r}; legal values: {', '.join(legal)}")


def require_samples(masks: Sequence[Tensor], **lists: Sequence[object] | None) -> None:
    """Raises ValueError unless every list that is given has an entry for each mask, of its shape
    where it is a tensor.

    masks: [R] bool by sample. lists: by argument name; None: not given.
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
    """Place and value of the first element where `flags` is True."""
    place = flags.nonzero()[0].tolist()
    return (f"[{', '.join(map(str, place))}]" if place else ""), float(values[tuple(place)])

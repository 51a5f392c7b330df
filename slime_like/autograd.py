"""Type of the context of a `torch.autograd.Function`."""

from __future__ import annotations

from typing import Protocol

from slime_like.lazy import Tensor


class AutogradContext(Protocol):
    """Context of a `torch.autograd.Function`; extended by functions that keep more than tensors."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

"""Models on the meta device: names and shapes without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Creates all new tensors on the meta device, whatever device was requested."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.arange, torch.tensor, torch.full):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

"""`torch`, imported on first use: for modules that the command-line parser imports.

Importing torch takes seconds; --help and a wrong command line should not. Instead of
`import torch`, `import torch.distributed as dist` and `from torch import Tensor`:

>>> from slime_like.lazy import Tensor, dist, torch

`Tensor` is for annotations; write `torch.Tensor` elsewhere. Code that needs torch at import time (a
base class, a decorator, a default value) has to defer it to the first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
    from torch import Tensor as Tensor
else:

    class _Lazy:
        """Proxy that shares the module's own `__dict__` from the first use on, so that it also sees
        monkey patches of the module."""

        __slots__ = ("__dict__", "_name")

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> object:
            module = importlib.import_module(self._name)
            # the module's own, not a copy: later calls find its names without __getattr__
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    torch = _Lazy("torch")
    dist = _Lazy("torch.distributed")
    Tensor = Any

__all__ = ["Tensor", "dist", "torch"]

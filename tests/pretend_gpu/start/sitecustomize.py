"""In an environment of `tests.pretend_gpu.environment.pretend`, every Python process that imports
torch gets the pretend GPU at that moment: torch asks for CUDA's hooks once and for all when it is
imported. CUDA_VISIBLE_DEVICES="" hides the device, as it does a real one."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """Acts around the first import of torch, and of the module that looks for the driver."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("torch", "arguments.cuda") or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None or not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if name == "torch":
                ctypes.CDLL(os.environ["PRETEND_CUDA"], ctypes.RTLD_GLOBAL)
                execute(module)
                from tests.pretend_gpu.device import install

                install()
            else:
                execute(module)
                module.cuda_available = lambda: True  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("PRETEND_CUDA"):
    sys.meta_path.insert(0, _AfterImport())

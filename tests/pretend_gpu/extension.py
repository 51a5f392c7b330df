"""The built backend.cpp as a module, in a process of the pretend environment."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ExtensionFileLoader
from typing import Any

from tests.pretend_gpu.build import NAME


def _load() -> Any:
    loader = ExtensionFileLoader(NAME, os.environ["PRETEND_CUDA"])
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


C = _load()

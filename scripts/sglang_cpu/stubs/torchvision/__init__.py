"""The installed torchvision, whose wheels have compiled operators for CUDA only. Those are declared
here without a body; models that see use none of them, and importing torchvision asks for two."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

_HERE = str(Path(__file__).resolve().parents[1])
_spec = importlib.machinery.PathFinder.find_spec(
    "torchvision", [entry for entry in sys.path if entry != _HERE]
)
assert _spec is not None and _spec.origin is not None, "see requirements.txt"
try:
    torch.ops.load_library(str(Path(_spec.origin).with_name("_C.so")))
except OSError:  # without CUDA's libraries
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
_module = importlib.util.module_from_spec(_spec)
sys.modules["torchvision"] = _module
assert _spec.loader is not None
_spec.loader.exec_module(_module)

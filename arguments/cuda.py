"""Whether torch would find a CUDA device, without importing torch: that takes seconds, which a
wrong command line must not."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path
from typing import Any


def cuda_available() -> bool:
    """What torch.cuda.is_available() says.

    It counts the devices of the driver, which must be at least of the major version that torch was
    built for (CUDA Compatibility Guide, "minor version compatibility").
    """
    build = _torch_build()
    if build.get("hip"):  # AMD's driver is asked by torch
        import torch

        return torch.cuda.is_available()
    if build["cuda"] is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    version, devices = ctypes.c_int(), ctypes.c_int()
    return (
        driver.cuInit(0) == 0
        and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
        and version.value // 1000 >= int(build["cuda"].partition(".")[0])
        and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0
        and devices.value > 0
    )


def _torch_build() -> dict[str, Any]:
    """The contents of torch.version, read from its file."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a requirement"
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))

"""Check for a CUDA device without importing torch, which takes seconds: an error in the command
line should be reported sooner."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path


def cuda_available() -> bool:
    """Equivalent to torch.cuda.is_available().

    There must be a device, and the driver's CUDA major version must be at least that of torch's
    build (CUDA Compatibility Guide, "minor version compatibility").
    """
    build = _torch_build()
    if build.get("hip"):  # only torch can query AMD's driver
        import torch

        return torch.cuda.is_available()
    if build["cuda"] is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    version = ctypes.c_int()
    devices = ctypes.c_int()
    return (
        driver.cuInit(0) == 0
        and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
        and version.value // 1000 >= int(str(build["cuda"]).partition(".")[0])
        and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0
        and devices.value > 0
    )


def _torch_build() -> dict[str, object]:
    """The contents of torch.version, read from its file."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a requirement"
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))

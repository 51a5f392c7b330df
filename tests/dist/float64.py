"""Training in float64, where a difference between two layouts is an error of one of them and not
rounding, which depends on the processor."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from arguments.run_config import RunConfig
from benchmarks.parity import steps

EXACT = 1e-11  # the largest relative difference of three steps on the small models is about 1e-13


class WithoutFloat32(TorchFunctionMode):
    """megatron-core and transformers take norms, softmaxes, sigmoids and angles in float32,
    whatever the model is in: here in float64. megatron-core's distributed optimizer and gradient
    clipping ask for float32 by the name of a tensor's type, and find it here. What is read from
    files and sent in messages stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        kwargs = kwargs or {}
        is_message = func is torch.Tensor.to and args[0].dtype is torch.float32
        if not (is_message or func in (torch.empty, torch.frombuffer, torch.Tensor.view)):
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args, kwargs = map(wide, args), {name: wide(value) for name, value in kwargs.items()}
        found = func(*args, **kwargs)
        return found.replace("Double", "Float") if isinstance(found, str) else found


def precise(config: RunConfig) -> RunConfig:
    """The same run, its networks in float64."""
    for networks in (config, config.critic_model):
        if networks is not None:
            steps.in_float64(networks)
    return config


def settings(folder: str, flags: str = "") -> RunConfig:
    """As those of benchmarks/parity/steps.py, in float64."""
    return precise(steps.settings(folder, flags))

"""Type strings: `param.type() == 'torch.cuda.FloatTensor'` also has to hold on CPU.

Target    the functions in TARGETS: the optimizers sort parameters into groups, and gradient clipping checks its input, by
          comparing `Tensor.type()` with 'torch.cuda.FloatTensor', '...HalfTensor' and
          '...BFloat16Tensor'.
Why       A CPU tensor's type is 'torch.FloatTensor': the optimizers raise TypeError, or leave bf16 parameters without a
          main parameter.
How       The string constants in the compiled functions lose their "cuda.". Copying three functions of up to 150 lines to
          change one word each would be the alternative; Tensor.type itself stays as it is.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import types
from typing import Any

from megatron_patches.patch import NO_CUDA, Patch, find, missing

NAME = "type_strings"
TARGETS = (
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
)


def _function(target: str) -> types.FunctionType:
    found = find(NAME, target)
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    assert isinstance(function, types.FunctionType)
    return function


def _without_cuda(constant: object) -> Any:
    """A code object's constant, strings rewritten, nested tuples and functions included."""
    if isinstance(constant, str):
        return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(map(_without_cuda, constant))
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=_without_cuda(constant.co_consts))
    return constant


def check() -> None:
    for target in TARGETS:
        constants = _function(target).__code__.co_consts
        if _without_cuda(constants) == constants:
            raise missing(NAME, f"megatron.core.{target} no longer names a CUDA tensor type")


def install() -> None:
    for target in TARGETS:
        function = _function(target)
        function.__code__ = _without_cuda(function.__code__)


PATCH = Patch(NAME, NO_CUDA, check, install)

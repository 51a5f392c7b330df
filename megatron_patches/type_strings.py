"""Type strings: comparisons like `param.type() == 'torch.cuda.FloatTensor'` must hold on CPU too.

Target    the functions in TARGETS. The optimizers sort parameters into groups, and gradient
          clipping checks its input, by comparing `Tensor.type()` with 'torch.cuda.FloatTensor',
          '...HalfTensor' and '...BFloat16Tensor'.
Why       The type of a CPU tensor is 'torch.FloatTensor'.
Without   The optimizers raise TypeError, or keep no main parameter for bf16 parameters.
How       "cuda." is removed from the string constants of the compiled functions. The alternative
          would be copies of functions of up to 150 lines that differ in one word. Tensor.type
          itself stays unchanged.
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
    value = find(NAME, target)
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    assert isinstance(function, types.FunctionType)
    return function


def _without_cuda(constant: object) -> Any:
    """Rewrite the strings in a constant of a code object, including nested tuples and functions."""
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

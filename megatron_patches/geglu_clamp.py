"""The fused activation of gpt-oss: the limit holds for the value with its bias.

Target    fusions.fused_bias_geglu: weighted_bias_quick_geglu_impl, under the names by which
          transformer.mlp and transformer.moe.experts call it.
Why       It clamps the output of the linear layer first and adds the bias after that. The model, as
          megatron-core's path without fusion, adds the bias first and clamps the sum.
Without   With --bias-activation-fusion, which is on where Transformer Engine is installed, experts
          that are computed one by one (without --moe-grouped-gemm) silently give other values and
          gradients wherever the sum is beyond the limit.
How       Where there is a limit, the bias is added before the call.
When      Always.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_patches.patch import ALWAYS, Patch, find, missing

if TYPE_CHECKING:
    from torch import Tensor

NAME = "geglu_clamp"
FUNCTION = "weighted_bias_quick_geglu_impl"
CALLERS = ("transformer.mlp", "transformer.moe.experts")


def check() -> None:
    for module in ("fusions.fused_bias_geglu", *CALLERS):
        function = find(NAME, f"{module}:{FUNCTION}")
        if "clamp_value" not in function.__code__.co_varnames:
            raise missing(NAME, f"megatron.core.{module}:{FUNCTION} has no clamp_value")


def install() -> None:
    original = find(NAME, f"fusions.fused_bias_geglu:{FUNCTION}")

    @functools.wraps(original)
    def biased_then_clamped(
        input: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        fp8_input_store: bool = False,
        linear_offset: float = 0.0,
        clamp_value: float | None = None,
    ) -> Tensor:
        if bias is not None and clamp_value is not None:
            input = input + bias
            bias = None
        output: Tensor = original(input, bias, weights, fp8_input_store, linear_offset, clamp_value)
        return output

    for module in CALLERS:
        setattr(find(NAME, module), FUNCTION, biased_then_clamped)


PATCH = Patch(NAME, ALWAYS, check, install)

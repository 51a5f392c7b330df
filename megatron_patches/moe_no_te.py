"""Mixture of experts without Transformer Engine: the router GEMM.

Target    transformer.moe.moe_utils: the global te_general_gemm.
Why       The module imports this name from megatron-core's Transformer Engine extension. If the
          import fails, the name stays undefined, and the router GEMM compares it with None.
Without   The router raises NameError.
When      No Transformer Engine.
Versions  megatron-core 0.16; fixed in 0.17.
"""

from __future__ import annotations

from megatron_patches.patch import NO_TE, Patch, find, missing

NAME = "moe_no_te"
MODULE = "transformer.moe.moe_utils"


def check() -> None:
    target = f"{MODULE}:RouterGatingLinearFunction.forward"
    if "te_general_gemm" not in find(NAME, target).__func__.__code__.co_names:
        raise missing(NAME, f"megatron.core.{target} no longer reads te_general_gemm")


def install() -> None:
    module = find(NAME, MODULE)
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


PATCH = Patch(NAME, NO_TE, check, install, fixed_in="0.17")

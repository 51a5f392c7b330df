"""Multi-latent attention without Transformer Engine: the output projection.

Target    transformer.multi_latent_attention: the global HAVE_TE.
Why       The module sets HAVE_TE if ModelOpt's layers can be imported. Without Transformer Engine
          their TELinear is None, and the constructor calls isinstance(..., None).
Without   Building an MLA layer raises TypeError.
When      No Transformer Engine.
Versions  megatron-core 0.16; fixed in 0.17.
"""

from __future__ import annotations

from megatron_patches.patch import NO_TE, Patch, find, missing

NAME = "mla_no_te"
MODULE = "transformer.multi_latent_attention"


def check() -> None:
    target = f"{MODULE}:MultiLatentAttention.__init__"
    if "HAVE_TE" not in find(NAME, target).__code__.co_names:
        raise missing(NAME, f"megatron.core.{target} no longer reads HAVE_TE")


def install() -> None:
    find(NAME, MODULE).HAVE_TE = False


PATCH = Patch(NAME, NO_TE, check, install, fixed_in="0.17")

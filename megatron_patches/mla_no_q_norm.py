"""Multi-latent attention without query compression: no norm before the query projection.

Target    transformer.mla_qk_norm_config: QKNormConfigResolver.resolve, which decides since 0.19
          where queries and keys are normalised.
Why       With `qk_layernorm` and without `q_lora_rank` (DeepSeek-V2-Lite), the compressed keys and
          values are normalised and the queries are not. The resolver asks for a norm fused into
          the query projection.
Without   The network has one norm too many, or construction fails: megatron-core's local layers
          have no such fused module.
How       In this case the modules of the layer spec are used, as in earlier releases.
When      Always.
Versions  megatron-core 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_patches.patch import ALWAYS, Patch, find

if TYPE_CHECKING:
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver


NAME = "mla_no_q_norm"
CLASS = "transformer.mla_qk_norm_config:QKNormConfigResolver"


def check() -> None:
    find(NAME, f"{CLASS}.resolve")


def install() -> None:
    cls = find(NAME, CLASS)
    original = find(NAME, f"{CLASS}.resolve")
    identity = find(NAME, "transformer.identity_op:IdentityOp")

    @functools.wraps(original)
    def resolve(self: QKNormConfigResolver) -> dict[str, object]:
        if self.has_q_lora or self.is_dsa or not self.config.qk_layernorm:
            modules: dict[str, object] = original(self)
            return modules
        parts = self.submodules
        return dict(
            linear_q_proj=parts.linear_q_proj or self.linear_impl,
            linear_q_up_proj=identity,
            linear_kv_up_proj=parts.linear_kv_up_proj or self.linear_impl,
            q_layernorm=identity,
            kv_layernorm=parts.kv_layernorm or identity,
        )

    cls.resolve = resolve


PATCH = Patch(NAME, ALWAYS, check, install, since="0.19")

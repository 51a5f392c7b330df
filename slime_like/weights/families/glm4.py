"""GLM-4 and GLM-Z1 (9B, 32B): glm-4-9b-hf with norms of the outputs of attention and MLP, too."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import glm
from slime_like.weights.families.base import ConfigReader, register_model_family
from slime_like.weights.mappings import Mapping, Replicated

PARAMETERS: dict[str, Mapping] = {
    **glm.PARAMETERS,
    **{
        f"decoder.layers.{{layer}}.{norm}.weight": Replicated(
            f"model.layers.{{layer}}.{norm}.weight"
        )
        for norm in ("post_self_attn_layernorm", "post_mlp_layernorm")
    },
}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {
        **glm.glm_settings(reader),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


register_model_family(
    dataclasses.replace(
        glm.GLM,
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        parameters=PARAMETERS,
        settings=_settings,
        published=("GLM-4-9B-0414", "GLM-4-32B", "GLM-Z1"),
    )
)

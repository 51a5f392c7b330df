"""Published config.json as files, and the networks that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments.hf.model import HfModel
from arguments.megatron_configs import activation_function, transformer_config_type
from arguments.schema import GPTModelConfig
from slime_like.preflight.shape import ModelShape, shape_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def write(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    """Write config.json and return its folder as a flag has it."""
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def config_of(model: HfModel) -> TransformerConfig:
    """megatron-core's config, as a run makes it."""
    found = model.transformer
    own = {"activation_func": activation_function(found["activation_func"])}
    return transformer_config_type(found)(**{**found, **own}, transformer_impl="local")


def shape(model: HfModel) -> ModelShape:
    """Numbers of parameters."""
    return shape_of(config_of(model), GPTModelConfig(**model.gpt))

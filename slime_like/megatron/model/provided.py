"""Policy chunks from a user's model provider (--custom-model-provider-path), with slime's
interface: ``function(pre_process, post_process, vp_stage=None)`` returns a `model_class()`.

The model is trained like the built-in one: it ends at hidden states, sequences are packed, and
parameters are converted by name. Models that cannot be trained this way are rejected here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter

from slime_like.import_utils import load_function
from slime_like.megatron.model.bases import known_bases
from slime_like.megatron.model.policy import PolicyModel, as_policy
from slime_like.megatron.ops.router import PackedRouter

PROVIDER = "--custom-model-provider-path"
Settings = Mapping[str, object]
# class and settings of the chunk under construction
_chunk: tuple[type[LanguageModule], Settings] | None = None


def model_class() -> type[LanguageModule]:
    """The class that the run would build this chunk of: megatron-core's GPTModel, or HybridModel
    with GPTModel's arguments. Raises RuntimeError outside a model provider."""
    if _chunk is None:
        raise RuntimeError("model_class() is only available within a model provider")
    return _chunk[0]


def model_settings() -> dict[str, object]:
    """Arguments that the run would pass to `model_class` for this chunk, except pre_process and
    post_process. Raises RuntimeError outside a model provider."""
    if _chunk is None:
        raise RuntimeError("model_settings() is only available within a model provider")
    return dict(_chunk[1])


def provided_chunk(
    path: str,
    base: type[LanguageModule],
    settings: Settings,
    *,
    pre_process: bool,
    post_process: bool,
) -> PolicyModel:
    """Call the model provider at `path` and make its model a policy chunk.

    Args:
        path: ``module.function`` or ``file.py:function``.
        base: See `model_class`.
        settings: Its arguments; see `model_settings`.
        pre_process: Whether this chunk has the embedding.
        post_process: Whether this chunk has the output layer.

    Raises:
        ValueError: The function raises, or its model cannot be trained; names the flag.
    """
    global _chunk
    function = load_function(path, PROVIDER)
    call: dict[str, object] = {"pre_process": pre_process, "post_process": post_process}
    if "vp_stage" in inspect.signature(function).parameters:
        call["vp_stage"] = settings["vp_stage"]
    _chunk = (base, settings)
    try:
        model = function(**call)
    except Exception as error:
        raise ValueError(
            f"{PROVIDER} {path}: the function raised {type(error).__name__}: {error}"
        ) from error
    finally:
        _chunk = None
    problem = _problem(model, settings, call)
    if problem is not None:
        raise ValueError(f"{PROVIDER} {path}: {problem}")
    return as_policy(model)


def _problem(model: object, settings: Settings, call: Mapping[str, object]) -> str | None:
    """Why a model cannot be trained here, or None."""
    if not isinstance(model, known_bases()):
        return (
            f"returned {type(model).__name__}; return model_class()(**model_settings(), ...) or "
            "megatron-core's GPTModel, or a subclass of either"
        )
    if model.config is not settings["config"]:
        return "the model has another TransformerConfig; build it with model_settings()['config']"
    expected = {
        "pre_process": call["pre_process"],
        "post_process": call["post_process"],
        "vocab_size": settings["vocab_size"],
        "share_embeddings_and_output_weights": settings["share_embeddings_and_output_weights"],
    }
    for name, value in expected.items():
        if getattr(model, name) != value:
            return f"the model has {name} {getattr(model, name)}, the run {value}"
    for name, module in model.named_modules():
        if isinstance(module, DotProductAttention):
            return (
                f"{name} is megatron-core's DotProductAttention, without packed sequences; use "
                "model_settings()['transformer_layer_spec'], or Transformer Engine's layers"
            )
        if isinstance(module, TopKRouter) and not isinstance(module, PackedRouter):
            return (
                f"{name} is megatron-core's TopKRouter, which would route padding; use "
                "model_settings()['transformer_layer_spec']"
            )
    return None

"""A chunk of the policy that a function of the user's builds (--custom-model-provider-path), as
slime calls it: ``function(pre_process, post_process, vp_stage=None)``, which returns a GPTModel.

The network is trained as ours are: it ends at hidden states, its rows are packed, and its parameters
are converted under their names. What would break one of these is refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter

from slime_like.import_utils import load_function
from slime_like.megatron.model.policy import PolicyModel, as_policy
from slime_like.megatron.ops.router import PackedRouter

PROVIDER = "--custom-model-provider-path"
_settings: Mapping[str, object] | None = None  # of the chunk that is being built


def model_settings() -> dict[str, object]:
    """The arguments that the run would give GPTModel for this chunk, all but pre_process and
    post_process. Raises RuntimeError outside a model provider."""
    if _settings is None:
        raise RuntimeError(
            "model_settings() answers while a model provider is called, and not else"
        )
    return dict(_settings)


def provided_chunk(
    path: str, settings: Mapping[str, object], *, pre_process: bool, post_process: bool
) -> PolicyModel:
    """What the function at `path` builds, as a chunk of the policy.

    Args:
        path: ``module.function`` or ``file.py:function``.
        settings: of `GPTModel`; see `model_settings`.
        pre_process: Whether the embedding is on this chunk.
        post_process: Whether the output layer is.

    Raises:
        ValueError: naming the flag, where the function raises, or what it returns cannot be trained.
    """
    global _settings
    function = load_function(path, PROVIDER)
    call: dict[str, object] = {"pre_process": pre_process, "post_process": post_process}
    if "vp_stage" in inspect.signature(function).parameters:
        call["vp_stage"] = settings["vp_stage"]
    _settings = settings
    try:
        model = function(**call)
    except Exception as error:
        raise ValueError(
            f"{PROVIDER} {path}: the function raised {type(error).__name__}: {error}"
        ) from error
    finally:
        _settings = None
    problem = _problem(model, settings, call)
    if problem is not None:
        raise ValueError(f"{PROVIDER} {path}: {problem}")
    return as_policy(model)


def _problem(
    model: object, settings: Mapping[str, object], call: Mapping[str, object]
) -> str | None:
    """Why a model cannot be trained here, or None."""
    if not isinstance(model, GPTModel):
        return f"returned {type(model).__name__}; return megatron-core's GPTModel, or a subclass"
    if model.config is not settings["config"]:
        return "the model has another TransformerConfig; build it with model_settings()['config']"
    wanted = {
        "pre_process": call["pre_process"],
        "post_process": call["post_process"],
        "vocab_size": settings["vocab_size"],
        "share_embeddings_and_output_weights": settings["share_embeddings_and_output_weights"],
    }
    for name, value in wanted.items():
        if getattr(model, name) != value:
            return f"the model has {name} {getattr(model, name)}, and the run {value}"
    for name, module in model.named_modules():
        if isinstance(module, DotProductAttention):
            return (
                f"{name} is megatron-core's DotProductAttention, which takes no packed rows; use "
                "model_settings()['transformer_layer_spec'], or Transformer Engine's layers"
            )
        if isinstance(module, TopKRouter) and not isinstance(module, PackedRouter):
            return (
                f"{name} is megatron-core's TopKRouter, which would route padding; use "
                "model_settings()['transformer_layer_spec']"
            )
    return None

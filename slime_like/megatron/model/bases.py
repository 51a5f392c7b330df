"""megatron-core's classes of which a network is built: GPTModel, or HybridModel, with the arguments
of GPTModel (hybrid.py). What this project adds is in classes without a base, `PolicyModel` and
`ValueModel`."""

from __future__ import annotations

from typing import TypeVar

from megatron.core.models.common.language_module.language_module import LanguageModule

from arguments.model_base import known_model_bases, resolve_model_base

Kind = TypeVar("Kind", bound=LanguageModule)


def base_class(model_base: str) -> type[LanguageModule]:
    """The class of --model-base; it has GPTModel's arguments."""
    if resolve_model_base(model_base) == "hybrid":
        from slime_like.megatron.model.hybrid import HybridChunk

        return HybridChunk
    from megatron.core.models.gpt import GPTModel

    base: type[LanguageModule] = GPTModel
    return base


def known_bases() -> tuple[type[LanguageModule], ...]:
    """The classes that this release has."""
    return tuple(map(base_class, known_model_bases()))


def on_base(kind: type[Kind], base: type[LanguageModule]) -> type[Kind]:
    """`kind` (PolicyModel or ValueModel) as a subclass of megatron-core's or a user's class."""
    return type(base.__name__, (kind, base), {})

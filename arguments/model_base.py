"""--model-base: the class of megatron-core that a network is built of. Both give the same numbers,
parameters and checkpoints."""

from __future__ import annotations

from megatron_patches.patch import release

# releases of megatron-core from which HybridModel can be used, and is what "auto" means
HYBRID_SINCE = (0, 18)
HYBRID_BY_DEFAULT_SINCE = (0, 19)  # which calls GPTModel deprecated


def known_model_bases() -> tuple[str, ...]:
    """What the installed release has."""
    return ("gpt", "hybrid") if release() >= HYBRID_SINCE else ("gpt",)


def resolve_model_base(model_base: str) -> str:
    """What --model-base auto means with the installed release: "gpt" or "hybrid"."""
    if model_base != "auto":
        return model_base
    return "hybrid" if release() >= HYBRID_BY_DEFAULT_SINCE else "gpt"

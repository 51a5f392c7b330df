"""Modules of a Hugging Face model that may have LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arguments.hf.model import HfModel
from arguments.hf.quantization import has_quantized_weights
from arguments.schema.lora import LATENT_ATTENTION, MIXTRAL_MLP, MLP, TARGETS
from slime_like.weights.families import model_families

MERGED = "; use --lora-sync merged"


def no_adapters(core: Mapping[str, object]) -> str:
    """Why a model has no adapters; "" if it may have some. core: its TransformerConfig fields."""
    if core.get("entry_rates"):
        return "not supported with DeepSeek-V4: most projections of its attention have no adapters"
    return ""


def unserved_beside_base(folder: str, model: HfModel) -> list[str]:
    """Why engines hold no adapter beside this base model, whatever it is on: what they do not
    compute, or what no test has compared with the trainer."""
    reasons = []
    if model.transformer.get("linear_attention_freq"):
        reasons.append(f"engines apply no adapters to linear attention{MERGED}")
    if model_families.get(model.architecture).vision is not None:
        reasons.append(f"adapters of models that see are not sent to engines{MERGED}")
    if has_quantized_weights(folder):
        reasons.append(f"the engine's base model is quantised, and the trainer's is not{MERGED}")
    return reasons


def padded_mlp(model: HfModel, gpus_per_engine: int, *, cuda: bool) -> str:
    """Why SGLang applies no adapters to the MLP; "" if it does."""
    size = model.transformer["ffn_hidden_size"]
    if cuda or size % (32 * gpus_per_engine) == 0:
        return ""
    return f"without a GPU SGLang pads an MLP of {size} units, and no adapter of it"


def target_modules(names: Sequence[str], model: HfModel) -> tuple[str, ...]:
    """The modules of this model that --lora-target-modules `names` stands for, sorted."""
    modules = {module for name in names for module in TARGETS[name]}
    return tuple(sorted(modules.difference(absent_modules(model))))


def absent_modules(model: HfModel) -> tuple[str, ...]:
    """Names in `TARGETS` that do not occur in this architecture."""
    parameters = model_families.get(model.architecture).parameters.values()
    others = MLP if any(".w1." in str(mapping) for mapping in parameters) else MIXTRAL_MLP
    if not model.transformer.get("multi_latent_attention"):
        stacked = any("gate_up_proj" in str(mapping) for mapping in parameters)
        stacked &= not any(".gate_proj." in str(mapping) for mapping in parameters)
        if not model.transformer["gated_linear_unit"]:
            return (*LATENT_ATTENTION, *others, MLP[0])
        return (*LATENT_ATTENTION, *others, *(MLP[:2] if stacked else ()))
    queries = ("q_proj",) if model.transformer["q_lora_rank"] else ("q_a_proj", "q_b_proj")
    if not model.transformer.get("linear_decay_per_channel"):
        return (*queries, "k_proj", "v_proj", *MIXTRAL_MLP)
    # delta nets have q_proj to v_proj; Kimi-Linear has the names of either MLP, GLM-5.3 only MLP's
    own = tuple(name for name in queries if name in LATENT_ATTENTION)
    return own if others == MLP else (*own, *others)

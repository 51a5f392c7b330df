"""Modules of a Hugging Face model that may have LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from arguments.hf.model import HfModel
from arguments.hf.moe import moe_layers
from arguments.hf.quantization import has_quantized_weights
from arguments.schema.lora import TARGETS
from slime_like.weights.families import OUTPUT_LAYER, model_families

MERGED = "; use --lora-sync merged"


def without_attention(core: Mapping[str, object]) -> str:
    """Why the attention of a model has no adapters; "" if it may have some. core: its
    TransformerConfig fields."""
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
    """Names of single modules in `TARGETS` that do not occur in this model, or have no adapters."""
    present = _linear_modules(model)
    single = (name for name, modules in TARGETS.items() if modules == (name,))
    return tuple(name for name in single if name not in present)


def missing_words(model: HfModel) -> tuple[str, ...]:
    """Words of --lora-target-modules that would leave out all that they name, or, of all-linear,
    the whole attention."""
    absent = set(absent_modules(model))
    words = [word for word, modules in TARGETS.items() if absent.issuperset(modules)]
    if "attn" in words:
        words.insert(0, "all-linear")
    return tuple(dict.fromkeys(words))


def _linear_modules(model: HfModel) -> set[str]:
    """Last components of the names of modules with adapters."""
    family = model_families.get(model.architecture)
    found = _modules(family.parameters[OUTPUT_LAYER])
    absent = _absent_parts(model.transformer)
    for name, mapping in family.parameters.items():
        if mapping.linear and not any(part in name for part in absent):
            found |= _modules(mapping)
    return found


def _modules(mapping: Any) -> set[str]:
    """Of the tensors of a mapping."""
    names = (getattr(mapping, field.name) for field in dataclasses.fields(mapping))
    tensors = (name for name in names if isinstance(name, str) and "." in name)
    return {name.removesuffix(".weight").rpartition(".")[2] for name in tensors}


def _absent_parts(core: Mapping[str, Any]) -> list[str]:
    """Parts of names of a family's parameters that no layer of this model has."""
    layers = core["num_layers"]
    experts = core.get("num_moe_experts")
    sparse = sum(moe_layers(core.get("moe_layer_freq") or 1 if experts else None, layers))
    blocks = core.get("block_pattern")
    dense = blocks.count("-") if blocks else layers - sparse
    deltas = sum(core.get("linear_attention_freq") or [])
    attentions = blocks.count("*") if blocks else layers - deltas
    present = {
        ".experts.": sparse,
        ".shared_experts.": sparse and core.get("moe_shared_expert_intermediate_size"),
        ".mlp.linear_fc": dense,
        ".self_attention.in_proj": deltas,
        ".self_attention.out_proj": deltas,
        ".self_attention.linear_": attentions,
        ".linear_q_proj": not core.get("q_lora_rank"),
        ".linear_q_down_proj": core.get("q_lora_rank"),
        ".linear_q_up_proj": core.get("q_lora_rank"),
    }
    return [part for part, there in present.items() if not there]

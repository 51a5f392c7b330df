"""Qwen3.8-Flash-Next, whose architecture is Qwen4Exp: Qwen3.5's delta nets, attention and experts,
with gated residual streams and attention to pooled keys (megatron/model/gated_streams.py), and with
a memory of n-grams in some layers (megatron/model/ngram_memory.py), which transformers calls
per-layer embeddings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from typing import Any

from slime_like.ngrams import NgramSettings
from slime_like.weights.families import qwen3_5, shells
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    ConfigReader,
    register_model_family,
    require_values,
)
from slime_like.weights.families.delta_net import LAYER_TYPES, delta_settings
from slime_like.weights.families.experts import expert_settings
from slime_like.weights.mappings import (
    Mapping,
    OfLayer,
    Replicated,
    ReplicatedMatrix,
    ReplicatedRows,
    Sizes,
    TensorPart,
)

LAYER = "decoder.layers.{layer}"
HF_LAYER = "model.layers.{layer}"
MIXER = "model.hyper_connection_mixer"
INDEXER = f"{ATTENTION}.indexer"
HF_INDEXER = f"{HF_ATTENTION}.indexer"
NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
# field of TransformerConfig -> key
SIZES = {
    "residual_streams": "hc_count",
    "stream_rank": "hc_lowrank",
    "index_n_heads": "indexer_n_heads",
    "index_head_dim": "indexer_head_dim",
    "index_topk": "indexer_budget",
    "index_pool": "indexer_compress_ratio",
}
# field of NgramSettings -> key, and transformers' default
MEMORY = {
    "size": ("ngram_size", 3),
    "heads": ("heads_per_ngram", 8),
    "smallest_table": ("ngram_vocab_size_base", 20_000_000),
    "row_multiple": ("make_ngram_vocab_size_divisible_by", 128),
    "seed": ("seed", 1234),
    "taps": ("ple_conv_kernel_size", 4),
    "parts": ("split_ngram_parts", 512),
}
MEMORY_KEYS = {key for key, _ in MEMORY.values()} | {
    *("ple_layer_ids", "ple_embed_dim", "number_of_conv_states")
}
HF_MEMORY = f"{HF_LAYER}.ple"
HF_TABLES = f"{HF_MEMORY}.ple_embedding"
OUTPUT_GATES = ("silu", "swish", "sigmoid")
DEFAULTS = {
    **qwen3_5.SPARSE_TEXT.defaults,
    **{"hc_count": 4, "hc_lowrank": 320, "norm_topk_prob": True},
}


def _whole_rotary(reader: ConfigReader) -> float:
    """Rotary share of files without `partial_rotary_factor`."""
    return 1.0


def _derived(config: MappingOf[str, Any]) -> dict[str, object]:
    """What transformers derives from the number of layers. No layer is dense."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):  # reported elsewhere
        return {}
    every = config.get("full_attention_interval") or 4
    kinds = ["linear_attention" if (n + 1) % every else "indexed_attention" for n in range(layers)]
    return {"layer_types": kinds, "intermediate_size": config.get("moe_intermediate_size")}


def _settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, {"indexer_kv_heads": 1})
    sizes = {field: reader.number(key) for field, key in SIZES.items()}
    topk = sizes["index_topk"]
    pool = sizes["index_pool"]
    if topk % pool:
        reader.refuse(f"indexer_compress_ratio {pool} does not divide indexer_budget {topk}")
    gate = reader.config.get("output_gate_type")
    if gate not in (None, *OUTPUT_GATES):
        legal = ", ".join(OUTPUT_GATES)
        reader.refuse(f"output_gate_type {gate!r} is not supported; legal values: {legal}")
    return {
        **delta_settings(reader),
        **expert_settings(reader, qwen3_5.EXPERTS),
        **sizes,
        "ngram_memory": _memory(reader),
        "linear_output_gate": "sigmoid" if gate == "sigmoid" else "silu",
    }


def _memory(reader: ConfigReader) -> NgramSettings | None:
    """The memory of n-grams. Reports unsupported settings to the reader."""
    numbers = reader.config.get("ple_layer_ids") or []
    layers = reader.number("num_hidden_layers")
    if not isinstance(numbers, list) or not all(n in range(1, layers + 1) for n in numbers):
        reader.refuse(f"ple_layer_ids {numbers!r:.80} must be a list of layers from 1 to {layers}")
        return None
    if not numbers:
        return None
    kinds = reader.config.get("layer_types") or []
    if attending := [n for n in numbers if n <= len(kinds) and kinds[n - 1] != "linear_attention"]:
        reader.refuse(
            f"ple_layer_ids {numbers!r:.80}: layers {attending!r:.80} have attention; a memory is "
            "supported in front of delta nets only"
        )
    end = reader.config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        reader.refuse("eos_token_id is missing, which no n-gram of the memory crosses")
        end = 0
    settings = NgramSettings(
        layers=tuple(n - 1 for n in sorted(set(numbers))),
        width=reader.number("ple_embed_dim", default=reader.number("hidden_size")),
        end=end,
        tokens=reader.number("vocab_size"),
        **{field: reader.number(key, default) for field, (key, default) in MEMORY.items()},
    )
    if settings.size < 2:
        reader.refuse(f"ngram_size {settings.size} must be at least 2")
    elif settings.width % settings.all_heads:
        reader.refuse(
            f"ple_embed_dim {settings.width} is not divisible by the {settings.all_heads} heads of "
            f"ngram_size {settings.size} and heads_per_ngram {settings.heads}"
        )
    return settings


def _constants(transformer: MappingOf[str, Any]) -> dict[str, list[int]]:
    """See `ModelFamily.constants`."""
    memory: NgramSettings | None = transformer.get("ngram_memory")
    found: dict[str, list[int]] = {}
    if memory is None:
        return found
    for layer in memory.layers:
        prefix = HF_TABLES.format(layer=layer)
        found[f"{prefix}.layer_multipliers"] = memory.multipliers(layer)
        found[f"{prefix}.ngram_heads_vocab_sizes"] = memory.tables(layer)
        found[f"{prefix}.ngram_heads_offsets"] = memory.offsets(layer)
    return found


def _constants_in_shell(transformer: MappingOf[str, Any]) -> dict[str, list[int]]:
    (old, new), *_ = shells.IN_MODEL.items()
    found = _constants(transformer)
    return {name.replace(old, new, 1): numbers for name, numbers in found.items()}


def _connection(own: str, file: str) -> dict[str, Mapping]:
    return {
        f"{own}.norm_weight": Replicated(f"{file}.hc_norm.weight", "stream_channels"),
        f"{own}.down_weight": ReplicatedMatrix(
            f"{file}.input_mix_weight_down.weight", "stream_rank", "stream_channels"
        ),
        f"{own}.up_weight": ReplicatedMatrix(
            f"{file}.input_mix_weight_up.weight", "stream_channels", "stream_rank"
        ),
    }


@dataclass(frozen=True)
class _Convolution(Replicated):
    """[channels, 1, taps], on every rank."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        assert sizes.memory is not None
        return {self.hf: (sizes.stream_channels, 1, sizes.memory.taps)}


@dataclass(frozen=True)
class _Tables(OfLayer):
    """All tables of a layer's memory [rows, head width], sharded by rows. A file has them in parts
    along the rows, of one size but for the last."""

    hf: str  # without the number of a part

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        parts = self._parts(sizes)
        assert sizes.memory is not None
        return {part.hf: (len(part), sizes.memory.head_width) for part in parts if part.hf}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        start = rows * tp_rank
        stop = start + rows
        found = []
        first = 0
        for part in self._parts(sizes):
            low = max(start - first, 0)
            high = min(stop - first, len(part))
            if low < high:
                found.append(TensorPart(part.hf, low, high))
            first += len(part)
        return found

    def _parts(self, sizes: Sizes) -> list[TensorPart]:
        """The parts of the file."""
        assert sizes.memory is not None
        rows = sizes.memory.rows(self.layer)
        size = -(-rows // sizes.memory.parts)
        bounds = [*range(0, rows, size), rows]
        return [
            TensorPart(f"{self.hf}.shard_{number}.weight", 0, stop - start)
            for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]


def _hyper_parameters() -> dict[str, Mapping]:
    found: dict[str, Mapping] = {}
    for own, block in {"self_attention": "attn", "mlp": "mlp"}.items():
        prefix = f"{LAYER}.{own}_hyper_connection"
        file = f"{HF_LAYER}.{block}_hyper_connection"
        found |= _connection(prefix, file)
        found[f"{prefix}.inject_weight"] = ReplicatedMatrix(
            f"{file}.block_inject_weight.weight", "streams", "stream_channels"
        )
    return found | _connection("decoder.final_layernorm", MIXER)


def _memory_parameters() -> dict[str, Mapping]:
    own = f"{LAYER}.ngram_memory"
    norms: dict[str, Mapping] = {
        f"{own}.{name}_norm_weight": Replicated(
            f"{HF_MEMORY}.norm_{name}.weight", "stream_channels"
        )
        for name in ("key", "query", "conv")
    }
    return {
        f"{own}.table.weight": _Tables(f"{HF_TABLES}.ngram_embedding"),
        f"{own}.key_weight": ReplicatedMatrix(
            f"{HF_MEMORY}.key_proj.weight", "stream_channels", "memory_width"
        ),
        f"{own}.value_weight": ReplicatedMatrix(
            f"{HF_MEMORY}.value_proj.weight", "hidden", "memory_width"
        ),
        **norms,
        f"{own}.conv_weight": _Convolution(f"{HF_MEMORY}.conv1d.weight", "stream_channels"),
    }


PARAMETERS: dict[str, Mapping] = {
    **_memory_parameters(),
    **{name: mapping for name, mapping in qwen3_5.SPARSE.items() if not name.endswith(NORMS)},
    f"{INDEXER}.query_key_weight": ReplicatedRows(
        f"{HF_INDEXER}.index_qk_proj.weight", "index_query_key"
    ),
    f"{INDEXER}.query_norm_weight": Replicated(f"{HF_INDEXER}.q_layernorm.weight", "index_dim"),
    f"{INDEXER}.key_norm_weight": Replicated(f"{HF_INDEXER}.k_layernorm.weight", "index_dim"),
    **_hyper_parameters(),
}
TEXT = dataclasses.replace(
    qwen3_5.SPARSE_TEXT,
    architecture="Qwen4ExpForCausalLM",
    model_type="qwen4_exp_text",
    parameters=PARAMETERS,
    required=(*qwen3_5.SPARSE_TEXT.required, *SIZES.values()),
    keys=qwen3_5.SPARSE_TEXT.keys | {*SIZES.values(), *MEMORY_KEYS, "indexer_kv_heads"},
    settings=_settings,
    defaults=DEFAULTS,
    derived=_derived,
    constants=_constants,
    layer_types=LAYER_TYPES | {"indexed_attention"},
    prediction=None,
    rotary_percent=_whole_rotary,
    vision="is offered here without images",
    tiny={
        **{k: v for k, v in qwen3_5.SPARSE_TEXT.tiny.items() if k != "full_attention_interval"},
        **{"hc_count": 3, "hc_lowrank": 7, "indexer_n_heads": 12, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 14, "indexer_budget": 8, "indexer_compress_ratio": 4},
        # tables of more than 37 rows, in parts of a file that end anywhere; with this seed no key
        # fits a stream so badly, near 0, that the slope of the root multiplies rounding
        **{"ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3},
        **{"ngram_size": 3, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 37, "split_ngram_parts": 3, "seed": 9},
        "make_ngram_vocab_size_divisible_by": 8,
        "layer_types": ("linear_attention", "indexed_attention"),
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        },
    },
)
register_model_family(TEXT)
register_model_family(
    dataclasses.replace(
        TEXT,
        architecture="Qwen4ExpForConditionalGeneration",
        model_type="qwen4_exp",
        parameters=shells.renamed(PARAMETERS, shells.IN_MODEL),
        text_config=("qwen4_exp_text",),
        constants=_constants_in_shell,
        published=("Qwen3.8-Flash-Next",),
        tiny={**TEXT.tiny, "vision_config": shells.QWEN_TOWER},
    )
)

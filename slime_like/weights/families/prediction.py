"""Names of multi-token prediction layers in files (slime_like/megatron/model/prediction.py)."""

from __future__ import annotations

from slime_like.weights.families.base import ConfigReader, PredictionNames
from slime_like.weights.mappings import JoinedProjection, Mapping, Replicated


def next_layers(reader: ConfigReader) -> int:
    """Number of prediction layers under DeepSeek's key."""
    return int(reader.config.get("num_nextn_predict_layers") or 0)


def one_layer(reader: ConfigReader) -> int:
    """For files that always have one prediction layer without a key for it."""
    return int(reader.config.get("num_nextn_predict_layers", 1))


def _parts(joined: Mapping, embedding: str, hidden: str, last: str) -> dict[str, Mapping]:
    """Parameters in addition to a transformer layer.

    Args:
        joined: Mapping of the projection.
        embedding, hidden, last: Names of its two norms and of the final norm.
    """
    return {
        "enorm.weight": Replicated(embedding),
        "hnorm.weight": Replicated(hidden),
        "eh_proj.weight": joined,
        "final_layernorm.weight": Replicated(last),
    }


def _deepseek(layer: str) -> dict[str, Mapping]:
    joined = JoinedProjection(f"{layer}.eh_proj.weight")
    names = (f"{layer}.{part}.weight" for part in ("enorm", "hnorm", "shared_head.norm"))
    return _parts(joined, *names)


AFTER_THE_LAST = "model.layers.{layer}"
DEEPSEEK_PREDICTION = PredictionNames(
    AFTER_THE_LAST,
    _deepseek(AFTER_THE_LAST),
    after_the_last=True,
    copies={
        "model.embed_tokens.weight": f"{AFTER_THE_LAST}.embed_tokens.weight",
        "lm_head.weight": f"{AFTER_THE_LAST}.shared_head.head.weight",
    },
    count=next_layers,
)
QWEN_PREDICTION = PredictionNames(
    "mtp.layers.{layer}",
    _parts(
        JoinedProjection("mtp.fc.weight"),
        *(f"mtp.{n}.weight" for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    ),
    count=one_layer,
)
MIMO_LAYER = "model.mtp_layers.{layer}"
MIMO_PREDICTION = PredictionNames(
    MIMO_LAYER,
    _parts(
        JoinedProjection(f"{MIMO_LAYER}.input_proj.weight", hidden_first=True),
        *(
            f"{MIMO_LAYER}.{n}.weight"
            for n in ("token_layernorm", "hidden_layernorm", "final_layernorm")
        ),
    ),
    count=next_layers,
)

"""MoE as in DeepSeek-V3 and GLM-4.5: sigmoid routing with a bias, limited to groups, with shared
experts, dense first layers, and MTP layers after the last one."""

from __future__ import annotations

from slime_like.weights.families.base import HF_MLP, MLP, ConfigReader, require_values
from slime_like.weights.families.experts import (
    WITHOUT_EFFECT,
    expert_parameters,
    shared_expert_parameters,
)
from slime_like.weights.mappings import Mapping, Replicated

EXPERT_KEYS = WITHOUT_EFFECT | {
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "moe_layer_freq",
    "aux_loss_alpha",
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "mlp_layer_types",
    "num_nextn_predict_layers",
    "num_mtp_layers",
}
EXPERTS_REQUIRED = ("n_routed_experts", "num_experts_per_tok")
FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
}
TINY = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 2},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    **{"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
}
EXPERT_PARAMETERS: dict[str, Mapping] = {
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
    f"{MLP}.router.expert_bias": Replicated(f"{HF_MLP}.gate.e_score_correction_bias", "experts"),
    **shared_expert_parameters(f"{HF_MLP}.shared_experts"),
}


def sigmoid_experts(reader: ConfigReader, *, shared_experts: bool = True) -> dict[str, object]:
    """Expert fields of TransformerConfig. Reports unsupported settings to the reader.

    shared_experts: The architecture has them.
    """
    require_values(reader, FIXED)
    experts = reader.number("n_routed_experts")
    topk = reader.number("num_experts_per_tok")
    groups = reader.number("n_group", default=1)
    chosen = reader.number("topk_group", default=1)
    limited = chosen < groups
    if limited and (experts % groups or topk % chosen or topk // chosen != 2):
        reader.refuse(
            f"n_group {groups} and topk_group {chosen} with num_experts_per_tok {topk}: "
            "megatron-core scores a group by its best num_experts_per_tok / topk_group experts, "
            "the file's architecture by its best two"
        )
    if topk == 1:
        reader.refuse(
            "num_experts_per_tok 1 is not supported: megatron-core does not renormalise a single "
            "weight"
        )
    layers = reader.number("num_hidden_layers")
    dense = _dense_layers(reader)
    if dense >= layers:
        reader.refuse(f"first_k_dense_replace {dense} leaves no layer with experts")
    ffn = reader.number("moe_intermediate_size")
    shared = int(reader.config.get("n_shared_experts") or 0)
    if bool(shared) != shared_experts:
        reader.refuse(f"n_shared_experts {shared} is not supported with this architecture")
    scaling = reader.number("routed_scaling_factor", default=1.0, whole=False)
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        # required by megatron-core for group-limited routing; a sigmoid has no softmax
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_router_topk_scaling_factor": float(scaling),
        "moe_shared_expert_intermediate_size": shared * ffn or None,
        "moe_router_load_balancing_type": "none",
    }


def _dense_layers(reader: ConfigReader) -> int:
    """Number of leading dense layers, from either key."""
    kinds = reader.config.get("mlp_layer_types")
    if kinds is None:
        return int(reader.config.get("first_k_dense_replace") or 0)
    dense = [kind == "dense" for kind in kinds]
    if dense != sorted(dense, reverse=True) or len(dense) != reader.number("num_hidden_layers"):
        reader.refuse(f"mlp_layer_types {kinds!r:.200}: dense layers must be the first ones")
    return sum(dense)


def untrained_layers(reader: ConfigReader) -> int:
    """Number of multi-token prediction layers, which follow the model's own."""
    return int(reader.config.get("num_nextn_predict_layers") or 0)

"""Settings and parameters of MoE families.

Renormalising the top-k of a softmax over all experts equals a softmax over the top-k logits, so
`norm_topk_prob` true is megatron-core's default order (top-k, then softmax), and false is
`moe_router_pre_softmax`.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.weights.families.base import MLP, ConfigReader
from slime_like.weights.mappings import GatedMLP, Mapping, ReplicatedRows, RowParallel

EXPERT = f"{MLP}.experts.local_experts.{{expert}}"
REQUIRED = ("num_key_value_heads", "num_experts_per_tok")
# Keys for transformers' training loss or outputs; here --moe-aux-loss-coeff alone decides.
WITHOUT_EFFECT = frozenset({"router_aux_loss_coef", "output_router_logits"})


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Names of the keys in a family's config.json that configure its experts."""

    experts: tuple[str, ...]  # alternative names of the number of experts; a file has one of them
    ffn: str  # inner size of an expert
    # key that enables renormalising the selected weights, with its default; None if they are always
    # renormalised
    norm_topk: tuple[str, bool] | None = None
    # some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`)
    dense_layers: bool = False
    shared: str | None = None  # inner size of the gated shared expert; None if there is none

    @property
    def keys(self) -> frozenset[str]:
        """Every config.json key that is read or has no effect here."""
        keys = {*self.experts, self.ffn, "num_experts_per_tok", *WITHOUT_EFFECT}
        if self.dense_layers:
            keys |= {"mlp_only_layers", "decoder_sparse_step"}
        if self.norm_topk is not None:
            keys.add(self.norm_topk[0])
        if self.shared is not None:
            keys.add(self.shared)
        return frozenset(keys)


def expert_parameters(block: str, gate: str, up: str, down: str) -> dict[str, Mapping]:
    """Router and experts of a layer.

    Args:
        block: Name of the MoE block in the file.
        gate, up, down: Names of an expert's three projections.
    """
    expert = f"{block}.experts.{{expert}}"
    return {
        f"{MLP}.router.weight": ReplicatedRows(f"{block}.gate.weight", "experts"),
        f"{EXPERT}.linear_fc1.weight": GatedMLP(
            f"{expert}.{gate}.weight", f"{expert}.{up}.weight", "expert_ffn"
        ),
        f"{EXPERT}.linear_fc2.weight": RowParallel(f"{expert}.{down}.weight", "expert_ffn"),
    }


def shared_expert_parameters(block: str) -> dict[str, Mapping]:
    """Projections of a layer's shared experts. block: their name in the file."""
    gate, up, down = (f"{block}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {
        f"{MLP}.shared_experts.linear_fc1.weight": GatedMLP(gate, up, "shared_ffn"),
        f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(down, "shared_ffn"),
    }


def expert_settings(reader: ConfigReader, keys: ExpertKeys) -> dict[str, object]:
    """Expert fields of TransformerConfig. Reports unsupported settings to the reader."""
    present = [key for key in keys.experts if reader.config.get(key) is not None]
    experts = reader.number((present or keys.experts)[0])
    topk = reader.number("num_experts_per_tok")
    if topk > experts:
        reader.refuse(f"num_experts_per_tok {topk} is above the number of experts {experts}")
    normalised = True if keys.norm_topk is None else reader.config.get(*keys.norm_topk)
    if normalised and topk == 1:
        reader.refuse(
            "num_experts_per_tok 1 with renormalised weights: every weight is 1, and the router "
            "would never learn"
        )
    settings = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": reader.number(keys.ffn),
        "moe_layer_freq": _layer_pattern(reader) if keys.dense_layers else 1,
        "moe_router_pre_softmax": not normalised,
        "moe_router_score_function": "softmax",
    }
    if keys.shared is not None:
        settings |= {
            "moe_shared_expert_intermediate_size": reader.number(keys.shared),
            "moe_shared_expert_gate": True,
        }
    return settings


def _layer_pattern(reader: ConfigReader) -> int | list[int]:
    """1 for an MoE layer, 0 for a dense one; a plain 1 if all layers have experts."""
    layers = reader.number("num_hidden_layers")
    step = reader.number("decoder_sparse_step", default=1)
    dense = reader.config.get("mlp_only_layers") or []
    pattern = [0 if layer in dense or (layer + 1) % step else 1 for layer in range(layers)]
    if not any(pattern):
        reader.refuse(
            f"mlp_only_layers {dense} and decoder_sparse_step {step} leave no layer with experts"
        )
    return 1 if all(pattern) else pattern

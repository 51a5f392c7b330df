"""Check flags that describe the network against config.json; slime's scripts repeat them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from arguments.hf.model import HfModel
from arguments.hf.moe import layer_pattern
from arguments.schema import ModelArgsConfig
from slime_like.config import Problem, flag_name

# Not read by megatron-core with MLA, which has its own sizes and no biases.
IDLE_WITH_LATENT_ATTENTION = ("kv_channels", "add_qkv_bias")
YARN = ("mscale", "mscale_all_dim")
# names for one setting: of latent attention, and of other networks
YARN_NAMES = ("rotary_scaling_factor", *YARN)
FEATURES = (
    "attention_output_gate",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)


def same_network(
    explicit: Mapping[str, object], checkpoint: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    """Flags that describe the network, without those that agree with config.json in other words or
    have no effect: one expert group means no groups, an auxiliary loss with coefficient 0 means
    none."""
    kept = dict(explicit)
    idle: list[str] = []
    if checkpoint.get("multi_latent_attention"):
        idle += IDLE_WITH_LATENT_ATTENTION
    if kept.get("moe_router_num_groups", 1) == 1 and kept.get("moe_router_group_topk", 1) == 1:
        idle += ["moe_router_num_groups", "moe_router_group_topk"]
    if not any(_as_list(kept.get("moe_aux_loss_coeff"))):
        idle += ["moe_router_load_balancing_type"] if "num_moe_experts" in checkpoint else []
    if checkpoint.get("ffn_hidden_size") is not None and not _has_dense_layers(checkpoint):
        idle += ["ffn_hidden_size"]  # no layer has this width
    if checkpoint.get("moe_router_score_function") == "sigmoid":
        idle += ["moe_router_pre_softmax"]
    return {name: value for name, value in kept.items() if name not in idle}


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _has_dense_layers(checkpoint: Mapping[str, object]) -> bool:
    return "num_moe_experts" not in checkpoint or checkpoint.get("moe_layer_freq", 1) != 1


def model_args_problems(
    config: ModelArgsConfig, checkpoint: HfModel | None, given: frozenset[str]
) -> list[Problem]:
    """The settings that differ from config.json, as problems.

    Args:
        checkpoint: None without --hf-checkpoint.
        given: Settings that the user set.
    """
    fields = [f.name for f in dataclasses.fields(config) if f.name in given]
    restated = {name: getattr(config, name) for name in fields}
    spec = restated.pop("spec", None)
    if checkpoint is None:
        names = [*restated, *([] if spec is None else ["spec"])]
        message = "requires --hf-checkpoint, which it is checked against"
        return [Problem(flag_name(name), None, message) for name in names]
    expected: dict[str, object] = {
        **dict.fromkeys(FEATURES, False),
        "multi_latent_attention": False,
        **checkpoint.transformer,
        "model_name": checkpoint.model_type,
        "use_gated_attention": checkpoint.transformer.get("attention_output_gate", False),
    }
    for name in YARN_NAMES:
        if f"yarn_{name}" in expected:
            expected.setdefault(name, expected[f"yarn_{name}"])
    if expected.get("rotary_scaling_factor", 1.0) == 1.0:  # YaRN has no effect
        restated = {name: value for name, value in restated.items() if name not in YARN}
    problems = []
    for name, value in restated.items():
        if value != expected.get(name) and not _is_same(name, value, expected):
            text = expected.get(name, "no such setting")
            message = f"conflicts with --hf-checkpoint, whose config.json has {text}; remove it"
            problems.append(Problem(flag_name(name), value, message))
    return problems


def _is_same(name: str, value: object, expected: Mapping[str, object]) -> bool:
    """Whether a value is the checkpoint's in another form: ``128,0`` for a window of 127 keys
    before the query, which Hugging Face counts with the query; N for every N-th layer without a
    window."""
    actual = expected.get(name)
    if name == "window_size" and isinstance(actual, tuple):
        before, after = actual
        given = ",".join(map(str, _as_list(value))).strip("()[]").replace(" ", ",")
        return given in (f"{before},{after}", f"{before + 1},{after}", f"{before + 1}")
    if name == "window_attn_skip_freq" and isinstance(actual, list):
        try:
            freq = layer_pattern(str(value))
        except ValueError:
            return False
        if isinstance(freq, int):
            freq = [int((layer + 1) % freq != 0) for layer in range(len(actual))]
        return freq == [int(windowed) for windowed in actual]
    return False

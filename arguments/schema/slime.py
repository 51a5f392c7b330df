"""Flags of slime's launch scripts that repeat what torchrun or the checkpoint define; they are
checked against it."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg

_RESTATED = "Must agree with --hf-checkpoint's config.json."


@dataclass(frozen=True, slots=True)
class SlimeConfig(CheckedSettings):
    actor_num_nodes: int | None = arg(
        None,
        "slime: nodes of the trainer. Times --actor-num-gpus-per-node it must equal the number of "
        "torchrun processes. Either flag selects slime's defaults: --bf16, "
        "--use-distributed-optimizer, one sample per prompt, --lr-decay-style linear, SGLang "
        "servers; and --ref-load as initial weights.",
        legal=AT_LEAST_ONE,
    )
    actor_num_gpus_per_node: int | None = arg(
        None, "slime: processes of the trainer on each node.", legal=AT_LEAST_ONE
    )
    num_gpus_per_node: int | None = arg(
        None,
        "slime: GPUs of a node; at least --actor-num-gpus-per-node.",
        legal=AT_LEAST_ONE,
        needs="actor_num_nodes|actor_num_gpus_per_node",
    )
    train_backend: str | None = arg(
        None, "slime: training backend; only megatron is supported.", choices=("megatron",)
    )
    disable_compute_advantages_and_returns: bool = arg(
        False,
        "slime: compute no advantages, as with --loss-type sft_loss.",
        needs="loss_type=sft_loss",
    )
    rollout_max_context_len: int | None = arg(
        None,
        "slime: maximum tokens of prompt and response. Prompts leave room for at least one token, "
        "unless --rollout-max-prompt-len is given; user functions find the value in args.",
        legal=POSITIVE,
    )
    custom_config_path: str | None = arg(
        None,
        "slime: a YAML file with keys that override flags of the same names in the args of user "
        "functions.",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class ModelArgsConfig(CheckedSettings):
    """Model settings without a flag in megatron-core's TransformerConfig or GPTModel."""

    multi_latent_attention: bool = arg(False, _RESTATED)
    q_lora_rank: int | None = arg(None, _RESTATED, legal=AT_LEAST_ONE)
    kv_lora_rank: int | None = arg(None, _RESTATED, legal=AT_LEAST_ONE)
    qk_head_dim: int | None = arg(None, _RESTATED, legal=AT_LEAST_ONE)
    qk_pos_emb_head_dim: int | None = arg(None, _RESTATED, legal=AT_LEAST_ONE)
    v_head_dim: int | None = arg(None, _RESTATED, legal=AT_LEAST_ONE)
    rotary_scaling_factor: float | None = arg(None, _RESTATED, legal=POSITIVE)
    mscale: float | None = arg(None, _RESTATED, legal=NON_NEGATIVE)
    mscale_all_dim: float | None = arg(None, _RESTATED, legal=NON_NEGATIVE)
    attention_output_gate: bool = arg(False, _RESTATED)
    use_gated_attention: bool = arg(False, _RESTATED)
    post_self_attn_layernorm: bool = arg(False, _RESTATED)
    post_mlp_layernorm: bool = arg(False, _RESTATED)
    softmax_type: str | None = arg(None, _RESTATED)
    window_size: list[str] | None = arg(None, _RESTATED, nargs="+")
    window_attn_skip_freq: str | None = arg(None, _RESTATED)
    glu_linear_offset: float | None = arg(None, _RESTATED)
    activation_func_clamp_value: float | None = arg(None, _RESTATED, legal=NON_NEGATIVE)
    yarn_rotary_scaling_factor: float | None = arg(None, _RESTATED, legal=POSITIVE)
    yarn_original_max_position_embeddings: int | None = arg(None, _RESTATED, legal=POSITIVE)
    yarn_beta_fast: float | None = arg(None, _RESTATED, legal=POSITIVE)
    yarn_beta_slow: float | None = arg(None, _RESTATED, legal=POSITIVE)
    yarn_mscale: float | None = arg(None, _RESTATED, legal=NON_NEGATIVE)
    yarn_mscale_all_dim: float | None = arg(None, _RESTATED, legal=NON_NEGATIVE)
    model_name: str | None = arg(
        None, "slime: the model_type of --hf-checkpoint, checked against it."
    )
    spec: list[str] | None = arg(
        None,
        "slime: module and function of the layer spec. Ignored: the layers follow from "
        "--hf-checkpoint's config.json.",
        nargs="+",
    )

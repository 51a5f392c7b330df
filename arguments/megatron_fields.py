"""megatron-core's settings that are flags, one row each.

All other fields of its configurations, of any release, are known flags that are rejected
(`megatron.py`). A row says what megatron-core's source does not: what the setting does, further
spellings, legal values, and the default as a user sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arguments.flags import Shape
from slime_like.config import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    UNIT_OPEN_HIGH,
    UNIT_OPEN_LOW,
    Range,
)


@dataclass(frozen=True, slots=True)
class MegatronField:
    """One supported setting."""

    help: str  # for --help and docs/flags.md
    # on, off: Megatron-LM's spellings that are not the field's name
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    # how a field of several types is parsed. A list with one item becomes the plain value; see
    # `network_of_flags`
    shape: Shape | None = None
    # Megatron-LM's names of the dtypes that Transformer Engine's Adam supports, for a field that is
    # a torch.dtype; `arguments/rules/training.py` has further restrictions
    dtypes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # supported values; a release may have more
    legal: Range | None = None
    # as in `slime_like.config.arg`
    needs: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    required_with: tuple[str, ...] = ()
    idle_without: tuple[str, ...] = ()
    relations: tuple[tuple[str, str], ...] = ()
    default: str = ""  # text of the default, where it is not megatron-core's own
    some_releases: bool = False  # some supported releases lack the field

    @property
    def union(self) -> Shape | None:
        """The shape to parse, where the annotation does not have one."""
        return Shape("value", str, self.dtypes) if self.dtypes else self.shape


NETWORK: Mapping[str, MegatronField] = {
    "num_layers": MegatronField(
        "Transformer layers of the whole model, over all pipeline stages.",
        default="from --hf-checkpoint",
        legal=AT_LEAST_ONE,
    ),
    "num_layers_in_first_pipeline_stage": MegatronField(
        "Layers of the first pipeline stage; the others share the rest equally.",
        on=("--decoder-first-pipeline-num-layers",),
    ),
    "num_layers_in_last_pipeline_stage": MegatronField(
        "Layers of the last pipeline stage; the others share the rest equally.",
        on=("--decoder-last-pipeline-num-layers",),
    ),
    "pipeline_model_parallel_layout": MegatronField(
        "Layers of every pipeline stage: E is the embedding, t a layer, L the loss, | separates"
        " stages, x*n repeats, e.g. Et*3|t*4|t*3L.",
        shape=Shape("value", str),
    ),
    "account_for_embedding_in_pipeline_split": MegatronField(
        "Count the embedding as a layer of the first pipeline stage when splitting layers."
    ),
    "account_for_loss_in_pipeline_split": MegatronField(
        "Count the loss as a layer of the last pipeline stage when splitting layers."
    ),
    "hidden_size": MegatronField(
        "Hidden size of the transformer.", default="from --hf-checkpoint", legal=AT_LEAST_ONE
    ),
    "num_attention_heads": MegatronField(
        "Query heads per attention layer; must be divisible by --tensor-model-parallel-size.",
        default="from --hf-checkpoint",
        legal=AT_LEAST_ONE,
    ),
    "num_query_groups": MegatronField(
        "Key-value heads per attention layer (grouped-query attention); a divisor of "
        "--num-attention-heads.",
        default="from --hf-checkpoint, else --num-attention-heads",
        legal=AT_LEAST_ONE,
    ),
    "kv_channels": MegatronField(
        "Dimension of one attention head.",
        default="from --hf-checkpoint, else --hidden-size / --num-attention-heads",
        legal=AT_LEAST_ONE,
    ),
    "ffn_hidden_size": MegatronField(
        "Inner size of a dense layer's MLP; of a gated MLP, of each of its two projections.",
        default="from --hf-checkpoint, else 4 * --hidden-size",
        legal=AT_LEAST_ONE,
    ),
    "attention_backend": MegatronField(
        "Attention kernel: flash, fused and unfused need Transformer Engine layers, local is "
        "for layers without it; auto chooses one.",
        choices=("flash", "fused", "unfused", "local", "auto"),
        default="auto",
    ),
    "hidden_dropout": MegatronField(
        "Dropout probability of embeddings and of the outputs of attention and MLP; not read "
        "from the checkpoint.",
        default="0.0",
        legal=UNIT_OPEN_HIGH,
    ),
    "attention_dropout": MegatronField(
        "Dropout probability of attention weights; not read from the checkpoint.",
        default="0.0",
        legal=UNIT_OPEN_HIGH,
    ),
    "fp32_residual_connection": MegatronField("Keep the residual stream in float32."),
    "layernorm_epsilon": MegatronField(
        "Epsilon of the normalization layers, added to the variance.",
        default="from --hf-checkpoint, else 1e-05",
    ),
    "layernorm_zero_centered_gamma": MegatronField(
        "Store normalization scales as offsets from 1; needs Transformer Engine layers."
    ),
    "add_bias_linear": MegatronField(
        "Add biases to the projections of attention and MLP (--disable-bias-linear: none). "
        "Experts with biases need --expert-tensor-parallel-size 1.",
        default="from --hf-checkpoint, else on",
    ),
    "add_qkv_bias": MegatronField(
        "Add biases to the QKV projection, also with --disable-bias-linear.",
        default="from --hf-checkpoint, else off",
    ),
    "rotary_interleaved": MegatronField(
        "Rotate adjacent dimensions (0 with 1, 2 with 3) instead of the first half with the "
        "second half."
    ),
    "normalization": MegatronField(
        "Type of the normalization layers.",
        choices=("LayerNorm", "RMSNorm"),
        default="from --hf-checkpoint, else LayerNorm",
    ),
    "qk_layernorm": MegatronField(
        "Normalize the queries and keys of each head, by --normalization, before rotary "
        "embeddings.",
        default="from --hf-checkpoint, else off",
    ),
    "init_method_std": MegatronField(
        "Standard deviation of initial weights; divided by sqrt(2 * --num-layers) for output "
        "projections."
    ),
    "embedding_init_method_std": MegatronField(
        "Standard deviation of initial embeddings; default: --init-method-std."
    ),
    "apply_query_key_layer_scaling": MegatronField(
        "Divide attention scores by the layer number; Transformer Engine also needs "
        "NVTE_APPLY_QK_LAYER_SCALING=1."
    ),
    "attention_softmax_in_fp32": MegatronField(
        "Compute softmax in float32; affects megatron-core's own attention only, not the "
        "kernels used here."
    ),
    "disable_bf16_reduced_precision_matmul": MegatronField(
        "Accumulate bfloat16 matrix products in float32 only; needs a GPU."
    ),
    "bias_activation_fusion": MegatronField(
        "Fuse bias and activation of the MLP (SwiGLU, quick GEGLU).",
        off=("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
        default="on with CUDA and Transformer Engine",
    ),
    "bias_dropout_fusion": MegatronField(
        "Fuse bias, dropout and residual addition.", default="on with CUDA and Transformer Engine"
    ),
    "masked_softmax_fusion": MegatronField(
        "Fuse scaling, mask and softmax; affects megatron-core's own attention only, not the "
        "kernels used here.",
        default="on with CUDA and Transformer Engine",
    ),
    "persist_layer_norm": MegatronField(
        "Use Apex's persistent LayerNorm kernel if it supports the hidden size."
    ),
    "apply_rope_fusion": MegatronField(
        "Fuse rotary embeddings; with --rotary-interleaved needs Transformer Engine 2.3.",
        off=("--no-rope-fusion",),
        default="on with CUDA and Transformer Engine",
    ),
    "recompute_granularity": MegatronField(
        "Recompute activations in the backward pass to save memory: full layers, or "
        "--recompute-modules (selective).",
        choices=("full", "selective"),
    ),
    "recompute_method": MegatronField(
        "Full recomputation: uniform stores the input of every --recompute-num-layers layers, "
        "block recomputes that many layers only.",
        choices=("uniform", "block"),
        only_with=("recompute_granularity=full",),
        required_with=("recompute_granularity=full",),
    ),
    "recompute_num_layers": MegatronField(
        "Full recomputation: layers per recomputed unit (uniform), or recomputed layers per "
        "pipeline chunk (block).",
        only_with=("recompute_granularity=full",),
        required_with=("recompute_granularity=full",),
    ),
    "recompute_modules": MegatronField(
        "Selective recomputation: modules to recompute; default: core_attn.",
        choices=("core_attn", "mlp", "layernorm", "moe", "shared_experts"),
        only_with=("recompute_granularity=selective",),
    ),
    "distribute_saved_activations": MegatronField(
        "Full recomputation: shard saved layer inputs over tensor-parallel ranks; not with "
        "--sequence-parallel.",
        needs=("recompute_granularity=full", "tensor_model_parallel_size>1"),
        excludes=("sequence_parallel, which shards activations",),
    ),
    "perform_initialization": MegatronField(
        "Initialise weights; --no-initialization leaves them undefined until they are loaded."
    ),
    "use_cpu_initialization": MegatronField(
        "Initialise weights on the CPU: independent of the tensor-parallel size, but slower "
        "than on the GPU."
    ),
    "bf16": MegatronField(
        "Weights and activations in bfloat16, with float32 main weights in the optimizer; "
        "default: everything in float32."
    ),
    "deterministic_mode": MegatronField(
        "Use deterministic, slower kernels; Transformer Engine also needs "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."
    ),
    "gradient_accumulation_fusion": MegatronField(
        "Fuse weight-gradient GEMMs with accumulation into the gradient buffer; needs Apex's "
        "CUDA extension.",
        default="on with CUDA and Apex's extension",
    ),
    "clone_scatter_output_in_embedding": MegatronField(
        "With --sequence-parallel: clone the scattered embeddings, so that the full tensor can "
        "be freed."
    ),
    "cp_comm_type": MegatronField(
        "How context-parallel ranks exchange keys and values: in a ring (p2p), all at once "
        "(all_gather), or heads for tokens (a2a).",
        choices=("p2p", "all_gather", "a2a"),
        default="p2p with Transformer Engine, else all_gather",
    ),
    "overlap_p2p_comm": MegatronField(
        "Interleaved schedule: overlap computation with pipeline communication.",
        on=("--overlap-p2p-communication",),
        off=("--no-overlap-p2p-communication",),
        default="on with NCCL and the interleaved schedule",
    ),
}

EXPERTS: Mapping[str, MegatronField] = {
    "num_moe_experts": MegatronField(
        "Experts per MoE layer, over all ranks; default: a dense network.",
        on=("--num-experts",),
        default="from --hf-checkpoint, else none",
    ),
    "moe_ffn_hidden_size": MegatronField(
        "Inner size of an expert's MLP.", default="from --hf-checkpoint, else --ffn-hidden-size"
    ),
    "moe_layer_freq": MegatronField(
        "MoE layers: every N-th layer, or a pattern of 0 and 1 over all layers, e.g. "
        '"[0]*3+[1]*45".',
        shape=Shape("value", str),
        default="from --hf-checkpoint, else 1",
    ),
    "moe_shared_expert_intermediate_size": MegatronField(
        "Total inner size of the shared experts, which process every token.",
        default="from --hf-checkpoint, else none",
    ),
    "moe_shared_expert_gate": MegatronField(
        "Multiply the output of the shared experts by a sigmoid gate.",
        default="from --hf-checkpoint, else off",
    ),
    "moe_router_topk": MegatronField("Experts per token.", default="from --hf-checkpoint, else 2"),
    "moe_router_num_groups": MegatronField("Number of expert groups for --moe-router-group-topk."),
    "moe_router_group_topk": MegatronField(
        "Choose a token's experts from its N best groups; default: from all experts."
    ),
    "moe_router_pre_softmax": MegatronField(
        "Apply softmax before top-k instead of after it; ignored for sigmoid scores.",
        default="from --hf-checkpoint, else off",
    ),
    "moe_router_topk_scaling_factor": MegatronField(
        "Scaling factor of a token's expert weights; default: none."
    ),
    "moe_router_score_function": MegatronField(
        "Router scores: softmax, or a sigmoid per expert, normalized over the chosen ones.",
        choices=("softmax", "sigmoid"),
        default="from --hf-checkpoint, else softmax",
    ),
    "moe_router_dtype": MegatronField(
        "Dtype of router logits and weights; default: that of the hidden states.",
        choices=("fp32", "fp64"),
    ),
    "moe_router_load_balancing_type": MegatronField(
        "Scope of the auxiliary loss: a micro-batch, a sequence, or all data-parallel ranks; "
        "several values need as many coefficients.",
        shape=Shape("list", str),
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    ),
    "moe_aux_loss_coeff": MegatronField(
        "Weight of the auxiliary loss, one per --moe-router-load-balancing-type; 0: no such loss.",
        shape=Shape("list", float),
        legal=NON_NEGATIVE,
    ),
    "moe_z_loss_coeff": MegatronField(
        "Weight of the z-loss (mean squared log-sum-exp of the router logits); default: no such"
        " loss.",
        legal=NON_NEGATIVE,
    ),
    "moe_router_enable_expert_bias": MegatronField(
        "Balance experts by a score bias that is updated after each optimizer step and affects "
        "the choice only; needs sigmoid scores."
    ),
    "moe_router_bias_update_rate": MegatronField(
        "Change of an expert's bias per optimizer step, towards the mean number of tokens."
    ),
    "moe_token_dispatcher_type": MegatronField(
        "Token dispatcher: alltoall sends tokens to the ranks of their experts, allgather to "
        "all ranks.",
        choices=("alltoall", "allgather", "flex"),
        default="alltoall",
    ),
    "moe_expert_capacity_factor": MegatronField(
        "Capacity of an expert per micro-batch, relative to an even share; excess tokens are "
        "dropped. Default: no limit."
    ),
    "moe_pad_expert_input_to_capacity": MegatronField(
        "Pad every expert's input to its capacity; needs --moe-expert-capacity-factor."
    ),
    "moe_token_drop_policy": MegatronField(
        "Tokens dropped by an expert over capacity: those with the lowest weights (probs) or "
        "the last ones (position).",
        choices=("probs", "position"),
    ),
    "moe_enable_deepep": MegatronField(
        "With --moe-token-dispatcher-type flex: dispatch by DeepEP if it is installed, else "
        "all-to-all."
    ),
    "moe_grouped_gemm": MegatronField(
        "Use grouped GEMMs for the experts; needs Transformer Engine layers.",
        needs=("@transformer_engine",),
    ),
    "moe_permute_fusion": MegatronField(
        "Fuse token permutation and its inverse; needs Transformer Engine layers.",
        needs=("@transformer_engine",),
    ),
    "moe_router_fusion": MegatronField(
        "Fuse top-k routing and the auxiliary loss; needs Transformer Engine layers.",
        needs=("@transformer_engine",),
    ),
}

_ADAM = ("optimizer=adam|optimizer=muon",)
OPTIMIZER: Mapping[str, MegatronField] = {
    "lr": MegatronField(
        "Peak learning rate, reached after warm-up.", default="none; required", legal=POSITIVE
    ),
    "min_lr": MegatronField(
        "Minimum learning rate, after decay; ignored with --lr-decay-style constant.",
        default="0.0",
        legal=NON_NEGATIVE,
        idle_without=("@decay",),
        relations=(("at_most", "lr"),),
    ),
    "decoupled_lr": MegatronField(
        "Peak learning rate of the embedding and the output layer; default: --lr.",
        excludes=("lora_rank, which freezes the embedding and the output layer",),
    ),
    "decoupled_min_lr": MegatronField(
        "Minimum learning rate of the embedding and the output layer, with --decoupled-lr; "
        "default: --min-lr.",
        excludes=("lora_rank, which freezes the embedding and the output layer",),
        idle_without=("decoupled_lr", "@decay"),
    ),
    "weight_decay": MegatronField(
        "Weight decay coefficient; biases and one-dimensional weights are exempt.",
        legal=NON_NEGATIVE,
    ),
    "apply_wd_to_qk_layernorm": MegatronField(
        "Apply weight decay to the scales of --qk-layernorm too."
    ),
    "use_precision_aware_optimizer": MegatronField(
        "Set the dtypes of optimizer state with the --*-dtype flags; needs Adam and "
        "--use-distributed-optimizer.",
        needs=("optimizer=adam", "use_distributed_optimizer"),
        excludes=("lora_rank",),
    ),
    "main_grads_dtype": MegatronField(
        "Precision-aware optimizer: dtype of the gradient buffers; bf16 needs --bf16.",
        dtypes=("fp32", "bf16"),
        default="fp32",
        needs=("use_precision_aware_optimizer",),
    ),
    "main_params_dtype": MegatronField(
        "Precision-aware optimizer: dtype of the main weights; fp16 needs Transformer Engine.",
        dtypes=("fp32", "fp16"),
        default="fp32",
        needs=("use_precision_aware_optimizer",),
        excludes=("optimizer_cpu_offload",),
    ),
    "exp_avg_dtype": MegatronField(
        "Precision-aware optimizer: dtype of Adam's first moment; fp16 and fp8 need Transformer"
        " Engine.",
        dtypes=("fp32", "fp16", "bf16", "fp8"),
        default="fp32",
        needs=("use_precision_aware_optimizer",),
        excludes=("optimizer_cpu_offload",),
    ),
    "exp_avg_sq_dtype": MegatronField(
        "Precision-aware optimizer: dtype of Adam's second moment; fp16 and fp8 need "
        "Transformer Engine.",
        dtypes=("fp32", "fp16", "bf16", "fp8"),
        default="fp32",
        needs=("use_precision_aware_optimizer",),
        excludes=("optimizer_cpu_offload",),
    ),
    "optimizer": MegatronField(
        "Optimizer: Adam (AdamW unless --no-decoupled-weight-decay), SGD, or Muon for matrices "
        "with AdamW for the rest (needs emerging_optimizers).",
        choices=("adam", "sgd", "muon"),
    ),
    "muon_momentum": MegatronField(
        "Momentum of Muon.", needs=("optimizer=muon",), legal=UNIT_OPEN_HIGH
    ),
    "muon_split_qkv": MegatronField(
        "Orthogonalise the query, key and value projections separately; --muon-no-split-qkv: as"
        " one matrix.",
        off=("--muon-no-split-qkv",),
        needs=("optimizer=muon",),
    ),
    "muon_use_nesterov": MegatronField(
        "Nesterov momentum in Muon.", needs=("optimizer=muon",), some_releases=True
    ),
    "muon_nesterov": MegatronField(
        "Nesterov momentum in Muon, Megatron-LM's --muon-use-nesterov.",
        on=("--muon-use-nesterov",),
        off=("--no-muon-use-nesterov",),
        needs=("optimizer=muon",),
        some_releases=True,
    ),
    "muon_scale_mode": MegatronField(
        "Scale of Muon's update [out, in]: spectral sqrt(max(out, in)), unit_rms_norm sqrt(out "
        "/ in), shape_scaling sqrt(max(1, out / in)).",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        needs=("optimizer=muon",),
    ),
    "muon_fp32_matmul_prec": MegatronField(
        "Precision of matrix products in Muon's Newton-Schulz iteration: medium is bf16, "
        "highest fp32.",
        choices=("medium", "high", "highest"),
        needs=("optimizer=muon",),
    ),
    "muon_coefficient_type": MegatronField(
        "Coefficients of Muon's Newton-Schulz iteration.",
        choices=("simple", "quintic", "polar_express", "aol"),
        needs=("optimizer=muon",),
        some_releases=True,
    ),
    "muon_num_ns_steps": MegatronField(
        "Newton-Schulz iterations of Muon.", needs=("optimizer=muon",), legal=AT_LEAST_ONE
    ),
    "muon_tp_mode": MegatronField(
        "Tensor-parallel weights: duplicated and distributed orthogonalise the full matrix; "
        "blockwise, Megatron-LM's default, each shard alone.",
        choices=("duplicated", "distributed", "blockwise"),
        needs=("optimizer=muon",),
        default="duplicated",
    ),
    "muon_extra_scale_factor": MegatronField(
        "Additional scale of Muon's update; 0.2 matches AdamW's size.",
        needs=("optimizer=muon",),
        legal=POSITIVE,
    ),
    "adam_beta1": MegatronField(
        "Adam's decay rate of the first moment.", legal=UNIT_OPEN_HIGH, idle_without=_ADAM
    ),
    "adam_beta2": MegatronField(
        "Adam's decay rate of the second moment.", legal=UNIT_OPEN_HIGH, idle_without=_ADAM
    ),
    "adam_eps": MegatronField(
        "Adam's epsilon, added to the denominator.", legal=POSITIVE, idle_without=_ADAM
    ),
    "decoupled_weight_decay": MegatronField(
        "Decoupled weight decay (AdamW); --no-decoupled-weight-decay adds the decay to the "
        "gradient.",
        excludes=("optimizer=muon", "optimizer_cpu_offload"),
        idle_without=_ADAM,
    ),
    "sgd_momentum": MegatronField(
        "Momentum of --optimizer sgd.", legal=UNIT_OPEN_HIGH, idle_without=("optimizer=sgd",)
    ),
    "use_distributed_optimizer": MegatronField(
        "Shard the optimizer state over data-parallel ranks.",
        excludes=(
            "optimizer=muon, whose state is unsharded",
            "optimizer=sgd, whose state megatron-core cannot shard; use adam",
        ),
    ),
    "overlap_param_gather": MegatronField(
        "Gather updated weights during the next forward pass; needs --use-distributed-optimizer"
        " and --overlap-grad-reduce.",
        needs=("use_distributed_optimizer", "overlap_grad_reduce"),
    ),
    "optimizer_cpu_offload": MegatronField(
        "Keep optimizer state in host memory and step there; needs "
        "--use-precision-aware-optimizer and --bf16.",
        needs=(
            "use_precision_aware_optimizer",
            "bf16, of which megatron-core restores fp32 copies",
        ),
    ),
    "optimizer_offload_fraction": MegatronField(
        "Fraction of the optimizer state in host memory, with --optimizer-cpu-offload.",
        needs=("optimizer_cpu_offload",),
        default="1.0",
        legal=UNIT_OPEN_LOW,
    ),
    "overlap_cpu_optimizer_d2h_h2d": MegatronField(
        "With --optimizer-cpu-offload: overlap copies between host and GPU with the update.",
        needs=("optimizer_cpu_offload",),
    ),
    "pin_cpu_grads": MegatronField(
        "With --optimizer-cpu-offload: keep gradients in pinned host memory.",
        needs=("optimizer_cpu_offload",),
    ),
    "pin_cpu_params": MegatronField(
        "With --optimizer-cpu-offload: keep main weights in pinned host memory; megatron-core "
        "0.16 always does.",
        needs=("optimizer_cpu_offload",),
    ),
    "clip_grad": MegatronField(
        "Clip gradients to this global L2 norm; 0 disables clipping.", legal=NON_NEGATIVE
    ),
}

DATA_PARALLEL: Mapping[str, MegatronField] = {
    "grad_reduce_in_fp32": MegatronField(
        "Accumulate and reduce gradients in float32.",
        on=("--accumulate-allreduce-grads-in-fp32",),
        default="on with --bf16, else off",
    ),
    "overlap_grad_reduce": MegatronField(
        "Overlap the data-parallel gradient reduction with the backward pass."
    ),
    "align_param_gather": MegatronField(
        "With --overlap-param-gather: start the gathers of all pipeline stages at the same time."
    ),
    "bucket_size": MegatronField(
        "Parameters per gradient bucket, with --overlap-grad-reduce; default: 1,000,000 per "
        "data-parallel rank, at least 40,000,000.",
        on=("--ddp-bucket-size",),
    ),
    "pad_buckets_for_high_nccl_busbw": MegatronField(
        "With --use-distributed-optimizer: pad buckets to a multiple of 65,536 elements, which "
        "NCCL transfers faster on many ranks."
    ),
    "average_in_collective": MegatronField(
        "Average gradients in the collective instead of scaling them before the sum.",
        on=("--ddp-average-in-collective",),
    ),
}

FIELDS: Mapping[str, MegatronField] = {**NETWORK, **EXPERTS, **OPTIMIZER, **DATA_PARALLEL}
SOME_RELEASES = frozenset(name for name, field in FIELDS.items() if field.some_releases)
OPTIMIZER_DTYPES = {name: field.dtypes for name, field in FIELDS.items() if field.dtypes}

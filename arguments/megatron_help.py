"""Help texts of megatron-core's settings, by field name, for `train.py --help` and docs/flags.md.

Defaults and legal values are added there; see `megatron.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

NETWORK: Mapping[str, str] = {
    "num_layers": "Transformer layers of the whole model, over all pipeline stages.",
    "num_layers_in_first_pipeline_stage": "Layers of the first pipeline stage; "
    "the others share the rest equally.",
    "num_layers_in_last_pipeline_stage": "Layers of the last pipeline stage; "
    "the others share the rest equally.",
    "pipeline_model_parallel_layout": "Layers of every pipeline stage: E is the embedding, t a "
    "layer, L the loss, | separates stages, x*n repeats, e.g. Et*3|t*4|t*3L.",
    "account_for_embedding_in_pipeline_split": "Count the embedding as a layer of the first "
    "pipeline stage when splitting layers.",
    "account_for_loss_in_pipeline_split": "Count the loss as a layer of the last pipeline stage "
    "when splitting layers.",
    "hidden_size": "Hidden size of the transformer.",
    "num_attention_heads": "Query heads per attention layer; "
    "must be divisible by --tensor-model-parallel-size.",
    "num_query_groups": "Key-value heads per attention layer (grouped-query attention); "
    "a divisor of --num-attention-heads.",
    "kv_channels": "Dimension of one attention head.",
    "ffn_hidden_size": "Inner size of a dense layer's MLP; "
    "of a gated MLP, of each of its two projections.",
    "attention_backend": "Attention kernel: flash, fused and unfused need Transformer Engine "
    "layers, local is for layers without it; auto chooses one.",
    "hidden_dropout": "Dropout probability of embeddings and of the outputs of attention and MLP; "
    "not read from the checkpoint.",
    "attention_dropout": "Dropout probability of attention weights; not read from the checkpoint.",
    "fp32_residual_connection": "Keep the residual stream in float32.",
    "layernorm_epsilon": "Epsilon of the normalization layers, added to the variance.",
    "layernorm_zero_centered_gamma": "Store normalization scales as offsets from 1; "
    "needs Transformer Engine layers.",
    "add_bias_linear": "Add biases to the projections of attention and MLP "
    "(--disable-bias-linear: none). "
    "Experts with biases need --expert-tensor-parallel-size 1.",
    "add_qkv_bias": "Add biases to the QKV projection, also with --disable-bias-linear.",
    "rotary_interleaved": "Rotate adjacent dimensions (0 with 1, 2 with 3) instead of the first "
    "half with the second half.",
    "normalization": "Type of the normalization layers.",
    "qk_layernorm": "Normalize the queries and keys of each head, by --normalization, before "
    "rotary embeddings.",
    "init_method_std": "Standard deviation of initial weights; divided by sqrt(2 * --num-layers) "
    "for output projections.",
    "embedding_init_method_std": "Standard deviation of initial embeddings; "
    "default: --init-method-std.",
    "apply_query_key_layer_scaling": "Divide attention scores by the layer number; "
    "Transformer Engine also needs NVTE_APPLY_QK_LAYER_SCALING=1.",
    "attention_softmax_in_fp32": "Compute softmax in float32; affects megatron-core's own "
    "attention only, not the kernels used here.",
    "disable_bf16_reduced_precision_matmul": "Accumulate bfloat16 matrix products in float32 only; "
    "needs a GPU.",
    "bias_activation_fusion": "Fuse bias and activation of the MLP (SwiGLU, quick GEGLU).",
    "bias_dropout_fusion": "Fuse bias, dropout and residual addition.",
    "masked_softmax_fusion": "Fuse scaling, mask and softmax; affects megatron-core's own "
    "attention only, not the kernels used here.",
    "persist_layer_norm": "Use Apex's persistent LayerNorm kernel if it supports the hidden size.",
    "apply_rope_fusion": "Fuse rotary embeddings; "
    "with --rotary-interleaved needs Transformer Engine 2.3.",
    "recompute_granularity": "Recompute activations in the backward pass to save memory: "
    "full layers, or --recompute-modules (selective).",
    "recompute_method": "Full recomputation: uniform stores the input of every "
    "--recompute-num-layers layers, block recomputes that many layers only.",
    "recompute_num_layers": "Full recomputation: layers per recomputed unit (uniform), or "
    "recomputed layers per pipeline chunk (block).",
    "recompute_modules": "Selective recomputation: modules to recompute; default: core_attn.",
    "distribute_saved_activations": "Full recomputation: shard saved layer inputs over "
    "tensor-parallel ranks; not with --sequence-parallel.",
    "perform_initialization": "Initialise weights; "
    "--no-initialization leaves them undefined until they are loaded.",
    "use_cpu_initialization": "Initialise weights on the CPU: independent of the tensor-parallel "
    "size, but slower than on the GPU.",
    "bf16": "Weights and activations in bfloat16, with float32 main weights in the optimizer; "
    "default: everything in float32.",
    "deterministic_mode": "Use deterministic, slower kernels; "
    "Transformer Engine also needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.",
    "gradient_accumulation_fusion": "Fuse weight-gradient GEMMs with accumulation into the "
    "gradient buffer; needs Apex's CUDA extension.",
    "clone_scatter_output_in_embedding": "With --sequence-parallel: clone the scattered "
    "embeddings, so that the full tensor can be freed.",
    "cp_comm_type": "How context-parallel ranks exchange keys and values: in a ring (p2p), all at "
    "once (all_gather), or heads for tokens (a2a).",
    "overlap_p2p_comm": "Interleaved schedule: overlap computation with pipeline communication.",
}

EXPERTS: Mapping[str, str] = {
    "num_moe_experts": "Experts per MoE layer, over all ranks; default: a dense network.",
    "moe_ffn_hidden_size": "Inner size of an expert's MLP.",
    "moe_layer_freq": "MoE layers: every N-th layer, or a pattern of 0 and 1 over all layers, "
    'e.g. "[0]*3+[1]*45".',
    "moe_shared_expert_intermediate_size": "Total inner size of the shared experts, which process "
    "every token.",
    "moe_shared_expert_gate": "Multiply the output of the shared experts by a sigmoid gate.",
    "moe_router_topk": "Experts per token.",
    "moe_router_num_groups": "Number of expert groups for --moe-router-group-topk.",
    "moe_router_group_topk": "Choose a token's experts from its N best groups; "
    "default: from all experts.",
    "moe_router_pre_softmax": "Apply softmax before top-k instead of after it; "
    "ignored for sigmoid scores.",
    "moe_router_topk_scaling_factor": "Scaling factor of a token's expert weights; default: none.",
    "moe_router_score_function": "Router scores: softmax, or a sigmoid per expert, normalized over "
    "the chosen ones.",
    "moe_router_dtype": "Dtype of router logits and weights; default: that of the hidden states.",
    "moe_router_load_balancing_type": "Scope of the auxiliary loss: a micro-batch, a sequence, or "
    "all data-parallel ranks; several values need as many coefficients.",
    "moe_aux_loss_coeff": "Weight of the auxiliary loss, one per "
    "--moe-router-load-balancing-type; 0: no such loss.",
    "moe_z_loss_coeff": "Weight of the z-loss (mean squared log-sum-exp of the router logits); "
    "default: no such loss.",
    "moe_router_enable_expert_bias": "Balance experts by a score bias that is updated after each "
    "optimizer step and affects the choice only; needs sigmoid scores.",
    "moe_router_bias_update_rate": "Change of an expert's bias per optimizer step, towards "
    "the mean number of tokens.",
    "moe_token_dispatcher_type": "Token dispatcher: alltoall sends tokens to the ranks of their "
    "experts, allgather to all ranks.",
    "moe_expert_capacity_factor": "Capacity of an expert per micro-batch, relative to an even "
    "share; excess tokens are dropped. Default: no limit.",
    "moe_pad_expert_input_to_capacity": "Pad every expert's input to its capacity; "
    "needs --moe-expert-capacity-factor.",
    "moe_token_drop_policy": "Tokens dropped by an expert over capacity: those with the lowest "
    "weights (probs) or the last ones (position).",
    "moe_enable_deepep": "With --moe-token-dispatcher-type flex: dispatch by DeepEP if it is "
    "installed, else all-to-all.",
    "moe_grouped_gemm": "Use grouped GEMMs for the experts; needs Transformer Engine layers.",
    "moe_permute_fusion": "Fuse token permutation and its inverse; "
    "needs Transformer Engine layers.",
    "moe_router_fusion": "Fuse top-k routing and the auxiliary loss; "
    "needs Transformer Engine layers.",
}

OPTIMIZER: Mapping[str, str] = {
    "lr": "Peak learning rate, reached after warm-up.",
    "min_lr": "Minimum learning rate, after decay; ignored with --lr-decay-style constant.",
    "decoupled_lr": "Peak learning rate of the embedding and the output layer; default: --lr.",
    "decoupled_min_lr": "Minimum learning rate of the embedding and the output layer, with "
    "--decoupled-lr; default: --min-lr.",
    "weight_decay": "Weight decay coefficient; biases and one-dimensional weights are exempt.",
    "apply_wd_to_qk_layernorm": "Apply weight decay to the scales of --qk-layernorm too.",
    "use_precision_aware_optimizer": "Set the dtypes of optimizer state with the --*-dtype flags; "
    "needs Adam and --use-distributed-optimizer.",
    "main_grads_dtype": "Precision-aware optimizer: dtype of the gradient buffers; "
    "bf16 needs --bf16.",
    "main_params_dtype": "Precision-aware optimizer: dtype of the main weights; "
    "fp16 needs Transformer Engine.",
    "exp_avg_dtype": "Precision-aware optimizer: dtype of Adam's first moment; "
    "fp16 and fp8 need Transformer Engine.",
    "exp_avg_sq_dtype": "Precision-aware optimizer: dtype of Adam's second moment; "
    "fp16 and fp8 need Transformer Engine.",
    "optimizer": "Optimizer: Adam (AdamW unless --no-decoupled-weight-decay), SGD, or Muon for "
    "matrices with AdamW for the rest (needs emerging_optimizers).",
    "muon_momentum": "Momentum of Muon.",
    "muon_split_qkv": "Orthogonalise the query, key and value projections separately; "
    "--muon-no-split-qkv: as one matrix.",
    "muon_use_nesterov": "Nesterov momentum in Muon.",
    "muon_nesterov": "Nesterov momentum in Muon, Megatron-LM's --muon-use-nesterov.",
    "muon_scale_mode": "Scale of Muon's update [out, in]: spectral sqrt(max(out, in)), "
    "unit_rms_norm sqrt(out / in), shape_scaling sqrt(max(1, out / in)).",
    "muon_fp32_matmul_prec": "Precision of matrix products in Muon's Newton-Schulz iteration: "
    "medium is bf16, highest fp32.",
    "muon_coefficient_type": "Coefficients of Muon's Newton-Schulz iteration.",
    "muon_num_ns_steps": "Newton-Schulz iterations of Muon.",
    "muon_tp_mode": "Tensor-parallel weights: duplicated and distributed orthogonalise the full "
    "matrix; blockwise, Megatron-LM's default, each shard alone.",
    "muon_extra_scale_factor": "Additional scale of Muon's update; 0.2 matches AdamW's size.",
    "adam_beta1": "Adam's decay rate of the first moment.",
    "adam_beta2": "Adam's decay rate of the second moment.",
    "adam_eps": "Adam's epsilon, added to the denominator.",
    "decoupled_weight_decay": "Decoupled weight decay (AdamW); "
    "--no-decoupled-weight-decay adds the decay to the gradient.",
    "sgd_momentum": "Momentum of --optimizer sgd.",
    "use_distributed_optimizer": "Shard the optimizer state over data-parallel ranks.",
    "overlap_param_gather": "Gather updated weights during the next forward pass; "
    "needs --use-distributed-optimizer and --overlap-grad-reduce.",
    "optimizer_cpu_offload": "Keep optimizer state in host memory and step there; "
    "needs --use-precision-aware-optimizer and --bf16.",
    "optimizer_offload_fraction": "Fraction of the optimizer state in host memory, with "
    "--optimizer-cpu-offload.",
    "overlap_cpu_optimizer_d2h_h2d": "With --optimizer-cpu-offload: overlap copies between "
    "host and GPU with the update.",
    "pin_cpu_grads": "With --optimizer-cpu-offload: keep gradients in pinned host memory.",
    "pin_cpu_params": "With --optimizer-cpu-offload: keep main weights in pinned host memory; "
    "megatron-core 0.16 always does.",
    "clip_grad": "Clip gradients to this global L2 norm; 0 disables clipping.",
}

DATA_PARALLEL: Mapping[str, str] = {
    "grad_reduce_in_fp32": "Accumulate and reduce gradients in float32.",
    "overlap_grad_reduce": "Overlap the data-parallel gradient reduction with the backward pass.",
    "align_param_gather": "With --overlap-param-gather: start the gathers of all pipeline "
    "stages at the same time.",
    "bucket_size": "Parameters per gradient bucket, with --overlap-grad-reduce; default: "
    "1,000,000 per data-parallel rank, at least 40,000,000.",
    "pad_buckets_for_high_nccl_busbw": "With --use-distributed-optimizer: pad buckets to a "
    "multiple of 65,536 elements, which NCCL transfers faster on many ranks.",
    "average_in_collective": "Average gradients in the collective instead of scaling them before "
    "the sum.",
}

HELP_TEXTS: Mapping[str, str] = {**NETWORK, **EXPERTS, **OPTIMIZER, **DATA_PARALLEL}

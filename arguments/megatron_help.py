"""What each of megatron-core's settings does here: a sentence for `train.py --help` and
docs/flags.md, by the field's name.

Defaults and legal values stand beside it there; see `megatron.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

NETWORK: Mapping[str, str] = {
    "num_layers": "Transformer layers of the whole model, over all pipeline stages.",
    "hidden_size": "Width of the hidden states between layers.",
    "num_attention_heads": "Query heads of each attention layer; --tensor-model-parallel-size has to divide them.",
    "num_query_groups": "Key-value heads of each attention layer, each shared by as many query heads; a divisor of --num-attention-heads.",
    "kv_channels": "Dimension of one attention head.",
    "ffn_hidden_size": "Inner width of a dense layer's MLP; of a gated one, that of each of its two projections.",
    "attention_backend": "Attention kernel: flash, fused, unfused of Transformer Engine layers, local for layers without it; auto lets them choose.",
    "hidden_dropout": "Dropout probability of the embeddings and of what attention and MLP add to the hidden states; never read from the checkpoint.",
    "attention_dropout": "Dropout probability of the attention weights; never read from the checkpoint.",
    "fp32_residual_connection": "Turn the embeddings into float32, so that layers add to a float32 residual stream.",
    "layernorm_epsilon": "Added to the variance (RMSNorm: the mean square) in every normalization layer.",
    "layernorm_zero_centered_gamma": "Store normalization scales as their distance from 1; needs Transformer Engine layers.",
    "add_bias_linear": "Biases in the projections of attention and MLP; --disable-bias-linear leaves them out. Experts need --expert-tensor-parallel-size 1 for them.",
    "add_qkv_bias": "Biases in the query, key and value projections, with --disable-bias-linear too.",
    "rotary_interleaved": "Rotary embeddings rotate neighbouring dimensions (0 with 1, 2 with 3) in place of the first half with the second.",
    "normalization": "Kind of the normalization layers.",
    "qk_layernorm": "Normalize queries and keys of each head, by --normalization, before positions are applied.",
    "init_method_std": "Standard deviation of initial weights; projections back into the residual stream have it over sqrt(2 * --num-layers).",
    "embedding_init_method_std": "Standard deviation of the embedding's initial weights; default: --init-method-std.",
    "apply_query_key_layer_scaling": "Divide attention scores by the layer's number, from 1; Transformer Engine wants NVTE_APPLY_QK_LAYER_SCALING=1 with it.",
    "attention_softmax_in_fp32": "Softmax in float32, in megatron-core's own attention only: the kernels used here do not ask this setting.",
    "disable_bf16_reduced_precision_matmul": "With --bf16 on a GPU: matrix products sum in float32 throughout, without bfloat16 partial sums.",
    "bias_activation_fusion": "One kernel for the MLP's bias and activation; for SwiGLU and quick GEGLU by default.",
    "bias_dropout_fusion": "One kernel for bias, dropout and the addition to the residual stream.",
    "masked_softmax_fusion": "Fused scale, mask and softmax, in megatron-core's own attention only: the kernels used here do not ask this setting.",
    "persist_layer_norm": "Apex's persistent LayerNorm kernel where it is installed and knows the hidden size.",
    "apply_rope_fusion": "One kernel that applies rotary embeddings; with --rotary-interleaved it needs Transformer Engine 2.3.",
    "recompute_granularity": "Compute activations again in the backward pass to save memory: whole layers (full) or --recompute-modules (selective).",
    "recompute_method": "With full recomputation: uniform keeps the input of every --recompute-num-layers layers, block recomputes that many layers only.",
    "recompute_num_layers": "With full recomputation: layers of a recomputed unit (uniform), or how many of each pipeline chunk are recomputed (block).",
    "recompute_modules": "With selective recomputation: which parts of a layer are computed again; default: core_attn.",
    "distribute_saved_activations": "With full recomputation: tensor-parallel ranks keep a share each of saved layer inputs; not with --sequence-parallel.",
    "perform_initialization": "Draw random initial weights; --no-initialization leaves them undefined until they are loaded.",
    "use_cpu_initialization": "Draw initial weights on the CPU: the same for every tensor-parallel size, and slower than on the GPU.",
    "bf16": "Weights and activations in bfloat16, with float32 main weights in the optimizer; without it everything is float32.",
    "deterministic_mode": "Take deterministic kernels, which are slower; Transformer Engine wants NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 with it.",
    "gradient_accumulation_fusion": "Weight-gradient products add to the gradient buffer themselves; needs Apex's CUDA extension.",
    "clone_scatter_output_in_embedding": "With --sequence-parallel: copy a rank's part of scattered embeddings, so that the whole can be freed.",
    "cp_comm_type": "How context-parallel ranks exchange keys and values: in a ring (p2p), all at once (all_gather), or heads for tokens (a2a).",
    "overlap_p2p_comm": "Interleaved schedule: computing goes on while pipeline stages exchange activations.",
}

EXPERTS: Mapping[str, str] = {
    "num_moe_experts": "Experts of each expert layer, over all ranks; makes the network a mixture of experts.",
    "moe_ffn_hidden_size": "Inner width of one expert's MLP.",
    "moe_layer_freq": 'Which layers have experts: N, each N-th from the first one on; or a pattern of 0 and 1 for all layers, as "[0]*3+[1]*45".',
    "moe_shared_expert_intermediate_size": "Inner width of the shared experts, which every token passes, all of them together.",
    "moe_shared_expert_gate": "Multiply the shared experts' output by a sigmoid gate of the token; needs shared experts.",
    "moe_router_topk": "Experts that a token is sent to.",
    "moe_router_num_groups": "Groups of equal size into which experts are cut for --moe-router-group-topk.",
    "moe_router_group_topk": "Choose a token's experts from its best this many groups only; default: from all experts.",
    "moe_router_pre_softmax": "Softmax over all experts before the best are chosen, in place of over the chosen; sigmoid scores ignore it.",
    "moe_router_topk_scaling_factor": "Multiply the weights of a token's chosen experts by this; default: no factor.",
    "moe_router_score_function": "Scores from the router's logits: softmax, or a sigmoid for each expert, normalized over the chosen ones.",
    "moe_router_dtype": "Type in which the router computes logits and weights; default: that of the hidden states.",
    "moe_router_load_balancing_type": "Auxiliary loss over a micro-batch, a sequence, or the data-parallel ranks too; several words take as many coefficients.",
    "moe_aux_loss_coeff": "Weight of the auxiliary loss, one for each word of --moe-router-load-balancing-type; 0: no such loss.",
    "moe_z_loss_coeff": "Weight of the mean squared log-sum-exp of the router's logits, as a loss; default: no such loss.",
    "moe_router_enable_expert_bias": "Balance experts by a bias on their scores, moved after each optimizer step, that chooses and does not weigh; sigmoid only.",
    "moe_router_bias_update_rate": "How far an optimizer step moves each expert's bias, up below the mean number of tokens, down above it.",
    "moe_token_dispatcher_type": "How tokens reach the ranks of their experts: each to those it needs (alltoall), or all to all ranks (allgather).",
    "moe_expert_capacity_factor": "Tokens an expert takes of a micro-batch, in multiples of its even share; more are dropped. Default: none are.",
    "moe_pad_expert_input_to_capacity": "Fill every expert up to its capacity, so that shapes are constant; needs --moe-expert-capacity-factor.",
    "moe_token_drop_policy": "Over capacity, an expert drops the tokens of least weight (probs) or the last ones (position).",
    "moe_grouped_gemm": "One grouped matrix product for all experts of a rank; needs Transformer Engine layers.",
    "moe_permute_fusion": "Fused kernels that sort tokens by expert and back; needs Transformer Engine layers.",
    "moe_router_fusion": "Fused kernels for choosing experts and for the auxiliary loss; needs Transformer Engine layers.",
}

OPTIMIZER: Mapping[str, str] = {
    "lr": "Peak learning rate, reached after warm-up.",
    "min_lr": "Learning rate at the end of decay and after it; --lr-decay-style constant has no use for it.",
    "decoupled_lr": "Peak learning rate of the embedding and the output layer; default: --lr.",
    "decoupled_min_lr": "Learning rate at the end of decay for the embedding and the output layer, with --decoupled-lr; default: --min-lr.",
    "weight_decay": "Coefficient of weight decay, times the learning rate; biases and one-dimensional weights are exempt.",
    "apply_wd_to_qk_layernorm": "Decay the scales of --qk-layernorm too, which as one-dimensional weights are exempt otherwise.",
    "use_precision_aware_optimizer": "Give the optimizer's state types of its own, by the --*-dtype flags; needs Adam and --use-distributed-optimizer.",
    "main_grads_dtype": "Type of the gradient buffers, which the precision-aware optimizer reads as they are; bf16 needs --bf16.",
    "main_params_dtype": "Type of the main weights in the precision-aware optimizer; fp16 needs Transformer Engine.",
    "exp_avg_dtype": "Type of Adam's first moment in the precision-aware optimizer; fp16 and fp8 need Transformer Engine.",
    "exp_avg_sq_dtype": "Type of Adam's second moment in the precision-aware optimizer; fp16 and fp8 need Transformer Engine.",
    "optimizer": "The optimizer: Adam (AdamW unless --no-decoupled-weight-decay), or SGD with --sgd-momentum.",
    "adam_beta1": "Adam's decay rate of the running mean of gradients, per optimizer step.",
    "adam_beta2": "Adam's decay rate of the running mean of squared gradients, per optimizer step.",
    "adam_eps": "Added to the root of Adam's second moment in the denominator.",
    "decoupled_weight_decay": "Decay weights beside Adam's update (AdamW); --no-decoupled-weight-decay adds the decay to the gradient.",
    "sgd_momentum": "Momentum of --optimizer sgd.",
    "use_distributed_optimizer": "Share out the optimizer's state over data-parallel ranks: gradients are reduce-scattered, weights gathered.",
    "overlap_param_gather": "Gather updated weights during the next forward pass; needs --use-distributed-optimizer and --overlap-grad-reduce.",
    "optimizer_cpu_offload": "Keep main weights and moments in host memory and step there; needs --use-precision-aware-optimizer and --bf16.",
    "optimizer_offload_fraction": "Share of the parameters whose optimizer is on the CPU, with --optimizer-cpu-offload.",
    "overlap_cpu_optimizer_d2h_h2d": "With --optimizer-cpu-offload: copy one parameter between GPU and host while another is updated.",
    "pin_cpu_grads": "With --optimizer-cpu-offload: gradients come to pinned host memory, which copies faster.",
    "pin_cpu_params": "With --optimizer-cpu-offload: main weights are in pinned host memory; megatron-core 0.16 pins them either way.",
    "clip_grad": "Scale the gradient down to this L2 norm over the whole model when it is longer; 0 switches clipping off.",
}

DATA_PARALLEL: Mapping[str, str] = {
    "grad_reduce_in_fp32": "Sum gradients over micro-batches and data-parallel ranks in float32 buffers.",
    "overlap_grad_reduce": "Reduce gradients over data-parallel ranks bucket by bucket during the last backward pass of a step.",
    "align_param_gather": "With --overlap-param-gather: pipeline stages start their gathers together, in place of each when it gets there.",
    "bucket_size": "Parameters of a gradient bucket, with --overlap-grad-reduce; default: 1,000,000 for each data-parallel rank, 40,000,000 at least.",
    "pad_buckets_for_high_nccl_busbw": "With --use-distributed-optimizer: pad buckets to a multiple of 65,536 elements, which NCCL transfers faster on many ranks.",
    "average_in_collective": "Let the reduction average gradients, in place of dividing them by the number of ranks before a sum.",
}

SENTENCES: Mapping[str, str] = {**NETWORK, **EXPERTS, **OPTIMIZER, **DATA_PARALLEL}

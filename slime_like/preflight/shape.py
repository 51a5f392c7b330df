"""Parameters of a network by formula: of the whole model, which no rank builds, and for the search,
which looks at too many layouts to build any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arguments.hf.moe import moe_layers
from arguments.schema import GPTModelConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of one layer's attention and norms, of a dense MLP, of an expert layer without its
    experts, of one expert, of the vocabulary's matrix. experts: whether each layer has some.
    active: of all that one token meets in matrix products."""

    attention: int
    dense: int
    shared: int
    expert: int
    vocabulary: int
    num_experts: int
    topk: int
    experts: tuple[bool, ...]
    tied: bool
    hidden: int

    @property
    def expert_parameters(self) -> int:
        return sum(self.experts) * self.num_experts * self.expert

    @property
    def other_parameters(self) -> int:
        dense_layers = len(self.experts) - sum(self.experts)
        layers = len(self.experts) * self.attention + dense_layers * self.dense
        layers += sum(self.experts) * self.shared
        return layers + self.vocabulary * (1 if self.tied else 2) + self.hidden

    @property
    def total(self) -> int:
        return self.expert_parameters + self.other_parameters

    @property
    def active(self) -> int:
        chosen = sum(self.experts) * self.topk * self.expert
        return self.other_parameters + chosen - (0 if self.tied else self.vocabulary)


def shape_of(config: Any, gpt: GPTModelConfig) -> Shape:
    """config: megatron-core's TransformerConfig. Without the padding of the vocabulary."""
    hidden, gated = config.hidden_size, 3 if config.gated_linear_unit else 2
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    bias = config.add_bias_linear
    attention = 2 * norm + (_latent(config) if config.multi_latent_attention else _heads(config))

    def mlp(inner: int) -> int:
        own = gated * hidden * inner
        return own + ((gated - 1) * inner + hidden if bias else 0)

    experts = config.num_moe_experts or 0
    inner = config.moe_ffn_hidden_size or config.ffn_hidden_size
    shared = hidden * experts  # the router; an expert bias is a buffer
    if config.moe_shared_expert_intermediate_size:
        shared += mlp(config.moe_shared_expert_intermediate_size)
        shared += hidden if config.moe_shared_expert_gate else 0
    return Shape(
        attention=attention,
        dense=mlp(config.ffn_hidden_size),
        shared=shared,
        expert=mlp(inner),
        vocabulary=(gpt.vocab_size or 0) * hidden,
        num_experts=experts,
        topk=config.moe_router_topk if experts else 0,
        experts=tuple(moe_layers(config.moe_layer_freq if experts else None, config.num_layers)),
        tied=not gpt.untie_embeddings_and_output_weights,
        hidden=norm,
    )


def _heads(config: Any) -> int:
    """Grouped-query attention: projections in and out, their biases, norms of queries and keys."""
    width = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups or config.num_attention_heads
    inputs = width + 2 * groups * config.kv_channels
    biases = inputs if config.add_qkv_bias or config.add_bias_linear else 0
    biases += config.hidden_size if config.add_bias_linear else 0
    norms = 2 * config.kv_channels if config.qk_layernorm else 0
    return config.hidden_size * (inputs + width) + biases + norms


def _latent(config: Any) -> int:
    """Multi-latent attention (arXiv 2405.04434, section 2.1)."""
    heads, hidden, norm = config.num_attention_heads, config.hidden_size, config.qk_layernorm
    query_width = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    if config.q_lora_rank is None:
        queries = hidden * query_width
    else:
        queries = config.q_lora_rank * (hidden + query_width + (1 if norm else 0))
    latent = config.kv_lora_rank
    keys = hidden * (latent + config.qk_pos_emb_head_dim) + (latent if norm else 0)
    keys += latent * heads * (config.qk_head_dim + config.v_head_dim)
    return int(queries + keys + heads * config.v_head_dim * hidden)

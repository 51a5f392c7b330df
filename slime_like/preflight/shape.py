"""Parameter counts of a network by formula: of the full model, which no rank builds, and for the
search, which compares too many layouts to build them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.hf.moe import moe_layers
from arguments.schema import GPTModelConfig
from slime_like.images.tower import tower_shapes
from slime_like.weights.attention_sizes import AttentionSizes, attention_sizes, layers_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameter counts."""

    attention: int  # of a layer's attention and norms
    dense: int  # of a dense MLP
    shared: int  # of an MoE layer without its experts
    expert: int  # of one expert
    vocabulary: int  # of the embedding matrix
    num_experts: int
    topk: int
    experts: tuple[bool, ...]  # whether each layer is an MoE layer
    tied: bool
    hidden: int
    delta: int = 0  # of a delta net or Mamba-2, and norms
    delta_nets: int = 0  # number of layers with one of them instead of attention
    # number of layers without attention or delta net, and without MLP, where layers are one block
    only_mlp: int = 0
    only_mixer: int = 0
    # by which layers whose sizes differ, as those with a window, do so, all together
    of_sizes: int = 0
    compressors: int = 0  # of compressed attentions, all together
    tower: int = 0  # of the vision tower, which text does not pass
    memory: int = 0  # of memories of n-grams and inputs of layers, without their tables
    tables: int = 0  # of which a token reads a few rows

    @property
    def expert_parameters(self) -> int:
        return sum(self.experts) * self.num_experts * self.expert

    @property
    def other_parameters(self) -> int:
        dense_layers = len(self.experts) - sum(self.experts) - self.only_mixer
        layers = (len(self.experts) - self.delta_nets - self.only_mlp) * self.attention
        layers += self.delta_nets * self.delta + dense_layers * self.dense
        layers += sum(self.experts) * self.shared + self.of_sizes
        layers += self.memory + self.tables + self.compressors
        return layers + self.vocabulary * (1 if self.tied else 2) + self.hidden

    @property
    def total(self) -> int:
        return self.expert_parameters + self.other_parameters + self.tower

    @property
    def active(self) -> int:
        routed = sum(self.experts) * self.topk * self.expert
        unread = self.tables + (0 if self.tied else self.vocabulary)
        return self.other_parameters + routed - unread


def shape_of(config: TransformerConfig, gpt: GPTModelConfig) -> ModelShape:
    """Parameter counts without vocabulary padding. config: megatron-core's TransformerConfig."""
    hidden = config.hidden_size
    gated = 3 if config.gated_linear_unit else 2
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    bias = config.add_bias_linear
    further = ("post_self_attn_layernorm", "post_mlp_layernorm")  # norms of `LayerConfig`
    gated_streams = hasattr(config, "stream_rank")  # they have the norms
    norms = 0 if gated_streams or getattr(config, "without_pre_norms", False) else 2
    norms += sum(bool(getattr(config, name, False)) for name in further)
    blocks = getattr(config, "block_pattern", "")
    norm_of_mlp = 0  # counted with attention
    if blocks:
        norms = 1
        norm_of_mlp = norm
    around = norms * norm + _hyper_connections(config)
    if hasattr(config, "entry_rates"):
        attention = around + _compressed(config)
    else:
        attention = around + _grouped_or_latent(config)

    def mlp(inner: int, width: int = hidden) -> int:
        own = gated * width * inner
        return own + ((gated - 1) * inner + width if bias else 0)

    experts = config.num_moe_experts or 0
    inner = config.moe_ffn_hidden_size or config.ffn_hidden_size
    latent = config.moe_latent_size or 0
    shared = experts * (hidden + bias)  # the router; an expert bias is a buffer
    shared += norm_of_mlp + 2 * hidden * latent
    if getattr(config, "experts_beside_mlp", False):  # norms, and scales in the router
        shared += 3 * norm + hidden + experts
    if config.moe_shared_expert_intermediate_size:
        shared += mlp(config.moe_shared_expert_intermediate_size)
        shared += hidden if config.moe_shared_expert_gate else 0
    return ModelShape(
        attention=attention,
        dense=norm_of_mlp + mlp(config.ffn_hidden_size),
        shared=shared,
        expert=mlp(inner, latent or hidden),
        vocabulary=(gpt.vocab_size or 0) * hidden,
        num_experts=experts,
        topk=config.moe_router_topk if experts else 0,
        experts=tuple(moe_layers(config.moe_layer_freq if experts else None, config.num_layers)),
        tied=not gpt.untie_embeddings_and_output_weights,
        hidden=_final_mixer(config) if gated_streams else norm + _streams_head(config),
        delta=around + _delta_net(config),
        delta_nets=sum(config.linear_attention_freq or []),
        only_mlp=blocks.count("-") + blocks.count("E"),
        only_mixer=blocks.count("M") + blocks.count("*"),
        of_sizes=_of_sizes(config),
        compressors=_compressors(config),
        tower=0 if gpt.vision is None else sum(map(math.prod, tower_shapes(gpt.vision).values())),
        memory=_memories(config) + _layer_inputs(config),
        tables=_tables(config, gpt),
    )


def _grouped_or_latent(config: TransformerConfig) -> int:
    if config.multi_latent_attention:
        return _latent(config)
    return _heads(config, attention_sizes(config, windowed=False))


def stream_matrices(config: TransformerConfig) -> int:
    """Weights of the projections of a layer's two hyper-connections (arXiv 2512.24880), or of two
    gated ones."""
    streams = config.residual_streams
    columns = streams * config.hidden_size
    if hasattr(config, "stream_rank"):
        return int(2 * (2 * config.stream_rank + streams) * columns)
    return int(2 * (2 + streams) * streams * columns)


def mixer_matrices(config: TransformerConfig) -> int:
    """The same of what reads the streams at the end, where that is no mean."""
    if hasattr(config, "entry_rates"):  # a CompressedConfig
        return int(config.residual_streams**2 * config.hidden_size)
    if not hasattr(config, "stream_rank"):
        return 0
    return int(2 * config.stream_rank * config.residual_streams * config.hidden_size)


def _hyper_connections(config: TransformerConfig) -> int:
    """A layer's two hyper-connections: their projections, and biases and three scales, or norms of
    all streams."""
    if not (streams := getattr(config, "residual_streams", 0)):
        return 0
    gated = hasattr(config, "stream_rank")
    own = streams * config.hidden_size if gated else (2 + streams) * streams + 3
    return int(stream_matrices(config) + 2 * own)


def _final_mixer(config: TransformerConfig) -> int:
    return int(mixer_matrices(config) + config.residual_streams * config.hidden_size)


def _streams_head(config: TransformerConfig) -> int:
    """What is in front of the last norm in DeepSeek-V4."""
    if not hasattr(config, "entry_rates"):
        return 0
    return int(mixer_matrices(config) + config.residual_streams + 1)


def memory_matrices(config: TransformerConfig) -> int:
    """Weights of the projections of all memories of n-grams: a key for each residual stream, and a
    value."""
    if (memory := getattr(config, "ngram_memory", None)) is None:
        return 0
    rows = (config.residual_streams + 1) * config.hidden_size
    return int(len(memory.layers) * rows * memory.width)


def _memories(config: TransformerConfig) -> int:
    """All memories without their tables: projections, norms of keys, queries and the convolution's
    input, and the convolution."""
    if (memory := getattr(config, "ngram_memory", None)) is None:
        return 0
    own = (3 + memory.taps) * config.residual_streams * config.hidden_size
    return int(memory_matrices(config) + len(memory.layers) * own)


def _tables(config: TransformerConfig, gpt: GPTModelConfig) -> int:
    inputs = config.num_layers * getattr(config, "layer_input_size", 0) * (gpt.vocab_size or 0)
    if (memory := getattr(config, "ngram_memory", None)) is None:
        return int(inputs)
    return int(sum(map(memory.rows, memory.layers)) * memory.head_width)


def layer_input_matrices(config: TransformerConfig) -> int:
    """Weights that make the inputs of layers, less their table, and that take them."""
    size = getattr(config, "layer_input_size", 0)
    return int(config.num_layers * 3 * config.hidden_size * size)


def _layer_inputs(config: TransformerConfig) -> int:
    """The same with the norms."""
    if not (size := getattr(config, "layer_input_size", 0)):
        return 0
    return int(layer_input_matrices(config) + size + config.num_layers * config.hidden_size)


def wider_mlps(config: TransformerConfig) -> int:
    """Weights that the MLPs of layers which share keys have beside those of the others."""
    if not getattr(config, "wide_mlps", False):
        return 0
    return int(config.shared_key_layers * 3 * config.hidden_size * config.ffn_hidden_size)


def head_matrices(config: TransformerConfig, sizes: AttentionSizes) -> int:
    """Weights of grouped-query attention's projections, in a layer of these sizes."""
    gates = sizes.output if config.attention_output_gate else 0
    return int(config.hidden_size * (sizes.width + gates + sizes.output))


def _heads(config: TransformerConfig, sizes: AttentionSizes) -> int:
    """Grouped-query attention: input and output projections, their biases, sinks, norms of queries
    and keys."""
    inputs = sizes.width + (sizes.output if config.attention_output_gate else 0)
    biases = inputs if config.add_qkv_bias or config.add_bias_linear else 0
    biases += config.hidden_size if config.add_bias_linear else 0
    biases += sizes.heads if sizes.sinks else 0
    of_all = getattr(config, "qk_norm_of_all_heads", False)
    own = 1 if sizes.reads_keys else 2
    normed = (sizes.heads + sizes.groups if of_all else own) * sizes.head_dim
    norms = normed if config.qk_layernorm else 0
    return head_matrices(config, sizes) + biases + norms


def _of_sizes(config: TransformerConfig) -> int:
    usual = _heads(config, attention_sizes(config, windowed=False))
    differing = sum(_heads(config, sizes) - usual for sizes in layers_of(config))
    return differing + wider_mlps(config)


def delta_matrices(config: TransformerConfig) -> int:
    """Weights of a delta net's projections: of a gated one, of Kimi's, with decays and gates of low
    rank, or of Mamba-2."""
    heads = config.linear_num_value_heads
    width = heads * config.linear_value_head_dim
    hidden = config.hidden_size
    if hasattr(config, "short_conv"):  # b, c, x and the output
        return int(4 * hidden * width)
    if getattr(config, "linear_decay_per_channel", False):
        low_rank = 2 * config.linear_key_head_dim * (hidden + width)
        return int(hidden * (delta_channels(config) + width + heads) + low_rank)
    rates = 0 if hasattr(config, "block_pattern") else heads  # Mamba-2 has decays alone
    return int(hidden * (delta_channels(config) + 2 * width + heads + rates))


def delta_channels(config: TransformerConfig) -> int:
    """Channels of a delta net's convolution: queries, keys and values; of a short convolution,
    values."""
    if hasattr(config, "short_conv"):
        return int(config.linear_num_value_heads * config.linear_value_head_dim)
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return int(keys + config.linear_num_value_heads * config.linear_value_head_dim)


def _delta_net(config: TransformerConfig) -> int:
    """A delta net (arXiv 2412.06464, or 2510.26692 with a decay per channel): its projections, the
    convolution, a decay rate per head, a bias per decay, the norm of a head. Mamba-2 (arXiv
    2405.21060) has a bias of the convolution, a skip per head, and a norm of all heads."""
    convolution = delta_channels(config) * config.linear_conv_kernel_dim
    if hasattr(config, "short_conv"):
        return int(delta_matrices(config) + convolution)
    heads = config.linear_num_value_heads
    if hasattr(config, "block_pattern"):
        own = delta_channels(config) + 3 * heads + heads * config.linear_value_head_dim
        return int(delta_matrices(config) + convolution + own)
    per_channel = getattr(config, "linear_decay_per_channel", False)
    decays = heads * (config.linear_key_head_dim if per_channel else 1)
    own = heads + decays + config.linear_value_head_dim
    return int(delta_matrices(config) + convolution + own)


def compressed_matrices(config: TransformerConfig) -> int:
    """Weights of the projections of compressed attention without its compressor: queries and output
    of low rank, and keys."""
    hidden = config.hidden_size
    width = config.num_attention_heads * config.kv_channels
    queries = config.q_lora_rank * (hidden + width)
    output = config.output_rank * (width + config.output_groups * hidden)
    return int(queries + hidden * config.kv_channels + output)


def _compressed(config: TransformerConfig) -> int:
    """Also norms of the query latent and of keys, and sinks."""
    own = config.q_lora_rank + config.kv_channels + config.num_attention_heads
    return compressed_matrices(config) + int(own)


def compressor_matrices(config: TransformerConfig) -> int:
    """Weights of the projections of all layers' compressors, twice as many with an overlap."""
    of_layers = [
        (2 if selects else 1) * bool(rate)
        for rate, selects in zip(config.entry_rates, config.entry_selection, strict=True)
    ]
    return int(sum(of_layers) * 2 * config.kv_channels * config.hidden_size)


def _compressors(config: TransformerConfig) -> int:
    """Also their biases by place, and norms. Indexers are buffers."""
    if not hasattr(config, "entry_rates"):
        return 0
    own = sum(
        (rate * (2 if selects else 1) + 1) * config.kv_channels
        for rate, selects in zip(config.entry_rates, config.entry_selection, strict=True)
        if rate
    )
    return compressor_matrices(config) + int(own)


def latent_matrices(config: TransformerConfig) -> int:
    """Weights of multi-latent attention's projections."""
    heads = config.num_attention_heads
    hidden = config.hidden_size
    latent = config.kv_lora_rank
    query_width = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    compressed = config.q_lora_rank
    queries = hidden * query_width if compressed is None else compressed * (hidden + query_width)
    keys = hidden * (latent + config.qk_pos_emb_head_dim)
    keys += latent * heads * (config.qk_head_dim + config.v_head_dim)
    return int(queries + keys + heads * config.v_head_dim * hidden)


def _latent(config: TransformerConfig) -> int:
    """Multi-latent attention (arXiv 2405.04434, section 2.1)."""
    normed = config.kv_lora_rank + (config.q_lora_rank or 0)
    return latent_matrices(config) + (normed if config.qk_layernorm else 0)

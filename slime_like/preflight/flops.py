"""Analytic FLOPs of a model, and peak FLOP/s of devices.

These are model FLOPs, with 2 per multiply-add: without recomputation and padding, and with the
output layer only at tokens that have a log-prob. A backward pass needs twice the FLOPs of the
forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arguments.hf.moe import moe_layers
from arguments.schema import GPTModelConfig
from slime_like.preflight.shape import (
    compressed_matrices,
    compressor_matrices,
    delta_channels,
    delta_matrices,
    head_matrices,
    latent_matrices,
    layer_input_matrices,
    memory_matrices,
    mixer_matrices,
    stream_matrices,
    wider_mlps,
)
from slime_like.weights.attention_sizes import attention_sizes, layers_of, windowed_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


TERA = 1e12
# Dense bf16 (V100: fp16) TFLOP/s with fp32 accumulation, without sparsity, from the vendors'
# data sheets. Keys match words of the device name; the longest match wins.
PEAK_TFLOPS = {
    "B300": 2250.0, "GB200": 2500.0, "B200": 2250.0, "H200": 989.4, "GH200": 989.4, "H100": 989.4,
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H800": 989.4, "H20": 148.0, "A100": 312.0,
    "A800": 312.0, "A10": 125.0, "A30": 165.0, "A40": 149.7, "L40S": 362.0, "L40": 181.0,
    "L20": 119.5, "L4": 121.0, "V100": 125.0, "T4": 65.0, "RTX 5090": 209.5, "RTX 4090": 165.2,
    "RTX 3090": 71.0, "RTX A6000": 154.8, "RTX 6000 Ada": 364.2, "MI300X": 1307.4,
    "MI325X": 1307.4, "MI355X": 2500.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of a forward pass through all layers. Indexers of sparse attention, which have no
    backward pass, are not counted."""

    matrices: float  # per token, in matrix products with weights
    # per token, in delta nets between their projections, of residual streams and in memories
    mixing: float
    pair: float  # per pair of tokens in attention
    head: float  # of the output layer, per token
    windowed: float = 0.0  # like pair, for layers that attend to at most `window` tokens
    window: int = 0
    # with compressed entries: like pair, but for those that all tokens see, and for those of which
    # a token sees at most what `reach` tokens make
    entries: float = 0.0
    selected: float = 0.0
    reach: int = 0

    def of_sequences(self, lengths: Iterable[int]) -> tuple[float, float]:
        """FLOPs (in products with weights, in attention and delta nets) of sequences with the given
        lengths, without the output layer. Causal attention has half of the square of pairs."""
        tokens = 0
        pairs = 0.0
        near = 0.0
        chosen = 0.0
        for length in lengths:
            tokens += length
            pairs += length * length / 2
            near += _pairs_within(length, self.window)
            chosen += _pairs_within(length, self.reach)
        attention = (self.pair + self.entries) * pairs + self.windowed * near
        attention += self.selected * chosen
        return self.matrices * tokens, self.mixing * tokens + attention


def _pairs_within(length: int, window: int) -> float:
    """Pairs of a token and one of at most `window` tokens up to it."""
    seen = min(length, window)
    return length * seen - seen * seen / 2


def forward_flops(config: TransformerConfig, gpt: GPTModelConfig) -> ForwardFlops:
    """config: megatron-core's TransformerConfig."""
    hidden = config.hidden_size
    gated = 3 if config.gated_linear_unit else 2
    deltas = sum(config.linear_attention_freq or [])
    blocks = getattr(config, "block_pattern", "")  # of layers that are one block
    attentions = blocks.count("*") if blocks else config.num_layers - deltas
    if hasattr(config, "entry_rates"):
        weights = attentions * compressed_matrices(config) + compressor_matrices(config)
    elif config.multi_latent_attention:
        weights = attentions * latent_matrices(config)
    else:
        alike = [attention_sizes(config, windowed=False)] * attentions
        weights = sum(head_matrices(config, sizes) for sizes in layers_of(config) or alike)
        weights += layer_input_matrices(config) + wider_mlps(config)
    mixing = 0.0
    if deltas:
        weights += deltas * delta_matrices(config)
        mixing = deltas * _delta_rule(config)
    experts = config.num_moe_experts
    sparse = sum(moe_layers(config.moe_layer_freq if experts else None, config.num_layers))
    dense = blocks.count("-") if blocks else config.num_layers - sparse
    weights += dense * gated * hidden * config.ffn_hidden_size
    if experts:
        inner = config.moe_router_topk * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
        shared = config.moe_shared_expert_intermediate_size or 0
        gate = hidden if shared and config.moe_shared_expert_gate else 0
        latent = config.moe_latent_size or 0
        own = gated * ((latent or hidden) * inner + hidden * shared)
        weights += sparse * (own + gate + hidden * experts + 2 * hidden * latent)
    if hasattr(config, "residual_streams"):
        weights += config.num_layers * stream_matrices(config) + mixer_matrices(config)
        mixing += config.num_layers * _streams(config)
    if (memory := getattr(config, "ngram_memory", None)) is not None:
        weights += memory_matrices(config)
        mixing += len(memory.layers) * _memory(config)
    # sparse attention, in which a token attends to at most this many tokens
    chosen = getattr(config, "index_topk", 0)
    near = attentions if chosen else sum(windowed_layers(config))
    return ForwardFlops(
        matrices=2.0 * weights,
        mixing=mixing,
        pair=2.0 * (attentions - near) * _pair(config, windowed=False),
        head=2.0 * hidden * (gpt.vocab_size or 0),
        windowed=2.0 * near * _pair(config, windowed=not chosen),
        window=chosen or (config.window_size[0] + 1 if near else 0),
        **_of_entries(config),
    )


def _of_entries(config: TransformerConfig) -> dict[str, Any]:
    """Fields of ForwardFlops about compressed entries, of which there is one for so many tokens."""
    if not hasattr(config, "entry_rates"):
        return {}
    pair = 2.0 * _pair(config, windowed=False)
    kinds = list(zip(config.entry_rates, config.entry_selection, strict=True))
    selecting = [rate for rate, selects in kinds if selects]
    return dict(
        entries=sum(pair / rate for rate, selects in kinds if rate and not selects),
        selected=sum(pair / rate for rate in selecting),
        reach=config.entry_topk * max(selecting, default=0),
    )


def _pair(config: TransformerConfig, *, windowed: bool) -> int:
    """Multiplications for a pair of tokens in one layer's attention: with the key, and of the
    value."""
    if config.multi_latent_attention:
        widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        return int(config.num_attention_heads * widths)
    sizes = attention_sizes(config, windowed=windowed)
    return sizes.heads * (sizes.head_dim + sizes.value_dim)


def step_flops(flops: ForwardFlops, lengths: Iterable[int], head_rows: float) -> float:
    """FLOPs of an optimizer step on all weights: forward and backward. head_rows: number of tokens
    with a log-prob."""
    weights, rest = flops.of_sequences(lengths)
    return 3 * (weights + rest + flops.head * head_rows)


def _delta_rule(config: TransformerConfig) -> float:
    """FLOPs per token in one delta net: its convolution, and for each head three products with its
    state, to read, correct and read again (arXiv 2412.06464, equation 10). Mamba-2 writes without
    reading: two products."""
    state = config.linear_key_head_dim * config.linear_value_head_dim
    convolution = 2 * config.linear_conv_kernel_dim * delta_channels(config)
    if hasattr(config, "short_conv"):
        return float(convolution)
    products = 2 if hasattr(config, "block_pattern") else 3
    return float(convolution + 2 * products * config.linear_num_value_heads * state)


def _streams(config: TransformerConfig) -> float:
    """FLOPs per token to read, mix and write the residual streams of a layer, twice (arXiv
    2512.24880). Gated ones are not mixed."""
    streams = config.residual_streams
    mixed = 0 if hasattr(config, "stream_rank") else streams * streams
    return float(2 * 2 * (2 * streams + mixed) * config.hidden_size)


def _memory(config: TransformerConfig) -> float:
    """FLOPs per token of a memory of n-grams, to compare its keys with the residual streams, to
    weight what they take, and of the convolution."""
    channels = config.residual_streams * config.hidden_size
    return float(2 * (2 + config.ngram_memory.taps) * channels)


def peak_tflops(device: str) -> float | None:
    """Peak TFLOP/s of a device, by torch's name of it; None if unknown."""
    matches = [name for name in PEAK_TFLOPS if re.search(rf"(?<!\w){name}(?!\w)", device, re.I)]
    return PEAK_TFLOPS[max(matches, key=len)] if matches else None

"""How large micro-batches are: settings, and the work of a token that samples are balanced by."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from arguments.schema import AlgorithmConfig
from slime_like.distributed.seqlen_balancing import linear_cost


def work_per_token(config: TransformerConfig, vocab_size: int) -> float:
    """The coefficient `a` of `seqlen_balancing.linear_cost` for this model. In an MoE model all
    layers count as MoE layers."""
    ffn = config.ffn_hidden_size
    if config.num_moe_experts:
        ffn = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk + (
            config.moe_shared_expert_intermediate_size or 0
        )
    return linear_cost(
        hidden_size=config.hidden_size,
        ffn_hidden_size=ffn,
        attention_size=config.num_attention_heads * config.kv_channels,
        key_value_size=(config.num_query_groups or config.num_attention_heads) * config.kv_channels,
        gated=config.gated_linear_unit,
        num_layers=config.num_layers,
        vocab_size=vocab_size,
    )


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Size of micro-batches."""

    samples: int  # per micro-batch, used if tokens is None
    tokens: int | None  # maximum per micro-batch, over all context-parallel ranks
    equal_sequences: bool = False  # pad the sequences of a micro-batch to its longest
    # number of adjacent samples that must stay in one micro-batch; divides samples
    together: int = 1


def micro_batch_size(
    algorithm: AlgorithmConfig, cp_size: int, *, forward_only: bool
) -> MicroBatchSize:
    """The size in a forward-only or a training pass. cp_size: of the network's layout."""
    samples = algorithm.micro_batch_size
    tokens = algorithm.max_tokens_per_gpu
    if forward_only:
        samples = algorithm.log_probs_micro_batch_size or samples
        tokens = algorithm.log_probs_max_tokens_per_gpu or tokens
    if tokens is not None:
        tokens *= cp_size
    together = algorithm.samples_together
    if algorithm.scores_mismatches:
        # a training pass has one sample of each two, as has the pass over mismatched ones
        samples //= 2
        together = 1
    return MicroBatchSize(
        samples,
        tokens if algorithm.use_dynamic_batch_size else None,
        equal_sequences=algorithm.qkv_format == "bshd",
        together=together,
    )

"""Replay of the keys that the rollout engine's indexers selected, for sparse attention
(ops/sparse_attention.py).

The records of a micro-batch stay on the host, since they are large (4 bytes per far query, indexer
and key); a layer copies its own part when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from arguments.hf.indexers import indexer_layers
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.key_indexer import KeyIndexer
from slime_like.types import TrainSample


def decoder_indexers(chunks: Iterable[torch.nn.Module]) -> list[tuple[int, KeyIndexer]]:
    """The indexers of a rank's decoder layers in layer order, with the number of their layer from
    1. Those of multi-token prediction are not replayed."""
    layers = itertools.chain.from_iterable(unwrap_model(chunk).decoder.layers for chunk in chunks)
    return [
        (layer.layer_number, module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, KeyIndexer)
    ]


def begin_indexers(chunks: Iterable[torch.nn.Module]) -> None:
    """Before each pass over micro-batches."""
    for slot, (_, indexer) in enumerate(decoder_indexers(chunks)):
        indexer.begin(slot)


def select_stage_keys(
    indexer_topk: Tensor, chunks: Iterable[torch.nn.Module], config: TransformerConfig
) -> Tensor:
    """Select this stage's layers, in the order of this rank's indexers, from a record of all."""
    indexed = indexer_layers(config)
    slots = [sum(indexed[: number - 1]) for number, _ in decoder_indexers(chunks)]
    return indexer_topk[:, slots]


def replayed_keys(
    packed: PackedRows,
    seq_ids: Tensor,
    samples: Sequence[TrainSample],
    *,
    pinned: bool,
    tokens: int = 1,
) -> dict[int, Tensor]:
    """The record of each indexer of this rank, -1 where it is unknown; nothing if a sample has
    none. [F, K] int32 for the far queries of its rows, or [T, K] for all of them where entries are
    selected (ops/compressed_attention.py).

    Args:
        packed: On the host.
        seq_ids: [T], of this rank's rows.
        samples: The sequences.
        pinned: Whether a GPU will read it.
        tokens: Of what an indexer selects: of an entry, or 1 of keys.
    """
    if packed.far is not None:
        places, sequences = packed.far.places, seq_ids[packed.far.queries]
    elif packed.entries is not None:
        places, sequences = packed.entries.places, seq_ids
    else:
        return {}
    records = [s.indexer_topk for s in samples if s.indexer_topk is not None]
    if len(records) < len(samples):
        return {}
    counts = torch.tensor([record.size(0) for record in records])
    firsts = counts.cumsum(0) - counts
    table = torch.cat(records)
    indexers, width = table.shape[1:]
    is_sample = sequences < len(samples)  # the last one may be padding, as the ends of sequences
    sequences = sequences.where(is_sample, 0)
    rows = places - width
    # a query that sees no more than it selects has no choice, whatever else its micro-batch has
    choice = (places + 1) // tokens > width
    known = (is_sample & choice & (rows < counts[sequences])).nonzero().squeeze(1)
    sources = (firsts[sequences] + rows)[known]
    found = {}
    for slot in range(indexers):
        keys = torch.full((rows.numel(), width), -1, dtype=torch.int32, pin_memory=pinned)
        found[slot] = keys.index_copy_(0, known, table[sources, slot])
    return found


def indexer_disagreement(chunks: Sequence[torch.nn.Module]) -> float:
    """Fraction of the keys replayed in the last pass that the trainer's indexers would not have
    selected; NaN without replay. Collective over all ranks."""
    counts = torch.zeros(2, dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for _, indexer in decoder_indexers(chunks):
        if indexer.disagreement is not None:
            counts += indexer.disagreement
    dist.all_reduce(counts)
    differing, compared = counts.tolist()
    return differing / compared if compared else float("nan")

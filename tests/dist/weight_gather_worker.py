"""Workers of tests/dist/test_weight_gather.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_weights import collectives, groups_of
from benchmarks.parity.steps import parallel
from slime_like.preflight.live_bytes import LiveBytes
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_export import HfExport
from slime_like.weights.hf_import import load_hf_weights
from tests.dist.convert_worker import build, stored_weights

RECEIVERS = [3, 1]  # neither of them is rank 0
WAYS = {
    "everywhere": lambda stream: stream,
    "own": WeightStream.own,
    "rank zero": WeightStream.to_rank_zero,
    "two nodes": lambda stream: stream.to_ranks(RECEIVERS),
}


def check_layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Every layout's weights in each way, compared with the folder's.

    Returns:
        By layout and way: "names" that this rank got, "calls" of collectives, each counted once
        over its ranks, "peak" of live bytes next to the model, "messages" and bytes of the largest.
    """
    folder, found = arguments["folder"], {}
    stored = stored_weights(folder)
    for sizes in arguments["layouts"]:
        with parallel(*sizes) as layout:
            chunks, hf, gpt = build(folder, layout)
            load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
            for way, choose in WAYS.items():
                live = LiveBytes(groups_of(layout))
                live.ignore(p for chunk in chunks for p in (*chunk.parameters(), *chunk.buffers()))
                names = []
                with live:
                    stream = HfExport(
                        chunks,
                        hf=hf,
                        gpt=gpt,
                        layout=layout,
                        bucket_bytes=arguments["bucket_bytes"],
                    ).stream()
                    before = live.peak = live.now
                    for bucket in choose(stream).buckets():
                        names += same_bits(bucket.weights, stored)
                        del bucket
                found[f"{layout.describe()} {way}"] = {
                    "names": names,
                    "calls": collectives(live, layout, other=len(RECEIVERS)),
                    "peak": live.peak - before,
                    "messages": len(stream.plan),
                    "largest": max(planned.nbytes for planned in stream.plan),
                }
    return found


def same_bits(weights: list[tuple[str, Tensor]], stored: dict[str, Tensor]) -> list[str]:
    for name, tensor in weights:
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
    return [name for name, _ in weights]

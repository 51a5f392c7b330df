"""Attention over packed rows on plain torch: forward and backward of one process, and what each
context-parallel rank computes of it.

    python benchmarks/bench_attention.py [--tokens 4096] [--json attention.json]

Rows of the same number of tokens, cut into sequences of several lengths. For context parallelism
the gathered keys and values are there already: the ratio is a rank's own seconds over the whole
attention's, divided by the number of ranks (1: nothing is lost by sharing it).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron_patches  # noqa: E402

megatron_patches.apply()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from benchmarks.bench_common import fastest, write_json  # noqa: E402
from slime_like.megatron.ops.attention import PackedAttention, PackedRows, packed_rows  # noqa: E402
from slime_like.megatron.ops.context_parallel import attend_chunks, rows_of_rank  # noqa: E402

HEADS = 8
GROUPS = 2
SIZE = 64


def make_module() -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self")


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def make_rows(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, n, SIZE, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]


def whole(module: PackedAttention, qkv: list[Tensor], rows: PackedRows) -> Tensor:
    out: Tensor = module(*qkv, None, packed_seq_params=rows)
    out.sum().backward()
    return out.detach()


def of_a_rank(
    module: PackedAttention, qkv: list[Tensor], lengths: list[int], cp_size: int, cp_rank: int
) -> tuple[Tensor, Any]:
    """(rows held by the rank, its attention output for them)."""
    cu_seqlens = bounds(lengths)
    context = packed_rows(cu_seqlens, cp_size, cp_rank).context
    assert context is not None
    mine = rows_of_rank(cu_seqlens, cp_size, cp_rank)

    def compute() -> Tensor:
        out = attend_chunks(qkv[0][mine], qkv[1], qkv[2], context, module._sdpa)
        out.sum().backward()
        return out.detach().flatten(1)

    return mine, compute


def shares(lengths: list[int], cp_size: int, repeats: int) -> dict[str, Any]:
    """Seconds of attention on one process, and of every context-parallel rank relative to an equal
    share of it."""
    module = make_module()
    qkv = make_rows(sum(lengths))
    rows = packed_rows(bounds(lengths))
    seconds, expected = fastest(
        lambda: whole(module, qkv, rows), repeats=repeats, clock=time.process_time
    )
    ratios = []
    for rank in range(cp_size):
        mine, compute = of_a_rank(module, qkv, lengths, cp_size, rank)
        own, found = fastest(compute, repeats=repeats, clock=time.process_time)
        torch.testing.assert_close(found, expected[mine], rtol=1e-4, atol=1e-5)
        ratios.append(own / (seconds / cp_size))
    return {
        "sequences": len(lengths),
        "length": lengths[0],
        "cp": cp_size,
        "whole_s": seconds,
        "over_fair_share": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    results = []
    print(
        f"{'sequences':>9} {'length':>7} {'cp':>3} {'whole s':>8}   each rank's seconds over its "
        "fair share"
    )
    for count in (1, 8, 32):
        for cp_size in (2, 4):
            found = shares([options.tokens // count] * count, cp_size, options.repeats)
            results.append(found)
            print(
                f"{count:9} {found['length']:7} {cp_size:3} {found['whole_s']:8.3f}   "
                + " ".join(f"{r:.2f}" for r in found["over_fair_share"])
            )
    write_json(options.json, results)


if __name__ == "__main__":
    main()

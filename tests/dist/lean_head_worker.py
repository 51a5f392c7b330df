"""Workers of tests/dist/test_lean_head.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megatron_patches

megatron_patches.apply()

from benchmarks.parity.steps import parallel  # noqa: E402
from slime_like.megatron.ops import fused_linear_logprob  # noqa: E402
from slime_like.megatron.ops.fused_linear_logprob import fused_linear_log_probs  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402

T, H, COLUMNS = 12, 6, 64
ROWS = {"all": None, "some": [0, 2, 3, 8, 11], "none": []}


def differences(
    layout: ParallelLayout,
    vocab_size: int,
    rows: list[int] | None,
    *,
    sequence_parallel: bool,
    sets: bool = False,
) -> list[float]:
    """Largest differences from one rank of log-probs, entropies and the gradients by hidden states,
    weight and bias on this rank."""
    torch.manual_seed(3)
    hidden, weight, bias = torch.randn(T, H), 2 * torch.randn(COLUMNS, H), torch.randn(COLUMNS)
    bias[1:3] = float("-inf")
    labels = torch.randint(3, vocab_size, (T,))
    sampling_mask = torch.randint(-1, vocab_size, (T, 7), dtype=torch.int32) if sets else None
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    weights = torch.randn(2, T if rows is None else len(rows))

    def everything(h: Tensor, w: Tensor, b: Tensor, **settings: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (h, w, b)]
        squared = torch.empty(T if rows is None else len(rows))
        log_probs, entropy = fused_linear_log_probs(
            leaves[0],
            leaves[1],
            labels,
            bias=leaves[2],
            vocab_size=vocab_size,
            rows=chosen,
            temperature=0.7,
            chunk_size=5,
            sampling_mask=sampling_mask,
            squared_out=squared,
            **settings,
        )
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 3
        return [log_probs.detach(), entropy.detach(), *gradients, squared]

    width, part = COLUMNS // layout.tp_size, T // layout.tp_size
    columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    own_rows = (
        slice(layout.tp_rank * part, (layout.tp_rank + 1) * part)
        if sequence_parallel
        else slice(None)
    )
    got = everything(
        hidden[own_rows],
        weight[columns],
        bias[columns],
        tp_group=layout.tp_group,
        sequence_parallel=sequence_parallel,
    )
    want = everything(hidden, weight, bias)
    want = [*want[:2], want[2][own_rows], want[3][columns], want[4][columns], want[5]]
    return [
        float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(got, want, strict=True)
    ]


def differences_on_all(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> dict[str, list[float]]:
    """Of four ranks the last has nothing but padding where the vocabulary has 33 tokens."""
    fused_linear_logprob.MIN_COLUMNS, fused_linear_logprob.BLOCK_ELEMENTS_CPU = 3, 16
    torch.set_default_dtype(torch.float64)
    with parallel(world_size) as layout:
        found = {
            f"{vocab_size} {name} {sequence_parallel}": differences(
                layout, vocab_size, rows, sequence_parallel=sequence_parallel
            )
            for vocab_size in (64, 61, 33)
            for name, rows in ROWS.items()
            for sequence_parallel in (False, True)
        }
        for sequence_parallel in (False, True):
            found[f"sets {sequence_parallel}"] = differences(
                layout, 61, ROWS["some"], sequence_parallel=sequence_parallel, sets=True
            )
    return found

"""Loss reductions as token weights: every active token of a sample gets the same weight `u`, which holds the whole denominator.

Denominators are those of the whole optimizer step, over all micro-batches and data-parallel ranks, from the original mask. Nothing
downstream divides again, so the loss does not depend on how the step is cut.

With N active tokens in the step, B sequences (fully masked ones count), L_i active tokens of sequence i, P prompts with N_p active
tokens, R rollouts with S_r active tokens (algorithms.md, section 3):

    rollout_mean 1/(R S_r)   sequence_mean 1/(B L_i)   token_mean 1/N   seq_mean_token_sum_norm 1/(B loss_norm_length)
    prompt_mean 1/(P N_p)   token_mean_legacy 1/(K N_k)

token_mean_legacy is the exception: the mean over K micro-batches of the mean over the N_k tokens of each, as frameworks compute it that
divide within a micro-batch. It depends on how the step is cut, and is here to reproduce their runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSS_REDUCTIONS: tuple[str, ...] = (
    "rollout_mean",
    "sequence_mean",
    "token_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_mean_legacy",
)


def reduction_weights(
    kind: str,
    *,
    active_tokens: Tensor,
    rollout_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    loss_norm_length: int | None = None,
    micro_batch_size: int | None = None,
) -> Tensor:
    """u of each sample, [B] float64.

    active_tokens: [B] int, L_i. rollout_ids, prompt_ids: [B] int, needed by rollout_mean and prompt_mean. loss_norm_length: needed by
    seq_mean_token_sum_norm. micro_batch_size: consecutive samples in a micro-batch, needed by token_mean_legacy. Raises ValueError for an unknown reduction or a missing input.
    """
    if kind not in LOSS_REDUCTIONS:
        raise ValueError(
            f"unknown loss reduction {kind!r}; legal values: {', '.join(LOSS_REDUCTIONS)}"
        )
    lengths = active_tokens.double()
    count = lengths.numel()
    if kind == "token_mean":
        return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    if kind == "sequence_mean":
        return 1.0 / (count * lengths.clamp(min=1))
    if kind == "seq_mean_token_sum_norm":
        if loss_norm_length is None or loss_norm_length < 1:
            raise ValueError(
                f"--loss-reduction seq_mean_token_sum_norm needs --loss-norm-length >= 1 (given: {loss_norm_length})"
            )
        return torch.full_like(lengths, 1.0 / (count * loss_norm_length))
    if kind == "token_mean_legacy":
        if micro_batch_size is None or micro_batch_size < 1 or count % micro_batch_size:
            raise ValueError(
                f"--loss-reduction token_mean_legacy needs a fixed micro-batch size that divides the {count} samples of a step (given: "
                f"{micro_batch_size}); use token_mean"
            )
        per_batch = lengths.view(-1, micro_batch_size).sum(1)
        return (1.0 / (per_batch.numel() * per_batch.clamp(min=1))).repeat_interleave(
            micro_batch_size
        )
    ids, name = (
        (rollout_ids, "rollout_ids") if kind == "rollout_mean" else (prompt_ids, "prompt_ids")
    )
    if ids is None:
        raise ValueError(f"--loss-reduction {kind} needs {name}")
    unique, place = ids.unique(return_inverse=True)
    totals = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device).index_add(
        0, place, lengths
    )
    return 1.0 / (unique.numel() * totals.clamp(min=1)[place])

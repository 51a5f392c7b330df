"""Reductions of the loss, as token weights.

Every active token of a sample gets the same weight `u`, which contains the full denominator, over
the whole optimizer step and the original mask, so the loss does not depend on how the step is
split. With N active tokens in the step, B sequences (fully masked ones count), L_i active tokens of
sequence i, P prompts with N_p active tokens, R rollouts with S_r:

    rollout_mean 1/(R S_r)      sequence_mean 1/(B L_i)      token_mean 1/N
    prompt_mean 1/(P N_p)       seq_mean_token_sum_norm 1/(B loss_norm_length)
    token_mean_legacy 1/(K N_k)

token_mean_legacy is the exception: the mean over K micro-batches of the mean over the N_k tokens of
each, as in frameworks that divide within a micro-batch. It depends on how the step is split, and
exists to reproduce their runs.
"""

from __future__ import annotations

from slime_like.lazy import Tensor, torch
from slime_like.validation import require_choice, require_ids, require_tensor

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
    """The token weight u of each sample.

    Args:
        kind: One of `LOSS_REDUCTIONS`.
        active_tokens: [B] integers >= 0, L_i; B may be 0.
        rollout_ids: [B] integers, needed by rollout_mean.
        prompt_ids: [B] integers, needed by prompt_mean.
        loss_norm_length: >= 1, needed by seq_mean_token_sum_norm.
        micro_batch_size: Consecutive samples in a micro-batch, needed by token_mean_legacy.

    Returns:
        [B] float64.

    Raises:
        ValueError: An unknown reduction, a missing or illegal input, or a wrong shape.
    """
    require_choice("loss reduction", kind, LOSS_REDUCTIONS)
    count = require_tensor("active_tokens", active_tokens).numel()
    require_ids("active_tokens", active_tokens, count)
    if count and int(active_tokens.min()) < 0:
        raise ValueError(f"active_tokens holds {int(active_tokens.min())}; it must be >= 0")
    lengths = active_tokens.double()
    if kind == "token_mean":
        return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    if kind == "sequence_mean":
        return 1.0 / (count * lengths.clamp(min=1))
    if kind == "seq_mean_token_sum_norm":
        if not isinstance(loss_norm_length, int) or loss_norm_length < 1:
            raise ValueError(
                "--loss-reduction seq_mean_token_sum_norm needs --loss-norm-length >= 1 "
                f"(given: {loss_norm_length})"
            )
        return torch.full_like(lengths, 1.0) / (count * loss_norm_length)
    if kind == "token_mean_legacy":
        return _token_mean_legacy(lengths, micro_batch_size)
    name = "prompt_ids"
    ids = prompt_ids
    if kind == "rollout_mean":
        name = "rollout_ids"
        ids = rollout_ids
    if ids is None:
        raise ValueError(f"--loss-reduction {kind} needs {name}")
    require_ids(name, ids, count)
    if count == 0:
        return lengths
    unique, index = ids.unique(return_inverse=True)
    totals = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device)
    totals = totals.index_add(0, index, lengths)
    return 1.0 / (unique.numel() * totals.clamp(min=1)[index])


def _token_mean_legacy(lengths: Tensor, micro_batch_size: int | None) -> Tensor:
    """The mean over the tokens of each micro-batch, then over micro-batches. lengths: [B]."""
    count = lengths.numel()
    if micro_batch_size is None or micro_batch_size < 1 or count % micro_batch_size:
        raise ValueError(
            "--loss-reduction token_mean_legacy needs a micro-batch size that divides the "
            f"{count} samples of a step (given: {micro_batch_size}); use token_mean"
        )
    if count == 0:
        return lengths
    per_batch = lengths.view(-1, micro_batch_size).sum(1)
    weights = 1.0 / (per_batch.numel() * per_batch.clamp(min=1))
    return weights.repeat_interleave(micro_batch_size)

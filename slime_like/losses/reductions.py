"""Loss reductions as token weights: every active token of a sample gets the same weight `u`, which
holds the whole denominator.

Denominators are those of the whole optimizer step, over all micro-batches and data-parallel ranks,
from the original mask. Nothing downstream divides again, so the loss does not depend on how the
step is cut.

With N active tokens in the step, B sequences (fully masked ones count), L_i active tokens of
sequence i, P prompts with N_p active tokens, R rollouts with S_r active tokens (algorithms.md,
section 3):

    rollout_mean 1/(R S_r)   sequence_mean 1/(B L_i)   token_mean 1/N   seq_mean_token_sum_norm 1/(B loss_norm_length)
    prompt_mean 1/(P N_p)   token_mean_legacy 1/(K N_k)

token_mean_legacy is the exception: the mean over K micro-batches of the mean over the N_k tokens of
each, as frameworks compute it that divide within a micro-batch. It depends on how the step is cut,
and is here to reproduce their runs.
"""

from __future__ import annotations

from slime_like.lazy import Tensor, torch
from slime_like.losses.checks import require_choice, require_ids, require_tensor

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
    """u of each sample.

    Args:
        kind: one of `LOSS_REDUCTIONS`.
        active_tokens: [B] integers >= 0, L_i; B may be 0.
        rollout_ids: [B] integers, needed by rollout_mean.
        prompt_ids: [B] integers, needed by prompt_mean.
        loss_norm_length: >= 1, needed by seq_mean_token_sum_norm.
        micro_batch_size: consecutive samples in a micro-batch, needed by token_mean_legacy.

    Returns:
        [B] float64.

    Raises:
        ValueError: for an unknown reduction, a missing or illegal input, and a wrong shape.
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
                f"--loss-reduction seq_mean_token_sum_norm needs --loss-norm-length >= 1 (given: {loss_norm_length})"
            )
        return torch.full_like(lengths, 1.0) / (count * loss_norm_length)
    if kind == "token_mean_legacy":
        return _token_mean_legacy(lengths, micro_batch_size)
    ids, name = (
        (rollout_ids, "rollout_ids") if kind == "rollout_mean" else (prompt_ids, "prompt_ids")
    )
    if ids is None:
        raise ValueError(f"--loss-reduction {kind} needs {name}")
    require_ids(name, ids, count)
    if count == 0:
        return lengths
    unique, place = ids.unique(return_inverse=True)
    totals = torch.zeros(unique.numel(), dtype=torch.float64, device=ids.device).index_add(
        0, place, lengths
    )
    return 1.0 / (unique.numel() * totals.clamp(min=1)[place])


def _token_mean_legacy(lengths: Tensor, micro_batch_size: int | None) -> Tensor:
    """The mean over the tokens of each micro-batch, then over micro-batches. lengths: [B]."""
    count = lengths.numel()
    if micro_batch_size is None or micro_batch_size < 1 or count % micro_batch_size:
        raise ValueError(
            f"--loss-reduction token_mean_legacy needs a fixed micro-batch size that divides the {count} samples of a step (given: "
            f"{micro_batch_size}); use token_mean"
        )
    if count == 0:
        return lengths
    per_batch = lengths.view(-1, micro_batch_size).sum(1)
    weights = 1.0 / (per_batch.numel() * per_batch.clamp(min=1))
    return weights.repeat_interleave(micro_batch_size)

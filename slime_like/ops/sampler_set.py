"""The tokens that top-k and top-p leave to a sampler, as a floor for `lean_log_probs`: log-probs over those tokens only.

Without the logits, and over a split vocabulary: a histogram of a row's logits says in which bin the k-th largest lies, or the one that
completes the mass p, and the bin becomes the range of the next, finer histogram. After three the bins are 88 / 512^3 = 7e-7 wide, less than
float32 resolves at a logit of 12. Tokens that lie closer to the floor than rounding reaches are kept.

The set is found from the logits of whoever computes the log-probs. It is the sampler's own where both have the same weights; a token near
the edge may then differ by rounding, and more of them once the weights have moved. The sampled token always counts as a member.

Training does not use it: there the engine tells its sets (`lean_log_probs`, token_sets), which rounding and later weights do not change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.ops.lean_head import DEFAULT_CHUNK_SIZE, Projection, columns_of_rank

RANGE = 88.0  # below the largest logit by so much, a probability is 0 in float32
BINS = 512
LEVELS = 3
SLACK = 1e-6  # relative; the last token of the set stays in it when a product in other blocks rounds its logit otherwise


@torch.no_grad()
def sampler_floor(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocab_size: int,
    top_k: int = -1,
    top_p: float = 1.0,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """[N]: the least logit over temperature that top-k (-1: all), then top-p among those left, keep. Arguments as `lean_log_probs`, hidden
    [N, H] whole. top_p: the smallest set with at least this probability. Three passes of the projection for each of the two, and one."""
    head = Projection(hidden, weight, bias, temperature, columns_of_rank(weight, vocab_size, tp_group)[1], chunk_size)
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    top = _largest(head, group).double()  # edges of bins are finer than float32
    floor = torch.full_like(top, float("-inf"))
    if top_k != -1 and top_k < vocab_size:
        floor = _cut(head, top, floor, group, torch.full_like(top, top_k), by_mass=False)
    if top_p < 1:
        everything, _ = _histogram(head, top, floor, top - RANGE, top + 1.0, group, by_mass=True)
        floor = torch.maximum(floor, _cut(head, top, floor, group, top_p * everything.sum(dim=1), by_mass=True))
    return (floor - SLACK * (1 + floor.abs())).to(head.dtype)


def _largest(head: Projection, group: dist.ProcessGroup | None) -> Tensor:
    top = head.hidden.new_full((head.hidden.size(0),), float("-inf"), dtype=head.dtype)
    workspace = head.workspace()
    for columns in head.column_blocks():
        for rows in head.row_blocks():
            z, _ = head.blocks(workspace, rows, columns)
            top[rows] = torch.maximum(top[rows], z.amax(dim=1))
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top


def _cut(head: Projection, top: Tensor, floor: Tensor, group: dist.ProcessGroup | None, target: Tensor, *, by_mass: bool) -> Tensor:
    """The largest edge above which tokens at or above `floor` number `target` [N], or hold that mass; the end of the range if none does."""
    low, high = top - RANGE, top + 1.0
    for _ in range(LEVELS):
        histogram, above = _histogram(head, top, floor, low, high, group, by_mass=by_mass)
        from_above = above.unsqueeze(1) + histogram.flip(1).cumsum(dim=1)  # what the topmost i + 1 bins hold
        enough = from_above >= target.unsqueeze(1)
        steps = torch.where(enough.any(dim=1), enough.to(torch.int8).argmax(dim=1), BINS - 1)
        width = (high - low) / BINS
        low, high = high - (steps + 1) * width, high - steps * width
    return low


def _histogram(
    head: Projection, top: Tensor, floor: Tensor, low: Tensor, high: Tensor, group: dist.ProcessGroup | None, *, by_mass: bool
) -> tuple[Tensor, Tensor]:
    """(what bins of [low, high) hold [N, BINS], what lies at high or above [N]): tokens at or above `floor`, each 1 or e^(z - top)."""
    histogram, above = top.new_zeros((top.numel(), BINS)), torch.zeros_like(top)
    workspace = head.workspace()
    for columns in head.column_blocks():
        for rows in head.row_blocks():
            z, _ = head.blocks(workspace, rows, columns)
            lowest, highest = low[rows].unsqueeze(1), high[rows].unsqueeze(1)
            counts = z >= torch.maximum(lowest, floor[rows].unsqueeze(1))
            weights = counts.double() * ((z - top[rows].unsqueeze(1)).exp() if by_mass else 1.0)
            is_above = z >= highest
            above[rows] += (weights * is_above).sum(dim=1)
            bins = ((z.clamp(min=lowest) - lowest) / (highest - lowest) * BINS).long().clamp(max=BINS - 1)
            histogram[rows] = histogram[rows].scatter_add(1, bins, weights * ~is_above)
    if group is not None:
        both = torch.cat([histogram, above.unsqueeze(1)], dim=1)
        dist.all_reduce(both, group=group)
        histogram, above = both[:, :-1], both[:, -1]
    return histogram, above

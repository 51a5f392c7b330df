"""Log-probability of the label and entropy from hidden states: vocabulary projection and softmax
fused, without materialising the logits.

The projection runs in blocks of rows x vocabulary columns through one small workspace; [T, V] never
exists, forward or backward. Forward keeps a running maximum and two running sums per row ("online
softmax", arXiv 1805.02867, with a second sum for the entropy). Backward recomputes each block,
turns it into the gradient of its logits,

    d log p(label) / d z_v = 1[v = label] - p_v          d H / d z_v = -p_v (log p_v + H),

and multiplies it into the gradients of hidden states and weight. This costs a fourth matrix product
but saves several passes over [T, V] in main memory: the elementwise work happens in cache.

Columns are the outer loop, so that each slice of the weight and of its gradient passes through the
cache once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from slime_like.autograd import AutogradContext

DEFAULT_CHUNK_SIZE = 1024  # rows of a block; benchmarks/bench_head.py --block-sizes compares
# Elements of a block. On CPU two float32 blocks fit the L2 cache of a core; a GPU needs larger
# matrix products.
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_GPU = 2**25
MIN_COLUMNS = 128
LOWEST = -1e20  # instead of -inf, since -inf times a probability of 0 is NaN


@dataclass(frozen=True, slots=True)
class Projection:
    """Projection to this rank's slice of the vocabulary, in blocks. Tensors as in
    `fused_linear_log_probs`, with hidden [N, H]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    num_columns: int  # columns of this rank, without padding
    chunk_size: int
    sampling_mask: Tensor | None = None  # [N, K] int64, relative to this rank's first token
    softcap: float | None = None  # logits z are cap * tanh(z / cap), before the temperature

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of everything but the matrix products, which use the dtype of the weight."""
        half = self.weight.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half else self.weight.dtype

    @property
    def block_shape(self) -> tuple[int, int]:
        size = self.hidden.size(0)
        rows = max(1, size if self.chunk_size == -1 else min(self.chunk_size, size))
        elements = BLOCK_ELEMENTS_GPU if self.hidden.is_cuda else BLOCK_ELEMENTS_CPU
        return rows, max(1, min(self.num_columns, max(MIN_COLUMNS, elements // rows)))

    def workspace(self) -> Tensor:
        """Room for two blocks."""
        rows, columns = self.block_shape
        return self.hidden.new_empty((2, rows * columns), dtype=self.dtype)

    def row_blocks(self) -> Iterator[slice]:
        return _slices(self.hidden.size(0), self.block_shape[0])

    def column_blocks(self) -> Iterator[slice]:
        return _slices(self.num_columns, self.block_shape[1])

    def blocks(self, workspace: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Compute the scaled logits of a block. Returns them and a scratch block of the same shape,
        both views of the workspace."""
        hidden = self.hidden[rows]
        weight = self.weight[columns]
        shape = (hidden.size(0), weight.size(0))
        logits, scratch = (half[: shape[0] * shape[1]].view(shape) for half in workspace)
        if weight.dtype == self.dtype:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            logits.copy_(torch.mm(hidden, weight.t()))
        if self.bias is not None:
            logits.add_(self.bias[columns])
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            logits.mul_(1 / self.temperature)
        return logits, scratch

    def slope(self, logits: Tensor) -> Tensor | None:
        """d capped / d z of a block of `blocks`, 1 - tanh(z / cap)^2, in one block of its own; None
        without a cap."""
        if self.softcap is None:
            return None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1)

    @property
    def has_banned(self) -> bool:
        """Whether a logit may be -inf."""
        return not (self.bias is None and self.sampling_mask is None)

    def restrict(
        self, logits: Tensor, rows: slice, columns: slice, column: Tensor, in_block: Tensor
    ) -> None:
        """Set logits outside the token sets to -inf in place, except that of the label, which is at
        `column` if `in_block`."""
        if self.sampling_mask is None:
            return
        width = logits.size(1)
        index = self.sampling_mask[rows] - columns.start
        index = torch.where((index >= 0) & (index < width), index, width)
        allowed = torch.zeros((len(logits), width + 1), dtype=torch.bool, device=logits.device)
        allowed = allowed.scatter_(1, index, True)[:, :width]
        allowed = allowed.scatter(1, column, allowed.gather(1, column) | in_block)
        logits.masked_fill_(~allowed, float("-inf"))

    def shifted(self, logits: Tensor, by: Tensor) -> Tensor:
        """Subtract `by` per row, in place, with a finite lower bound."""
        logits.sub_(by.unsqueeze(1))
        return logits.clamp_(min=LOWEST) if self.has_banned else logits


@torch.no_grad()
def scaled_logits(head: Projection) -> Tensor:
    """All logits [N, num_columns], capped and divided by the temperature, for drawing tokens. They
    are computed in the blocks of `fused_linear_log_probs` and so have the bits that its log-probs
    are made of."""
    logits = head.hidden.new_empty((head.hidden.size(0), head.num_columns), dtype=head.dtype)
    workspace = head.workspace()
    for columns in head.column_blocks():
        for rows in head.row_blocks():
            logits[rows, columns] = head.blocks(workspace, rows, columns)[0]
    return logits


def columns_of_rank(
    weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """(first token, number of tokens) of this rank's slice of the vocabulary, without padding."""
    start = 0 if group is None else group.rank() * weight.size(0)
    return start, max(0, min(weight.size(0), vocab_size - start))


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _in_block(local_labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Column of each label within the block, clamped, and whether the label is in it; [N, K]
    each."""
    column = local_labels - columns.start
    width = columns.stop - columns.start
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _softmax_statistics(
    head: Projection,
    local_labels: Tensor,
    group: dist.ProcessGroup | None,
    *,
    squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax statistics over the full vocabulary, without a device synchronisation.

    Returns:
        (logits of the labels [N, K], log normaliser [N], entropy [N], sum of squared probabilities
        [N], 0 unless `squares`).

    With logits z_v, m = max_v z_v and Z = sum_v exp(z_v - m):

        log normaliser = m + log Z      entropy = log Z - sum_v exp(z_v - m) (z_v - m) / Z
        sum of squared probabilities = sum_v exp(2 (z_v - m)) / Z^2

    The sums run over blocks of the vocabulary with the maximum so far (online softmax, Milakov and
    Gimelshein, arXiv 1805.02867), so that no [N, V] tensor exists.
    """
    size = head.hidden.size(0)
    top = head.hidden.new_full((size,), LOWEST, dtype=head.dtype)
    total, weighted, squared = top.new_zeros((3, size))
    label_logit = top.new_zeros(local_labels.shape)
    workspace = head.workspace()
    for columns in head.column_blocks():
        for rows in head.row_blocks():
            z, p = head.blocks(workspace, rows, columns)
            column, in_block = _in_block(local_labels[rows], columns)
            head.restrict(z, rows, columns, column, in_block)
            label_logit[rows] += torch.where(in_block, z.gather(1, column), 0.0)
            # a larger maximum shrinks the sums of the blocks before it
            new_top = torch.maximum(top[rows], z.amax(dim=1))
            _rescale(total[rows], weighted[rows], squared[rows], top[rows] - new_top)
            top[rows] = new_top
            z = head.shifted(z, new_top)
            torch.exp(z, out=p)
            total[rows] += p.sum(dim=1)
            if squares:
                squared[rows] += torch.linalg.vector_norm(p, dim=1).square()
            weighted[rows] += p.mul_(z).sum(dim=1)
    if group is not None and group.size() > 1:
        # each rank has the sums of its shard of the vocabulary, relative to its own maximum
        local_top = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        _rescale(total, weighted, squared, local_top - top)
        sums = torch.cat([torch.stack([total, weighted, squared]), label_logit.t()])
        dist.all_reduce(sums, group=group)
        total, weighted, squared = sums[:3]
        label_logit = sums[3:].t()
    log_total = total.log()
    return label_logit, top + log_total, log_total - weighted / total, squared / total.square()


def _rescale(total: Tensor, weighted: Tensor, squared: Tensor, change: Tensor) -> None:
    """Rescale the sums of e^(z - a), e^(z - a) (z - a) and e^(2 (z - a)) in place to a new maximum
    b >= a. change: a - b."""
    factor = change.exp()
    weighted.add_(total * change).mul_(factor)
    total.mul_(factor)
    squared.mul_(factor * factor)


class _Context(AutogradContext, Protocol):
    # temperature, columns, chunk size, cap
    settings: tuple[float, int, int, float | None]


class _FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_size: int,
        sampling_mask: Tensor | None,
        squares: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocab_start, num_columns = columns_of_rank(weight, vocab_size, group)
        sampling_mask = None if sampling_mask is None else sampling_mask.long() - vocab_start
        settings = temperature, num_columns, chunk_size
        head = Projection(hidden, weight, bias, *settings, sampling_mask, softcap)
        local_labels = labels - vocab_start
        label_logit, log_normaliser, entropy, squared = _softmax_statistics(
            head, local_labels, group, squares=squares
        )
        ctx.save_for_backward(
            hidden, weight, bias, local_labels, log_normaliser, entropy, sampling_mask
        )
        ctx.settings = (*settings, softcap)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squared)
        return label_logit - log_normaliser.unsqueeze(1), entropy, squared

    @staticmethod
    def backward(
        ctx: _Context, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local_labels, log_normaliser, entropy, sampling_mask = (
            ctx.saved_tensors
        )
        temperature, num_columns, chunk_size, softcap = ctx.settings
        settings = temperature, num_columns, chunk_size
        head = Projection(hidden, weight, bias, *settings, sampling_mask, softcap)
        # grad z = p (slope (z - log normaliser) + offset), plus label_grads at the labels
        if grad_log_probs is None:
            label_grads = entropy.new_zeros(local_labels.shape)
        else:
            label_grads = grad_log_probs / temperature
        slope = None if grad_entropy is None else -grad_entropy / temperature
        offset = -label_grads.sum(dim=1)
        offset = offset if slope is None else slope * entropy + offset

        grads = _Gradients.like(head, ctx.needs_input_grad)
        workspace = head.workspace()
        for columns in head.column_blocks():
            for rows in head.row_blocks():
                z, p = head.blocks(workspace, rows, columns)
                of_cap = head.slope(z)
                column, in_block = _in_block(local_labels[rows], columns)
                head.restrict(z, rows, columns, column, in_block)
                z = head.shifted(z, log_normaliser[rows])
                torch.exp(z, out=p)
                factor = offset[rows].unsqueeze(1)
                if slope is not None:
                    factor = z.mul_(slope[rows].unsqueeze(1)).add_(factor)
                p.mul_(factor)
                p.scatter_add_(1, column, torch.where(in_block, label_grads[rows], 0.0))
                if of_cap is not None:
                    p.mul_(of_cap)
                grads.add(p, rows, columns)
        return (*grads.results(), None, None, None, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The required gradients, accumulated in `Projection.dtype`."""

    head: Projection
    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V/tp, H] in the dtype of the weight; weight_sum accumulates over rows
    bias: Tensor | None  # [V/tp]
    # [columns of a block, H]; only for a narrower weight and several row blocks
    weight_sum: Tensor | None

    @classmethod
    def like(cls, head: Projection, needs_grad: tuple[bool, ...]) -> _Gradients:
        hidden = torch.zeros_like(head.hidden, dtype=head.dtype) if needs_grad[0] else None
        weight = torch.empty_like(head.weight) if needs_grad[1] else None
        if weight is not None:
            # zero the padding, or everything if there are no rows
            weight[head.num_columns if head.hidden.size(0) else 0 :] = 0
        bias = weight_sum = None
        if needs_grad[2] and head.bias is not None:
            bias = torch.zeros_like(head.bias, dtype=head.dtype)
        block_rows, block_columns = head.block_shape
        if weight is not None and weight.dtype != head.dtype and len(head.hidden) > block_rows:
            weight_sum = weight.new_empty((block_columns, weight.size(1)), dtype=head.dtype)
        return cls(head, hidden, weight, bias, weight_sum)

    def add(self, logit_grads: Tensor, rows: slice, columns: slice) -> None:
        """Accumulate the gradient of one block. Blocks come with columns as the outer loop."""
        head = self.head
        if self.bias is not None:
            self.bias[columns] += logit_grads.sum(dim=0)
        logit_grads = logit_grads.to(head.weight.dtype)
        if self.hidden is not None:
            if self.hidden.dtype == logit_grads.dtype:
                self.hidden[rows].addmm_(logit_grads, head.weight[columns])
            else:
                self.hidden[rows] += logit_grads @ head.weight[columns]
        if self.weight is None:
            return
        if self.weight_sum is None:
            target = self.weight[columns]
            beta = 0 if rows.start == 0 else 1
            torch.addmm(target, logit_grads.t(), head.hidden[rows], beta=beta, out=target)
            return
        total = self.weight_sum[: columns.stop - columns.start]
        product = logit_grads.t() @ head.hidden[rows]
        total.copy_(product) if rows.start == 0 else total.add_(product)
        if rows.stop == head.hidden.size(0):
            self.weight[columns] = total.to(self.weight.dtype)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden = self.hidden
        bias = self.bias
        if hidden is not None:
            hidden = hidden.to(self.head.hidden.dtype)
        if bias is not None and self.head.bias is not None:
            bias = bias.to(self.head.bias.dtype)
        return hidden, self.weight, bias


def fused_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    sampling_mask: Tensor | None = None,
    squared_out: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of labels and entropy of softmax((hidden weight^T + bias) / temperature).

    Matrix products are computed in the dtype of the weight, everything else in float32 or wider.
    Results are equal on all ranks of `tp_group`. Each rank gets the gradient of its own columns and
    that of its hidden states, already summed over the ranks. All ranks of the group must run
    backward together, even with no rows.

    Args:
        hidden: [T, H]; under sequence parallelism this rank's [T / tp, H].
        weight: [V_padded / tp, H], this rank's columns of the vocabulary.
        labels: [T] int64 over the full vocabulary, or [T, K].
        vocab_size: Number of tokens without padding; padded columns get no probability and no
            gradient.
        rows: [N] int64, rows to compute, in this order; None: all.
        bias: [V_padded / tp]; -inf bans a token.
        chunk_size: Rows per block; -1: all.
        sampling_mask: [T, K] over the full vocabulary, padded with -1: the tokens that top-k and
        top-p
            left to the sampler. Only these and the label get probability. Not with labels [T, K].
        squared_out: [N], filled with the sum of squared probabilities, without gradient.
        softcap: Logits z are softcap * tanh(z / softcap), before the temperature.

    Returns:
        (log-probs [N], or [N, K] for labels [T, K]; entropy [N]), float32 for narrower inputs.
    """
    single = labels.dim() == 1
    assert bias is None or softcap is None, "a banned token would have the lowest capped logit"
    assert single or sampling_mask is None, "some of K labels may be banned"
    hidden = rows_to_score(hidden, rows, tp_group, sequence_parallel=sequence_parallel)
    if rows is not None:
        labels = labels.index_select(0, rows)
        sampling_mask = None if sampling_mask is None else sampling_mask.index_select(0, rows)
    labels = labels.unsqueeze(1) if single else labels
    settings = (
        vocab_size,
        temperature,
        tp_group,
        chunk_size,
        sampling_mask,
        squared_out is not None,
        softcap,
    )
    log_probs, entropy, squared = _FusedLinearLogProbs.apply(
        hidden, weight, bias, labels, *settings
    )
    if squared_out is not None:
        squared_out.copy_(squared)
    return log_probs.squeeze(1) if single else log_probs, entropy


def rows_to_score(
    hidden: Tensor,
    rows: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool,
) -> Tensor:
    """Hidden states [N, H] of the rows to compute, equal on all ranks; backward sums over ranks.
    Arguments as for `fused_linear_log_probs`."""
    parallel = tp_group is not None and tp_group.size() > 1
    if parallel and sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=tp_group
        )
    if rows is not None:
        hidden = hidden.index_select(0, rows)
    if parallel and not sequence_parallel:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    return hidden

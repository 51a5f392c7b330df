"""Operations of the packed training pass that patches put in place of megatron-core's and torch's:
bitwise equal, in fewer passes over memory. `torch_norm_sp` installs the norm, `rope_thd` the rotary
embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from slime_like.autograd import AutogradContext


class FusedRMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, equation 4). Products
    and sums are those of torch's chain of operations, in its order, with fewer temporaries."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, again: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """
        Args:
            x: [..., d].
            again: `x` once more; it receives the gradient through r, since torch adds the two terms
                to the gradients of other uses one by one.
            weight: [d], of the same dtype.
        """
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, r)
        return x.mul(r).mul_(weight)

    @staticmethod
    def backward(
        ctx: AutogradContext, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """dx = r w dy - x (x . w dy) r^3 / d; dw = sum over rows of x r dy."""
        x, weight, r = ctx.saved_tensors
        (dy,) = gradients
        product = torch.mul(x, r)
        dw = None
        if ctx.needs_input_grad[2]:
            dw = product.mul_(dy).sum(tuple(range(dy.dim() - 1)))
        if not ctx.needs_input_grad[0]:
            return None, None, dw, None
        dx = dy * weight
        dr = torch.mul(dx, x, out=product).sum(-1, keepdim=True)
        dmean = (-0.5 * dr * r.pow(3)) / x.size(-1)
        return dx.mul_(r), torch.mul(x, dmean * 2, out=product), dw, None


def can_fuse_norm(x: Tensor, weight: Tensor, eps: float | None) -> bool:
    """Whether `FusedRMSNorm` computes this norm on a CPU."""
    return eps is not None and x.dtype in (torch.float32, torch.float64) and weight.dtype is x.dtype


class PackedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with `FusedRMSNorm` on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d]."""
        if x.device.type != "cpu" or not can_fuse_norm(x, self.weight, self.eps):
            return super().forward(x)
        return FusedRMSNorm.apply(x, x, self.weight, self.eps)


def positions_of_rows(cu_seqlens: Tensor, rows: int, cp_size: int, cp_rank: int) -> Tensor:
    """Position of each row of a context-parallel rank within its sequence.

    Args:
        cu_seqlens: [S + 1], of the full sequences. Under context parallelism their lengths are
            multiples of 2 * cp_size, and the rank holds chunks `cp_rank` and
            `2 * cp_size - 1 - cp_rank` of each.
        rows: Number of rows of this rank, as a host value to avoid a device synchronisation.

    Returns:
        [rows] int64.
    """
    starts = cu_seqlens[:-1].long() // cp_size
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    of_row = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=starts.device), lengths // cp_size, output_size=rows
    )
    positions = torch.arange(rows, device=starts.device) - starts[of_row]
    if cp_size == 1:
        return positions
    chunk = (lengths // (2 * cp_size))[of_row]
    # a rank's second chunk is as far from the end of the sequence as its first from the start
    skipped = torch.where(positions < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank)
    return positions + skipped * chunk


def starts_of_rows(cu_seqlens: Tensor, rows: int, cp_size: int) -> Tensor:
    """First row of the full sequence of each row of a context-parallel rank: [rows] int64;
    arguments as of `positions_of_rows`."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp_size
    return cu_seqlens[:-1].long().repeat_interleave(lengths, output_size=rows)


class Rotation(torch.autograd.Function):
    """Rotate the first 2h dimensions of each row by halves: y1 = x1 cos - x2 sin,
    y2 = x2 cos + x1 sin (Su et al. 2021, "RoFormer", equation 34). The rest passes through."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """
        Args:
            rows: [T, ..., d].
            cos, sin: [T, ..., 2h], broadcast over heads.
        """
        ctx.save_for_backward(cos, sin)
        return _rotated(rows, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(gradients[0], *ctx.saved_tensors, backward=True), None, None


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """The rotation, or its transpose. Each product and sum is rounded separately, as in
    megatron-core, so the results are bitwise equal."""
    size = cos.size(-1)
    half = size // 2
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    torch.mul(rows[..., :size], cos, out=out[..., :size])
    first = rows[..., :half]
    second = rows[..., half:size]
    if backward:
        out[..., :half].add_(second * sin[..., half:])
        out[..., half:size].sub_(first * sin[..., :half])
    else:
        out[..., :half].sub_(second * sin[..., :half])
        out[..., half:size].add_(first * sin[..., half:])
    if size < rows.size(-1):
        out[..., size:] = rows[..., size:]
    return out


class _Angles:
    """Angles of the rows of a micro-batch, shared by all layers."""

    def __init__(
        self, cu_seqlens: Tensor, freqs: Tensor, rows: int, cp_group: ProcessGroup
    ) -> None:
        """freqs: by position, or by row of the full sequences."""
        self.source = (cu_seqlens, freqs)
        places = positions_of_rows(cu_seqlens, rows, cp_group.size(), cp_group.rank())
        # of a single sequence, angles by row are those of its positions
        if cu_seqlens.numel() > 2 and freqs.size(0) == rows * cp_group.size():
            places = places + starts_of_rows(cu_seqlens, rows, cp_group.size())
        self.freqs = freqs[places]
        self._parts: dict[tuple[torch.dtype, float], tuple[Tensor, Tensor]] = {}

    def is_of(self, cu_seqlens: Tensor, freqs: Tensor) -> bool:
        return self.source[0] is cu_seqlens and self.source[1] is freqs

    def parts(self, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """(cosines, sines) of the rows, scaled by `mscale`."""
        if (dtype, mscale) not in self._parts:
            cos = torch.cos(self.freqs)
            sin = torch.sin(self.freqs)
            self._parts[dtype, mscale] = (cos * mscale).to(dtype), (sin * mscale).to(dtype)
        return self._parts[dtype, mscale]


def packed_rotary(
    original: Callable[..., Tensor], rotate: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Replacement for megatron-core's `_apply_rotary_pos_emb_thd`.

    Args:
        original: megatron-core's function, for calls without a group.
        rotate: megatron-core's rotation [T, 1, ..., d], for interleaved and MLA rotations.
    """
    last: _Angles | None = None  # those of the current micro-batch

    @functools.wraps(original)
    def apply(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        *args: object,
        cp_group: ProcessGroup | None = None,
        **named: Any,
    ) -> Tensor:
        nonlocal last
        # since 0.20, to avoid a copy to the host; the number of rows does as well
        longest = named.pop("max_seqlen", None)
        known = {} if longest is None else {"max_seqlen": longest}
        if cp_group is None:
            return original(t, cu_seqlens, freqs, *args, cp_group=cp_group, **named, **known)
        if last is None or not last.is_of(cu_seqlens, freqs):
            last = _Angles(cu_seqlens, freqs, t.size(0), cp_group)
        rows = t.unsqueeze(1)
        if args or any(value for name, value in named.items() if name != "mscale"):
            return rotate(rows, last.freqs, *args, **named).squeeze(1)
        parts = last.parts(t.dtype, named.get("mscale", 1.0))
        return Rotation.apply(rows, *parts).squeeze(1)

    return apply

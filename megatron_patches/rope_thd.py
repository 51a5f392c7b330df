"""Rotary embeddings of packed rows without a loop over the sequences.

Target    models.common.embeddings.rope_utils: _apply_rotary_pos_emb_thd.
Why       For queries and keys of every layer it splits the row into its sequences in Python and asks the host for their lengths:
          on 512 short sequences that is a fifth of a training step, and on a GPU a synchronization at each call. Since 0.19 it also
          rotates them one by one.
How       The angles of all rows of a micro-batch are picked with one index, and their cosines and sines taken, once for all layers.
          The rotation has the bits of megatron-core's in fewer passes over memory; interleaved angles and those of latent attention
          keep megatron-core's. Angles that are by row already, of a single sequence or of positions that are not 0, 1, 2, ..., go to
          the original.
When      Always; with fused kernels (`apply_rope_fusion`) the function is not called.
Versions  megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_patches.patch import ALWAYS, Patch, find, missing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


NAME = "rope_thd"
MODULE = "models.common.embeddings.rope_utils"
THD, BSHD = "_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd"


def check() -> None:
    wanted = ["t", "cu_seqlens", "freqs", "rotary_interleaved"]
    found = list(inspect.signature(find(NAME, f"{MODULE}:{THD}")).parameters)
    if found[:4] != wanted or "cp_group" not in found:
        raise missing(NAME, f"the parameters of megatron.core.{MODULE}:{THD} have changed")
    find(NAME, f"{MODULE}:{BSHD}")


def positions_of_rows(cu_seqlens: Tensor, rows: int, cp_size: int, cp_rank: int) -> Tensor:
    """[rows]: the place in its sequence of each row that a context-parallel rank holds.

    Args:
        cu_seqlens: [S + 1], of the whole sequences. Under context parallelism their lengths are
            multiples of 2 * cp_size, and the rank holds chunks `cp_rank` and
            `2 * cp_size - 1 - cp_rank` of each.
        rows: this rank's; known without asking the device.
    """
    starts = cu_seqlens[:-1].long() // cp_size
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    of_row = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=starts.device), lengths // cp_size, output_size=rows
    )
    places = torch.arange(rows, device=starts.device) - starts[of_row]
    if cp_size == 1:
        return places
    chunk = (lengths // (2 * cp_size))[of_row]
    # the second chunk of a rank lies as far from the end as the first from the start
    skipped = torch.where(places < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank)
    return places + skipped * chunk


class Rotation(torch.autograd.Function):
    """Rotate the first 2h dimensions of each row by halves: y1 = x1 cos - x2 sin,
    y2 = x2 cos + x1 sin (Su et al. 2021, "RoFormer", equation 34). The rest passes through."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """rows: [T, ..., d]; cos, sin: [T, ..., 2h], broadcast over heads."""
        ctx.save_for_backward(cos, sin)
        return _rotated(rows, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(gradients[0], *ctx.saved_tensors, backward=True), None, None


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """The rotation, or its transpose. Products and sums are rounded one by one, as megatron-core's
    are: its bits."""
    size = cos.size(-1)
    half = size // 2
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    torch.mul(rows[..., :size], cos, out=out[..., :size])
    first, second = rows[..., :half], rows[..., half:size]
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
    """The angles of a micro-batch's rows, for which all layers ask."""

    def __init__(
        self, cu_seqlens: Tensor, freqs: Tensor, rows: int, cp_group: ProcessGroup
    ) -> None:
        self.source = (cu_seqlens, freqs)
        self.freqs = freqs[positions_of_rows(cu_seqlens, rows, cp_group.size(), cp_group.rank())]
        self._parts: dict[tuple[torch.dtype, float], tuple[Tensor, Tensor]] = {}

    def is_of(self, cu_seqlens: Tensor, freqs: Tensor) -> bool:
        return self.source[0] is cu_seqlens and self.source[1] is freqs

    def parts(self, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines, scaled."""
        if (dtype, mscale) not in self._parts:
            cos, sin = torch.cos(self.freqs), torch.sin(self.freqs)
            self._parts[dtype, mscale] = (cos * mscale).to(dtype), (sin * mscale).to(dtype)
        return self._parts[dtype, mscale]


def install() -> None:
    module = find(NAME, MODULE)
    was, rotate = getattr(module, THD), getattr(module, BSHD)
    last: _Angles | None = None  # of one micro-batch

    @functools.wraps(was)
    def apply_rotary_pos_emb_thd(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        *args: object,
        cp_group: ProcessGroup | None = None,
        **named: Any,
    ) -> Tensor:
        nonlocal last
        if cp_group is None or freqs.size(0) == t.size(0) * cp_group.size():
            return was(t, cu_seqlens, freqs, *args, cp_group=cp_group, **named)
        if last is None or not last.is_of(cu_seqlens, freqs):
            last = _Angles(cu_seqlens, freqs, t.size(0), cp_group)
        rows = t.unsqueeze(1)
        if args or any(value for name, value in named.items() if name != "mscale"):
            return rotate(rows, last.freqs, *args, **named).squeeze(1)
        parts = last.parts(t.dtype, named.get("mscale", 1.0))
        return Rotation.apply(rows, *parts).squeeze(1)

    setattr(module, THD, apply_rotary_pos_emb_thd)


PATCH = Patch(NAME, ALWAYS, check, install)

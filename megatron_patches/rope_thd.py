"""Rotary embeddings of packed rows without a loop over the sequences.

Target    models.common.embeddings.rope_utils: _apply_rotary_pos_emb_thd.
Why       For queries and keys of every layer it splits the row into its sequences in Python and asks the host for their lengths:
          on 512 short sequences that is a fifth of a training step, and on a GPU a synchronization at each call. Since 0.19 it also
          rotates them one by one.
How       The angles of all rows of a micro-batch are picked with one index, once for all layers; the rotation is megatron-core's.
          Angles that are by row already, of a single sequence or of positions that are not 0, 1, 2, ..., go to the original.
When      Always; with fused kernels (`apply_rope_fusion`) the function is not called.
Versions  megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from megatron_patches.patch import ALWAYS, Patch, find, missing

if TYPE_CHECKING:
    from torch import Tensor
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
    import torch

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


def install() -> None:
    module = find(NAME, MODULE)
    was, rotate = getattr(module, THD), getattr(module, BSHD)
    last: tuple[Tensor | None, Tensor | None, Tensor | None] = (
        None,
        None,
        None,
    )  # of one micro-batch: all layers ask for it

    @functools.wraps(was)
    def apply_rotary_pos_emb_thd(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        *args: object,
        cp_group: ProcessGroup | None = None,
        **named: object,
    ) -> Tensor:
        nonlocal last
        if cp_group is None or freqs.size(0) == t.size(0) * cp_group.size():
            return was(t, cu_seqlens, freqs, *args, cp_group=cp_group, **named)
        if last[0] is not cu_seqlens or last[1] is not freqs:
            places = positions_of_rows(cu_seqlens, t.size(0), cp_group.size(), cp_group.rank())
            last = (cu_seqlens, freqs, freqs[places])
        return rotate(t.unsqueeze(1), last[2], *args, **named).squeeze(1)

    setattr(module, THD, apply_rotary_pos_emb_thd)


PATCH = Patch(NAME, ALWAYS, check, install)

"""YaRN of a part of each head (`partial_rotary_factor`) and of neighbouring pairs, and its angles.

Target    models.common.embeddings.yarn_rotary_pos_embedding: YarnRotaryEmbedding.__init__ and
          get_emb.
Why       It ignores `rotary_percent`, rejects `rotary_interleaved`, and leaves in `inv_freq` the
          frequencies without YaRN, which other axes of positions (images) are turned by.
Without   Other dimensions would be turned than the model's, an assertion fails when the model is
          built, and angles of images would be those of a model without YaRN.
How       The part is the whole of a smaller head. Angles of pairs are those of halves, in the order
          of pairs.
When      Always. What megatron-core supports is unchanged.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from megatron_patches.patch import ALWAYS, Patch, find

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding
    from torch import Tensor


NAME = "yarn_parts"
CLASS = "models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding"


def check() -> None:
    for method in ("__init__", "get_emb"):
        find(NAME, f"{CLASS}.{method}")


def install() -> None:
    cls = find(NAME, CLASS)
    original_init = cls.__init__
    original_get_emb = cls.get_emb

    @functools.wraps(original_init)
    def init(
        self: YarnRotaryEmbedding, kv_channels: int, rotary_percent: float = 1.0, **settings: Any
    ) -> None:
        original_init(self, int(kv_channels * rotary_percent), **settings)
        angles, _ = self.get_emb(2)  # of the positions 0 and 1
        turned = angles[1, 0, 0]
        self.inv_freq = turned[::2] if self.rotary_interleaved else turned[: turned.numel() // 2]

    @functools.wraps(original_get_emb)
    def get_emb(
        self: YarnRotaryEmbedding, max_seq_len: int, offset: int = 0
    ) -> tuple[Tensor, float]:
        interleaved = self.rotary_interleaved
        self.rotary_interleaved = False
        try:
            angles, scale = original_get_emb(self, max_seq_len, offset)
        finally:
            self.rotary_interleaved = interleaved
        if interleaved:
            angles = angles[..., : angles.size(-1) // 2].repeat_interleave(2, dim=-1)
        return angles, scale

    cls.__init__ = init
    cls.get_emb = get_emb


PATCH = Patch(NAME, ALWAYS, check, install)

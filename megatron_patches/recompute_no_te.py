"""Selective recomputation without Transformer Engine.

Target    tensor_parallel.random: CheckpointWithoutOutput.__init__.
Why       It tests `fp8 is not None`, so that `fp8=False` counts as fp8, and then asks Transformer
          Engine for the fp8 state. Without Transformer Engine there is no fp8.
Without   NameError, with `--recompute-modules layernorm` among others.
When      No Transformer Engine.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_patches.patch import NO_TE, Patch, find

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput


NAME = "recompute_no_te"
TARGET = "tensor_parallel.random:CheckpointWithoutOutput.__init__"


def check() -> None:
    find(NAME, TARGET)


def install() -> None:
    original = find(NAME, TARGET)

    @functools.wraps(original)
    def init(self: CheckpointWithoutOutput, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    find(NAME, TARGET.rpartition(".")[0]).__init__ = init


PATCH = Patch(NAME, NO_TE, check, install)

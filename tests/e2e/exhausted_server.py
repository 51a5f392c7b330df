"""The server, of which one rank runs out of memory in the middle of a pass as long as the file
EXHAUSTED_RANK_FILE is there; its text is the rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import megatron_patches

megatron_patches.apply()

from megatron.core.transformer.mlp import MLP  # noqa: E402

from slime_like.tinker.__main__ import main  # noqa: E402

VARIABLE = "EXHAUSTED_RANK_FILE"
forward = MLP.forward


def exhausting(self: MLP, *args: object, **keywords: object) -> object:
    file = Path(os.environ[VARIABLE])
    if file.exists() and file.read_text() == os.environ["RANK"]:
        torch.empty(2**60, dtype=torch.uint8)  # more than there is
    return forward(self, *args, **keywords)


if __name__ == "__main__":
    MLP.forward = exhausting
    main()

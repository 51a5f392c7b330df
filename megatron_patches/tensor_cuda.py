"""Make Tensor.cuda() the identity on CPU. The only patch with an effect outside megatron-core.

Target    torch.Tensor.cuda, process-wide.
Why       megatron-core calls the method on tensors in seven places (tied embeddings, broadcast
          data, the gradient scaler's state, checkpoint exchange, ...). A method cannot be replaced
          for one caller only.
Without   These calls raise an error.
When      No CUDA device, where the method could only raise.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import torch

from megatron_patches.patch import NO_CUDA, Patch, missing

NAME = "tensor_cuda"


def _identity(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return self


def check() -> None:
    if not hasattr(torch.Tensor, "cuda"):
        raise missing(NAME, "torch.Tensor.cuda, which is called, is missing")


def install() -> None:
    torch.Tensor.cuda = _identity  # type: ignore[method-assign,assignment]


PATCH = Patch(NAME, NO_CUDA, check, install)

"""A stream of whole weights, cut into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Bucket:
    """Weights that travel together. is_last: nothing comes after it."""

    weights: list[tuple[str, Tensor]] = field(default_factory=list)
    is_last: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.weights]

    @property
    def dtypes(self) -> list[str]:
        return [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.weights]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for _, tensor in self.weights]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.weights)

    def flat(self) -> Tensor:
        """[nbytes] uint8, the weights one after another: what SGLang's load format
        "flattened_bucket" expects."""
        return torch.cat(
            [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in self.weights]
        )


def in_buckets(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """At most `max_bytes` each, or one weight. Weights of one dtype in each, so that all are
    aligned. At any time one bucket and the weight behind it are held."""
    bucket = Bucket()
    for name, tensor in weights:
        if bucket.weights and (
            bucket.nbytes + tensor.nbytes > max_bytes or tensor.dtype != bucket.weights[0][1].dtype
        ):
            yield bucket
            bucket = Bucket()
        bucket.weights.append((name, tensor.detach()))
    if bucket.weights:
        bucket.is_last = True
        yield bucket

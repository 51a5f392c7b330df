"""No exchange of shapes that all pipeline stages know.

Target    pipeline_parallel.p2p_communication: P2PCommunicator._communicate_shapes.
Why       Packed rows differ in length, so `variable_seq_lengths` is on, and every message between
          stages is preceded by one with its shape. The receiver reads it from the device.
Without   Each micro-batch stops the device of each stage for it, in forward and backward. All
          stages have packed the same samples, so they know every length.
How       Within `known_shapes(shapes)` the k-th message in a direction has the k-th shape: the
          schedule without interleaving sends activations and gradients in the order of the
          micro-batches. A sender asserts it. Elsewhere the shapes are exchanged as before.
When      Always.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megatron_patches.patch import ALWAYS, Patch, find

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

NAME = "known_shapes"
CLASS = "pipeline_parallel.p2p_communication:P2PCommunicator"
METHOD = f"{CLASS}._communicate_shapes"
Shape = Sequence[int]
NOTHING = [0, 0, 0]


class KnownShapes:
    """The shapes of one pass over the micro-batches, which counts the messages of each kind."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._messages = dict.fromkeys(("from previous", "from next", "to previous", "to next"), 0)

    def take(self, kind: str) -> list[int]:
        """The shape of the next message of a kind."""
        number = self._messages[kind]
        self._messages[kind] = number + 1
        return list(self._shapes[number])

    def check(self, kind: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            expected = self.take(kind)
            assert list(tensor.shape) == expected, (kind, tensor.shape, expected)


_current: list[KnownShapes] = []


@contextmanager
def known_shapes(shapes: Sequence[Shape]) -> Iterator[None]:
    """During one pass of the schedule without interleaving. shapes: of the hidden states that this
    rank sends and receives, by micro-batch."""
    _current.append(KnownShapes(shapes))
    try:
        yield
    finally:
        _current.pop()


def check() -> None:
    find(NAME, METHOD)


def install() -> None:
    original = find(NAME, METHOD)

    @functools.wraps(original)
    def communicate_shapes(
        self: P2PCommunicator,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        if not _current:
            exchanged: tuple[list[int], list[int]] = original(
                self, tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
            return exchanged
        known = _current[-1]
        known.check("to next", tensor_send_next)
        known.check("to previous", tensor_send_prev)
        return (
            known.take("from previous") if recv_prev else NOTHING,
            known.take("from next") if recv_next else NOTHING,
        )

    find(NAME, CLASS)._communicate_shapes = communicate_shapes


PATCH = Patch(NAME, ALWAYS, check, install)

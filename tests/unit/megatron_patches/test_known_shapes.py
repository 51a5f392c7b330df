"""Shapes between pipeline stages, without messages about them."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.known_shapes import KnownShapes


def test_messages_have_the_shapes_of_the_micro_batches_in_order() -> None:
    known = KnownShapes([(5, 1, 8), (3, 1, 8)])
    assert known.take("from previous") == [5, 1, 8]
    known.check("to previous", torch.zeros(5, 1, 8))  # its gradient, on another count
    assert known.take("from previous") == [3, 1, 8]
    with pytest.raises(AssertionError):
        known.check("to previous", torch.zeros(5, 1, 8))

"""How a weight differs from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.certify.weights import LARGEST_RANK, Difference, WeightComparison


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def difference(tensor: Tensor, expected: Tensor) -> Difference:
    (found,) = WeightComparison({"w": expected}, torch.float32).differences({"w": tensor})
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named_first(value: float) -> None:
    tensor = random(8, 8)
    tensor[2, 3] = value
    found = difference(tensor, random(8, 8))
    assert found.cause == "not finite"
    assert found.text == "w has 1 of 64 numbers that are NaN or infinite, the reference's 0"
    found = difference(torch.full((8, 8), value), tensor)
    assert found.text.endswith("has 64 of 64 numbers that are NaN or infinite, the reference's 1")


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3])
def test_a_small_change_is_no_scale(size: float) -> None:
    """An engine that is one step of a small rate behind."""
    expected = 0.02 * random(64, 64)
    found = difference(expected + size * random(64, 64, seed=2), expected)
    assert found.cause != "wrong scale"


@pytest.mark.parametrize("factor", [1 + 1e-5, 0.5])
def test_a_scale_and_a_shift_are_named(factor: float) -> None:
    expected = 0.02 * random(64, 64)
    assert difference(factor * expected, expected).cause == "wrong scale"
    assert "plus 0.001" in difference(expected + 0.001, expected).text


class Elsewhere(Tensor):
    """A tensor of another device: it takes no part in a computation with one of this."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        here = [a for a in args if type(a) is Tensor]
        if here and function is not Tensor.to:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, dict(kwargs or {}))


def test_a_weight_on_another_device_is_compared() -> None:
    expected = random(16, 16)
    with pytest.raises(RuntimeError, match="same device"):
        expected.as_subclass(Elsewhere) - expected
    assert difference((2 * expected).as_subclass(Elsewhere), expected).cause == "wrong scale"
    assert difference(expected.t().as_subclass(Elsewhere), expected).cause == "transposed weight"


@pytest.mark.parametrize("rank", [1, 7, 250])
@pytest.mark.parametrize("shape", [(900, 1000), (1000, 900)])
def test_the_rank_of_an_adapter(rank: int, shape: tuple[int, int]) -> None:
    expected = random(*shape)
    update = random(shape[0], rank, seed=2) @ random(rank, shape[1], seed=3)
    found = difference((expected + update).double(), expected.double())
    assert (found.cause, found.text.split(",")[0]) == (
        "adapter",
        f"w differs by a matrix of rank {rank}",
    )


def test_no_large_matrix_is_decomposed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    decompose = torch.linalg.svdvals

    def seen(matrix: Tensor) -> Tensor:
        sizes.append(min(matrix.shape))
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "svdvals", seen)
    expected = random(1000, 1000)
    assert difference(expected + random(1000, 1000, seed=2), expected).cause == "different weights"
    update = random(1000, 300, seed=2) @ random(300, 1000, seed=3)
    assert difference(expected + update, expected).cause == "different weights", "of a high rank"
    update = random(1000, 3, seed=2) @ random(3, 1000, seed=3)
    assert difference(expected + update, expected).cause == "adapter"
    assert max(sizes) <= LARGEST_RANK + 8

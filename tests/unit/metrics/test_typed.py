"""Metrics make the host wait for the device once in an optimizer step, where they are reduced;
counted as what would wait on a GPU, on the CPU."""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_like.losses import LossInputs, LossTerms, policy_losses, total_loss
from slime_like.metrics.typed import (
    MetricAccumulator,
    masked_max,
    masked_mean,
    masked_min,
    masked_std,
)
from tests.unit.losses.loss_cases import with_needed
from tests.unit.losses.test_invariance import VARIANTS, legal

# Operations whose result the host must see, or whose size depends on values. A mask as an index is
# one of them too.
WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::unique_consecutive",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::repeat_interleave", "aten::histc", "aten::argwhere",
}  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts them by the place in our own code that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def note(self, what: str) -> None:
        ours = [
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "slime_like/" in frame.filename
        ]
        self.places[f"{what} at {ours[-1] if ours else '?'}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        by_mask = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING or by_mask:
            self.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """tolist, numpy and cpu do not pass through the dispatcher on the CPU."""
    waits = Waits()
    with monkeypatch.context() as patch, waits:
        for name in ("tolist", "numpy", "cpu"):
            real = getattr(Tensor, name)

            def noting(
                self: Tensor, *args: Any, _real: Any = real, _name: str = name, **kwargs: Any
            ) -> Any:
                waits.note(_name)
                return _real(self, *args, **kwargs)

            patch.setattr(Tensor, name, noting)
        yield waits


def micro_batch(seed: int) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    count = 40

    def near(scale: float = 0.2) -> Tensor:
        return -1.0 + scale * torch.randn(count, generator=g)

    return LossInputs(
        log_probs=near().requires_grad_(), loss_mask=torch.rand(count, generator=g) < 0.7,
        loss_weights=torch.full((count,), 0.01),
        seq_ids=torch.arange(count) // 8, num_seqs=5,
        **with_needed({
            "advantages": near(1.0), "old_log_probs": near(), "rollout_log_probs": near(), "ref_log_probs": near(),
            "entropy": -near(), "rewards": near(1.0), "nll_weights": torch.full((count,), 0.01),
            "keep_mask": torch.rand(count, generator=g) < 0.9,
        }, torch.empty(count)),
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_waits_once(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, every metric and backward of three micro-batches do not wait at all; the reduction of
    the step's metrics does, once."""
    name, settings = VARIANTS[variant]
    loss = policy_losses.get(name)
    config = loss.config_type(**settings)
    masks = legal(variant, "token mask")
    terms = LossTerms(
        kl_loss_coef=0.1,
        entropy_coef=0.01,
        positive_nll_coef=0.1,
        opsm_delta=0.01 if masks else None,
        estr_threshold=0.5 if masks else None,
    )
    batches = [micro_batch(seed) for seed in range(3)]
    if not masks:
        batches = [dataclasses.replace(b, keep_mask=None) for b in batches]
    with counted(monkeypatch) as waits:
        accumulator = MetricAccumulator()
        for batch in batches:
            output = total_loss(batch, loss, config, terms)
            output.loss.backward()
            accumulator.add(output.metrics)
        assert not waits.places, f"in the loss: {waits.places}"
        metrics = accumulator.reduce()
    assert len(metrics) > 5
    assert sum(waits.places.values()) == 1, waits.places


def test_every_kind_of_metric_in_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
    with counted(monkeypatch) as waits:
        accumulator = MetricAccumulator()
        for _ in range(2):
            accumulator.add(
                {
                    "mean": masked_mean(x, mask),
                    "std": masked_std(x, mask),
                    "min": masked_min(x, mask),
                    "max": masked_max(x, mask),
                }
            )
        assert accumulator.reduce() == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert waits.places.keys() == {next(iter(waits.places))} and sum(waits.places.values()) == 1


def test_without_metrics_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as waits:
        assert MetricAccumulator().reduce() == {}
    assert not waits.places


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: int(x.argmax()),
    ],
)
def test_what_waits_is_seen(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter can fail."""
    x = torch.tensor([1.0, -2.0])
    with counted(monkeypatch) as waits:
        waiting(x)
    assert sum(waits.places.values()) >= 1


def test_a_mask_is_counted_anew_when_it_changes() -> None:
    """The count is kept for the metrics that follow on the same mask."""
    mask, x = torch.tensor([True, False]), torch.tensor([1.0, 3.0])
    assert float(masked_mean(x, mask).count) == 1  # type: ignore[arg-type]
    mask[1] = True
    assert float(masked_mean(x, mask).count) == 2  # type: ignore[arg-type]
    assert float(masked_mean(x, torch.tensor([False, False])).count) == 0  # type: ignore[arg-type]
    with torch.inference_mode():
        inside = masked_mean(x.clone(), torch.tensor([True, True]))
    assert float(inside.value) == 4


def test_a_share_is_the_mean_of_its_flags() -> None:
    flags, mask = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    as_flags, as_numbers = masked_mean(flags, mask), masked_mean(flags.float(), mask)
    assert (
        float(as_flags.value) == float(as_numbers.value) == 2 and as_flags.count == as_numbers.count
    )
    assert as_flags.value.dtype == torch.float32

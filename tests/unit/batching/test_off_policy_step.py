"""The correction of a rollout's optimizer steps, and functions of the user's own in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.batching.off_policy_step import (
    check_rollout_log_probs,
    correct_steps,
    has_rollout_log_probs,
)
from slime_like.losses.custom_tis import CustomTISArgs, custom_correction
from slime_like.losses.mismatch import with_ess
from slime_like.losses.off_policy import off_policy_correction
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.megatron.packing import pack, unpack
from slime_like.metrics.typed import MetricAccumulator
from slime_like.types import Sample, TrainSample

NAN = math.nan
LENGTHS = (4, 6, 1, 3, 5, 2)
PATH = "mine.weights"


def train_samples() -> tuple[list[list[TrainSample]], list[Tensor]]:
    """Two optimizer steps of three samples, and the trainer's log-probs."""
    generator = torch.Generator().manual_seed(0)
    samples, old = [], []
    for n in LENGTHS:
        rollout = -torch.rand(n, generator=generator) * 3
        old.append(rollout + 0.6 * torch.randn(n, generator=generator))
        samples.append(
            TrainSample(
                tokens=torch.arange(n + 3),
                response_length=n,
                loss_mask=torch.rand(n, generator=generator) > 0.2,
                loss_weights=torch.ones(n),
                rollout_log_probs=rollout,
            )
        )
    return [samples[:3], samples[3:]], old


def test_every_step_is_corrected_on_its_own() -> None:
    steps, old = train_samples()
    config = OffPolicyConfig(
        tis_ratio_type="token", sequence_mask_metric="product", m2po_threshold=0.2
    )
    got, metrics = correct_steps(config, steps, old, None)
    accumulator = MetricAccumulator()
    for start, step in zip((0, 3), steps):
        lengths = torch.tensor([s.response_length for s in step])
        expected = off_policy_correction(
            config,
            old_log_probs=torch.cat(old[start : start + 3]),
            rollout_log_probs=torch.cat(
                [s.rollout_log_probs for s in step if s.rollout_log_probs is not None]
            ),
            loss_mask=torch.cat([s.loss_mask for s in step]),
            seq_ids=torch.repeat_interleave(torch.arange(3), lengths),
            num_seqs=3,
        )
        accumulator.add(expected.metrics)
        local = got[start : start + 3]
        assert expected.keep_mask is not None and expected.importance_weights is not None
        assert torch.equal(
            torch.cat([c.keep_mask for c in local if c.keep_mask is not None]), expected.keep_mask
        )
        assert torch.equal(
            torch.cat([c.importance_weights for c in local if c.importance_weights is not None]),
            expected.importance_weights,
        )
    assert metrics == with_ess(accumulator.reduce())


def test_masks_and_weights_travel_to_the_rows_of_their_tokens() -> None:
    from dataclasses import replace

    steps, old = train_samples()
    got, _ = correct_steps(
        OffPolicyConfig(
            tis_ratio_type="token",
            token_mask_is_threshold_low=0.7,
            token_mask_is_threshold_high=1.4,
        ),
        steps,
        old,
        None,
    )
    samples = [
        replace(s, keep_mask=c.keep_mask, importance_weights=c.importance_weights)
        for s, c in zip([*steps[0], *steps[1]], got)
    ]
    packed = pack(samples, multiple=4)
    assert (
        packed.keep_mask is not None
        and packed.importance_weights is not None
        and packed.keep_mask.dtype == torch.bool
    )
    for values, name in (
        (packed.keep_mask, "keep_mask"),
        (packed.importance_weights, "importance_weights"),
    ):
        for sample, value in zip(samples, unpack(values, samples, packed.lengths)):
            assert torch.equal(value, getattr(sample, name))


def test_without_a_correction_the_mismatch_is_still_measured() -> None:
    steps, old = train_samples()
    got, metrics = correct_steps(OffPolicyConfig(), steps, old, None)
    assert all(c.keep_mask is None and c.importance_weights is None for c in got)
    assert metrics["tis_abs"] > 0 and metrics["rollout_train_logprobs_abs_diff_max"] > 0.5


def sample(sample_id: int, log_probs: Tensor | None, active: bool = True) -> Sample:
    return Sample(
        0, sample_id, torch.arange(4), 2, torch.full((2,), active), rollout_log_probs=log_probs
    )


def test_missing_log_probs_of_the_sampler() -> None:
    complete_samples = [sample(0, torch.zeros(2)), sample(1, None, active=False)]
    assert has_rollout_log_probs(complete_samples)
    check_rollout_log_probs(OffPolicyConfig(tis_ratio_type="token"), complete_samples)
    mixed = [*complete_samples, sample(7, None)]
    assert not has_rollout_log_probs(mixed)
    check_rollout_log_probs(OffPolicyConfig(), mixed)
    for config in (
        OffPolicyConfig(tis_ratio_type="token"),
        OffPolicyConfig(outlier_token_is_threshold_low=0.1),
    ):
        with pytest.raises(ValueError, match=r"sample 7 has no rollout_log_probs"):
            check_rollout_log_probs(config, mixed)


# --- functions of the user's own ---


def slimes_truncation(
    args: CustomTISArgs, **kwargs: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """What slime's own function computes, written anew."""
    assert set(kwargs) == {
        "pg_loss",
        "train_log_probs",
        "rollout_log_probs",
        "loss_masks",
        "total_lengths",
        "response_lengths",
    }
    x = (torch.cat(kwargs["train_log_probs"]) - torch.cat(kwargs["rollout_log_probs"])).exp()
    return (
        kwargs["pg_loss"] * x.clamp(args.tis_clip_low, args.tis_clip),
        kwargs["loss_masks"],
        {"mine/ratio": x, "mine/number": x.new_tensor(3)},
    )


def custom(function: Callable[..., Any], **changes: Any) -> Any:
    steps, old = train_samples()
    step = [*steps[0], *steps[1]]
    values: dict[str, Any] = dict(
        old_log_probs=old,
        rollout_log_probs=[s.rollout_log_probs for s in step],
        loss_masks=[s.loss_mask for s in step],
        total_lengths=[int(s.tokens.numel()) for s in step],
    )
    config = OffPolicyConfig(
        tis_ratio_type="token",
        custom_tis_function_path=PATH,
        token_tis_ratio_clip_high=1.3,
        token_tis_ratio_clip_low=0.6,
    )
    return custom_correction(function, config, **{**values, **changes})


def test_a_function_written_for_slime() -> None:
    got = custom(slimes_truncation)
    steps, old = train_samples()
    own, _ = correct_steps(
        OffPolicyConfig(
            tis_ratio_type="token", token_tis_ratio_clip_high=1.3, token_tis_ratio_clip_low=0.6
        ),
        [[*steps[0], *steps[1]]],
        old,
        None,
    )
    mask = torch.cat([s.loss_mask for step in steps for s in step])
    torch.testing.assert_close(
        got.importance_weights,
        torch.cat([c.importance_weights for c in own if c.importance_weights is not None]),
    )
    assert got.keep_mask.all() and torch.equal(
        got.importance_weights[~mask], torch.ones(int((~mask).sum()))
    )
    accumulator = MetricAccumulator()
    accumulator.add(got.metrics)
    reported = accumulator.reduce()
    x = (
        torch.cat(old)
        - torch.cat(
            [s.rollout_log_probs for step in steps for s in step if s.rollout_log_probs is not None]
        )
    ).exp()
    assert (
        reported["mine/ratio"] == pytest.approx(float(x[mask].mean()))
        and reported["mine/number"] == 3
    )
    assert reported["is_ratio_mean"] == pytest.approx(float(x[mask].mean()))


def test_masks_and_weights_of_zero_reject() -> None:
    def pop(args: CustomTISArgs, **kwargs: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        loss = kwargs["pg_loss"].clone()
        loss[0] = 0.0
        masks = [m.clone() for m in kwargs["loss_masks"]]
        masks[1][:] = 0
        return loss, masks, {}

    masks = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
    got = custom(pop, loss_masks=masks)
    assert (~got.keep_mask).nonzero().squeeze(1).tolist() == [0, *range(4, 10)]
    assert (got.importance_weights == 1).all()


def test_a_broken_sequence_is_dropped_before_the_function_sees_it() -> None:
    def finite(
        args: CustomTISArgs, **kwargs: Any
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        assert torch.cat(kwargs["rollout_log_probs"]).isfinite().all()
        return slimes_truncation(args, **kwargs)

    masks = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
    steps, _ = train_samples()
    rollout = [
        s.rollout_log_probs.clone()
        for step in steps
        for s in step
        if s.rollout_log_probs is not None
    ]
    rollout[1][2] = NAN
    got = custom(finite, loss_masks=masks, rollout_log_probs=rollout)
    assert (~got.keep_mask).nonzero().squeeze(1).tolist() == list(range(4, 10))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss, masks: (loss.mean(), masks, {}), "returned a loss of shape"),
        (lambda loss, masks: (loss, masks[:-1], {}), "masks of"),
        (lambda loss, masks: (-loss, masks, {}), "negative or not finite"),
        (lambda loss, masks: (loss * NAN, masks, {}), "negative or not finite"),
    ],
)
def test_what_a_function_may_not_return(result: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--custom-tis-function-path {PATH}: .*{message}"):
        custom(lambda args, pg_loss, loss_masks, **kwargs: result(pg_loss, loss_masks))


def test_the_function_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text(
        "def half(args, *, pg_loss, loss_masks, **kw):\n    return pg_loss / 2, loss_masks, {}\n"
    )
    steps, old = train_samples()
    config = OffPolicyConfig(
        tis_ratio_type="token", custom_tis_function_path=f"{tmp_path}/weights.py:half"
    )
    got, _ = correct_steps(config, steps, old, None)
    for correction, one in zip(got, [*steps[0], *steps[1]]):
        assert correction.importance_weights is not None
        assert torch.equal(correction.importance_weights, torch.where(one.loss_mask, 0.5, 1.0))

"""Settings of the off-policy correction (`off_policy.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg

_LEVELS = ("token", "seq_mean", "seq_sum", "seq_max")
REJECTION_METRICS = tuple(f"{level}_{kind}" for level, kind in product(_LEVELS, ("k2", "k3")))


@dataclass(frozen=True, slots=True)
class OffPolicyConfig(CheckedSettings):
    tis_ratio_type: str | None = arg(
        None,
        "Truncated importance sampling (TIS): weight the policy loss by the trainer/engine "
        "probability ratio, per token or per sequence.",
        choices=("token", "sequence"),
    )
    token_tis_ratio_clip_high: float = arg(
        2.0,
        "Cap of the weight with --tis-ratio-type token.",
        legal=POSITIVE,
        idle_without="tis_ratio_type=token",
    )
    token_tis_ratio_clip_low: float = arg(
        0.0,
        "Lower bound of the weight with --tis-ratio-type token.",
        legal=NON_NEGATIVE,
        idle_without="tis_ratio_type=token",
        at_most="token_tis_ratio_clip_high",
    )
    sequence_tis_ratio_clip_high: float = arg(
        5.0,
        "Cap of the weight with --tis-ratio-type sequence.",
        legal=POSITIVE,
        idle_without="tis_ratio_type=sequence",
    )
    tis_batch_normalize: bool = arg(
        False,
        "Divide importance weights by their mean over the optimizer step (token: over tokens, "
        "sequence: over sequences).",
        aliases=("--rollout-is-batch-normalize",),
        idle_without="tis_ratio_type",
    )
    sequence_mask_metric: str | None = arg(
        None,
        "Drop sequences by their trainer/engine ratio: geometric mean over tokens, or product.",
        choices=("geometric", "product"),
    )
    geo_mask_low: float = arg(
        0.99,
        "Lower bound of the geometric mean; use a smaller value for MoE models.",
        legal=NON_NEGATIVE,
        idle_without="sequence_mask_metric=geometric",
        at_most="geo_mask_high",
    )
    geo_mask_high: float = arg(
        1.01,
        "Upper bound of the geometric mean; use a larger value for MoE models.",
        legal=POSITIVE,
        idle_without="sequence_mask_metric=geometric",
    )
    product_mask_low: float = arg(
        0.5,
        "Lower bound of the product.",
        legal=NON_NEGATIVE,
        idle_without="sequence_mask_metric=product",
        at_most="product_mask_high",
    )
    product_mask_high: float = arg(
        2.0,
        "Upper bound of the product.",
        legal=POSITIVE,
        idle_without="sequence_mask_metric=product",
    )
    outlier_token_is_threshold_low: float | None = arg(
        None,
        "Drop sequences with a token ratio below this; try 1e-4.",
        legal=NON_NEGATIVE,
        at_most="outlier_token_is_threshold_high",
    )
    outlier_token_is_threshold_high: float | None = arg(
        None, "Drop sequences with a token ratio above this; try 100.", legal=POSITIVE
    )
    token_mask_is_threshold_low: float | None = arg(
        None,
        "Drop tokens with a ratio below this; try 0.5.",
        legal=NON_NEGATIVE,
        at_most="token_mask_is_threshold_high",
        needs="token_mask_is_threshold_high",
    )
    token_mask_is_threshold_high: float | None = arg(
        None,
        "Drop tokens with a ratio above this; try 2.",
        legal=POSITIVE,
        needs="token_mask_is_threshold_low",
    )
    rejection_metric: str | None = arg(
        None,
        "Drop tokens, or sequences by sum, mean or maximum, by an estimate of the KL between "
        "trainer and engine.",
        choices=REJECTION_METRICS,
        aliases=("--rollout-rs",),
        needs="rejection_threshold",
    )
    rejection_threshold: float | None = arg(
        None,
        "Upper bound of the --rejection-metric estimate; try 0.01 for means, 0.1 for tokens.",
        legal=POSITIVE,
        aliases=("--rollout-rs-threshold",),
        needs="rejection_metric",
    )
    m2po_threshold: float | None = arg(
        None,
        "M2PO: drop the tokens with the largest mismatch until the mean squared log-ratio of the "
        "rest is below this; try 0.04.",
        legal=POSITIVE,
    )
    custom_tis_function_path: str | None = arg(
        None,
        "With --use-tis: module.function or file.py:function in place of truncated importance "
        "sampling, called with slime's keyword arguments once per optimizer step; a path ending in "
        "icepop_function selects the built-in IcePop.",
        needs="tis_ratio_type=token",
    )

    @property
    def outliers(self) -> bool:
        low = self.outlier_token_is_threshold_low
        high = self.outlier_token_is_threshold_high
        return low is not None or high is not None

    @property
    def token_mask(self) -> bool:
        low = self.token_mask_is_threshold_low
        high = self.token_mask_is_threshold_high
        return low is not None or high is not None

    @property
    def weights(self) -> bool:
        """Whether tokens get importance weights."""
        return self.tis_ratio_type is not None or self.custom_tis_function_path is not None

    @property
    def enabled(self) -> bool:
        """Whether any correction is on; the rollout engine must then return log-probs."""
        by_name = (self.sequence_mask_metric, self.rejection_metric, self.m2po_threshold)
        masks = self.outliers or self.token_mask or any(x is not None for x in by_name)
        return self.weights or masks

"""Samples that are not trained on, and sampling masks that a run must or must not have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from slime_like.lazy import torch
from slime_like.samples.index import AnySample, RemoteSample, untrained
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus


def mask_failed(sample: AnySample) -> AnySample:
    """Mask out an aborted sample. A sample without a finite reward keeps its mask, and so all
    denominators, and gets advantage 0."""
    if sample.status == SampleStatus.ABORTED:
        sample = untrained(sample)
    elif sample.status != SampleStatus.FAILED:
        return sample
    if isinstance(sample, RemoteSample):
        return sample.with_reward(math.nan)
    return replace(sample, reward=math.nan)


def mask_older(sample: AnySample, version: int) -> AnySample:
    """Mask out the tokens that weights before `version` sampled. The metadata of a sample that
    another rank holds are unchanged."""
    if isinstance(sample, RemoteSample) or min(sample.version_counts, default=version) >= version:
        return sample
    branches = tuple(_mask_older(branch, version) for branch in sample.branches)
    return replace(_mask_older(sample, version), branches=branches)


def _mask_older(sequence: Sample, version: int) -> Sample:
    if not sequence.weight_versions:
        return sequence
    versions = torch.tensor(sequence.weight_versions)
    young = (versions >= version) | (versions == NOT_SAMPLED)
    return replace(sequence, loss_mask=sequence.loss_mask & young)


def oldest_trained(sample: Sample, current: int) -> int:
    """The oldest weight version whose tokens are trained on. current: the version of the policy,
    returned if there are no tokens."""
    oldest = current
    for sequence in (sample, *sample.branches):
        for version, trained in zip(sequence.weight_versions, sequence.loss_mask.tolist()):
            if trained and version != NOT_SAMPLED:
                oldest = min(oldest, version)
    return oldest


def check_sampling_masks(samples: Sequence[AnySample], *, wanted: bool) -> None:
    """Raise ValueError unless all samples that are trained on have token sets, or with `wanted`
    False none has."""
    for s in samples:
        if wanted and s.active_tokens and not s.has("sampling_mask"):
            raise ValueError(
                f"--renormalize-sampled-log-probs: sample {s.sample_id} has no sampling mask; it "
                "was recorded without this flag, or the engine does not report sampling masks"
            )
        if not wanted and s.has("sampling_mask"):
            raise ValueError(
                f"sample {s.sample_id} was recorded with --renormalize-sampled-log-probs: its "
                "log-probs are normalised over the sampling mask; give this flag, and the "
                "--rollout-top-k and --rollout-top-p of that run"
            )

"""One sampling step, as a pure function of logits and uniforms: what makes a response depend on its
seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from slime_like.rollout.engines.base import SamplingParams


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[B, count] float64 in [0, 1): row i is a stream keyed by seeds[i] alone, and a longer draw
    starts with the shorter one.

    Philox (Salmon et al. 2011) is keyed by the whole 64-bit seed; torch's CPU generator would use
    its lower 32 bits only, so that seeds made as (rollout << 32) + sample would repeat.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_tokens(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution in float64.

    logits [B, V]; uniforms [B] float64 (not read when greedy). Returns tokens [B] int64 and
    log_probs [B] float32, the latter under the temperature-scaled distribution before top-k and
    top-p. NaN logits give a NaN log-prob.
    """
    tokens, _, scores = _sample(logits, uniforms, sampling)
    return tokens, _log_prob(scores, tokens)


def sample_from_sets(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sample_tokens`, with log-probs after top-k and top-p, and which tokens these leave: [B,
    V] bool, the sampled one among them."""
    tokens, kept, _ = _sample(logits, uniforms, sampling)
    return tokens, _log_prob(kept, tokens), kept > float("-inf")


def _sample(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B], scaled logits after top-k and top-p [B, V], before them [B, V])."""
    scores = logits.float()
    if sampling.greedy:
        return scores.argmax(-1), scores, scores
    scores = scores / sampling.temperature
    kept = scores
    if sampling.top_k != -1 and sampling.top_k < scores.size(-1):
        kept = TopKLogitsWarper(sampling.top_k)(None, kept)
    if sampling.top_p < 1:
        kept = TopPLogitsWarper(sampling.top_p)(None, kept)
    cumulative = kept.double().softmax(-1).cumsum(-1)
    target = (
        uniforms * cumulative[:, -1]
    )  # below the total also after rounding, as uniforms end at 1 - 2^-53
    # The first entry strictly above the target is a token of positive probability; the clamp is for
    # NaN alone.
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(
        max=scores.size(-1) - 1
    )
    return tokens, kept, scores


def _log_prob(scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)

"""Scores on evaluation sets: the mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slime_like.rollout.engine import SamplingParams
from slime_like.rollout.rollouter import Rollouter
from slime_like.types import Prompt, SampleGroup


def evaluate(rollouter: Rollouter, eval_sets: Mapping[str, Sequence[Prompt]], n_samples: int, sampling: SamplingParams) -> dict[str, float]:
    """Scores of every set under the engine's current weights, by metric name."""
    metrics: dict[str, float] = {}
    for name, prompts in eval_sets.items():
        groups = rollouter.generate(prompts, n_samples, sampling, purpose=f"eval/{name}")
        metrics |= score(name, groups)
    return metrics


def score(name: str, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """eval/<name>/mean, pass@k for k = 1, 2, 4, ... up to the group size, response length and share of truncated responses.

    A sample passes when its reward is at least 1. A sample without a finite reward (a failed grader, say) counts as 0: the score is
    over all prompts.
    """
    samples = [s for g in groups for s in g.samples]
    values = {s.sample_id: s.reward if s.reward is not None and math.isfinite(s.reward) else 0.0 for s in samples}
    metrics = {
        f"eval/{name}/mean": sum(values.values()) / len(values),
        f"eval/{name}/response_length_mean": sum(s.response_length for s in samples) / len(samples),
        f"eval/{name}/truncated_frac": sum(s.status == "truncated" for s in samples) / len(samples),
        f"eval/{name}/unscored_frac": sum(s.reward is None or not math.isfinite(s.reward) for s in samples) / len(samples),
    }
    size = min(len(g.samples) for g in groups)
    k = 1
    while k <= size:
        per_group = [pass_at_k(len(g.samples), sum(values[s.sample_id] >= 1 for s in g.samples), k) for g in groups]
        metrics[f"eval/{name}/pass@{k}"] = sum(per_group) / len(per_group)
        k *= 2
    return metrics


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes, from c passes among n (arXiv 2107.03374, equation 1)."""
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

"""Teacher log-probs for on-policy distillation: of the sampled tokens, and with --opd-topk of the
policy's top-k tokens at each position."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.trainer.rollout_batch import BatchSettings, Rollout
from slime_like.types import Sample, TrainSample


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Teacher scores of this rank's samples. log_probs: [R] each. tokens, probs: with --opd-topk,
    [R, K] each: token ids and the teacher's probabilities, all 0 for a sample without teacher."""

    log_probs: list[Tensor]
    tokens: list[Tensor] | None = None
    probs: list[Tensor] | None = None

    def lay_on(self, place: int, sample: TrainSample) -> TrainSample:
        """`sample`, the one at index `place`, with the scores that its loss needs."""
        if self.tokens is None or self.probs is None:
            return sample
        return dataclasses.replace(
            sample, label_sets=self.tokens[place], label_weights=self.probs[place]
        )


def teacher_scores(
    settings: BatchSettings,
    backend: MegatronBackend,
    rollout: Rollout,
    old: Sequence[LogProbOutput] | None,
) -> TeacherScores:
    """Scores from the Megatron teacher or the served teacher. old: the policy's log-probs.
    Collective."""
    if backend.teacher is None:
        return TeacherScores(_served(rollout.drawn))
    assert old is not None, "see RunConfig.old_is_current"
    if settings.hooks is not None:
        settings.hooks.before_log_prob(backend.teacher.chunks, "teacher_")
    top = [o.top_tokens.long() for o in old if o.top_tokens is not None]
    local = rollout.local
    if top:
        local = [dataclasses.replace(s, label_sets=t) for s, t in zip(local, top, strict=True)]
    taught = [True] * len(local)
    if settings.distillation.teaches_itself:
        prompts = [sample.teacher_prompt for sample in rollout.drawn]
        taught = [prompt is not None for prompt in prompts]
        local = [_as_taught(s, prompt) for s, prompt in zip(local, prompts, strict=True)]
    found = backend.forward(local, backend.teacher)
    # samples without a teacher use the policy's own log-probs: their gap is 0
    log_probs = [t.log_probs if has else o.log_probs for t, o, has in zip(found, old, taught)]
    if not top:
        return TeacherScores(log_probs)
    probs = [
        t.label_log_probs.exp() * has
        for t, has in zip(found, taught)
        if t.label_log_probs is not None
    ]
    return TeacherScores(log_probs, top, probs)


def _as_taught(sample: TrainSample, prompt: Tensor | None) -> TrainSample:
    """The sample with the teacher's prompt and without routed experts. Samples without a teacher's
    prompt get a one-token prompt; their result is not used."""
    response = (
        sample.tokens[-sample.response_length :] if sample.response_length else sample.tokens[:0]
    )
    start = sample.tokens[:1] if prompt is None else prompt.to(sample.tokens.dtype)
    return dataclasses.replace(sample, tokens=torch.cat([start, response]), routes=None)


def _served(samples: Sequence[Sample]) -> list[Tensor]:
    """Log-probs of a served teacher, [R] each. A sample that has none is not trained on."""
    return [
        torch.zeros(s.response_length) if s.teacher_log_probs is None else s.teacher_log_probs
        for s in samples
    ]

"""Teacher log-probs for on-policy distillation: of the sampled tokens, and with --opd-topk of the
policy's top-k tokens at each position."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.batching.rollout_batch import Rollout
from slime_like.batching.settings import BatchSettings
from slime_like.megatron.backend import LogProbOutput, MegatronBackend
from slime_like.types import Sample, TrainSample


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Teacher scores of the local samples."""

    log_probs: list[Tensor]  # [R] each
    # tokens, probs: with --opd-topk, [R, K] each: token ids and the teacher's probabilities, all 0
    # for a sample without teacher
    tokens: list[Tensor] | None = None
    probs: list[Tensor] | None = None

    def with_scores(self, i: int, sample: TrainSample) -> TrainSample:
        """Add the scores that the loss needs to `sample`, the i-th local sample."""
        if self.tokens is None or self.probs is None:
            return sample
        return dataclasses.replace(sample, label_sets=self.tokens[i], label_weights=self.probs[i])


def teacher_scores(
    settings: BatchSettings,
    backend: MegatronBackend,
    rollout: Rollout,
    old: Sequence[LogProbOutput] | None,
) -> TeacherScores:
    """Scores of the teacher, of Megatron or served. old: the policy's log-probs. Collective."""
    if backend.teacher is None:
        return TeacherScores(_served_log_probs(rollout.local_samples))
    assert old is not None, "see RunConfig.old_is_current"
    settings.hooks.before_log_prob(backend.teacher.chunks, "teacher_")
    top = [o.top_tokens.long() for o in old if o.top_tokens is not None]
    local = rollout.local
    if top:
        local = [dataclasses.replace(s, label_sets=t) for s, t in zip(local, top, strict=True)]
    has_teacher = [True] * len(local)
    if settings.distillation.teaches_itself:
        prompts = [sample.teacher_prompt for sample in rollout.local_samples]
        has_teacher = [prompt is not None for prompt in prompts]
        local = [_with_teacher_prompt(s, prompt) for s, prompt in zip(local, prompts, strict=True)]
    outputs = backend.forward(local, backend.teacher)
    # samples without a teacher use the policy's own log-probs: their gap is 0
    log_probs = [
        (output if has else policy).log_probs
        for output, policy, has in zip(outputs, old, has_teacher)
    ]
    if not top:
        return TeacherScores(log_probs)
    probs = [
        output.label_log_probs.exp() * has
        for output, has in zip(outputs, has_teacher)
        if output.label_log_probs is not None
    ]
    return TeacherScores(log_probs, top, probs)


def _with_teacher_prompt(sample: TrainSample, prompt: Tensor | None) -> TrainSample:
    """The sample with the teacher's prompt and without routed experts and selected keys. Samples
    without a teacher's prompt get a one-token prompt; their result is not used."""
    response = sample.tokens[sample.tokens.numel() - sample.response_length :]
    start = sample.tokens[:1] if prompt is None else prompt.to(sample.tokens.dtype)
    return dataclasses.replace(
        sample, tokens=torch.cat([start, response]), routed_experts=None, indexer_topk=None
    )


def _served_log_probs(samples: Sequence[Sample]) -> list[Tensor]:
    """Log-probs of a served teacher, [R] each. A sample that has none is not trained on."""
    return [
        torch.zeros(s.response_length) if s.teacher_log_probs is None else s.teacher_log_probs
        for s in samples
    ]

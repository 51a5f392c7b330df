"""A completion that is generated in parts, because the engine is paused in its middle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.rollouter import truncate_at_stop
from slime_like.samples.indexer_topk import join_indexer_topk
from slime_like.samples.routed_experts import join_routed_experts
from slime_like.types import Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False, slots=True)
class Unfinished:
    """A completion in progress: the model's prompt, and the output so far."""

    request: GenerateRequest
    output: GenerateOutput

    @classmethod
    def of(cls, request: GenerateRequest) -> Unfinished:
        """Before the first token."""
        return cls(request, GenerateOutput(request.sample_id, (), (), "length", ()))

    @property
    def remaining_request(self) -> GenerateRequest:
        """The request for the remaining tokens; its random seed differs from that of the start."""
        tokens = self.output.tokens
        if not tokens:
            return self.request
        key = f"{self.request.seed}@{len(tokens)}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        prompt = (*self.request.prompt_tokens, *tokens)
        return replace(self.request, prompt_tokens=prompt, seed=seed)

    def append(
        self, part: GenerateOutput, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Append the output of `remaining_request`, with the weight versions and log-probs that its
        tokens were sampled with."""
        before = self.output
        if before.tokens and sampling.stop:
            part = truncate_at_stop(tokenizer, self._sample(), part, sampling.stop)
        length = len(self.remaining_request.prompt_tokens) + len(part.tokens)
        sampling_mask = part.sampling_mask
        if sampling_mask is not None:
            sampling_mask = (before.sampling_mask or ()) + sampling_mask
        self.output = replace(
            part,
            sample_id=self.request.sample_id,
            tokens=before.tokens + part.tokens,
            log_probs=before.log_probs + part.log_probs,
            weight_versions=before.weight_versions + part.weight_versions,
            sampling_mask=sampling_mask,
            routed_experts=join_routed_experts(before.routed_experts, part.routed_experts, length),
            indexer_topk=join_indexer_topk(before.indexer_topk, part.indexer_topk, length),
        )

    def _sample(self) -> Sample:
        """The completion as a sample for `truncate_at_stop`: the tokens after its prompt."""
        tokens = torch.tensor((*self.request.prompt_tokens, *self.output.tokens))
        count = len(self.output.tokens)
        return Sample(
            group_id=0,
            sample_id=self.request.sample_id,
            tokens=tokens,
            response_length=count,
            loss_mask=torch.ones(count, dtype=torch.bool),
            status=SampleStatus.PARTIAL,
        )

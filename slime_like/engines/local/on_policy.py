"""True on-policy sampling with the local engine: responses are drawn from the distribution that the
trainer itself computes, bit for bit.

transformers' model and Megatron's are two implementations, whose log-probs differ in the last bits.
Here transformers only drafts. A token is a pure function of its distribution and of one uniform
number of its sample's stream (`sample_tokens`), so the trainer can say in one forward pass over a
drafted row what it would have drawn at every position with the same numbers. Where it draws another
token, that one is taken, the rest is drafted again, and the new row is checked again. A row is done
when the trainer draws every token of it, in one pass over exactly this row. Its log-probs are those
of that pass.

This is speculative sampling (Leviathan et al., arXiv 2211.17192) with the common random number in
place of the acceptance test: nothing depends on the draft but the time.

A pass has one row, because the bits of a matrix product depend on how many rows it has; the trainer
needs micro-batches of one sequence to compute the same bits. For this reason the bits of a token
may also depend on how many tokens follow, and a row need not settle: the trainer may draw A where
the row goes on as it does after B, and B as after A. This takes a uniform number within one
rounding of a step of the distribution. Such a row fails like a request that a server rejects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.decoder import draw_uniforms, sample_tokens
from slime_like.engines.local.engine import LocalEngine
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.model.policy import LogProbHead
from slime_like.megatron.network import Network
from slime_like.types import MicroBatch, TokenOutput, TrainSample

FULL = SamplingParams()  # temperature 1 and all tokens: the logits are scaled already
ONE_ROW = MicroBatchSize(samples=1, tokens=None)
# Drafts of a row, per token that it may have. Each settles at least one more token, unless the bits
# of a token's distribution depend on the length of the row.
DRAFTS_PER_TOKEN = 2


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Computes what the trainer draws at each position of one response.

    Columns: log-probs of the row's tokens, entropies, drawn tokens.
    """

    head: LogProbHead
    uniforms: Tensor  # [R] float64

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        log_probs, entropy = self.head(model, batch, hidden).columns
        logits = self.head.scaled_logits(model, batch, hidden)
        tokens, _ = sample_tokens(logits, self.uniforms.to(logits.device), FULL)
        assert batch.active_rows is not None
        # float32 holds tokens below 2^24 exactly
        drawn = torch.zeros_like(log_probs, dtype=torch.float64)
        drawn = drawn.index_copy(0, batch.active_rows, tokens.double())
        return TokenOutput((log_probs.double(), entropy.double(), drawn))


@dataclass(frozen=True, slots=True)
class TrainersDraws:
    """What the trainer's policy draws. Not collective: the whole model is on this rank."""

    policy: Network
    head: LogProbHead  # at the sampling temperature

    def __call__(
        self, prompt: Sequence[int], response: Sequence[int], uniforms: Tensor
    ) -> tuple[list[int], list[float]]:
        """The token that the policy draws at each position of a response, and the log-probs of the
        response's tokens. uniforms: [R] float64, of the sample's stream."""
        row = TrainSample(
            tokens=torch.tensor([*prompt, *response]),
            response_length=len(response),
            loss_mask=torch.ones(len(response), dtype=torch.bool),
            loss_weights=torch.zeros(len(response)),
        )
        output = self.policy.forward([row], DrawnTokens(self.head, uniforms), ONE_ROW)
        log_probs, _, drawn = (column[0] for column in output.columns)
        return [int(token) for token in drawn.tolist()], log_probs.tolist()


class OnPolicyEngine(LocalEngine):
    """A local engine whose responses the trainer has drawn, with --true-on-policy-mode."""

    def __init__(self, draws: TrainersDraws, *args: object, **keywords: object) -> None:
        """Other arguments as for `LocalEngine`."""
        super().__init__(*args, **keywords)  # type: ignore[arg-type]
        self._draws = draws
        self._redrafts = 0

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        """See `RolloutEngine`. Answers to other sampling parameters than those that are trained on,
        i.e. of an evaluation, are transformers' alone."""
        drafts = super().generate(requests, sampling)
        if not self._is_trained_on(sampling):
            return drafts
        outputs: list[GenerateOutput | None] = [None] * len(requests)
        pending = list(range(len(requests)))
        limit = DRAFTS_PER_TOKEN * sampling.max_new_tokens
        for _ in range(limit):
            redrafts = []
            for i, draft in zip(pending, drafts, strict=True):
                outputs[i], forced = self._drawn(requests[i], draft)
                if outputs[i] is None:
                    redrafts.append((i, replace(requests[i], forced=forced)))
            if not redrafts:
                return [output for output in outputs if output is not None]
            pending = [i for i, _ in redrafts]
            self._redrafts += len(pending)
            drafts = super().generate([request for _, request in redrafts], sampling)
        for i, draft in zip(pending, drafts, strict=True):
            # trained on as a failed request: not at all, and --max-failed-samples counts it
            reason = (
                f"--true-on-policy-mode: unsettled after {limit} drafts: the bits of the trainer's "
                "log-probs depend on the tokens that follow"
            )
            outputs[i] = replace(draft, finish_reason="abort", failure=reason)
        return [output for output in outputs if output is not None]

    def _drawn(
        self, request: GenerateRequest, draft: GenerateOutput
    ) -> tuple[GenerateOutput | None, tuple[int, ...]]:
        """The response with the trainer's log-probs if it has drawn every token of the draft;
        otherwise None, and its tokens up to the first one that it draws differently."""
        size = len(draft.tokens)
        if draft.finish_reason == "abort" or not size:
            return draft, ()
        uniforms = draw_uniforms([request.seed], size)[0]
        tokens, log_probs = self._draws(request.prompt_tokens, draft.tokens, uniforms)
        if not all(map(math.isfinite, log_probs)):
            # broken weights draw nothing; the guards on the trainer's numbers say what is wrong
            return replace(draft, log_probs=tuple(log_probs)), ()
        for at, (drawn, drafted) in enumerate(zip(tokens, draft.tokens, strict=True)):
            if drawn != drafted:
                return None, (*draft.tokens[:at], drawn)
        return replace(draft, log_probs=tuple(log_probs)), ()

    def _is_trained_on(self, sampling: SamplingParams) -> bool:
        whole = (sampling.top_p, sampling.top_k) == (FULL.top_p, FULL.top_k)
        return whole and sampling.temperature == self._draws.head.temperature

    def take_metrics(self) -> dict[str, float]:
        metrics = super().take_metrics()
        metrics["rollout/true_on_policy_redrafts"] = float(self._redrafts)
        self._redrafts = 0
        return metrics

"""Verify that servers hold the trainer's weights, by comparing log-probs of freshly sampled
tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slime_like.distributed.collectives import from_rank_zero
from slime_like.engines.base import GenerateRequest, RolloutEngine, SamplingParams
from slime_like.errors import RunError
from slime_like.megatron.backend import MegatronBackend
from slime_like.types import TrainSample

NUM_PROMPTS = 4
PROMPT_LENGTH = 24
RESPONSE_LENGTH = 16


class WeightCheck:
    """Checks servers after a weight update. Collective over all ranks."""

    def __init__(
        self, backend: MegatronBackend, engine: RolloutEngine, *, limit: float, seed: int
    ) -> None:
        """
        Args:
            limit: Largest mean log-prob difference, in nats.
            seed: For the random prompts.
        """
        assert engine.is_remote
        self._backend = backend
        self._engine = engine
        algorithm = backend.algorithm
        self._repeats = algorithm.log_probs_micro_batch_size or algorithm.micro_batch_size
        self._limit = limit
        self._sampling = SamplingParams(
            temperature=backend.head.temperature, max_new_tokens=RESPONSE_LENGTH
        )
        vocabulary = min(backend.gpt.vocab_size or 2, 50_000)
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(vocabulary, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)
        self._requests = [
            GenerateRequest(-1 - i, tuple(prompt), seed=i)
            for i, prompt in enumerate(prompts.tolist())
        ]

    def run(self, version: int) -> Mapping[str, float]:
        """Returns the largest mean difference over servers. Raises RunError on every rank, naming a
        server with other log-probs than the trainer."""
        worst = 0.0
        responses = from_rank_zero(self._responses)
        if not responses:  # all servers were lost; restarted ones get the weights before requests
            return {}
        for url, outputs in responses:
            samples = [
                self._sample(request, tokens)
                for request, (tokens, _) in zip(self._requests, outputs, strict=True)
            ]
            batch = samples * self._repeats  # repeated to fill micro-batches
            computed = self._backend.forward(batch)[: len(samples)]
            differences = [
                output.log_probs.cpu() - torch.tensor(log_probs)
                for output, (_, log_probs) in zip(computed, outputs, strict=True)
            ]
            gaps = torch.cat(differences).abs()
            mean = float(gaps.mean())
            largest = float(gaps.max())
            if not mean <= self._limit:
                raise RunError(
                    f"the engine {url} does not have the weights of version {version}: its "
                    f"log-probs of {gaps.numel()} tokens differ from the trainer's by {mean:.3g} "
                    f"on average (at most {largest:.3g}; limit {self._limit:g}); "
                    "`slime-like certify` says why"
                )
            worst = max(worst, mean)
        return {"engine/weight_check_log_prob_diff": worst}

    def _responses(self) -> list[tuple[str, list[tuple[tuple[int, ...], tuple[float, ...]]]]]:
        """On rank 0, tokens and log-probs of every server, with its address. Raises RunError; see
        `RolloutEngine.probe`."""
        responses = []
        for url, outputs in self._engine.probe(self._requests, self._sampling):
            responses.append((url, [(output.tokens, output.log_probs) for output in outputs]))
        return responses

    def _sample(self, request: GenerateRequest, tokens: tuple[int, ...]) -> TrainSample:
        ones = torch.ones(len(tokens))
        return TrainSample(
            torch.tensor([*request.prompt_tokens, *tokens]), len(tokens), ones.bool(), ones
        )

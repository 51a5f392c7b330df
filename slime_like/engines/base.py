"""Interface of a rollout engine: prompts in, sampled tokens with log-probs out, weight updates in
between.

`generate_one` and `abort` are called from an event loop, which may run in another thread and be a
new one in each rollout. All other methods are called by the training thread, on all ranks.

Log-prob convention of every engine (SGLang's): the log-prob of the sampled token under the
temperature-scaled distribution over the full vocabulary, BEFORE top-k and top-p; greedy sampling
reports temperature 1. With `SamplingParams.report_sampling_mask` it is AFTER them, normalised over
the kept tokens (the sampling mask), which are reported too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from slime_like.config import GREEDY_OR_TEMPERATURE
from slime_like.images.encoded import EncodedImage

FinishReason = Literal["stop", "length", "abort"]
ABORT_AGAIN_S = 2.0  # an abort that overtook its request on the way to the server found nothing
# tokens, digests of images, adapter
PromptKey: TypeAlias = tuple[tuple[int, ...], tuple[str, ...], str]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Construction raises ValueError naming every field out of range."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability, after top_k
    top_k: int = -1  # -1 keeps all
    max_new_tokens: int = 128  # longest response, stop token included
    stop: tuple[str, ...] = ()  # strings that end a response once its text contains one
    # tokens that end a response, in addition to the model's end tokens (unless ignore_end_tokens);
    # the stop token is part of the response
    stop_token_ids: tuple[int, ...] = ()
    # report the sampling mask of each token, and log-probs over it; no effect when greedy
    report_sampling_mask: bool = False
    ignore_end_tokens: bool = False
    # report the routed experts of each token; ValueError from an engine that cannot
    report_routed_experts: bool = False
    # likewise the keys that indexers of sparse attention select for each token
    report_indexer_topk: bool = False
    # which special tokens the text of a response lacks; see `data.tokenizer.response_text`. Engines
    # return tokens and ignore it
    skip_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        rules = (
            (
                "temperature",
                math.isfinite(self.temperature) and GREEDY_OR_TEMPERATURE.holds(self.temperature),
                f"finite, and {GREEDY_OR_TEMPERATURE.description}",
            ),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1 (1: off)"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or >= 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("stop", all(self.stop), "without empty strings"),
        )
        problems = [
            f"{name} is {getattr(self, name)!r}, must be {legal}"
            for name, holds, legal in rules
            if not holds
        ]
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to sample. Its randomness depends on `seed` only, not on the batch."""

    sample_id: int  # unique over the run
    prompt_tokens: tuple[int, ...]
    seed: int  # any 64-bit integer
    # of the prompt, in the order of their placeholders, of which there are as many as features
    images: tuple[EncodedImage, ...] = ()
    # the first tokens of the response, which the local engine takes instead of sampling them; the
    # others are sampled as if these had been
    forced: tuple[int, ...] = ()
    # name of a LoRA adapter that the engine holds; "": of the weights as the trainer syncs them
    adapter: str = ""

    @property
    def prompt(self) -> PromptKey:
        """What a pass over the prompt depends on, to find equal ones."""
        return self.prompt_tokens, tuple(image.digest for image in self.images), self.adapter


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """One response; all tuples have one entry per response token. Weight versions increase if
    weights were replaced during generation."""

    sample_id: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    # "stop" (a stop token or string, included in tokens), "length" or "abort" (tokens may then be
    # partial)
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    # [k] int32 each, sampling mask of a token, which includes the token; None if not requested
    sampling_mask: tuple[Tensor, ...] | None = None
    # [prompt and response tokens, MoE layers, topk] int16, routed experts; -1 for tokens that were
    # never fed to the model, such as the last one; None if not requested
    routed_experts: Tensor | None = None
    # [tokens with a choice, indexers, K] int32, selected keys of prompt and response, see
    # samples/indexer_topk.py; None if not requested
    indexer_topk: Tensor | None = None
    failure: str | None = None  # why the request was aborted; None if the caller aborted it


class RolloutEngine:
    """Generates responses with weights that the trainer syncs. Engines implement `generate_one` and
    `update_weights`; the other defaults suffice for a synchronous in-process engine."""

    weight_version: int = -1  # of the last complete update; -1 before the first
    # True: shared servers, rank 0 sends all requests; False: each rank has its own engine
    serves_all_ranks: bool = False
    # True: with a quantised --hf-checkpoint, weights arrive in its quantised format
    takes_quantized: bool = False
    takes_prediction_layers: bool = False
    # True: it holds the base model, and a LoRA policy's weights arrive as its adapter
    takes_adapter: bool = False
    # True: other processes hold the weights, and `probe` shows whether they are the trainer's
    is_remote: bool = False

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        """Generate all requests; outputs in their order. Not callable inside an event loop. Raises
        RuntimeError while weights are missing or partially updated, ValueError for requests that
        the engine can never serve."""

        async def generate_all() -> list[GenerateOutput]:
            try:
                return await asyncio.gather(*(self.generate_one(r, sampling) for r in requests))
            finally:
                await self.leave_loop()

        return asyncio.run(generate_all())

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Generate one response. Any number of calls may be pending; the engine limits concurrency.
        Raises as `generate`. A failed request, or one with an invalid response, has finish_reason
        "abort" and a reason in `failure`."""
        raise NotImplementedError

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        """Abort pending requests (None: all). Each returns its partial output with finish_reason
        "abort" and failure None. Ids that are not pending are ignored."""

    async def leave_loop(self) -> None:
        """The caller's event loop is about to end: close its connections."""

    def pause(self) -> None:
        """Stop generating; pending requests keep their tokens."""

    def resume(self) -> None:
        """Continue after `pause`, with the current weights."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. Collective: all ranks consume the stream to its end.

        While paused, pending requests continue with the new weights after `resume`.

        Args:
            weights: (Hugging Face name, full tensor) pairs, the same stream on all ranks.
            version: `weight_version` after the update.

        Raises:
            ValueError: Names unknown, repeated or missing weights and wrong shapes. The engine then
                refuses to generate until an update succeeds.
        """
        raise NotImplementedError

    def check_health(self) -> None:
        """Check the engine before a rollout. Collective. Sets `weight_version` to -1 if the engine
        needs the weights again. Raises RunError if it can no longer serve."""

    def probe(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[tuple[str, list[GenerateOutput]]]:
        """On rank 0 of a remote engine, the outputs of every server for the same requests, with the
        server's address. Raises RunError if no server can answer, or if an answer is invalid."""
        raise NotImplementedError

    def trace(self, sequences: Sequence[Tensor]) -> list[tuple[str, Mapping[str, Tensor]]]:
        """On rank 0 of a remote engine, what its servers compute inside for sequences of tokens [L]
        that no cache has, by the site of `StateRecorder`: [N, C] of all tokens. Only of servers
        that show it, with their addresses."""
        return []

    def release_memory(self) -> None:
        """Release memory on the trainer's GPUs before training; `update_weights` reallocates it."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of requests and weight updates since the last call; rank 0's are logged."""
        return {}

    def close(self) -> None:
        """Shut the engine down at the end of the run."""


class GenerationClient(Protocol):
    """Answers single requests: an engine or a proxy of one. Methods as in `RolloutEngine`."""

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput: ...

    async def abort(self, sample_ids: Collection[int] | None = None) -> None: ...

    async def leave_loop(self) -> None: ...


def num_generating_ranks(engine: RolloutEngine, world_size: int) -> int:
    """Number of ranks, from rank 0 on, that send requests; the others get samples from them."""
    return 1 if engine.serves_all_ranks else world_size

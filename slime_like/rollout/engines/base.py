"""What a rollout engine is: prompts in, sampled tokens with their log-probs out, weights in
between.

Requests are served from an event loop (`generate_one`, `abort`), which may run in a thread of its
own and may be another one in each rollout; everything else is called by the training thread, on all
ranks alike.

Log-prob convention of every engine (SGLang's): the log-prob of the sampled token under the
temperature-scaled distribution over the whole vocabulary, BEFORE top-k and top-p; greedy sampling
reports temperature 1. With `SamplingParams.report_token_sets` it is AFTER them, over the tokens
that they leave, and these are reported too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from slime_like.config import GREEDY_OR_TEMPERATURE

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Raises ValueError naming every field out of range.

    temperature: 0 is greedy. top_p: smallest set of tokens with at least this probability, after
    top_k. top_k: -1 is all. max_new_tokens: longest response, stop token included. stop: strings
    that end a response once its text contains one. stop_token_ids: tokens that end a response
    besides the model's own, which do not with ignore_end_tokens; a stop token stays part of the
    response. report_token_sets: tell which tokens each one was sampled from, with its log-prob over
    these; not when greedy. report_routes: tell to which experts each token went; ValueError from an
    engine that cannot.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    report_token_sets: bool = False
    ignore_end_tokens: bool = False
    report_routes: bool = False

    def __post_init__(self) -> None:
        rules = (
            (
                "temperature",
                math.isfinite(self.temperature) and GREEDY_OR_TEMPERATURE.holds(self.temperature),
                f"finite, and {GREEDY_OR_TEMPERATURE.words}",
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
    """One response to sample. seed alone decides the randomness, whatever else is generated beside
    it."""

    sample_id: int  # unique over the run
    prompt_tokens: tuple[int, ...]
    seed: int  # any 64-bit integer


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """One response; all tuples have one entry per response token.

    finish_reason: "stop" (a stop token or string, included in tokens), "length" or "abort" (tokens
    may then be partial). token_sets: the tokens that each one was sampled from, itself among them;
    None where they were not asked for. routes: the experts of every token, the prompt's too, in
    every layer that has experts; -1 where the token was not computed, as the last one is not; None
    likewise. failure: why an aborted response was given up or rejected; None where its caller asked
    for the abort. weight_versions rise where weights were replaced in the middle.
    """

    sample_id: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]
    token_sets: tuple[Tensor, ...] | None = None  # [k] int32 each
    routes: Tensor | None = None  # [prompt and response tokens, expert layers, topk] int16
    failure: str | None = None


class RolloutEngine(Protocol):
    """Generates responses under weights that the trainer hands over.

    What has a default is enough for an engine that answers each request before anything else
    happens in its process. The defaults return explicitly: to mypy an empty body is abstract.
    """

    weight_version: int = -1  # of the last complete update; -1 before the first
    # True: servers that all ranks share, rank 0 asks for all; False: each rank has an engine of its
    # own, and asks it
    serves_all_ranks: bool = False
    # of a quantised --hf-checkpoint it takes weights in its format; False: unquantised ones
    takes_quantized: bool = False
    takes_prediction_layers: bool = False

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        """Outputs in the order of `requests`; not from within an event loop. Raises RuntimeError
        while the weights are missing or half updated, ValueError for requests that the engine can
        never serve."""

        async def all_of_them() -> list[GenerateOutput]:
            try:
                return await asyncio.gather(*(self.generate_one(r, sampling) for r in requests))
            finally:
                await self.leave_loop()

        return asyncio.run(all_of_them())

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """One output; any number may be waited for at a time, the engine bounds what runs together.
        Raises as `generate`. A request that was given up, or rejected for what came back, has
        finish_reason "abort", and `failure` tells why."""
        ...

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        """End pending requests (None: all of them); each returns what it has, with finish_reason
        "abort" and failure None. Ids that are not pending are passed over."""
        return

    async def leave_loop(self) -> None:
        """The event loop that asked ends: close what belongs to it."""
        return

    def pause(self) -> None:
        """Stop making tokens; pending requests stay, and so do their tokens."""
        return

    def resume(self) -> None:
        """Go on after `pause`, under the weights of now."""
        return

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by (Hugging Face name, full tensor) pairs. A collective: all ranks
        hand in the same stream, to its end. Raises ValueError naming unknown, repeated or missing
        names and wrong shapes; the engine then refuses to generate until an update succeeds.
        `weight_version` becomes `version` at the end. While paused, pending requests go on under
        the new weights."""
        ...

    def check_health(self) -> None:
        """A collective, before a rollout. `weight_version` is -1 after it where the engine needs
        the weights again. Raises RunError when the engine cannot serve any more."""
        return

    def release_memory(self) -> None:
        """Before training: give up what the GPUs of the trainer are needed for. `update_weights`
        takes it back."""
        return

    def take_metrics(self) -> dict[str, float]:
        """Numbers about requests and weight updates since the last call; rank 0's are logged."""
        return {}

    def close(self) -> None:
        """The run ends."""
        return


class GenerationClient(Protocol):
    """What answers single requests: an engine, or what passes them on to one. The methods are
    those of `RolloutEngine`."""

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput: ...

    async def abort(self, sample_ids: Collection[int] | None = None) -> None: ...

    async def leave_loop(self) -> None: ...


def asking_ranks(engine: RolloutEngine, world_size: int) -> int:
    """How many of the first ranks send requests; the others get the samples from them."""
    return 1 if engine.serves_all_ranks else world_size

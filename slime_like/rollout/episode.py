"""A response in several parts: what the model wrote and what its environment answered.

A function named by --custom-generate-function-path makes each response (`CustomGenerate`). In our
convention it is called as ``await function(model, episode)``: it lets the model write, answers, and
returns when the episode is over:

    async def play(model: Model, episode: Episode) -> None:
        while (turn := await model.write(episode, stop=("</call>",))).stopped:
            episode.observe(answer(turn.text))

Only what the model wrote is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

import slime_like
from slime_like.rollout.engines.base import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.sampler_choices import (
    full_routes,
    joined_routes,
    no_sets,
    pad_token_sets,
)
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CUSTOM_GENERATE = "--custom-generate-function-path"
PACKAGE = Path(slime_like.__file__).parent
SeedOf = Callable[[int, int], int]  # (sample id, tokens of the response so far) -> seed


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote at once. finish_reason: "stop" (by a stop token or string, which is part
    of it), "length" or "abort"."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def stopped(self) -> bool:
        return self.finish_reason == "stop"


@dataclass(slots=True)
class Episode:
    """One response in the making. The function may set `reward`, which is then not asked for
    elsewhere, and add to `metadata`.

    limit: tokens that the response may have, of the model and its environment together. tokens,
    loss_mask, log_probs, weight_versions: one entry for each response token. token_sets, routes: as
    of `GenerateOutput`, up to the last token that the model wrote.
    """

    sample_id: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    label: Any
    metadata: dict[str, Any]
    limit: int
    encode: Callable[[str], list[int]]
    evaluation: bool = False
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    token_sets: list[Tensor] | None = None
    routes: Tensor | None = None
    reward: float | None = None
    last: FinishReason | None = None  # how the last part ended
    failure: str | None = None

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.limit - len(self.tokens)

    def observe(self, text: str | Sequence[int]) -> bool:
        """Add what the environment answers, as text or as token ids; it is not trained on. What
        does not fit is left out, and the episode is then over; returns whether there is room for
        more."""
        tokens = self.encode(text) if isinstance(text, str) else list(text)
        fits = tokens[: self.room]
        self.tokens += fits
        self.loss_mask += [False] * len(fits)
        self.log_probs += [0.0] * len(fits)
        self.weight_versions += [NOT_SAMPLED] * len(fits)
        return self.room > 0

    def append(self, output: GenerateOutput) -> None:
        """Add what the model wrote."""
        if output.token_sets is not None:
            before = self.token_sets or []
            between = no_sets(len(self.tokens) - len(before))
            self.token_sets = [*before, *between, *output.token_sets]
        self.tokens += output.tokens
        self.loss_mask += [True] * len(output.tokens)
        self.log_probs += output.log_probs
        self.weight_versions += output.weight_versions
        length = len(self.prompt_tokens) + len(self.tokens)
        self.routes = joined_routes(self.routes, output.routes, length)
        self.last, self.failure = output.finish_reason, output.failure


class Model:
    """The engine, for functions of the user's; local or served. sampling: the run's, or that of
    an evaluation set."""

    def __init__(
        self,
        engine: GenerationClient,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        seed_of: SeedOf,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.seed_of = seed_of

    async def write(
        self,
        episode: Episode,
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Turn:
        """Let the model go on until it stops, or there is no more room. stop: strings that end this
        turn, besides those of the run; temperature: other than the run's only where the turn is not
        trained on."""
        room = min(episode.room, max_new_tokens or episode.room)
        if room <= 0:
            episode.last = "length"
            return Turn("", (), "length")
        sampling = replace(
            self.sampling,
            max_new_tokens=room,
            stop=(*self.sampling.stop, *stop),
            temperature=self.sampling.temperature if temperature is None else temperature,
        )
        request = GenerateRequest(
            episode.sample_id,
            (*episode.prompt_tokens, *episode.tokens),
            self.seed_of(episode.sample_id, len(episode.tokens)),
        )
        output = await self.engine.generate_one(request, sampling)
        episode.append(output)
        if output.finish_reason == "abort":
            raise Aborted
        return Turn(
            self.tokenizer.decode(output.tokens, skip_special_tokens=True),
            output.tokens,
            output.finish_reason,
        )


class Aborted(Exception):
    """The engine dropped the request, or was asked to: the function must not continue."""


# (empty sample, model, whether this is an evaluation) -> the sample with its response
Respond = Callable[[Sample, Model, bool], Awaitable[Sample]]
# (sample that ended, tokenizer, rollout, whether this is an evaluation) -> the sample to grade
SampleHook = Callable[[Sample, Any, int | None, bool], Awaitable[Sample]]


class LoopRunner(Protocol):
    """What of `asyncio.Runner` is used."""

    def __enter__(self) -> LoopRunner: ...

    def __exit__(self, *error: Any) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop: ...

    def run(self, work: Coroutine[Any, Any, Any], /) -> Any: ...


class CustomGenerate:
    """Makes responses with a user's function, all samples of a rank in one event loop.

    A function that raises or takes too long loses its sample, with the reason in its metadata. One
    that returns something other than a sample ends the run.
    """

    def __init__(self, name: str, respond: Respond, *, timeout_s: float) -> None:
        """
        Args:
            name: The flag and the function, for messages.
            respond: The function, in the types of the core.
            timeout_s: Seconds for each sample.
        """
        self.name = name
        self.timeout_s = timeout_s
        self._respond = respond

    def run(
        self, samples: Sequence[Sample], model: Model, *, evaluation: bool, limit: int | None = None
    ) -> list[Sample]:
        """The samples with their responses, in the same order. Not from within an event loop.
        limit: tokens after which a response may be left PARTIAL; here each is made to its end."""
        return asyncio.run(self._respond_to_all(samples, model, evaluation=evaluation))

    async def _respond_to_all(
        self, samples: Sequence[Sample], model: Model, *, evaluation: bool
    ) -> list[Sample]:
        responses = [self.respond(s, model, evaluation=evaluation) for s in samples]
        return list(await asyncio.gather(*responses))

    def runner(self) -> LoopRunner:
        """The event loop of a rollout in which `respond` is called for each sample."""
        return asyncio.Runner()

    def stop(self) -> None:
        """There are enough responses: the requests of the others are aborted, and come back as they
        are. Called in that event loop."""
        return

    def close(self) -> None:
        """No more responses are asked for."""
        return

    async def respond(self, sample: Sample, model: Model, *, evaluation: bool) -> Sample:
        """One sample with its response, ABORTED where the function failed.

        Raises:
            ValueError: the function returned something other than the sample, or a wrong one.
        """
        try:
            response = self._respond(sample, model, evaluation)
            return await asyncio.wait_for(response, self.timeout_s)
        except TimeoutError:
            limit = f"--custom-generate-timeout-s {self.timeout_s:g}"
            return lost(sample, f"{self.name} took longer than {limit}")
        except (Exception, SystemExit) as error:
            if isinstance(error, ValueError) and _raised_here(error):
                raise
            return lost(sample, f"{self.name} raised {type(error).__name__}: {error}"[:500])


def play_episode(function: Callable[[Model, Episode], Awaitable[None]]) -> Respond:
    """``function(model, episode)`` as what `CustomGenerate` calls."""

    async def respond(sample: Sample, model: Model, evaluation: bool) -> Sample:
        episode = episode_of(sample, model.sampling, model.tokenizer, evaluation=evaluation)
        with contextlib.suppress(Aborted):
            await function(model, episode)
        return sample_of(episode, sample, model.tokenizer)

    return respond


def lost(sample: Sample, reason: str) -> Sample:
    """The sample as ABORTED, with the reason in its metadata."""
    metadata = {**sample.metadata, "failure": reason}
    return replace(sample, status=SampleStatus.ABORTED, metadata=metadata)


def _raised_here(error: Exception) -> bool:
    """Whether this package raised it, as it does for a wrong argument or return value. A
    ValueError of the function itself, or of a library that it calls, fails one sample only."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def episode_of(
    sample: Sample,
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    evaluation: bool,
) -> Episode:
    """The episode of a sample, at its beginning."""
    assert sample.response_length == 0, sample.sample_id
    return Episode(
        sample_id=sample.sample_id,
        prompt=sample.text,
        prompt_tokens=tuple(sample.tokens.tolist()),
        label=sample.label,
        metadata=dict(sample.metadata),
        limit=sampling.max_new_tokens,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        evaluation=evaluation,
    )


def sample_of(episode: Episode, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """The sample as the episode left it. Raises ValueError naming the sample where the function
    spoiled it."""
    lengths = {
        len(values)
        for values in (
            episode.tokens,
            episode.loss_mask,
            episode.log_probs,
            episode.weight_versions,
        )
    }
    if len(lengths) > 1 or len(episode.tokens) > episode.limit:
        raise ValueError(
            f"sample {sample.sample_id}: tokens, masks and log-probs of the episode do not belong together; use write and observe"
        )
    reward = episode.reward
    if reward is not None and (
        isinstance(reward, bool | str) or not isinstance(reward, int | float)
    ):
        raise ValueError(
            f"sample {sample.sample_id}: the episode's reward is {type(reward).__name__}, must be a number"
        )
    failed = episode.last == "abort"
    sets, routes = episode.token_sets, episode.routes
    if sets is not None:
        sets = [*sets, *no_sets(len(episode.tokens) - len(sets))]
        if not failed and any(m and not len(ids) for m, ids in zip(episode.loss_mask, sets)):
            raise ValueError(
                f"sample {sample.sample_id}: with --renormalize-sampled-log-probs nothing that was written greedily is trained on; set its entries of episode.loss_mask to False"
            )
    length = len(episode.prompt_tokens) + len(episode.tokens)
    full = episode.last == "length" or episode.room <= 0
    return replace(
        sample,
        tokens=torch.tensor([*episode.prompt_tokens, *episode.tokens], dtype=torch.int64),
        response_length=len(episode.tokens),
        loss_mask=torch.tensor(episode.loss_mask, dtype=torch.bool) & (not failed),
        rollout_log_probs=torch.tensor(episode.log_probs, dtype=torch.float32),
        weight_versions=tuple(episode.weight_versions),
        token_sets=None if sets is None else pad_token_sets(sets),
        routes=None if routes is None else full_routes([routes], length),
        status=SampleStatus.ABORTED
        if failed
        else SampleStatus.TRUNCATED
        if full
        else SampleStatus.COMPLETED,
        reward=None
        if reward is None or failed
        else float(reward)
        if math.isfinite(reward)
        else math.nan,
        response=tokenizer.decode(episode.tokens, skip_special_tokens=True),
        metadata=episode.metadata
        if episode.failure is None
        else {**episode.metadata, "failure": episode.failure},
    )

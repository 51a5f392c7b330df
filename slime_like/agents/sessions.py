"""An agent's session: the requests and completions of one episode, with every token kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from slime_like.agents.answer_parsers import parse_answer
from slime_like.agents.messages import BadRequest, ContextExceeded, canonical, images_of
from slime_like.agents.templates import ChatTemplate
from slime_like.agents.tool_calls import NO_TOOLS, Parsed
from slime_like.agents.tree import NextPrompt, SessionTree, TreeTurn
from slime_like.data.messages import ASSISTANT, Message, tool_call
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rewards.limit import beyond_limit
from slime_like.rollout.episode import Model

Finish = Literal["stop", "length", "tool_calls"]
SESSION_COUNTS = (
    "answers",
    "tool_errors",
    "overridden",
    "refused",
    "engine_failures",
    "internal_errors",
    "workers_lost",
    "restarted",
)
TREE_COUNTS = ("roots", "forks", "foreign_messages", "rewritten_turns")
PREFIX = 64  # tokens at the end of a prompt that contain the full opening of a turn
WAITING = 32  # waiting requests of a session, in addition to running ones
EXTRA_REQUESTS = 8  # further requests of a session: rewards, token counts
COUNTS_PER_TURN = 8  # prompts per turn that a client may have counted


class TooManyRequests(Exception):
    """The session cannot accept this request, now or at all; the message is for the client."""


class EngineAborted(Exception):
    """The engine aborted the request; the client may retry."""


class SessionEnded(Exception):
    """The episode is over; no more completions."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request."""

    messages: tuple[Message, ...]  # in canonical form
    tools: list[dict[str, Any]] | None = None  # for the chat template
    n: int = 1
    stop: tuple[str, ...] = ()  # stop strings
    max_tokens: int | None = None  # per completion
    seed: int | None = None  # the client's
    overridden: int = 0  # number of the client's sampling parameters that the run's override


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion: its message as sent to the client, and the generated tokens with their texts
    and log-probs."""

    message: Message
    finish: Finish
    prompt_tokens: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session."""

    turns: int = 256  # completions per episode
    concurrent: int = 8  # concurrent requests
    waiting: int = WAITING  # queued requests; further ones are rejected with a retry hint
    answers: int = 16  # completions per request
    positions: int | None = None  # the model's context length, None: unlimited
    tokens: int | None = None  # per completion; None: unlimited
    reward: float = 1e6  # magnitude of a turn's and of the episode's


class Session:
    """The session of one sample."""

    def __init__(
        self,
        sample_id: int,
        model: Model,
        template: ChatTemplate,
        *,
        tool_format: str = NO_TOOLS,
        limits: SessionLimits | None = None,
    ) -> None:
        """
        Args:
            sample_id: Of the sample; with the run's seed it decides the randomness.
            model: The engine, with the run's sampling parameters.
            template: The model's.
            tool_format: See `answer_parsers.parse_answer`.
        """
        self.sample_id = sample_id
        self.tree = SessionTree(template)  # its turns
        self.counts: Counter[str] = Counter()  # see `numbers`
        self.aborted = False  # the run no longer needs the episode
        self.on_abort = asyncio.Event()  # set then
        self.ended = False
        self._model = model
        self._template = template
        self._format = tool_format
        self._limits = limits or SessionLimits()
        self._slots = asyncio.Semaphore(self._limits.concurrent)
        self._pending = self._requests = 0
        self._running: set[asyncio.Task[object]] = set()
        self._request_counts: Counter[bytes] = Counter()
        self._main: TreeTurn | None = None  # the turn that the main conversation continues
        self._started = False

    async def answer(self, request: ParsedRequest) -> list[Choice]:
        """Generate the completions of a request.

        Raises:
            BadRequest: The request is invalid.
            TooManyRequests, EngineAborted, SessionEnded: See the classes.
        """
        limits = self._limits
        self._check_open()
        if not 1 <= request.n <= limits.answers:
            raise BadRequest(f"n is {request.n}; 1 to {limits.answers} is offered")
        self._check_turns(request)
        if self._pending >= limits.concurrent + limits.waiting:
            self.counts["refused"] += 1
            raise TooManyRequests(f"{self._pending} requests of this session are waiting already")
        self._pending += 1
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with self._slots:
                return await self._answer(request)
        except asyncio.CancelledError:
            if not self.ended:
                raise
            task.uncancel()  # cancelled by `end`, and not by the waiting caller
            raise SessionEnded("the episode has ended") from None
        finally:
            self._pending -= 1
            self._running.discard(task)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count an HTTP request, before its body is read. Raises TooManyRequests."""
        if self._requests >= self._limits.concurrent + self._limits.waiting + EXTRA_REQUESTS:
            self.counts["refused"] += 1
            raise TooManyRequests(f"{self._requests} requests of this session are open already")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def _check_open(self) -> None:
        if self.ended:
            raise SessionEnded("the episode has ended")
        if self.aborted:
            raise SessionEnded("the run asks for no more of this episode")

    def _check_turns(self, request: ParsedRequest) -> None:
        if self.counts["answers"] + request.n > self._limits.turns:
            self.counts["refused"] += 1
            raise TooManyRequests(f"the episode has had its {self._limits.turns} answers")

    def end(self) -> None:
        """End the session; running requests are aborted."""
        self.ended = True
        for task in list(self._running):
            task.cancel()

    def numbers(self) -> dict[str, float]:
        """Statistics of the session: answers; roots and forks of its tree; foreign_messages
        (assistant messages from the client that the model did not generate in this form);
        rewritten_turns; tool_errors (unparsable calls); overridden (sampling parameters); refused;
        engine_failures."""
        counts = {name: float(self.counts[name]) for name in SESSION_COUNTS}
        return counts | {name: float(self.tree.counts[name]) for name in TREE_COUNTS}

    async def _answer(self, request: ParsedRequest) -> list[Choice]:
        self._check_open()  # checked again after waiting
        self._check_turns(request)
        prompt = self.tree.next_prompt(request.messages, request.tools)
        room = self._room(prompt)
        if room <= 0:
            raise ContextExceeded(
                f"context_length_exceeded: the conversation has {len(prompt.tokens)} tokens, and "
                "the model's context length leaves no room for an answer "
                "(--rollout-max-response-len, and the model's positions)"
            )
        for limit in (request.max_tokens, self._limits.tokens):
            if limit is not None:
                room = min(room, limit)
        sampling = replace(
            self._model.sampling,
            max_new_tokens=room,
            stop=(*self._model.sampling.stop, *request.stop),
        )
        # counted before the first await, so that the limit holds
        self.counts["answers"] += request.n
        is_main = not self._started or (self._main is not None and prompt.parent is self._main)
        self._started = True
        before = self._main
        if is_main:
            self._main = None  # concurrent requests are side conversations
        requests = [
            self._request(prompt, request, is_main=is_main and not i) for i in range(request.n)
        ]
        generate = self._model.engine.generate_one
        try:
            outputs = await asyncio.gather(*(generate(request, sampling) for request in requests))
        except BaseException:  # also of a client that leaves: it has had no answer
            self.counts["answers"] -= request.n
            if is_main:
                self._main = before
                self._started = before is not None
            raise
        if self.ended:
            raise SessionEnded("the episode has ended")
        self.counts["overridden"] += request.overridden
        for output in outputs:
            if output.finish_reason == "abort":
                self.counts["answers"] -= request.n
                if output.failure is None:
                    self.aborted = True
                    self.on_abort.set()
                    raise SessionEnded("the run asks for no more of this episode")
                self.counts["engine_failures"] += 1
                if is_main:  # the client may retry
                    self._main = before
                    self._started = before is not None
                raise EngineAborted(output.failure)
        choices = [self._choice(prompt, request, sampling.stop, output) for output in outputs]
        if is_main:
            self._main = self.tree.turns[-request.n]
        return choices

    def _room(self, prompt: NextPrompt) -> int:
        """Maximum tokens of a completion, given the response length from the first prompt of its
        path on, and the model's context length."""
        first = len(prompt.tokens if prompt.parent is None else prompt.parent.root.prompt)
        room = self._model.sampling.max_new_tokens - (len(prompt.tokens) - first)
        if self._limits.positions is None:
            return room
        return min(room, self._limits.positions - len(prompt.tokens))

    def _request(
        self, prompt: NextPrompt, request: ParsedRequest, *, is_main: bool
    ) -> GenerateRequest:
        """Requests of the main conversation draw the same random numbers as an episode with the
        same texts; other requests are seeded by their tokens, so that neither order nor timing
        affects the samples."""
        if is_main and request.seed is None:
            first = prompt.tokens if prompt.parent is None else prompt.parent.root.prompt
            position = len(prompt.tokens) - len(first)
        else:
            digests = [image.digest for image in images_of(request.messages)]
            key = repr((prompt.tokens, request.seed, *digests)).encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            again = self._request_counts[digest]
            self._request_counts[digest] += 1
            position = (int.from_bytes(digest, "big") + again) % 2**62 + 2**32
        seed = self._model.seed_of(self.sample_id, position)
        identity = self.sample_id if self._pending <= 1 and request.n == 1 else self._new_id()
        return GenerateRequest(identity, prompt.tokens, seed, images_of(request.messages))

    def _new_id(self) -> int:
        """A unique id: concurrent requests of a sample need separate ids, because the engine aborts
        by id."""
        self.counts["identities"] += 1
        return (1 << 62) + (self.sample_id << 20) + self.counts["identities"] % (1 << 20)

    def _choice(
        self,
        prompt: NextPrompt,
        request: ParsedRequest,
        stop: Sequence[str],
        output: GenerateOutput,
    ) -> Choice:
        tokens = output.tokens
        has_end_token = bool(tokens) and tokens[-1] in self._template.end_ids
        text = self._template.decode(tokens[:-1] if has_end_token else tokens)
        text, stop_string = split_at_stop_string(text, stop)
        prefix = self._template.decode(prompt.tokens[-PREFIX:])
        parsed = parse_answer(
            text,
            self._format,
            tokenizer=self._template.tokenizer,
            prefix=prefix,
            tools=request.tools,
        )
        self.counts["tool_errors"] += parsed.errors
        message = self._message(parsed)
        truncated = output.finish_reason == "length"
        self.tree.add(prompt, request.messages, request.tools, message, output)
        finish: Finish = "length" if truncated else "stop"
        if parsed.calls and not truncated:  # a further call may have been cut
            finish = "tool_calls"
        return Choice(message, finish, len(prompt.tokens), tokens, output.log_probs, stop_string)

    def _message(self, parsed: Parsed) -> dict[str, object]:
        message: dict[str, Any] = {"role": ASSISTANT, "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = []
        for name, arguments in parsed.calls:
            self.counts["calls"] += 1
            # nine letters and digits, as required by the templates of some families
            identity = f"c{self.counts['calls']:08d}"
            message["tool_calls"].append(tool_call(identity, name, arguments))
        return message

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling parameters."""
        return self._model.sampling

    def prompt_length(self, request: ParsedRequest) -> int:
        """Number of prompt tokens of a request. Raises BadRequest, and TooManyRequests for far more
        counts than turns."""
        self.counts["counted"] += 1
        if self.counts["counted"] > COUNTS_PER_TURN * self._limits.turns:
            self.counts["refused"] += 1
            raise TooManyRequests(
                f"{self.counts['counted'] - 1} prompts of this session were counted"
            )
        return len(self.tree.next_prompt(request.messages, request.tools).tokens)

    def add_reward(self, value: object, answer: object = -1) -> None:
        """Add to the reward of one turn.

        Args:
            value: A finite number.
            answer: Index of the turn in the episode; negative: from the end.

        Raises:
            BadRequest: An invalid value, or no such turn.
        """
        turns = self.tree.turns
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"the reward of an answer must be a number, not {value!r:.60}")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"the reward of an answer must be finite, not {value!r:.60}")
        if isinstance(answer, bool) or not isinstance(answer, int):
            raise BadRequest(f"answer must be an integer, not {answer!r:.60}")
        if not -len(turns) <= answer < len(turns):
            raise BadRequest(f"answer is {answer}; the episode has had {len(turns)} answers")
        reason = beyond_limit(value, self._limits.reward)
        # a client may add as often as it likes
        reason = reason or beyond_limit(turns[answer].reward + value, self._limits.reward)
        if reason is not None:
            raise BadRequest(f"answer {answer}: {reason}")
        turns[answer].reward += value

    def text_of(self, tokens: Sequence[int], *, stopped: bool) -> str:
        """Text for a reward function; see `response_text`."""
        return self._model.text_of(tokens, stopped=stopped)

    def token_text(self, token: int) -> str:
        """Text of a single token, for clients that request log-probs."""
        return self._template.decode([token])


def split_at_stop_string(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that stop string, which clients do not receive."""
    matches = [(text.find(s), s) for s in stop if s in text]
    if not matches:
        return text, None
    place, stop_string = min(matches)
    return text[:place], stop_string


def messages_of(body: Mapping[str, object]) -> list[Message]:
    """The messages in a body of chat completions. Raises BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    return [canonical(message, place) for place, message in enumerate(messages)]

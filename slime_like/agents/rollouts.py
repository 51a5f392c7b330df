"""Agent episodes as rollouts: a user function, a process per episode, or a text environment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from slime_like.agents.answer_parsers import default_format
from slime_like.agents.episode_samples import answers_of, bad_reward, sample_of
from slime_like.agents.live_episodes import (
    Begin,
    LiveEpisode,
    LiveEpisodes,
    partial_sample,
    reset_episode,
)
from slime_like.agents.loop_watch import LoopWatch
from slime_like.agents.pausable_engine import PausableEngine
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import Session, SessionLimits
from slime_like.agents.task import Task, cancel_and_wait, seed_of
from slime_like.agents.tasks import WorkerLost
from slime_like.agents.templates import ChatTemplate
from slime_like.batching.turn_credit import TURNS
from slime_like.data.agent_prompts import question_of, row_messages
from slime_like.rollout.episode import CustomGenerate, LoopRunner, Model, mark_aborted
from slime_like.text import both_ends
from slime_like.types import ANSWER_REWARDS, Sample

logger = logging.getLogger(__name__)
CHARACTERS_PER_TOKEN = 16  # no text has so many on average: English has 4, indented code up to 10
AGENT_FUNCTION = "--agent-function-path"
AGENT_COMMAND = "--agent-command"
AGENT_WORKERS = "--agent-worker-keys"
TOOL_FORMAT = "--agent-tool-format"


class Play(Protocol):
    """An agent: runs an episode and returns its reward, or None to use the run's reward
    function."""

    def __call__(self, task: Task, /) -> Awaitable[float | None]: ...


class AgentGenerate(CustomGenerate):
    """Runs agent episodes, all of a rank in one event loop with their gateway. If an agent raises,
    times out or makes no request, its sample is aborted, with the reason in its metadata."""

    def __init__(
        self,
        name: str,
        play: Play,
        gateway: Gateway,
        *,
        end_ids: frozenset[int],
        template_arguments: Mapping[str, object] | None = None,
        tool_format: str | None = None,
        limits: SessionLimits,
        timeout_s: float,
        episodes: int,
        observations: bool = False,
        by_turn: bool = False,
        by_token: bool = False,
        attempts: int = 1,
        own_timeout: bool = False,
        pauses: bool = False,
    ) -> None:
        """
        Args:
            name: Flag and agent, for messages.
            play: The agent.
            gateway: The gateway that agents connect to.
            end_ids: Tokens that end a completion.
            template_arguments: --apply-chat-template-kwargs.
            tool_format: See `answer_parsers.parse_answer`; None: `default_format`.
            limits: Limits of each session.
            timeout_s: Time limit per episode in seconds.
            episodes: Concurrent episodes.
            observations: See `SessionTree.branches`.
            attempts: Maximum attempts per episode; it is repeated when a worker is lost.
            own_timeout: The agent enforces `timeout_s` itself.
            pauses: Episodes may be paused and continued in a later rollout.
            by_turn: Advantages are per turn; otherwise turn rewards are added to the episode's.
            by_token: Advantages need to know which turn continues which.
        """
        super().__init__(name, self._unused, timeout_s=timeout_s)
        self._play = play
        self._gateway = gateway
        self._end_ids = end_ids
        self._template_arguments = template_arguments
        self._tool_format = tool_format
        self._limits = limits
        self._episodes = episodes
        self._observations = observations
        self._by_turn = by_turn
        self._by_token = by_token
        self._attempts = attempts
        self._limit_s = None if own_timeout else timeout_s
        code = getattr(play, "__code__", None)
        self._watch = None if code is None else LoopWatch(name, code)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._live = LiveEpisodes() if pauses else None
        self._warned_restart = False

    def run(
        self, samples: Sequence[Sample], model: Model, *, evaluation: bool, limit: int | None = None
    ) -> list[Sample]:
        """See `CustomGenerate`. With --partial-rollout an episode pauses after `limit` generated
        tokens and is PARTIAL; it continues when its sample is passed again. Episodes of an earlier
        process are restarted."""
        live = self._live
        if live is None:
            return super().run(samples, model, evaluation=evaluation)
        if evaluation:
            return live.run_while_paused(
                lambda: self._respond_to_all(samples, model, evaluation=True)
            )
        prepared, begin = self._prepare(samples, model)
        return live.round(prepared, begin, model.engine, limit)

    def runner(self) -> LoopRunner:
        """See `CustomGenerate`."""
        return super().runner() if self._live is None else self._live.loop

    def stop(self) -> None:
        """See `CustomGenerate`."""
        if self._live is not None:
            self._live.stop()

    def _prepare(self, samples: Sequence[Sample], model: Model) -> tuple[list[Sample], Begin]:
        """Arguments for `LiveEpisodes`; episodes that another process started are restarted."""
        assert self._live is not None
        lost_ids = {
            s.sample_id for s in samples if s.response_length and s.sample_id not in self._live
        }
        if lost_ids and not self._warned_restart:
            self._warned_restart = True
            logger.warning("episodes of a resumed run are played from their beginning")
        prepared = [reset_episode(s) if s.sample_id in lost_ids else s for s in samples]
        return prepared, partial(self._start_episode, model, lost_ids)

    def _start_episode(
        self,
        model: Model,
        lost_ids: Collection[int],
        sample: Sample,
        limit: float,
        changed: asyncio.Event,
    ) -> LiveEpisode:
        engine = PausableEngine(model.engine, model.tokenizer, self._slot(), changed)
        engine.allow(limit)
        pausable = Model(engine, model.tokenizer, model.sampling, model.seed_of, model.processor)
        sessions: list[Session] = []

        async def play() -> Sample:
            await engine.begin()
            try:
                async with self._watch_loop(), self._gateway.listening():
                    counts = {"restarted": int(sample.sample_id in lost_ids)}
                    return await self._respond_to(sample, pausable, False, sessions, counts, engine)
            finally:
                engine.end()

        return LiveEpisode(
            engine,
            asyncio.get_running_loop().create_task(play()),
            lambda: partial_sample(sample, sessions[-1] if sessions else None, engine),
        )

    def close(self) -> None:
        """End paused agents."""
        if self._live is not None:
            self._live.close()

    async def respond(self, sample: Sample, model: Model, *, evaluation: bool) -> Sample:
        """The sample with the first branch of its session, and the other branches attached; PARTIAL
        if `stop` interrupted it."""
        live = self._live
        if live is not None and not evaluation:
            (prepared,), begin = self._prepare([sample], model)
            return await live.respond(prepared, begin, model.engine)
        async with self._slot(), self._watch_loop(), self._gateway.listening():
            return await self._respond_to(sample, model, evaluation, [])

    async def _respond_to(
        self,
        sample: Sample,
        model: Model,
        evaluation: bool,
        sessions: list[Session],
        counts: Mapping[str, int] | None = None,
        engine: PausableEngine | None = None,
    ) -> Sample:
        """Run one episode.

        Args:
            sessions: Extended by its sessions.
            counts: Initial counts of each session.
            engine: May be paused.
        """
        try:
            seed = seed_of(sample, evaluation=evaluation)
        except ValueError as error:
            return mark_aborted(sample, str(error))
        positions = self._limits.positions
        template = ChatTemplate(
            model.tokenizer,
            self._end_ids,
            self._template_arguments,
            max_characters=None if positions is None else CHARACTERS_PER_TOKEN * positions,
            processor=model.processor,
        )
        tool_format = self._tool_format or default_format(model.tokenizer)
        messages = row_messages(sample)
        for lost_workers in range(self._attempts):
            session = Session(
                sample.sample_id, model, template, tool_format=tool_format, limits=self._limits
            )
            sessions.append(session)
            key = secrets.token_urlsafe(24)
            task = Task(
                sample.sample_id,
                question_of(messages[-1]),
                sample.label,
                dict(sample.metadata),
                evaluation,
                url="",
                api_key=key,
                seed=seed,
                messages=messages,
                session=session,
            )
            session.counts.update({"workers_lost": lost_workers, **(counts or {})})
            try:
                async with self._gateway.episode(key, session):
                    task.url = self._gateway.url
                    reward, reason = await self._outcome(task, engine)
                break
            except WorkerLost as error:
                reward = None
                reason = f"{self.name}: {error}"
        if reason is None:
            reason = bad_reward(reward, self._limits.reward)
        branches = session.tree.branches(observations=self._observations)
        by_turn = self._by_turn and not evaluation
        if (self._by_turn or self._by_token) and not evaluation:
            task.metadata[TURNS] = answers_of(session.tree, branches, summed=not by_turn)
        rewards = [turn.reward for turn in session.tree.turns]
        if not by_turn and reason is None and any(rewards):
            total = sum(rewards) + (reward or 0.0)
            reason = bad_reward(total, self._limits.reward)
            if reward is None:
                task.metadata[ANSWER_REWARDS] = total
            else:
                reward = total
        return sample_of(sample, task, session, branches, reward, reason)

    async def _outcome(self, task: Task, engine: PausableEngine | None) -> tuple[Any, str | None]:
        """Result of the agent, or why it has none. The agent runs in a separate task, so that
        cancelling it does not affect other episodes. engine: its pauses do not count towards the
        time limit."""
        assert task.session is not None
        play = asyncio.create_task(self._run_agent(task))
        abort = asyncio.create_task(task.session.on_abort.wait())
        try:
            remaining = self._limit_s
            started = asyncio.get_running_loop().time()
            while remaining is None or remaining > 0:
                done, _ = await asyncio.wait(
                    {play, abort}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED
                )
                if done or self._limit_s is None:
                    break
                elapsed = asyncio.get_running_loop().time() - started
                remaining = self._limit_s - elapsed + (0.0 if engine is None else engine.paused_s)
            if not play.done() and task.session.aborted:
                return None, "the run asks for no more of this episode"
            if not play.done():
                return None, f"{self.name} took longer than --agent-timeout-s {self.timeout_s:g}"
        finally:
            abort.cancel()
            await cancel_and_wait(play)
            await task.close()
        if play.cancelled():
            return None, f"{self.name} raised CancelledError"
        if isinstance(error := play.exception(), WorkerLost):
            raise error
        if error is not None:
            return None, both_ends(f"{self.name} raised {type(error).__name__}: {error}")
        return play.result(), None

    async def _run_agent(self, task: Task) -> object:
        try:
            return await self._play(task)
        except SystemExit as error:  # this would end the event loop
            raise RuntimeError(f"SystemExit: {error}") from error

    @contextlib.asynccontextmanager
    async def _watch_loop(self) -> AsyncIterator[None]:
        with contextlib.nullcontext() if self._watch is None else self._watch.running():
            yield

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._episodes)
        return self._slots[1]

    async def _unused(self, sample: Sample, model: Model, evaluation: bool) -> Sample:
        raise AssertionError("respond is overridden")

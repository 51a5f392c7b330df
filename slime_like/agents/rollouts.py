"""Agent episodes as rollouts: a user function, a process per episode, or a text environment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
from asyncio.tasks import _unregister_task
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from arguments.rules.agents import worker_keys
from arguments.run_config import RunConfig
from slime_like.advantages import TurnEstimator, advantage_estimators, follows_tokens
from slime_like.agents.answer_parsers import TRANSFORMERS, default_format
from slime_like.agents.command import run_command
from slime_like.agents.credit import answers_of
from slime_like.agents.environment import player
from slime_like.agents.episode_samples import bad_reward, sample_of
from slime_like.agents.live_episodes import Begin, LiveEpisode, LiveEpisodes, begun_again, so_far
from slime_like.agents.loop_watch import LoopWatch
from slime_like.agents.pausable_engine import PausableEngine
from slime_like.agents.server import CONNECTIONS, Gateway
from slime_like.agents.sessions import WAITING, Session, SessionLimits
from slime_like.agents.task import CANCEL_S, Task
from slime_like.agents.tasks import TaskQueue, WorkerLost
from slime_like.agents.templates import ChatTemplate
from slime_like.environments.base import FLAG as ENVIRONMENT
from slime_like.environments.base import environment_maker
from slime_like.import_utils import load_function
from slime_like.rollout.answer_credit import ANSWERS
from slime_like.rollout.episode import CustomGenerate, LoopRunner, Model, mark_aborted
from slime_like.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
AGENT_FUNCTION, AGENT_COMMAND = "--agent-function-path", "--agent-command"
AGENT_WORKERS = "--agent-worker-keys"
TOOL_FORMAT = "--agent-tool-format"
EVALUATION_SEED, MOST_SEED = 2**30, 2**31


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
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._live = LiveEpisodes() if pauses else None
        self._told_restart = False

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
            return live.meanwhile(lambda: self._respond_to_all(samples, model, evaluation=True))
        given, begin = self._beginning(samples, model)
        return live.round(given, begin, model.engine, limit)

    def runner(self) -> LoopRunner:
        """See `CustomGenerate`."""
        return super().runner() if self._live is None else self._live.loop

    def stop(self) -> None:
        """See `CustomGenerate`."""
        if self._live is not None:
            self._live.stop()

    def _beginning(self, samples: Sequence[Sample], model: Model) -> tuple[list[Sample], Begin]:
        """Arguments for `LiveEpisodes`; episodes that another process started are restarted."""
        assert self._live is not None
        gone = {s.sample_id for s in samples if s.response_length and s.sample_id not in self._live}
        if gone and not self._told_restart:
            self._told_restart = True
            logger.warning("episodes of a resumed run are played from their beginning")
        given = [begun_again(s) if s.sample_id in gone else s for s in samples]
        return given, partial(self._begin, model, gone)

    def _begin(
        self,
        model: Model,
        gone: Collection[int],
        sample: Sample,
        limit: float,
        changed: asyncio.Event,
    ) -> LiveEpisode:
        engine = PausableEngine(model.engine, model.tokenizer, self._place(), changed)
        engine.allow(limit)
        own = Model(engine, model.tokenizer, model.sampling, model.seed_of)
        sessions: list[Session] = []

        async def play() -> Sample:
            await engine.begin()
            try:
                async with self._watched(), self._gateway.listening():
                    counts = {"restarted": int(sample.sample_id in gone)}
                    return await self._respond_to(sample, own, False, sessions, counts, engine)
            finally:
                engine.end()

        return LiveEpisode(
            engine,
            asyncio.get_running_loop().create_task(play()),
            lambda: so_far(sample, sessions[-1] if sessions else None, engine),
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
            (given,), begin = self._beginning([sample], model)
            return await live.respond(given, begin, model.engine)
        async with self._place(), self._watched(), self._gateway.listening():
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
        """Run one episode. sessions: extended by its sessions. counts: initial counts of each
        session. engine: may be paused."""
        try:
            seed = seed_of(sample, evaluation=evaluation)
        except ValueError as error:
            return mark_aborted(sample, str(error))
        template = ChatTemplate(model.tokenizer, self._end_ids, self._template_arguments)
        found = self._tool_format or default_format(model.tokenizer)
        for lost_workers in range(self._attempts):
            session = Session(
                sample.sample_id, model, template, tool_format=found, limits=self._limits
            )
            sessions.append(session)
            key = secrets.token_urlsafe(24)
            task = Task(
                sample.sample_id, sample.text, sample.label, dict(sample.metadata), evaluation,
                "", key, seed, session=session,
            )  # fmt: skip
            session.counts.update({"workers_lost": lost_workers, **(counts or {})})
            try:
                async with self._gateway.episode(key, session):
                    task.url = self._gateway.url
                    reward, reason = await self._outcome(task, engine)
                break
            except WorkerLost as error:
                reward, reason = None, f"{self.name}: {error}"
        if reason is None:
            reason = bad_reward(reward)
        branches = session.tree.branches(observations=self._observations)
        by_turn = self._by_turn and not evaluation
        if by_turn or (self._by_token and not evaluation):
            task.metadata[ANSWERS] = answers_of(session.tree, branches, summed=not by_turn)
        if (
            not by_turn
            and reason is None
            and any(rewards := [turn.reward for turn in session.tree.turns])
        ):
            reward = sum(rewards) + (reward or 0.0)
        return sample_of(sample, task, session, branches, reward, reason)

    async def _outcome(self, task: Task, engine: PausableEngine | None) -> tuple[Any, str | None]:
        """Result of the agent, or why it has none. The agent runs in a separate task, so that
        cancelling it does not affect other episodes. engine: its pauses do not count towards the
        time limit."""
        assert task.session is not None
        play = asyncio.create_task(self._contained(task))
        abort = asyncio.create_task(task.session.on_abort.wait())
        try:
            left = self._limit_s
            begun = asyncio.get_running_loop().time()
            while left is None or left > 0:
                done, _ = await asyncio.wait(
                    {play, abort}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if done or self._limit_s is None:
                    break
                taken = asyncio.get_running_loop().time() - begun
                left = self._limit_s - taken + (0.0 if engine is None else engine.paused_s)
            if not play.done() and task.session.aborted:
                return None, "the run asks for no more of this episode"
            if not play.done():
                return None, f"{self.name} took longer than --agent-timeout-s {self.timeout_s:g}"
        finally:
            abort.cancel()
            await _ended(play)
            await task.close()
        if play.cancelled():
            return None, f"{self.name} raised CancelledError"
        if isinstance(error := play.exception(), WorkerLost):
            raise error
        if error is not None:
            return None, f"{self.name} raised {type(error).__name__}: {error}"[:500]
        return play.result(), None

    async def _contained(self, task: Task) -> object:
        try:
            return await self._play(task)
        except SystemExit as error:  # this would end the event loop
            raise RuntimeError(f"SystemExit: {error}") from error

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        with contextlib.nullcontext() if self._watch is None else self._watch.running():
            yield

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._episodes)
        return self._places[1]

    async def _unused(self, sample: Sample, model: Model, evaluation: bool) -> Sample:
        raise AssertionError("respond is overridden")


async def _ended(play: asyncio.Task[object]) -> None:
    """Cancel a task; if it ignores the cancellation it is abandoned, and the end of the event loop
    does not wait for it."""
    if play.done():
        return
    play.cancel()
    await asyncio.wait({play}, timeout=CANCEL_S)
    if not play.done():
        play.add_done_callback(lambda task: task.cancelled() or task.exception())
        play._log_destroy_pending = False  # type: ignore[attr-defined]
        _unregister_task(play)


def seed_of(sample: Sample, *, evaluation: bool) -> int:
    """Seed for an agent's own randomness, equal for all samples of a prompt: ``seed`` in the row's
    metadata, otherwise the prompt's number in the run (from 2**30 on for evaluations, whose prompts
    are numbered separately). Raises ValueError for an invalid seed."""
    seed = sample.metadata.get("seed", (sample.group_id + (EVALUATION_SEED if evaluation else 0)))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MOST_SEED:
        raise ValueError(f"'seed' of the row's metadata is {seed!r:.60}, must be 0 to 2**31 - 1")
    return seed


def agent_generate(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, rank: int
) -> AgentGenerate | None:
    """The agent runner of --agent-function-path, --agent-command, --agent-environment or
    --agent-worker-keys; None without these. Raises ValueError naming the flag."""
    config = run.agents
    tasks: TaskQueue | None = None
    play: Callable[[Task], Awaitable[object]]
    if (path := config.agent_function_path) is not None:
        name = f"{AGENT_FUNCTION} {path}"
        play = load_function(path, AGENT_FUNCTION)
    elif (line := config.agent_command) is not None:
        name = f"{AGENT_COMMAND} {line!r}"
        words = shlex.split(line)

        async def play(task: Task) -> float | None:
            return await run_command(words, task)
    elif (spec := config.agent_environment) is not None:
        name = f"{ENVIRONMENT} {spec}"
        play = player(environment_maker(spec))
    elif (file := config.agent_worker_keys) is not None:
        name = f"{AGENT_WORKERS} {file}"
        keys = worker_keys(file)
        tasks = TaskQueue(keys, config.agent_timeout_s, config.agent_heartbeat_s)
        play = tasks.play
    else:
        return None
    end_ids = end_ids_of(run, tokenizer)
    ChatTemplate(tokenizer, end_ids)  # rejects tokenizers without a template early
    if config.agent_tool_format == TRANSFORMERS and default_format(tokenizer) != TRANSFORMERS:
        raise ValueError(f"{TOOL_FORMAT} {TRANSFORMERS}: the tokenizer has no response_template")
    port = config.agent_port + rank if config.agent_port else 0
    estimator = advantage_estimators.get(run.algorithm.advantage_estimator)
    return AgentGenerate(
        name,
        play,
        Gateway(
            config.agent_host,
            port,
            max_body=int(config.agent_max_body_mb * 2**20),
            connections=CONNECTIONS + config.agent_episodes * (config.agent_concurrency + WAITING),
            tasks=tasks,
        ),
        end_ids=end_ids,
        template_arguments=run.data.apply_chat_template_kwargs,
        tool_format=config.agent_tool_format,
        limits=SessionLimits(
            config.agent_max_turns,
            config.agent_concurrency,
            positions=run.gpt.max_position_embeddings,
            tokens=config.agent_max_answer_tokens,
        ),
        timeout_s=config.agent_timeout_s,
        episodes=config.agent_episodes,
        observations=run.algorithm.observation_loss_coef > 0,
        pauses=run.scheduling.partial_rollout,
        attempts=1 if tasks is None else 1 + config.agent_retries,
        own_timeout=tasks is not None,
        by_turn=isinstance(estimator, TurnEstimator),
        by_token=follows_tokens(estimator),
    )


def end_ids_of(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the checkpoint's, the tokenizer's and
    --rollout-stop-token-ids."""
    from transformers import AutoConfig

    from slime_like.rollout.engines.local.engine import end_token_ids

    folder = str(run.model.hf_checkpoint)
    trust = run.model.trust_remote_code
    found = end_token_ids(
        folder, AutoConfig.from_pretrained(folder, trust_remote_code=trust), tokenizer
    )
    return found | frozenset(run.rollout.rollout_stop_token_ids or ())

"""Agent that runs a text environment: observations are user messages, model turns are actions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from slime_like.agents.messages import ContextExceeded
from slime_like.agents.sessions import TooManyRequests
from slime_like.agents.task import Task
from slime_like.environments.interface import Observation, Step, TextEnvironment
from slime_like.images.files import as_image

T = TypeVar("T")

logger = logging.getLogger(__name__)


def player(make: Callable[[], TextEnvironment]) -> Callable[[Task], Awaitable[float | None]]:
    """An agent that runs one environment per episode.

    The reward of a step is the reward of its turn. The agent returns None if the environment leaves
    the reward of the last step to the run's reward function, otherwise 0. An episode at the token
    limit or at --agent-max-turns ends where it is.

    Args:
        make: Creates the environment; called in the thread of the episode.
    """

    async def play(task: Task) -> float | None:
        thread = _EpisodeThread()
        environment: TextEnvironment | None = None
        try:
            environment = await thread.call(make)
            return await _episode(environment, thread, task)
        finally:
            await thread.end(getattr(environment, "close", None))

    return play


async def _episode(
    environment: TextEnvironment, thread: _EpisodeThread, task: Task
) -> float | None:
    row = {
        "prompt": task.prompt,
        "label": task.label,
        "metadata": task.metadata,
        "messages": task.messages,
        "images": task.images,
        "evaluation": task.evaluation,
    }
    observation = await thread.call(environment.reset, seed=task.seed, row=row)
    messages = [{"role": "user", "content": await thread.call(_content, observation)}]
    result: float | None = 0.0
    while True:
        try:
            answer = await task.chat(messages)
        except (ContextExceeded, TooManyRequests):
            if len(messages) == 1:
                raise
            return result
        message = answer["choices"][0]["message"]
        step = await thread.call(environment.step, message["content"] or "")
        observation, reward, done = _validate_step(environment, step)
        result = None if reward is None else 0.0
        if reward is not None:
            task.reward(reward)
        if done:
            return result
        content = await thread.call(_content, observation)
        messages += [message, {"role": "user", "content": content}]


def _validate_step(environment: TextEnvironment, step: object) -> Step:
    if isinstance(step, tuple) and len(step) == 3 and isinstance(step[0], str | list | tuple):
        observation, reward, done = step
        return observation, None if reward is None else float(reward), bool(done)
    name = type(environment).__name__
    raise TypeError(
        f"{name}.step returned {step!r:.100}; return (text, reward, done), or a list of texts and "
        "pictures in place of the text"
    )


def _content(observation: Observation) -> str | list[dict[str, object]]:
    """The content of a message, in OpenAI's form. Raises ImageProblem for what is neither text nor
    image."""
    if isinstance(observation, str):
        return observation
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": as_image(part).data_url}}
        for part in observation
    ]


class _EpisodeThread:
    """Runs the calls of one episode sequentially in one daemon thread, so that a hanging call
    blocks neither the event loop nor the end of the run. Async functions run in the event loop."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    async def call(self, function: Callable[..., T], *values: object, **named: object) -> T:
        """Call the function; returns or raises as it does."""
        if inspect.iscoroutinefunction(function):
            return await function(*values, **named)
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*values, **named))
            except StopIteration as error:  # asyncio's futures do not take it, and would never end
                stopped = RuntimeError(f"StopIteration: {error}")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return await asyncio.wrap_future(future)

    async def end(self, close: Callable[[], object] | None) -> None:
        """Schedule `close` after all other calls; waits for it only if it is async."""
        if close is not None and not inspect.iscoroutinefunction(close):
            self._jobs.put(close)
        self._jobs.put(None)
        if inspect.iscoroutinefunction(close):
            await close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # of `close`: the episode is already over
                logger.exception("an environment could not be closed")

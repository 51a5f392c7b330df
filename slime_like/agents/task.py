"""The episode as an agent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from asyncio.tasks import _unregister_task
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_like.agents.messages import BadRequest
from slime_like.agents.openai_api import chat_json, parse_chat_request
from slime_like.agents.sessions import Session
from slime_like.images.files import image_bytes
from slime_like.types import Sample

CANCEL_S = 5.0  # seconds for a cancelled agent, or a client, to end
EVALUATION_SEED = 2**30
MAX_SEED = 2**31


@dataclass(slots=True)
class Task:
    """One episode, for an agent."""

    sample_id: int
    prompt: str  # the row's, without chat template; of a list of messages the last one's text
    label: Any
    metadata: dict[str, Any]  # the row's; additions are visible to the reward function
    evaluation: bool  # nothing is trained on
    url: str  # for Anthropic's SDKs
    api_key: str
    seed: int = 0  # equal for all samples of a prompt
    model: str = "policy"
    # the row's, in OpenAI's format, with images as data URLs
    messages: list[dict[str, Any]] = field(default_factory=list)
    session: Session | None = field(default=None, repr=False)
    _clients: list[Any] = field(default_factory=list, repr=False)

    @property
    def base_url(self) -> str:
        """For OpenAI's SDKs."""
        return f"{self.url}/v1"

    @property
    def images(self) -> list[bytes]:
        """The files of the row's images, in order."""
        parts = [
            part for m in self.messages if isinstance(m["content"], list) for part in m["content"]
        ]
        return [image_bytes(p["image_url"]["url"]) for p in parts if p["type"] == "image_url"]

    async def chat(
        self, messages: Sequence[Mapping[str, object]], **parameters: object
    ) -> dict[str, Any]:
        """Request a chat completion from the gateway, without HTTP.

        Args:
            messages: In OpenAI's format.
            parameters: Of chat completions; unsupported ones are rejected.

        Raises:
            BadRequest: Where HTTP clients get status 400; also the other errors of
                `Session.answer`.
        """
        assert self.session is not None
        self._no_stream(parameters)
        body = {"messages": list(messages), **parameters}
        request = parse_chat_request(body, self.session.sampling)
        choices = await self.session.answer(request)
        logprobs = bool(body.get("logprobs"))
        return chat_json(choices, self.session, self.model, logprobs=logprobs)

    @staticmethod
    def _no_stream(parameters: Mapping[str, object]) -> None:
        if parameters.get("stream"):
            raise BadRequest("task.chat has no streams; use an SDK at task.base_url")

    def reward(self, value: float, answer: int = -1) -> None:
        """Add to the reward of one turn, the newest by default. Raises BadRequest unless the value
        is a finite number and the turn exists."""
        assert self.session is not None
        self.session.add_reward(value, answer)

    def openai(self) -> Any:
        """``openai.AsyncOpenAI`` for this episode. Raises ValueError without the package."""
        return self._client(_package("openai"), "AsyncOpenAI", self.base_url)

    def anthropic(self) -> Any:
        """``anthropic.AsyncAnthropic`` for this episode. Raises ValueError without the package."""
        return self._client(_package("anthropic"), "AsyncAnthropic", self.url)

    def _client(self, package: Any, name: str, url: str) -> Any:
        # The gateway speaks plain HTTP: reading the machine's certificates, 17 ms for each client,
        # would be most of the time of a short episode.
        http = package.DefaultAsyncHttpxClient(verify=False)
        client = getattr(package, name)(base_url=url, api_key=self.api_key, http_client=http)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Close the connections of its clients, as far as possible."""
        for client in self._clients:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), CANCEL_S)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"task.{name}() needs the package {name}: pip install {name}") from None


def seed_of(sample: Sample, *, evaluation: bool) -> int:
    """Seed for an agent's own randomness, equal for all samples of a prompt: ``seed`` in the row's
    metadata, otherwise the prompt's number in the run (from 2**30 on for evaluations, whose prompts
    are numbered separately). Raises ValueError for an invalid seed."""
    seed = sample.metadata.get("seed", (sample.group_id + (EVALUATION_SEED if evaluation else 0)))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MAX_SEED:
        raise ValueError(f"'seed' of the row's metadata is {seed!r:.60}, must be 0 to 2**31 - 1")
    return seed


async def cancel_and_wait(play: asyncio.Task[object]) -> None:
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

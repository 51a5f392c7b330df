"""A reward server: ``POST --rm-url {"prompt", "response", "label"}`` returns a number, or an object
with --reward-key.

Equivalent to slime's ``remote_rm``. Failed connections, 429 and 5xx are retried with exponential
backoff until --rm-timeout-s; any other status, or a response that is not JSON, is final. Runs in a
worker's event loop (`worker.py`), which handles many samples concurrently.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Any

from slime_like.rewards.custom import RewardArgs
from slime_like.samples.slime_sample import SlimeSample
from slime_like.text import clean, mask_url

MAX_BYTES = 2**20  # of a response
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    return None


def prepare() -> None:
    _certificates()


@cache
def _certificates() -> ssl.SSLContext:
    """Cached, because loading takes longer than a request."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def only_remote(response: str, label: object, metadata: Mapping[str, object]) -> float:
    raise AssertionError("remote rewards are computed in an event loop")


async def score(args: RewardArgs, sample: SlimeSample) -> object:
    """Query the reward server. Raises RuntimeError with URL and status if the error is permanent or
    there is no time to retry."""
    import httpx

    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    assert args.rm_url is not None
    pause = FIRST_PAUSE_S
    tries = 0
    deadline = asyncio.get_running_loop().time() + args.rm_timeout_s
    # one connection per request: a killed worker leaves none behind; proxies in the environment are
    # ignored
    async with httpx.AsyncClient(
        timeout=args.rm_timeout_s, trust_env=False, verify=_certificates()
    ) as client:
        while True:
            try:
                return await _ask(client, args.rm_url, body)
            except _Retry as reason:
                tries += 1
                wait = pause * (0.5 + random.random())
                if asyncio.get_running_loop().time() + wait > deadline:
                    raise RuntimeError(
                        f"{mask_url(args.rm_url)} {reason}, {tries} times"
                    ) from reason
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE_S)


class _Retry(Exception):
    """A temporary error."""


async def _ask(client: Any, url: str, body: dict[str, Any]) -> object:
    import httpx

    data = b""
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code == 429 or response.status_code >= 500:
                raise _Retry(f"answered {response.status_code}")
            if response.status_code != 200:
                raise RuntimeError(f"{mask_url(url)} answered {response.status_code}")
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MAX_BYTES:
                    raise RuntimeError(f"{mask_url(url)} answered more than {MAX_BYTES} bytes")
    except httpx.TransportError as error:
        raise _Retry(f"could not be reached ({type(error).__name__})") from error
    try:
        return json.loads(data)
    except ValueError as error:
        raise RuntimeError(
            f"{mask_url(url)} answered no JSON: {clean(data[:80].decode(errors='replace'))}"
        ) from error

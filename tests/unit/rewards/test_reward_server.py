"""Deadlines of requests to servers that grade, against a server in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from slime_like.rewards.reward_server import AnsweredOnce, OutOfTime, RewardServer

OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = (
    "endless"  # a response that goes on with white space, as some servers keep connections alive
)
BOUND_S = 60.0  # of what ends much earlier


class Answers:
    """Of a server: what it says to its next connections; the last one to all others."""

    def __init__(self, *says: str) -> None:
        self.says = list(says)
        self.asked = 0
        self.open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        say = self.says[min(self.asked, len(self.says) - 1)]
        self.asked += 1
        self.open += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            if say != ENDLESS:
                writer.write(OK + f"Content-Length: {len(say)}\r\n\r\n{say}".encode())
                return
            writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
            while not reader.at_eof():
                writer.write(b"1\r\n \r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def serving(answers: Answers) -> AsyncIterator[Callable[[float], RewardServer]]:
    """Yields clients by their timeout."""
    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield lambda timeout_s: RewardServer(url, timeout_s)
    finally:
        server.close()


async def is_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_response_that_never_ends_ends_at_the_deadline() -> None:
    async def run() -> None:
        answers = Answers(ENDLESS)
        async with serving(answers) as client:
            with pytest.raises(OutOfTime, match=r"gave no whole answer in 0\.5 s"):
                await asyncio.wait_for(client(0.5).post({}), BOUND_S)
            await is_true(lambda: answers.open == 0)

    asyncio.run(run())


def test_a_request_ends_with_the_sample_that_asks() -> None:
    """So that a sample beyond its deadline leaves no request beside those of --rm-concurrency."""

    async def run() -> None:
        answers = Answers(ENDLESS)
        async with serving(answers) as client:
            once = AnsweredOnce(client(BOUND_S), 10, float)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(once.score({}), 0.5)
            await is_true(lambda: answers.asked == 1 and answers.open == 0)

    asyncio.run(run())


@pytest.mark.parametrize("first_s", [0.5, BOUND_S])
def test_a_late_asker_has_its_own_time(first_s: float) -> None:
    """When the first one's is over, by its own clock or the client's; then the others share one
    request again."""

    async def run() -> None:
        answers = Answers(ENDLESS, "0.5")
        async with serving(answers) as client:
            server = client(BOUND_S)
            once = AnsweredOnce(server, 10, float)
            if first_s < BOUND_S:
                object.__setattr__(server, "timeout_s", first_s)
            first = asyncio.ensure_future(asyncio.wait_for(once.score({}), 2.0))
            await is_true(lambda: answers.asked == 1)
            object.__setattr__(server, "timeout_s", BOUND_S)
            late = [asyncio.ensure_future(once.score({})) for _ in range(5)]
            with pytest.raises((TimeoutError, OutOfTime)):
                await first
            async with asyncio.timeout(BOUND_S):
                assert await asyncio.gather(*late) == [0.5] * 5
            assert answers.asked == 2 and await once.score({}) == 0.5

    asyncio.run(run())


def test_a_lasting_fault_is_that_of_all_who_ask() -> None:
    async def run() -> None:
        answers = Answers("nonsense")
        async with serving(answers) as client:
            once = AnsweredOnce(client(BOUND_S), 10, float)
            failed = await asyncio.gather(
                *(once.score({}) for _ in range(5)), return_exceptions=True
            )
            assert all("answered no JSON: nonsense" in str(error) for error in failed)
            assert answers.asked == 1

    asyncio.run(run())

"""The dispatcher alone: order within a model, turns between models and samplers, what a restart finds in the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime_like.server.dispatcher import Dispatcher, request_id
from slime_like.server.errors import Failed, HttpError, Refused
from slime_like.server.futures import Request, json_result
from slime_like.server.journal import Journal


class Recorder:
    """Operations that note what is executed, and wait while `held`."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.free = asyncio.Event()
        self.free.set()

    async def execute(self, requests: Sequence[Request]) -> list[tuple[bytes, str] | Exception]:
        await self.free.wait()
        self.seen.append([r.id for r in requests])
        if requests[0].body.get("bad"):
            raise Refused("it is bad")
        return [json_result({"id": r.id}) for r in requests]

    def alike(self, first: Request, other: Request) -> bool:
        return first.body == other.body

    def executed(self, request: Request) -> None: ...


def make(journal: Journal, **settings: float) -> tuple[Dispatcher, Recorder]:
    operations = Recorder()
    options = {"most_waiting": 100, "gap_s": 60.0, "batch": 3, **settings}
    return Dispatcher(journal, operations, **options), operations  # type: ignore[arg-type]


def request(queue: str, seq: int, **body: object) -> Request:
    return Request(request_id(queue, seq), "op", queue, seq, "me", f"digest {body}", time.time(), dict(body))


async def settled(dispatcher: Dispatcher) -> None:
    for pending in list(dispatcher.requests.values()):
        await asyncio.wait_for(pending.done.wait(), 5)


def test_models_take_turns_and_each_keeps_its_order() -> None:
    async def run() -> None:
        dispatcher, operations = make(Journal(":memory:"))
        for key in "abc":
            dispatcher.queue(key, next_seq=1)
        for key, order in (("a", (3, 1, 2, 5, 4)), ("b", (1, 2)), ("c", (2, 1))):
            for seq in order:
                dispatcher.accept(request(key, seq))
        dispatcher.start()
        await settled(dispatcher)
        await dispatcher.stop()
        executed = [ids[0] for ids in operations.seen]
        assert executed == ["a/1", "b/1", "c/1", "a/2", "b/2", "c/2", "a/3", "a/4", "a/5"]

    asyncio.run(run())


def test_samples_alike_are_executed_together_up_to_a_batch() -> None:
    async def run() -> None:
        dispatcher, operations = make(Journal(":memory:"))
        dispatcher.queue("s", next_seq=None)
        for seq in range(5):
            dispatcher.accept(request("s", seq, temperature=1.0 if seq != 1 else 0.5))
        dispatcher.start()
        await settled(dispatcher)
        await dispatcher.stop()
        assert operations.seen == [["s/0", "s/2", "s/3"], ["s/1"], ["s/4"]]

    asyncio.run(run())


def test_too_much_waiting_is_refused_for_a_while() -> None:
    async def run() -> None:
        dispatcher, _ = make(Journal(":memory:"), most_waiting=2)
        dispatcher.queue("a", next_seq=1)
        dispatcher.accept(request("a", 1))
        dispatcher.accept(request("a", 2))
        with pytest.raises(HttpError, match="try again later") as caught:
            dispatcher.accept(request("a", 3))
        assert caught.value.status == 429, "which clients repeat"

    asyncio.run(run())


def test_a_restart_finds_results_and_what_waits(tmp_path: Path) -> None:
    """A request that was accepted is executed after a restart; one whose model is gone fails, and says so."""

    async def before() -> None:
        dispatcher, operations = make(Journal(tmp_path / "journal"))
        for key in "ab":
            dispatcher.queue(key, next_seq=1)
        dispatcher.start()
        dispatcher.accept(request("a", 1))
        dispatcher.accept(request("b", 1, bad=True))
        await settled(dispatcher)
        operations.free.clear()
        dispatcher.accept(request("a", 2, data=b"\x00\xff"))
        dispatcher.accept(request("b", 2))
        await asyncio.sleep(0.05)
        await dispatcher.stop()

    async def after() -> None:
        dispatcher, operations = make(Journal(tmp_path / "journal"))
        for key in "ab":
            dispatcher.queue(key, next_seq=2)
        dispatcher.restore(lambda r: r.queue == "b")
        assert dispatcher.known("a", 1, "digest {}") is dispatcher.requests["a/1"]
        dispatcher.start()
        await settled(dispatcher)
        await dispatcher.stop()
        assert operations.seen == [["a/2"]]
        results = {id: await dispatcher.result(found, hold_s=1) for id, found in dispatcher.requests.items()}
        assert results["a/1"] == json_result({"id": "a/1"})
        assert results["b/1"] == {"error": "it is bad", "category": "user"}
        assert isinstance(results["b/2"], dict) and results["b/2"]["category"] == "server" and "restarted" in results["b/2"]["error"]

    asyncio.run(before())
    asyncio.run(after())


def test_results_are_forgotten_after_a_while_and_then_gone() -> None:
    async def run() -> None:
        dispatcher, _ = make(Journal(":memory:"))
        dispatcher.queue("a", next_seq=1)
        dispatcher.start()
        found = dispatcher.accept(request("a", 1))
        await dispatcher.result(found, hold_s=5)
        dispatcher.expire(time.time() + 60)
        assert dispatcher.find("a/1", "me") is found
        dispatcher.expire(time.time() + 1000)
        with pytest.raises(HttpError) as gone:
            dispatcher.find("a/1", "me")
        with pytest.raises(HttpError) as never:
            dispatcher.find("a/2", "me")
        assert (gone.value.status, never.value.status) == (410, 404)
        await dispatcher.stop()

    asyncio.run(run())


def test_a_result_belongs_to_its_owner() -> None:
    async def run() -> None:
        dispatcher, _ = make(Journal(":memory:"))
        dispatcher.queue("a", next_seq=1)
        dispatcher.accept(request("a", 1))
        with pytest.raises(HttpError) as caught:
            dispatcher.find("a/1", "another")
        assert caught.value.status == 404

    asyncio.run(run())


def test_a_lasting_failure_keeps_its_words() -> None:
    async def run() -> None:
        dispatcher, _ = make(Journal(":memory:"))
        dispatcher.queue("a", next_seq=1)
        waiting = dispatcher.accept(request("a", 2))
        dispatcher.fail_all("a", Failed("the model is lost"))
        assert await dispatcher.result(waiting, hold_s=1) == {"error": "the model is lost", "category": "server"}

    asyncio.run(run())

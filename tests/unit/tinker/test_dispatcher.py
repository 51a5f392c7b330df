"""The dispatcher alone: order within a model, turns between models and samplers, what a restart
finds in the journal."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime_like.tinker.api_process import listen
from slime_like.tinker.errors import Failed, HttpError, Refused
from slime_like.tinker.futures import Request, json_result
from slime_like.tinker.request_queue import Dispatcher, request_id
from slime_like.tinker.store import Journal


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

    def can_batch(self, batch: Sequence[Request], other: Request) -> bool:
        return batch[0].body == other.body

    def needs_workers(self, request: Request) -> bool:
        return not request.body.get("bad")

    def executed(self, request: Request) -> None: ...

    def failed(self, request: Request, reason: str) -> None: ...

    def skipped(self, queue: str, numbers: range) -> None: ...


def make(journal: Journal, **settings: object) -> tuple[Dispatcher, Recorder]:
    operations = Recorder()
    options = {"max_waiting": 100, "gap_s": 60.0, "batch": 3, **settings}
    return Dispatcher(journal, operations, **options), operations  # type: ignore[arg-type]


def request(queue: str, seq: int, **body: object) -> Request:
    return Request(
        request_id(queue, seq), "op", queue, seq, "me", f"digest {body}", time.time(), dict(body)
    )


async def settled(dispatcher: Dispatcher) -> None:
    for pending in list(dispatcher.requests.values()):
        await asyncio.wait_for(pending.done.wait(), 5)


def test_what_fails_without_workers_does_not_wait_for_them() -> None:
    async def run() -> None:
        with_workers = False
        dispatcher, operations = make(Journal(":memory:"), has_workers=lambda: with_workers)
        for model in "ab":
            dispatcher.queue(model, next_seq=0)
        dispatcher.start()
        good = dispatcher.accept(request("a", 0))
        bad = dispatcher.accept(request("b", 0, bad=True))
        await asyncio.wait_for(bad.done.wait(), 5)
        assert bad.failed and operations.seen == [["b/0"]] and not good.done.is_set()
        with_workers = True
        dispatcher.wake()
        await asyncio.wait_for(good.done.wait(), 5)
        await dispatcher.stop()

    asyncio.run(run())


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


def test_samplers_take_turns_in_a_batch() -> None:
    """Alike requests of several samplers are executed together, one of each in turn, so that who has
    many waiting does not fill the batch. Models are never part of it."""

    async def run() -> None:
        dispatcher, operations = make(Journal(":memory:"), batch=4)
        dispatcher.queue("model", next_seq=1)
        for key in "abc":
            dispatcher.queue(key, next_seq=None)
        for seq in range(1, 6):
            dispatcher.accept(request("a", seq))
        dispatcher.accept(request("b", 1))
        dispatcher.accept(request("c", 1, temperature=0.5))
        dispatcher.accept(request("c", 2))
        dispatcher.accept(request("model", 1))
        dispatcher.start()
        await settled(dispatcher)
        await dispatcher.stop()
        assert operations.seen == [
            ["a/1", "b/1", "c/2", "a/2"],
            ["c/1"],
            ["model/1"],
            ["a/3", "a/4", "a/5"],
        ]

    asyncio.run(run())


def test_too_much_waiting_is_refused_for_a_while() -> None:
    """One model fills half of the room; what it leaves is there for others, who fill half of that."""

    async def run() -> None:
        dispatcher, _ = make(Journal(":memory:"), max_waiting=8)
        for key, room in (("a", 4), ("b", 2), ("c", 1)):
            dispatcher.queue(key, next_seq=1)
            for seq in range(1, room + 1):
                dispatcher.accept(request(key, seq))
            with pytest.raises(HttpError, match="try again later") as caught:
                dispatcher.accept(request(key, room + 1))
            assert caught.value.status == 429, "which clients repeat"
        dispatcher.start()
        await settled(dispatcher)
        dispatcher.accept(request("a", 5))
        await dispatcher.stop()

    asyncio.run(run())


def test_a_client_that_floods_does_not_hold_others_up() -> None:
    """While one model has a hundred requests waiting, others send one, wait for it, send the next:
    between two of theirs there is one of the flood and one of each other."""

    async def run() -> None:
        dispatcher, operations = make(Journal(":memory:"), max_waiting=1000)
        for key in ("flood", "first", "second", "third"):
            dispatcher.queue(key, next_seq=1)
        for seq in range(1, 101):
            dispatcher.accept(request("flood", seq))
        dispatcher.start()

        async def polite(key: str) -> None:
            for seq in range(1, 11):
                await asyncio.wait_for(dispatcher.accept(request(key, seq)).done.wait(), 5)

        await asyncio.gather(*(polite(key) for key in ("first", "second", "third")))
        executed = [ids[0].partition("/")[0] for ids in operations.seen]
        for key in ("first", "second", "third"):
            places = [place for place, name in enumerate(executed) if name == key]
            assert len(places) == 10 and max(b - a for a, b in itertools.pairwise(places)) <= 5, (
                executed
            )
        await settled(dispatcher)
        assert len(operations.seen) == 130, "and the flood is served too"
        await dispatcher.stop()

    asyncio.run(run())


def test_a_restart_finds_results_and_what_waits(tmp_path: Path) -> None:
    """A request that was accepted is executed after a restart; one whose model is gone fails, and
    says so."""

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
        dispatcher.restore(lambda r: "its model is lost" if r.queue == "b" else None)
        assert dispatcher.accepted("a", 1, "digest {}") is dispatcher.requests["a/1"]
        dispatcher.start()
        await settled(dispatcher)
        await dispatcher.stop()
        assert operations.seen == [["a/2"]]
        results = {
            id: await dispatcher.result(found, hold_s=1)
            for id, found in dispatcher.requests.items()
        }
        assert results["a/1"] == json_result({"id": "a/1"})
        assert results["b/1"] == {"error": "it is bad", "category": "user"}
        assert (
            isinstance(results["b/2"], dict)
            and results["b/2"]["category"] == "server"
            and "restarted" in results["b/2"]["error"]
        )

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
        assert await dispatcher.result(waiting, hold_s=1) == {
            "error": "the model is lost",
            "category": "server",
        }

    asyncio.run(run())


def test_answers_do_not_wait_for_more_to_send() -> None:
    """Nagle's algorithm is off on the API's connections: an answer is two writes, and the second
    would wait 40 ms for the client's word."""

    async def run() -> None:
        listening = await listen("127.0.0.1", 0)
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.put_nowait(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        server = await asyncio.start_server(serve, sock=listening)
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(seen.get(), 5) == 1
        writer.close()
        server.close()

    asyncio.run(run())

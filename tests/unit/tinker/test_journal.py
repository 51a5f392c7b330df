"""A journal that cannot be written for a while: nothing is lost, nothing is executed twice."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from slime_like.tinker.errors import HttpError
from slime_like.tinker.store import Journal, JournalError
from slime_like.tinker.supervision import supervised
from tests.unit.tinker.test_dispatcher import make, request, settled


class FullDisk(Journal):
    """Its writes fail while `full`."""

    full = False

    def _write(self, kind: str, id: str, row: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(kind, id, row)


def test_execution_continues_after_a_disk_was_full(tmp_path: Path) -> None:
    """The result that could not be written is answered; the next request waits for the disk; new
    ones are refused with 503, which clients repeat; everything is in the file in the end."""

    async def run() -> None:
        journal = FullDisk(tmp_path / "journal")
        dispatcher, operations = make(journal)
        dispatcher.queue("a", next_seq=1)
        operations.free.clear()
        first, second = (dispatcher.accept(request("a", seq)) for seq in (1, 2))
        dispatcher.start()
        await asyncio.sleep(0)
        journal.full = True
        operations.free.set()
        await asyncio.wait_for(first.done.wait(), 5)
        with pytest.raises(HttpError, match="No space left on device; try again later") as caught:
            dispatcher.accept(request("a", 3))
        assert caught.value.status == 503
        again = await dispatcher.result(second, hold_s=0.05)
        assert isinstance(again, dict) and again["queue_state"] == "paused_capacity"
        assert "No space left" in again["queue_state_reason"] and operations.seen == [["a/1"]]
        journal.full = False
        third = dispatcher.accept(request("a", 3)) if journal.flush() else None
        await settled(dispatcher)
        assert third is not None and operations.seen == [["a/1"], ["a/2"], ["a/3"]]
        assert journal.problem is None
        await dispatcher.stop()
        journal.close()

    asyncio.run(run())
    states = {
        id: record["state"] for id, record, *_ in Journal(tmp_path / "journal").entries("request")
    }
    assert states == {"a/1": "done", "a/2": "done", "a/3": "done"}


def test_a_lock_of_another_process_is_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / "journal")
        dispatcher, operations = make(journal)
        dispatcher.queue("a", next_seq=1)
        operations.free.clear()
        waiting = [dispatcher.accept(request("a", seq)) for seq in (1, 2)]
        dispatcher.start()
        other = sqlite3.connect(tmp_path / "journal", isolation_level=None)
        other.execute("begin immediate")
        operations.free.set()
        await asyncio.wait_for(waiting[0].done.wait(), 5)
        assert "locked" in str(journal.problem)
        other.execute("rollback")
        await asyncio.wait_for(waiting[1].done.wait(), 10)  # nobody has to come and ask
        assert operations.seen == [["a/1"], ["a/2"]]
        await dispatcher.stop()

    asyncio.run(run())


def test_a_required_write_that_failed_is_not_made_later(tmp_path: Path) -> None:
    journal = FullDisk(tmp_path / "journal")
    journal.full = True
    with pytest.raises(JournalError, match="No space left"):
        journal.put("request", "a", {}, required=True)
    assert not journal.flush() and journal.problem, "with nothing left to write"
    journal.put("model", "m", {"x": 1})
    journal.remove("model", "gone")
    journal.full = False
    assert journal.flush() and [id for id, *_ in journal.entries("request")] == []
    assert [record for _, record, *_ in journal.entries("model")] == [{"x": 1}]


def test_a_background_task_that_ends_is_reported() -> None:
    async def run() -> list[str]:
        faults: list[str] = []

        async def breaks() -> None:
            raise KeyError("x")

        async def returns() -> None: ...

        async def runs() -> None:
            await asyncio.sleep(60)

        tasks = [supervised(c.__name__, c(), faults.append) for c in (breaks, returns, runs)]
        await asyncio.wait(tasks[:2])
        tasks[2].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        return faults

    assert asyncio.run(run()) == [
        "the breaks has ended (KeyError: 'x')",
        "the returns has ended (it returned)",
    ]


def test_an_operation_that_breaks_does_not_stop_execution() -> None:
    """Neither in the request nor after it."""

    async def run() -> None:
        dispatcher, operations = make(Journal(":memory:"))
        for key in "ab":
            dispatcher.queue(key, next_seq=1)

        def executed(done: Any) -> None:
            if done.id == "a/1":
                raise RuntimeError("a fault")

        operations.executed = executed  # type: ignore[method-assign]
        waiting = [dispatcher.accept(request(key, 1)) for key in "ab"]
        dispatcher.start()
        for one in waiting:
            await asyncio.wait_for(one.done.wait(), 5)
        await dispatcher.stop()

    asyncio.run(run())


def test_internal_requests_are_accepted_when_the_queues_are_full() -> None:
    """The server's own, such as the unloading of a model."""
    dispatcher, _ = make(Journal(":memory:"), max_waiting=2)
    for key in ("a", "own"):
        dispatcher.queue(key, next_seq=None)
    dispatcher.accept(request("a", 1))
    with pytest.raises(HttpError, match="try again later"):
        dispatcher.accept(request("a", 2))
    dispatcher.accept(request("a", 3), internal=True)
    dispatcher.accept(request("own", 1), internal=True)
    assert dispatcher.waiting == 3

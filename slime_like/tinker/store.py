"""Persistent store of the API process (sessions, models, checkpoints, requests) in one SQLite file.

Records are JSON; the body of a request and its result are bytes in separate columns. A write has
reached the operating system when the call returns (synchronous = NORMAL), so a crash of the process
loses nothing; a crash of the machine may lose the last writes.

A failed write (full disk, locked file) is kept in memory and retried by `flush`; until then
`problem` has the reason. Callers that must not continue without it pass `required`.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
SCHEMA = """
create table if not exists entries (
    kind text not null, id text not null, record text not null, body blob, result blob,
    primary key (kind, id)
) without rowid
"""
OPEN_S = 30.0  # seconds that another process may lock the file at startup
BUSY_S = 0.2  # and during a write, which blocks all responses
Record = dict[str, Any]
Row = tuple[str, bytes | None, bytes | None]  # record, body, result


class JournalError(Exception):
    """A required write failed and was rolled back."""


class Journal:
    """Persistent entries by kind and id.

    problem: why the last write failed; None if everything is written.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or create the journal.

        Args:
            path: A file, or ":memory:".

        Raises:
            JournalError: The file cannot be opened or written.
        """
        self.problem: str | None = None
        self._pending: dict[tuple[str, str], Row | None] = {}  # None: to be removed
        try:
            self._db = sqlite3.connect(str(path), isolation_level=None, timeout=OPEN_S)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.execute(SCHEMA)
            self._db.execute(f"pragma busy_timeout = {int(BUSY_S * 1000)}")
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"cannot open the journal {path}: {error}") from error

    def put(
        self,
        kind: str,
        id: str,
        record: Record,
        *,
        body: bytes | None = None,
        result: bytes | None = None,
        required: bool = False,
    ) -> None:
        """Add or replace an entry, including its bytes.

        Raises:
            JournalError: The write is `required` and failed.
        """
        key = (kind, id)
        row = (json.dumps(record), body, result)
        self._pending[key] = row
        if self.problem is None:
            self.flush()
        if required and self.problem is not None:
            del self._pending[key]
            raise JournalError(self.problem)

    def remove(self, kind: str, id: str) -> None:
        self._pending[kind, id] = None
        if self.problem is None:
            self.flush()

    def flush(self) -> bool:
        """Write pending entries; returns whether everything is written."""
        if self.problem is not None:  # only a successful write clears the problem
            self._pending.setdefault(("probe", "probe"), ("{}", None, None))
        try:
            for (kind, id), row in list(self._pending.items()):
                self._write(kind, id, row)
                del self._pending[kind, id]
        except (sqlite3.Error, OSError) as error:
            if self.problem is None:
                log.error("cannot write the journal, execution is paused: %s", error)
            self.problem = f"cannot write the server's journal: {error}"
            return False
        if self.problem is not None:
            log.warning("the journal can be written again, execution continues")
        self.problem = None
        return True

    def _write(self, kind: str, id: str, row: Row | None) -> None:
        if row is None:
            self._db.execute("delete from entries where kind = ? and id = ?", (kind, id))
        else:
            insert = "insert or replace into entries values (?, ?, ?, ?, ?)"
            self._db.execute(insert, (kind, id, *row))

    def entries(self, kind: str) -> Iterator[tuple[str, Record, bytes | None, bytes | None]]:
        """(id, record, body, result) of every entry of a kind."""
        query = "select id, record, body, result from entries where kind = ? order by id"
        for id, record, body, result in self._db.execute(query, (kind,)):
            yield id, json.loads(record), body, result

    def close(self) -> None:
        """Write pending entries if possible, and close."""
        self.flush()
        self._db.close()

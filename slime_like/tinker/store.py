"""What the API process remembers of sessions, models, checkpoints and requests, in one SQLite file, so that its restart loses nothing.

Records are JSON; the body of a request and its result are bytes beside it. A write is on the disk's journal when the call returns, up to what
the operating system holds back (synchronous = NORMAL): the death of the process loses nothing, that of the machine the last moments.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = """
create table if not exists entries (
    kind text not null, id text not null, record text not null, body blob, result blob, primary key (kind, id)
) without rowid
"""


class Journal:
    def __init__(self, path: str | Path) -> None:
        """path: a file, made when it is not there; ":memory:" for none."""
        self._db = sqlite3.connect(str(path), isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.execute(SCHEMA)

    def put(
        self,
        kind: str,
        id: str,
        record: dict[str, Any],
        *,
        body: bytes | None = None,
        result: bytes | None = None,
    ) -> None:
        """Add or replace an entry, its bytes included."""
        self._db.execute(
            "insert or replace into entries values (?, ?, ?, ?, ?)",
            (kind, id, json.dumps(record), body, result),
        )

    def remove(self, kind: str, id: str) -> None:
        self._db.execute("delete from entries where kind = ? and id = ?", (kind, id))

    def entries(
        self, kind: str
    ) -> Iterator[tuple[str, dict[str, Any], bytes | None, bytes | None]]:
        """(id, record, body, result) of every entry of a kind."""
        for id, record, body, result in self._db.execute(
            "select id, record, body, result from entries where kind = ? order by id", (kind,)
        ):
            yield id, json.loads(record), body, result

    def close(self) -> None:
        self._db.close()

"""The keys of a data file's first rows, so that a wrong --input-key or --label-key is told with the
other problems of a command line, before processes meet."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 2**24  # bytes of a row that is read here
_MOST_ROWS = 1000
_ROW_RANGE = re.compile(r"@\[[^\]]*\]$")


def file_of(spec: str) -> Path:
    """What a data source names, without its range of rows."""
    return Path(_ROW_RANGE.sub("", spec))


def first_keys(path: Path, may_be_bad: int) -> set[str] | None:
    """The keys that the first rows have together.

    Args:
        path: of a .jsonl or .parquet file.
        may_be_bad: how many rows may be left out (--skip-bad-rows): one more is read.

    Returns:
        None where these rows cannot be read, or are many: the pass over the whole file says what
        is wrong, and where.
    """
    if may_be_bad >= _MOST_ROWS:
        return None
    return _parquet_columns(path) if path.suffix == ".parquet" else _keys(path, may_be_bad + 1)


def first_is_text(path: Path, key: str) -> bool:
    """Whether the first row of a .jsonl file has a string there; False where that cannot be read."""
    try:
        row = next(_rows(path), None)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and isinstance(row.get(key), str)


def _parquet_columns(path: Path) -> set[str] | None:
    try:
        import pyarrow.parquet as pq

        return set(pq.read_schema(path).names)
    except (ImportError, OSError, ValueError):  # pyarrow's own errors are among these
        return None


def _keys(path: Path, count: int) -> set[str] | None:
    """Of the first `count` rows; None where one of them is no JSON object."""
    keys: set[str] = set()
    try:
        for row in itertools.islice(_rows(path), count):
            if not isinstance(row, dict):
                return None
            keys |= row.keys()
    except (OSError, ValueError, RecursionError):
        return None
    return keys or None


def _rows(path: Path) -> Iterator[object]:
    """Raises ValueError for a line that is no JSON, or too long."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST):
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))

"""Read the keys of a data file's first rows, so that a wrong --input-key or --label-key is reported
with the other problems of the command line, before the rendezvous."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 2**24  # maximum bytes of a row that is read here
_MOST_ROWS = 1000
_ROW_RANGE = re.compile(r"@\[[^\]]*\]$")


def without_range(spec: str) -> str:
    """A data source without its range of rows, whatever the range says."""
    return _ROW_RANGE.sub("", spec)


def file_of(spec: str) -> Path:
    """Path of a data source, without its range of rows."""
    return Path(without_range(spec))


def first_keys(path: Path, may_be_bad: int) -> set[str] | None:
    """All keys that occur in the first rows.

    Args:
        path: A .jsonl or .parquet file.
        may_be_bad: Number of rows that may be skipped (--skip-bad-rows); one more is read.

    Returns:
        None if the rows cannot be read or are too many; reading the full file later reports the
        problem and its location.
    """
    if may_be_bad >= _MOST_ROWS:
        return None
    return _parquet_columns(path) if path.suffix == ".parquet" else _keys(path, may_be_bad + 1)


def first_is_text(path: Path, key: str) -> bool:
    """Whether `key` is a string in the first row of a .jsonl file; False if that cannot be read."""
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
    """Keys of the first `count` rows; None if one of them is not a JSON object."""
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
    """Parse the rows of a .jsonl file. Raises ValueError for a line that is not JSON or too
    long."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST):
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))

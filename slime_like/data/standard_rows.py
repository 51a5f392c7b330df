"""Rows of a standard evaluation set, from its published files (`standard_sets/`)."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from arguments.eval_sets import EvalSet
from slime_like.data.rows import Row
from slime_like.data.source import (
    BadRows,
    RowCheck,
    RowSource,
    SlicedSource,
    open_source,
    split_range,
)
from slime_like.standard_sets import StandardSet, located, standard_sets
from slime_like.standard_sets.base import NotThisSet

_LARGE_FIELD = min(sys.maxsize, 2**31 - 1)


def open_standard(
    eval_set: EvalSet, *, check: RowCheck, flag: str, skip_bad_rows: int = 0
) -> RowSource:
    """The rows of a set as ``{"prompt", "label", "metadata"}``.

    Args:
        eval_set: With the name of a standard set.
        check: Called once on every row.
        flag: Named in errors.
        skip_bad_rows: Maximum number of bad rows of each file to skip.

    Raises:
        ValueError: The files are missing, or have another form than the set's.
    """
    assert eval_set.set is not None
    name, template = eval_set.set, eval_set.prompt_template
    standard = standard_sets.get(name)
    place, bounds = split_range(eval_set.path, flag)

    def checked(row: Row) -> str | None:
        try:
            converted = standard.convert(row, template)
        except NotThisSet as error:
            return f"no row of {name}: {error}"
        except ValueError as error:
            return f"set {eval_set.name}: {error}"
        return check(converted)

    parts = [
        _open(path, standard, checked, flag, skip_bad_rows) for path in located(name, place or None)
    ]
    source: RowSource = StandardSource(
        parts, functools.partial(standard.convert, template=template)
    )
    return source if bounds is None else SlicedSource(source, eval_set.path, bounds, flag)


def _open(
    path: Path, standard: StandardSet, check: RowCheck, flag: str, skip_bad_rows: int
) -> RowSource:
    if path.suffix in (".jsonl", ".parquet"):
        return open_source(
            str(path),
            check=check,
            columns=standard.columns,
            skip_bad_rows=skip_bad_rows,
            flag=flag,
        )
    return WholeSource(path, check, skip_bad_rows, flag)


class WholeSource:
    """A small file that is kept in memory: CSV with a head, a JSON list, or compressed JSONL."""

    def __init__(self, path: Path, check: RowCheck, skip_bad_rows: int, flag: str) -> None:
        self.name = str(path)
        self._rows: list[Row] = []
        self._numbers: list[int] = []
        bad_rows = BadRows(self.name, skip_bad_rows)
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            rows = _parsed(path, data.decode("utf-8-sig"))
        except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
            raise ValueError(f"{flag} {path}: cannot be read: {error}") from error
        for number, row in enumerate(rows):
            problem = check(row) if isinstance(row, dict) else "the row is no object"
            if problem:
                bad_rows.add(f"{path}: row {number}: {problem}")
            else:
                self._rows.append(row)
                self._numbers.append(number)
        if not self._rows:
            raise ValueError(f"{flag} {path}: the file holds no rows")
        self.notes = bad_rows.notes()
        self.content = f"bytes={len(data)} crc32={zlib.crc32(data):08x}"

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return [self._rows[index] for index in indices]

    def where(self, index: int) -> str:
        return f"{self.name}: row {self._numbers[index]}"


def _parsed(path: Path, text: str) -> list[Row]:
    if path.suffix == ".csv":
        csv.field_size_limit(_LARGE_FIELD)
        return list(csv.DictReader(io.StringIO(text, newline="")))
    if path.suffix == ".gz":
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("is no list of rows")
    return rows


class StandardSource:
    """The rows of all files of a set, one after the other, in our own form.

    Args:
        parts: The files.
        convert: Makes the form.
    """

    def __init__(self, parts: Sequence[RowSource], convert: functools.partial[Row]) -> None:
        self._parts = parts
        self._convert = convert
        self._places = [(part, index) for part in parts for index in range(len(part))]
        self.name = ", ".join(part.name for part in parts)
        self.content = "; ".join(part.content for part in parts)
        self.notes = [note for part in parts for note in part.notes]

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        result: list[Row] = []
        places = (self._places[index] for index in indices)
        for part, group in itertools.groupby(places, key=lambda place: place[0]):
            result += map(self._convert, part.rows([place for _, place in group]))
        return result

    def where(self, index: int) -> str:
        part, place = self._places[index]
        return part.where(place)

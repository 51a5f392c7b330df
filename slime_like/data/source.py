"""Rows of a data source, read lazily: JSONL, Parquet and reasoning-gym tasks.

Opening a file validates every row with the caller's check and keeps a byte offset (JSONL) or row
number (Parquet) of the valid ones, so memory does not grow with the size of the rows. An accepted
row can always be read later.
"""

from __future__ import annotations

import functools
import json
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from slime_like.data.rows import TASK_PREFIX, Row
from slime_like.data.values import dotted, half_surrogate, unwritable, with_paths, without_nulls
from slime_like.extras import pip_install
from slime_like.text import clean

RowCheck = Callable[[Row], str | None]  # problem with a row, or None
Recorded = Callable[[Row], Row]  # the part of a row that recordings must be able to hold

SUFFIXES = (".jsonl", ".parquet")
_UTF8_BOM = b"\xef\xbb\xbf"
_RANGE = re.compile(r"^(?P<path>.*)@\[(?P<bounds>[^\[\]]*)\]$", re.DOTALL)
_BOUNDS = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?")
# parts of `RowSource.content` that the states of earlier releases lack
_LATER_PARTS = re.compile(r"(?<=^reasoning_gym) version=\S+|(?<=parquet) crc32=[0-9a-f]{8}")


class RowSource(Protocol):
    """Random access to rows."""

    name: str
    content: str  # identifies the data, so that a changed file is detected on resume
    notes: list[str]  # messages for the user, one line each

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> list[Row]: ...

    def where(self, index: int) -> str:
        """Location of a row for messages, e.g. ``train.jsonl:17``."""
        ...


def open_source(
    spec: str,
    *,
    check: RowCheck,
    columns: Sequence[str],
    recorded: Recorded = lambda row: row,
    skip_bad_rows: int = 0,
    flag: str = "--prompt-data",
) -> RowSource:
    """Open a data source: ``file.jsonl``, ``file.parquet``, either with ``@[start:end]``, or
    ``reasoning_gym:<task>?...``.

    Args:
        spec: The source.
        check: Called once on every row.
        columns: The keys that may be read; Parquet reads no others. ``a.b`` is the field b of the
            object under a, unless there is a key of this name.
        recorded: The part of a row that recordings and checkpoints must be able to hold.
        skip_bad_rows: Maximum number of bad rows to skip.
        flag: Named in errors.

    Raises:
        ValueError: A missing file, a directory, an unknown format, an empty file or range, or too
            many bad rows.
    """
    path_text, bounds = split_range(spec, flag)
    check = functools.partial(_clean_problem, check)
    source: RowSource
    if path_text.startswith(TASK_PREFIX):
        from slime_like.data.tasks import TaskSource

        source = TaskSource(path_text, flag=flag)
        problem = check(source.rows([0])[0])
        if problem:
            raise ValueError(f"{flag} {source.where(0)}: {problem}")
    else:
        path = _existing_file(path_text, flag)
        bad_rows = BadRows(path_text, skip_bad_rows)
        if path.suffix == ".jsonl":
            source = JsonlSource(path, check, bad_rows, columns)
        else:
            source = ParquetSource(path, check, bad_rows, columns, flag, recorded)
        source.notes = bad_rows.notes()
        if len(source) == 0:
            raise ValueError(f"{flag} {path_text}: the file holds no rows")
    return source if bounds is None else SlicedSource(source, spec, bounds, flag)


def _clean_problem(check: RowCheck, row: Row) -> str | None:
    """Problem with a row, sanitised with `text.clean` because it quotes the row."""
    return clean(problem) if (problem := check(row)) else None


def same_content(saved: object, current: str) -> bool:
    """Whether the `content` of a saved state is that of a source. One of an earlier release has no
    checksum of Parquet files and no version of reasoning-gym."""
    return saved in (current, _LATER_PARTS.sub("", current))


def split_range(spec: str, flag: str = "--prompt-data") -> tuple[str, slice | None]:
    """Path and range of rows of a data source. Raises ValueError for what is no range."""
    match = _RANGE.match(spec)
    if match is None:
        return spec, None
    bounds = _BOUNDS.fullmatch(match["bounds"])
    if bounds is None:
        raise ValueError(
            f"{flag} {spec}: {match['bounds']!r} is no range of rows; legal: start:end, two whole "
            "numbers of which each may be left out or negative, as in @[0:100], @[:100], @[-100:]"
        )
    start, end = (int(text) if text else None for text in bounds.groups())
    return match["path"], slice(start, end)


def folder_of(spec: str) -> Path:
    """The folder of a data file, with or without a range."""
    return Path(split_range(spec)[0]).parent


def _existing_file(text: str, flag: str) -> Path:
    path = Path(text)
    try:
        if path.is_dir():
            raise ValueError(
                f"{flag} {text}: a directory; name a {' or '.join(SUFFIXES)} file in it"
            )
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{flag} {text}: unknown format; legal: {', '.join(SUFFIXES)} files, "
                f"{TASK_PREFIX}<task>"
            )
        if not path.is_file():
            raise ValueError(f"{flag} {text}: no such file")
        with path.open("rb"):
            return path
    except OSError as error:  # a too long name, a file of another user
        raise ValueError(f"{flag} {text}: cannot be read: {error.strerror}") from error


class BadRows:
    """Counts bad rows, up to the number that may be skipped."""

    def __init__(self, path: str, allowed: int) -> None:
        self.path = path
        self.allowed = allowed
        self.count = 0
        self._first = ""

    def add(self, problem: str) -> None:
        """Count a bad row. Raises ValueError if there are too many."""
        self.count += 1
        if self.count > self.allowed:
            if self.allowed:
                problem += f" (more than the {self.allowed} bad rows that --skip-bad-rows allows)"
                raise ValueError(f"{problem}; correct the file")
            raise ValueError(f"{problem}; correct the file, or set --skip-bad-rows N")
        self._first = self._first or problem

    def notes(self) -> list[str]:
        """A message with the number of bad rows, if there are any."""
        if not self.count:
            return []
        flag = f"--skip-bad-rows {self.allowed}"
        return [f"{self.path}: skipped {self.count} bad rows ({flag}); the first: {self._first}"]


class _FileGuard:
    """Detects changes of an open file, which a run reads until its end.

    A check is one `stat`. If size or modification time differ, the content decides: a copied or
    touched file with equal content is accepted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stat = self._read_stat()
        self._crc: int | None = None

    def record(self, crc: int | None = None) -> int:
        """Store and return the CRC-32 of the content; None: compute it here. Raises ValueError if
        the file changed in the meantime."""
        checksum = self._compute_crc() if crc is None else crc
        if self._read_stat() != self._stat:
            raise ValueError(f"{self._path}: the file changed while it was read; start again")
        self._crc = checksum
        return checksum

    def check(self) -> None:
        """Raise ValueError if the content has changed."""
        current = self._read_stat()
        if current == self._stat:
            return
        if current is None or self._compute_crc() != self._crc:
            raise ValueError(
                f"{self._path}: the file has changed since the run opened it; restore it and "
                "resume from a checkpoint, or start a new run"
            )
        self._stat = current

    def _read_stat(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _compute_crc(self) -> int:
        checksum = 0
        with self._path.open("rb") as file:
            while part := file.read(2**20):
                checksum = zlib.crc32(part, checksum)
        return checksum


class JsonlSource:
    """One JSON object per line, UTF-8; a byte order mark, CRLF line ends and blank lines are
    accepted. The index takes 16 bytes per row."""

    notes: list[str]

    def __init__(
        self, path: Path, check: RowCheck, bad_rows: BadRows, columns: Sequence[str] = ()
    ) -> None:
        self.name = str(path)
        self._path = path
        self._paths = dotted(columns)
        self._offsets = array("q")
        self._lines = array("q")
        self._guard = _FileGuard(path)
        checksum = 0
        offset = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                checksum = zlib.crc32(raw, checksum)
                bom = len(_UTF8_BOM) if number == 1 and raw.startswith(_UTF8_BOM) else 0
                line = raw[bom:]
                if line.strip():
                    problem = self._problem(line, number, offset + bom, check)
                    if problem:
                        bad_rows.add(problem)
                    else:
                        self._offsets.append(offset + bom)
                        self._lines.append(number)
                offset += len(raw)
        self._guard.record(checksum)
        self.content = f"jsonl bytes={offset} crc32={checksum:08x}"

    def _problem(self, line: bytes, number: int, offset: int, check: RowCheck) -> str | None:
        location = f"{self.name}:{number}"
        start = f"byte offset {offset}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return f"{location}: invalid UTF-8 at byte offset {offset + error.start}"
        except json.JSONDecodeError as error:
            if not line.endswith(b"\n"):
                return f"{location}: truncated last line, which starts at {start} ({error.msg})"
            position = offset + len(error.doc[: error.pos].encode())
            return f"{location}: bad JSON at byte offset {position}: {error.msg}"
        # integers with thousands of digits; too deep nesting
        except (ValueError, RecursionError) as error:
            return f"{location}: bad JSON in the line at {start}: {error}"
        if not isinstance(row, dict):
            return f"{location}: the row is a JSON {_json_kind(row)}, not an object ({start})"
        surrogate = half_surrogate(row) if b"\\ud" in line.lower() else None
        problem = clean(surrogate) if surrogate else check(with_paths(row, self._paths))
        return f"{location}: {problem} ({start})" if problem else None

    def __len__(self) -> int:
        return len(self._offsets)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Read rows. Raises ValueError if the file has changed."""
        self._guard.check()
        with self._path.open("rb") as file:
            rows = [self._read(file, index) for index in indices]
        self._guard.check()  # nor while reading
        return rows

    def _read(self, file: BinaryIO, index: int) -> Row:
        file.seek(self._offsets[index])
        try:
            row = json.loads(file.readline())
        except ValueError as error:
            raise ValueError(
                f"{self.where(index)}: the file has changed since it was opened ({error})"
            ) from error
        return with_paths(row, self._paths)

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"


class ParquetSource:
    """A Parquet file; only the named columns and one row group at a time are in memory. Rows are
    those of JSONL: see `without_nulls`."""

    notes: list[str]

    def __init__(
        self,
        path: Path,
        check: RowCheck,
        bad_rows: BadRows,
        columns: Sequence[str],
        flag: str,
        recorded: Recorded = lambda row: row,
    ) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ValueError(
                f"{flag} {path}: Parquet needs pyarrow: {pip_install('tasks')}"
            ) from error
        self.name = str(path)
        self._damage = (pa.ArrowException, OSError)
        # invalid UTF-8, a time that Python cannot hold, a map whose keys cannot be those of a dict
        self._no_values = (pa.ArrowException, ValueError, OverflowError, TypeError, LookupError)
        self._guard = _FileGuard(path)
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except self._damage as error:
            raise ValueError(f"{flag} {path}: not a readable Parquet file: {error}") from error
        names = self._file.schema_arrow.names
        # A column that is missing altogether is reported by the check of the first row, which sees
        # `names` as its keys.
        self._paths = dotted(columns)
        wanted = {*columns, *(path.partition(".")[0] for path in self._paths)}
        self._columns = [name for name in names if name in wanted] or names
        for name in self._columns:
            if self._columns.count(name) > 1:
                raise ValueError(f"{flag} {path}: has two columns named {name!r}; rename one")
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)
        self._loaded: tuple[int, Any] = (-1, None)
        self._numbers = array("q")
        other_keys = dict.fromkeys(name for name in names if name not in self._columns)
        number = 0
        for row in self._every_row(flag):
            if isinstance(row, str):
                problem: str | None = row
            else:
                problem = check({**other_keys, **row}) or unwritable(recorded(row))
            if problem:
                bad_rows.add(f"{self.name}: row {number}: {problem}")
            else:
                self._numbers.append(number)
            number += 1
        checksum = self._guard.record()
        size = path.stat().st_size
        columns_text = ",".join(names)
        self.content = (
            f"parquet crc32={checksum:08x} bytes={size} rows={number} columns={columns_text}"
        )

    def _every_row(self, flag: str) -> Iterator[Row | str]:
        """Yield all rows, or what is wrong with one. Raises ValueError for a damaged page."""
        try:
            for batch in self._file.iter_batches(batch_size=1024, columns=self._columns):
                for place in range(batch.num_rows):
                    try:
                        yield self._row(batch, place)
                    except ValueError as error:
                        yield str(error)
        except self._damage as error:
            raise ValueError(f"{flag} {self.name}: a damaged page: {error}") from error

    def _row(self, batch: Any, place: int) -> Row:
        """A row of a record batch or table. Raises ValueError naming the column whose value Python
        cannot hold."""
        row = {}
        for name, column in zip(batch.schema.names, batch.columns):
            try:
                row[name] = without_nulls(column[place].as_py(), column.type)
            except self._no_values as error:
                raise ValueError(
                    f"{name!r} is a {column.type} that cannot be read: {clean(error, 200)}"
                ) from error
        return with_paths(row, self._paths)

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Rows in the requested order; each row group is decoded once per call. Raises ValueError
        if the file has changed, or a page is damaged."""
        self._guard.check()
        by_number = sorted(
            (self._numbers[index], position) for position, index in enumerate(indices)
        )
        result: list[Row] = [{}] * len(by_number)
        group = 0
        for number, position in by_number:
            while number >= self._starts[group + 1]:
                group += 1
            if self._loaded[0] != group:
                try:
                    table = self._file.read_row_group(group, columns=self._columns)
                except self._damage as error:
                    raise ValueError(
                        f"{self.name}: a damaged page in row group {group}: {error}"
                    ) from error
                self._loaded = (group, table)
            try:
                result[position] = self._row(self._loaded[1], number - self._starts[group])
            except ValueError as error:
                raise ValueError(f"{self.name}: row {number}: {error}") from error
        return result

    def where(self, index: int) -> str:
        return f"{self.name}: row {self._numbers[index]}"


class SlicedSource:
    """The rows ``source[start:end]``, with Python's semantics of negative and missing bounds."""

    def __init__(self, source: RowSource, spec: str, bounds: slice, flag: str) -> None:
        self._source = source
        self._range = range(len(source))[bounds]
        self.name = spec
        self.notes = source.notes
        self.content = f"{source.content} rows {self._range.start}:{self._range.stop}"
        if not self._range:
            raise ValueError(f"{flag} {spec}: empty range; {source.name} has {len(source)} rows")

    def __len__(self) -> int:
        return len(self._range)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return self._source.rows([self._range[index] for index in indices])

    def where(self, index: int) -> str:
        return self._source.where(self._range[index])


def batches(count: int, size: int) -> Iterator[range]:
    """Consecutive index ranges of at most `size` that cover range(count)."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")

"""Logging setup: rank 0 prints to stdout; errors, and warnings of other ranks (with the rank), go
to stderr.

A closed stdout (`| head`, a closed terminal, a full disk) does not end the run: see
`SurvivingStream`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO, cast

from slime_like.text import mask_credentials, printable

OURS = ("slime_like", "arguments", "megatron_patches")
LOG_FILE = "run.log"  # in the output folder, for messages that no stream accepts
ERROR_FILE = "error.txt"  # in the output folder: the error that ended the run
_log_file: Path | None = None
_display: Callable[[str], None] | None = None
_RANK_0_ONLY = "rank_0_only"  # attribute of a log record


class RankHandler(logging.Handler):
    """Prints INFO as plain text on rank 0 only; prefixes warnings with "warning: " and errors with
    "error: ", after the traceback if the record has one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        text = visible(record.getMessage())
        if record.levelno >= logging.ERROR:
            if record.exc_info and record.exc_info[1] is not None:
                lines = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
                print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)
            print(f"error: {text}", file=sys.stderr, flush=True)
        elif self.rank == 0:
            line = f"warning: {text}" if record.levelno >= logging.WARNING else text
            if _display is None:
                print(line, flush=True)
            else:
                _display(line)
        elif record.levelno >= logging.WARNING and not getattr(record, _RANK_0_ONLY, False):
            print(f"warning: rank {self.rank}: {text}", file=sys.stderr, flush=True)


def set_up_logging(rank: int) -> None:
    """Install handlers for our loggers and protect stdout and stderr. A second call replaces the
    rank."""
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = [RankHandler(rank)]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if not isinstance(sys.stderr, SurvivingStream):
        sys.stderr = cast(TextIO, SurvivingStream(sys.stderr, 2, "stderr"))
    if not isinstance(sys.stdout, SurvivingStream):
        sys.stdout = cast(TextIO, SurvivingStream(sys.stdout, 1, "stdout"))


def warn_rank_0(logger: logging.Logger, text: str | None) -> None:
    """Log a warning that every rank reaches, on rank 0 only. `None` logs nothing."""
    if text is not None:
        logger.warning("%s", text, extra={_RANK_0_ONLY: True}, stacklevel=2)


def show_through(display: Callable[[str], None] | None) -> None:
    """Route rank 0's lines through a live display; None restores stdout."""
    global _display
    _display = display


def log_into(folder: Path) -> None:
    """From now on, write messages to `folder` when neither stdout nor stderr accepts them."""
    global _log_file
    _log_file = folder / LOG_FILE
    with contextlib.suppress(OSError):
        (folder / ERROR_FILE).unlink(missing_ok=True)  # left by the run that this one resumes


def leave_error(folder: Path, text: str) -> None:
    """Write the error that ended the run to `folder`, for its report."""
    with contextlib.suppress(OSError), (folder / ERROR_FILE).open("a", encoding="utf-8") as file:
        file.write(f"error: {visible(text)}\n")


def visible(text: str) -> str:
    """Make untrusted text safe to print: control characters (except newline and tab), bidi marks
    and lone surrogates become escapes, and credentials in URLs are masked."""
    return printable(mask_credentials(text))


class SurvivingStream:
    """A text stream that survives the loss of its reader.

    After a failed write its file descriptor is redirected to stderr, else to run.log in the output
    folder, else to /dev/null. Nothing is raised; one line says where the output is now.

    Args:
        stream: None if the process was started without it.
        descriptor: 1 or 2.
    """

    def __init__(self, stream: TextIO | None, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        if stream is None:
            self._redirect()
            raw = io.FileIO(descriptor, "w", closefd=False)
            stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        # a BufferedIOBase retains what it could not write; with PYTHONUNBUFFERED there is none
        if not isinstance(getattr(self._stream, "buffer", None), io.BufferedIOBase):
            with contextlib.suppress(OSError):
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Redirect the descriptor, then flush what the stream still buffers."""
        place = self._redirect()
        reason = error.strerror or str(error)
        text = (
            f"warning: {self._name} is closed ({reason}): the run continues, and writes to {place} "
            "from here on\n"
        )
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())
        with contextlib.suppress(OSError):
            self._stream.flush()

    def _redirect(self) -> str:
        """Make the descriptor writable again. Returns the name of its new target."""
        if self._descriptor == 1 and _is_writable(2):
            os.dup2(2, 1)
            return "stderr"
        for path in (_log_file, Path(os.devnull)):
            with contextlib.suppress(OSError):
                if path is None:
                    continue
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(file, self._descriptor)
                if file != self._descriptor:
                    os.close(file)
                return str(path)
        return "nowhere"


def _is_writable(descriptor: int) -> bool:
    """Polls the descriptor, because an empty write to a pipe without a reader succeeds."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        events = poll.poll(0)
    except OSError:
        return False
    return not any(
        event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in events
    )

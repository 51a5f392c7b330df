"""Where a run's messages go: rank 0's to stdout, as a user reads them; warnings of other ranks,
with their rank, and all errors to stderr.

A reader of stdout that ends (`| head`, a closed terminal, a full disk) does not end the run: see
`SurvivingStream`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from slime_like.text import mask_credentials, printable

OURS = ("slime_like", "arguments", "megatron_patches")
LOG_FILE = "run.log"  # in the output folder, where neither stdout nor stderr can be written
ERROR_FILE = "error.txt"  # there: what ended the run
_log_file: Path | None = None
_display: Callable[[str], None] | None = None
_RANK_0_ONLY = "rank_0_only"  # attribute of a record


class RankHandler(logging.Handler):
    """INFO is plain text on rank 0 and nothing elsewhere; a warning begins with "warning: ", an
    error with "error: ", below its traceback where the record has one."""

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
    """Handlers for the loggers of our packages, and streams that survive their readers. Calling it
    again replaces the rank."""
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
    """Warn of what every rank finds alike, once: other ranks show nothing. None is no warning."""
    if text is not None:
        logger.warning("%s", text, extra={_RANK_0_ONLY: True}, stacklevel=2)


def show_through(display: Callable[[str], None] | None) -> None:
    """Print rank 0's lines above a live display while it is drawn; None prints to stdout again."""
    global _display
    _display = display


def log_into(folder: Path) -> None:
    """From now on messages that no stream takes are kept in `folder`."""
    global _log_file
    _log_file = folder / LOG_FILE
    with contextlib.suppress(OSError):
        (folder / ERROR_FILE).unlink(missing_ok=True)  # of the run that this one continues


def leave_error(folder: Path, text: str) -> None:
    """Keep what ended the run in `folder`, for its report."""
    with contextlib.suppress(OSError), (folder / ERROR_FILE).open("a", encoding="utf-8") as file:
        file.write(f"error: {visible(text)}\n")


def visible(text: str) -> str:
    """Control characters but newline and tab, marks of text direction and lone surrogates as
    escapes: text from outside cannot move the cursor, colour a terminal, hide a line, be impossible
    to write, or show the credentials of a URL."""
    return printable(mask_credentials(text))


class SurvivingStream:
    """A text stream whose reader may end. From then on its descriptor leads to stderr, or, where
    that is gone too, to run.log in the output folder, or nowhere; nothing is raised. Says once
    where its lines are.

    Args:
        stream: None where the process was started without it.
        descriptor: 1 or 2.
    """

    def __init__(self, stream: TextIO | None, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name
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
        # a buffer keeps what it could not write; PYTHONUNBUFFERED leaves none
        if not isinstance(getattr(self._stream, "buffer", None), io.BufferedIOBase):
            with contextlib.suppress(OSError):
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """What the stream still holds is written to where the descriptor leads then."""
        place = self._redirect()
        reason = error.strerror or str(error)
        text = f"warning: {self._name} is closed ({reason}): the run continues, and writes to {place} from here on\n"
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())
        with contextlib.suppress(OSError):
            self._stream.flush()

    def _redirect(self) -> str:
        """Make the descriptor writable again. Returns where it leads."""
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
    """An empty write to a pipe without a reader succeeds, so this asks the pipe itself."""
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

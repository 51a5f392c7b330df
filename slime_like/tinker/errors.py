"""What goes wrong with a request, by who can remedy it."""

from __future__ import annotations


class Refused(ValueError):
    """A request that is understood and cannot be served as it is: the client's to change. Its
    future fails with category "user"."""


class Failed(RuntimeError):
    """A request that failed here: category "server". broken: its model cannot be used any more."""

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


class HttpError(Exception):
    """A request that gets no future. status: 4xx; not 408, 409 or 429 unless the client is to try
    again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

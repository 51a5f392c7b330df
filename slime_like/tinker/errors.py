"""Errors of requests, by who can fix them."""

from __future__ import annotations


class Refused(ValueError):
    """A valid but unsupported or illegal request, which the client has to change. Its future fails
    with category "user"."""


class Failed(RuntimeError):
    """A failure of the server: category "server". broken: the model is no longer usable."""

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


class HttpError(Exception):
    """A request that gets no future. status: 4xx; not 408, 409 or 429 unless the client is to try
    again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

"""Errors of requests, by who has to act on them."""

from __future__ import annotations

from slime_like.errors import RunError


class Refused(ValueError):
    """A well-formed request that is invalid or unsupported; the client must change it. Its future
    fails with category "user"."""


class Failed(RuntimeError):
    """A server error; futures fail with category "server".

    Args:
        broken: The model is lost.
        common: Another request in its place would have failed, too: the engine's servers, or the
            workers, are at fault.
    """

    def __init__(self, message: str, *, broken: bool = False, common: bool = False) -> None:
        super().__init__(message)
        self.broken = broken
        self.common = common


class ServersFailed(RunError):
    """The engine's servers are at fault, or the weights on them: whatever is sampled fails."""


class HttpError(Exception):
    """An error response without a future. status: 4xx; 408, 409 and 429 only if the client should
    retry."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

"""Responses of server and router control endpoints."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from slime_like.checked_json import Items, ShortText, StrictModel

_Ranks = Annotated[int, Field(ge=1, le=4096)]


def _check_address(text: str) -> str:
    """http://host:port, without trailing slash. Raises ValueError."""
    parts = urlsplit(text)
    _ = parts.port  # raises for an invalid port
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable():
        raise ValueError("not a server address")
    return text.rstrip("/")


class ModelInfo(StrictModel):
    """/model_info."""

    weight_version: ShortText  # as it was sent


class ServerInfo(StrictModel):
    """/server_info."""

    tp_size: _Ranks = 1
    pp_size: _Ranks = 1
    dp_size: _Ranks = 1


class RankChecksums(StrictModel):
    checksums: dict[str, ShortText]


class Checksums(StrictModel):
    """/weights_checker."""

    ranks: Items[RankChecksums]

    def by_name(self) -> dict[str, str]:
        """The checksum of every weight, by rank and name."""
        by_name: dict[str, str] = {}
        for i, rank in enumerate(self.ranks):
            by_name |= {f"{i}/{name}": value for name, value in rank.checksums.items()}
        return by_name


class RouterWorker(StrictModel):
    """A server in a router's list."""

    id: ShortText | int
    url: Annotated[ShortText, AfterValidator(_check_address)]
    is_healthy: bool = True  # it gets requests


class RouterWorkers(StrictModel):
    """/workers of a router."""

    workers: Annotated[Items[RouterWorker], Field(max_length=10_000)]

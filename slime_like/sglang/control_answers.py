"""Validate responses of server and router control endpoints, with the checks of `checked_json`.

Each function takes the response object and raises a one-line InvalidResponse if it is invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from slime_like.checked_json import InvalidResponse, int_of, list_of, object_of, shown, text_of

_MAX_RANKS = 4096
_MAX_WORKERS = 10_000


def weight_version(answer: Mapping[str, object]) -> str:
    """The weight version in a /model_info response, as it was sent."""
    return text_of(answer.get("weight_version"), "weight_version")


def tensor_parallel_size(answer: Mapping[str, object]) -> int | None:
    """The tensor-parallel size in a /server_info response; None if the server also uses other
    parallelism."""
    others = [int_of(answer.get(n, 1), n, 1, _MAX_RANKS) for n in ("pp_size", "dp_size")]
    size = int_of(answer.get("tp_size", 1), "tp_size", 1, _MAX_RANKS)
    return size if others == [1, 1] else None


def checksums(answer: Mapping[str, object]) -> dict[str, str]:
    """The checksum of every weight in a /weights_checker response, by rank and name."""
    by_name: dict[str, str] = {}
    for i, rank in enumerate(list_of(answer.get("ranks"), "ranks")):
        sums = object_of(object_of(rank, f"rank {i}").get("checksums"), f"checksums of rank {i}")
        by_name |= {f"{i}/{name}": str(value) for name, value in sums.items()}
    return by_name


def router_workers(answer: Mapping[str, object]) -> list[tuple[str, str, bool]]:
    """(address, id, whether it gets requests) of each worker in a router's /workers response."""
    entries = list_of(answer.get("workers"), "the list of workers")
    if len(entries) > _MAX_WORKERS:
        raise InvalidResponse(f"{len(entries)} workers, more than {_MAX_WORKERS}")
    workers = []
    for i, entry in enumerate(entries):
        worker = object_of(entry, f"worker {i}")
        number = worker.get("id")
        if type(number) not in (int, str):
            raise InvalidResponse(f"the id of worker {i} is {shown(number)}")
        url = server_address(worker.get("url"), f"the url of worker {i}")
        workers.append((url, text_of(str(number), "id"), worker.get("is_healthy", True) is True))
    return workers


def server_address(value: object, what: str) -> str:
    """A validated http://host:port, without trailing slash."""
    text = text_of(value, what)
    try:
        parts = urlsplit(text)
        legal = parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable()
        _ = parts.port  # raises for an invalid port
    except ValueError:
        legal = False
    if not legal:
        raise InvalidResponse(f"{what} is not a server address: {shown(value)}")
    return text.rstrip("/")

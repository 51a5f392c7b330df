"""Serialise sessions, models and checkpoints for clients, with pagination."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TypeVar

from slime_like.tinker.errors import HttpError
from slime_like.tinker.model_registry import Checkpoint, Model, Registry, Session

T = TypeVar("T")

PAGE = 20
LONGEST_PAGE = 1000


def page_of(records: list[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, int]]:
    """Select the page given by the query's `limit` and `offset`. Raises HttpError."""
    try:
        limit, offset = int(query.get("limit", PAGE)), int(query.get("offset", 0))
    except ValueError:
        raise HttpError(422, "limit and offset are whole numbers") from None
    if not 1 <= limit <= LONGEST_PAGE or not 0 <= offset < 2**31:
        raise HttpError(422, f"limit is 1 to {LONGEST_PAGE}, offset at least 0")
    return records[offset : offset + limit], {
        "offset": offset,
        "limit": limit,
        "total_count": len(records),
    }


def moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def texts(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata with string values only, as clients require."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def session_record(registry: Registry, session: Session) -> dict[str, object]:
    return {
        "training_run_ids": [
            model.id for model in registry.models.values() if model.session == session.id
        ],
        "sampler_ids": [
            sampler.id for sampler in registry.samplers.values() if sampler.session == session.id
        ],
        "user_metadata": texts(session.user_metadata),
        "display_name": session.display_name,
    }


def checkpoint_record(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": moment(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": texts(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires is None else moment(checkpoint.expires),
    }


def run_record(registry: Registry, model: Model) -> dict[str, object]:
    def newest(kind: str) -> dict[str, object] | None:
        mine = [c for c in registry.checkpoints.values() if c.run == model.id and c.kind == kind]
        return checkpoint_record(max(mine, key=lambda c: c.created)) if mine else None

    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "corrupted": model.corrupted,
        "last_request_time": moment(model.seen),
        "last_checkpoint": newest("training"),
        "last_sampler_checkpoint": newest("sampler"),
        "user_metadata": texts(model.user_metadata),
    }


def holdings(registry: Registry) -> list[dict[str, object]]:
    """Open sessions with their models and samplers, for operators."""
    return [
        {
            "session_id": session.id,
            "owner": session.owner,
            "created": moment(session.created),
            "last_seen": moment(session.seen),
            "display_name": session.display_name,
            "models": [
                {"model_id": m.id, "role": m.role, "rank": (m.lora or {"rank": 0})["rank"]}
                for m in registry.live_models()
                if m.session == session.id
            ],
            "sampler_ids": [s.id for s in registry.samplers.values() if s.session == session.id],
        }
        for session in registry.sessions.values()
        if not session.finished
    ]

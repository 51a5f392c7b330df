"""Serialises sessions, models and checkpoints for clients, with pagination."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TypeVar

from slime_like.tinker.errors import HttpError
from slime_like.tinker.model_registry import ApiSession, Checkpoint, ModelRegistry, RegisteredModel

T = TypeVar("T")

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def page_of(records: list[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, int]]:
    """Select the page given by the query's `limit` and `offset`. Raises HttpError."""
    try:
        limit = int(query.get("limit", DEFAULT_LIMIT))
        offset = int(query.get("offset", 0))
    except ValueError:
        raise HttpError(422, "limit and offset must be integers") from None
    if not 1 <= limit <= MAX_LIMIT or not 0 <= offset < 2**31:
        raise HttpError(422, f"limit must be 1 to {MAX_LIMIT}, offset at least 0")
    cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
    return records[offset : offset + limit], cursor


def iso_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def as_strings(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata with string values only, as clients require."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def session_record(registry: ModelRegistry, session: ApiSession) -> dict[str, object]:
    models = [m.id for m in registry.models.values() if m.session == session.id]
    return {
        "training_run_ids": models,
        "sampler_ids": sampler_ids(registry, session),
        "user_metadata": as_strings(session.user_metadata),
        "display_name": session.display_name,
    }


def sampler_ids(registry: ModelRegistry, session: ApiSession) -> list[str]:
    return [s.id for s in registry.samplers.values() if s.session == session.id]


def checkpoint_record(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": iso_time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": as_strings(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires is None else iso_time(checkpoint.expires),
    }


def run_record(registry: ModelRegistry, model: RegisteredModel) -> dict[str, object]:
    def newest(kind: str) -> dict[str, object] | None:
        checkpoint = registry.newest_checkpoint(model.id, kind)
        return None if checkpoint is None else checkpoint_record(checkpoint)

    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora is not None,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "corrupted": model.corrupted,
        "last_request_time": iso_time(model.seen),
        "last_checkpoint": newest("training"),
        "last_sampler_checkpoint": newest("sampler"),
        "user_metadata": as_strings(model.user_metadata),
    }


def open_sessions(registry: ModelRegistry) -> list[dict[str, object]]:
    """Open sessions with their models and samplers, for operators."""
    records: list[dict[str, object]] = []
    for session in registry.sessions.values():
        if session.finished:
            continue
        models = [m for m in registry.live_models() if m.session == session.id]
        record: dict[str, object] = {
            "session_id": session.id,
            "owner": session.owner,
            "created": iso_time(session.created),
            "last_seen": iso_time(session.seen),
            "display_name": session.display_name,
            "models": [
                {"model_id": m.id, "role": m.role, "rank": (m.lora or {"rank": 0})["rank"]}
                for m in models
            ],
            "sampler_ids": sampler_ids(registry, session),
        }
        records.append(record)
    return records

"""Groups as plain JSON, exactly: waiting groups of a checkpoint, and prefetched rollouts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.data.prompts import PendingGroup
from slime_like.rollout.recording import decode, encode
from slime_like.sample_index import AnySample, remote_samples, rows_of
from slime_like.types import Prompt, Sample, SampleGroup, SampleStatus, complete

_ARRAYS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "token_sets",
    "routes",
    "teacher_log_probs",
    "teacher_prompt",
    "token_rewards",
)
_PLAIN = ("sample_id", "response_length", "response")


def waiting_to_rows(
    groups: Sequence[PendingGroup], holders: Sequence[Sequence[int]]
) -> list[dict[str, object]]:
    """Serialise waiting groups to plain JSON, exactly. groups: complete. holders: the rank that
    holds each of their samples."""
    return [
        {
            "prompt": _prompt_row(group.prompt),
            "samples": [
                _sample_row(s) | {"holder": holder}
                for s, holder in zip(complete(group.samples), of_group, strict=True)
            ],
        }
        for group, of_group in zip(groups, holders, strict=True)
    ]


def waiting_from_rows(
    rows: Sequence[Mapping[str, Any]], *, rank: int, num_holders: int
) -> list[PendingGroup]:
    """The groups that `waiting_to_rows` was given. Called on every rank; each gets the samples it
    held, or a share if the number of ranks changed.

    Args:
        rank: This rank.
        num_holders: Number of ranks that hold samples, from rank 0 on.
    """
    return [_pending(row, place, rank, num_holders) for place, row in enumerate(rows)]


def _pending(row: Mapping[str, Any], place: int, rank: int, num_holders: int) -> PendingGroup:
    """place: index among the waiting groups, the default holder."""
    prompt = _prompt(row["prompt"])
    samples: list[AnySample] = []
    for saved in row["samples"]:
        sample = _sample(prompt.group_id, prompt.text, prompt.label, saved)
        holder = int(saved.get("holder", place)) % num_holders
        has_begun = sample.response_length or sample.ended  # empty samples exist on all ranks
        if has_begun and holder != rank:
            samples += remote_samples(*rows_of([sample], holder))
        else:
            samples.append(sample)
    return PendingGroup(prompt, tuple(samples))


def groups_to_rows(groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
    """Serialise sampled groups to plain JSON, exactly; inverse of `groups_from_rows`. groups:
    complete."""
    return [
        {
            "group_id": group.group_id,
            "samples": [
                _sample_row(s)
                | {
                    "group_id": s.group_id,
                    "text": s.text,
                    "label": _text(s.label, f"sample {s.sample_id}: label"),
                }
                for s in complete(group.samples)
            ],
        }
        for group in groups
    ]


def groups_from_rows(rows: Sequence[Mapping[str, Any]]) -> list[SampleGroup]:
    """The groups that `groups_to_rows` was given."""
    return [
        SampleGroup(
            row["group_id"],
            tuple(_sample(s["group_id"], s["text"], _value(s["label"]), s) for s in row["samples"]),
        )
        for row in rows
    ]


def _prompt_row(prompt: Prompt) -> dict[str, object]:
    return {
        "group_id": prompt.group_id,
        "text": prompt.text,
        "tokens": list(prompt.tokens),
        "label": _text(prompt.label, f"prompt {prompt.group_id}: label"),
        "metadata": _text(dict(prompt.metadata), f"prompt {prompt.group_id}: metadata"),
    }


def _prompt(row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        row["group_id"],
        row["text"],
        tuple(row["tokens"]),
        _value(row["label"]),
        _value(row["metadata"]),
    )


def _sample_row(sample: Sample) -> dict[str, object]:
    row = {name: getattr(sample, name) for name in _PLAIN} | {
        name: _pack(getattr(sample, name)) for name in _ARRAYS
    }
    return row | {
        "status": str(sample.status),
        "weight_versions": list(sample.weight_versions),
        "reward": None if sample.reward is None else float(sample.reward).hex(),
        "metadata": _text(dict(sample.metadata), f"sample {sample.sample_id}: metadata"),
        "branches": [_sample_row(branch) for branch in sample.branches],
    }


def _sample(group_id: int, text: str, label: Any, row: Mapping[str, Any]) -> Sample:
    # checkpoints of older versions have no log-probs of a teacher and no rewards of tokens
    arrays = {name: _unpack(row.get(name)) for name in _ARRAYS}
    tokens, mask = arrays.pop("tokens"), arrays.pop("loss_mask")
    assert tokens is not None and mask is not None
    sample = Sample(
        group_id=group_id,
        text=text,
        tokens=tokens,
        loss_mask=mask,
        status=SampleStatus(row["status"]),
        weight_versions=tuple(row["weight_versions"]),
        label=label,
        reward=None if row["reward"] is None else float.fromhex(row["reward"]),
        metadata=_value(row["metadata"]),
        **{name: row[name] for name in _PLAIN},
    )
    return replace(
        sample,
        rollout_log_probs=arrays["rollout_log_probs"],
        token_sets=arrays["token_sets"],
        routes=arrays["routes"],
        teacher_log_probs=arrays["teacher_log_probs"],
        teacher_prompt=arrays["teacher_prompt"],
        token_rewards=arrays["token_rewards"],
        branches=tuple(
            _sample(group_id, text, label, branch) for branch in row.get("branches", ())
        ),
    )


def _text(value: object, where: str) -> str:
    """Encode a value as a JSON string, because the JSON of the checkpoint rejects NaN."""
    return json.dumps(encode(value, where))


def _value(text: str) -> Any:
    return decode(json.loads(text))


def _pack(tensor: Tensor | None) -> dict[str, object] | None:
    if tensor is None:
        return None
    array = tensor.numpy()
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": base64.b64encode(array.tobytes()).decode(),
    }


def _unpack(row: Mapping[str, Any] | None) -> Tensor | None:
    if row is None:
        return None
    array = np.frombuffer(base64.b64decode(row["bytes"]), dtype=row["dtype"]).reshape(row["shape"])
    return torch.from_numpy(array.copy())

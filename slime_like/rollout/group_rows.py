"""Groups as plain JSON, exactly: waiting groups of a checkpoint, and prefetched rollouts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.data.group_buffer import PendingGroup
from slime_like.images.encoded import EncodedImage
from slime_like.rollout.recording import decode, encode
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup, split
from slime_like.samples.index import AnySample, remote_samples, rows_of
from slime_like.types import Prompt, Sample, SampleStatus

_ARRAYS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "sampling_mask",
    "routed_experts",
    "indexer_topk",
    "teacher_log_probs",
    "teacher_prompt",
    "token_rewards",
)
# names in the files of all versions
_STORED_AS = {"sampling_mask": "token_sets", "routed_experts": "routes"}
_PLAIN = ("sample_id", "response_length", "response")
_PROMPT_FIELDS = ("group_id", "text", "label")
Row = Mapping[str, Any]  # plain JSON


def waiting_to_rows(
    groups: Sequence[PendingGroup], holders: Sequence[int]
) -> list[dict[str, object]]:
    """Serialise waiting groups to plain JSON, exactly.

    Args:
        groups: Complete.
        holders: The rank that holds each sample, over all groups.
    """
    rows: list[dict[str, object]] = []
    for group, ranks in zip(groups, split(holders, [len(group.samples) for group in groups])):
        local = complete(group.samples)
        samples = [_sample_row(s) | {"holder": rank} for s, rank in zip(local, ranks)]
        images = _image_table([*group.prompt.images, *_all_images(local)])
        row: dict[str, object] = {"prompt": _prompt_row(group.prompt), "samples": samples}
        row["images"] = images
        if group.started is not None:
            row["started"] = group.started
        rows.append(row)
    return rows


def waiting_from_rows(rows: Sequence[Row], *, rank: int, num_holders: int) -> list[PendingGroup]:
    """The inverse of `waiting_to_rows`. Called on every rank; each gets the samples it
    held, or a share if the number of ranks changed.

    Args:
        rank: This rank.
        num_holders: Number of ranks that hold samples, from rank 0 on.
    """
    return [_pending(row, i, rank, num_holders) for i, row in enumerate(rows)]


def _pending(row: Row, index: int, rank: int, num_holders: int) -> PendingGroup:
    """index: among the waiting groups, the default holder."""
    prompt_fields = {name: row["prompt"][name] for name in _PROMPT_FIELDS}
    images = _images_by_digest(row)
    samples: list[AnySample] = []
    for sample_row in row["samples"]:
        sample = _sample({**sample_row, **prompt_fields}, images)
        holder = int(sample_row.get("holder", index)) % num_holders
        started = sample.response_length or sample.ended  # empty samples exist on all ranks
        if started and holder != rank:
            samples += remote_samples(*rows_of([sample], holder))
        else:
            samples.append(sample)
    return PendingGroup(_prompt(row["prompt"], images), tuple(samples), row.get("started"))


def groups_to_rows(groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
    """Serialise sampled groups to plain JSON, exactly; inverse of `groups_from_rows`. groups:
    complete."""
    rows: list[dict[str, object]] = []
    for group in groups:
        local = complete(group.samples)
        samples = [_sample_row(s) | _prompt_fields(s) for s in local]
        images = _image_table(_all_images(local))
        rows.append({"group_id": group.group_id, "samples": samples, "images": images})
    return rows


def groups_from_rows(rows: Sequence[Row]) -> list[SampleGroup]:
    """The inverse of `groups_to_rows`."""
    groups = []
    for row in rows:
        images = _images_by_digest(row)
        samples = tuple(_sample(sample_row, images) for sample_row in row["samples"])
        groups.append(SampleGroup(row["group_id"], samples))
    return groups


def _all_images(samples: Sequence[Sample]) -> list[EncodedImage]:
    return [image for s in samples for each in (s, *s.branches) for image in each.images]


def _image_table(images: Iterable[EncodedImage]) -> dict[str, str]:
    """The distinct images of a group, in base64 by digest."""
    return {image.digest: base64.b64encode(image.data).decode() for image in images}


def _images_by_digest(row: Row) -> dict[str, EncodedImage]:
    """The images of a group's row; checkpoints of older versions have none."""
    table = row.get("images") or {}
    return {digest: EncodedImage(base64.b64decode(data)) for digest, data in table.items()}


def _prompt_row(prompt: Prompt) -> dict[str, object]:
    return {
        "group_id": prompt.group_id,
        "text": prompt.text,
        "tokens": list(prompt.tokens),
        "label": _to_json(prompt.label, f"prompt {prompt.group_id}: label"),
        "metadata": _to_json(dict(prompt.metadata), f"prompt {prompt.group_id}: metadata"),
        "images": [image.digest for image in prompt.images],
    }


def _prompt(row: Row, images: Mapping[str, EncodedImage]) -> Prompt:
    return Prompt(
        row["group_id"],
        row["text"],
        tuple(row["tokens"]),
        _from_json(row["label"]),
        _from_json(row["metadata"]),
        images=tuple(images[digest] for digest in row.get("images", ())),
    )


def _prompt_fields(sample: Sample) -> dict[str, object]:
    """The fields of a sample's row that follow from its prompt."""
    label = _to_json(sample.label, f"sample {sample.sample_id}: label")
    return {"group_id": sample.group_id, "text": sample.text, "label": label}


def _sample_row(sample: Sample) -> dict[str, object]:
    row = {name: getattr(sample, name) for name in _PLAIN}
    row |= {_STORED_AS.get(name, name): _pack(getattr(sample, name)) for name in _ARRAYS}
    return row | {
        "status": str(sample.status),
        "weight_versions": list(sample.weight_versions),
        "reward": None if sample.reward is None else float(sample.reward).hex(),
        "metadata": _to_json(dict(sample.metadata), f"sample {sample.sample_id}: metadata"),
        "branches": [_sample_row(branch) for branch in sample.branches],
        "images": [image.digest for image in sample.images],
    }


def _sample(row: Row, images: Mapping[str, EncodedImage]) -> Sample:
    """The sample of a row with `_prompt_fields`. images: of its group, by digest."""
    prompt_fields = {name: row[name] for name in _PROMPT_FIELDS}
    # checkpoints of older versions have no log-probs of a teacher and no rewards of tokens
    arrays: dict[str, Any] = {
        name: _unpack(row.get(_STORED_AS.get(name, name))) for name in _ARRAYS
    }
    tokens = arrays.pop("tokens")
    mask = arrays.pop("loss_mask")
    assert tokens is not None and mask is not None
    sample = Sample(
        group_id=row["group_id"],
        text=row["text"],
        tokens=tokens,
        loss_mask=mask,
        status=SampleStatus(row["status"]),
        weight_versions=tuple(row["weight_versions"]),
        label=_from_json(row["label"]),
        reward=None if row["reward"] is None else float.fromhex(row["reward"]),
        metadata=_from_json(row["metadata"]),
        images=tuple(images[digest] for digest in row.get("images", ())),
        **{name: row[name] for name in _PLAIN},
    )
    branches = tuple(
        _sample({**branch, **prompt_fields}, images) for branch in row.get("branches", ())
    )
    return replace(sample, branches=branches, **arrays)


def _to_json(value: object, where: str) -> str:
    """Encode a value as a JSON string, because the JSON of the checkpoint rejects NaN."""
    return json.dumps(encode(value, where))


def _from_json(text: str) -> Any:
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


def _unpack(row: Row | None) -> Tensor | None:
    if row is None:
        return None
    array = np.frombuffer(base64.b64decode(row["bytes"]), dtype=row["dtype"]).reshape(row["shape"])
    return torch.from_numpy(array.copy())

"""The tensors, images and texts of a sample as one row of bytes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_like.images.encoded import EncodedImage
from slime_like.samples.index import AnySample, RemoteSample, greedy_metadata
from slime_like.types import OPTIONAL_TENSORS, Sample

_LENGTH = torch.int64  # of an image, in bytes
_DTYPES = {
    "token_rewards": torch.float64,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "sampling_mask": torch.int32,
    "teacher_prompt": torch.int32,
    "indexer_topk": torch.int32,
    "routed_experts": torch.int16,
}


def _columns(sample: AnySample) -> list[tuple[str, torch.dtype, int]]:
    """(name, dtype, number of elements) of the tensors that are sent for a sample, widest dtype
    first, so that all are aligned. Token ids are sent with 32 bits. Weight versions are sent only
    if they do not follow from the metadata: for several versions, tokens that the model did not
    generate, or branches."""
    counts = sample.version_counts
    length = sample.response_length
    has_one_version = not sample.num_branches and list(counts.values()) == [length]
    columns = [("tokens", torch.int32, sample.total_length)]
    if sample.versions_length > 0 and not has_one_version:
        columns.append(("weight_versions", torch.int32, length))
    columns.append(("loss_mask", torch.uint8, length))
    for name in OPTIONAL_TENSORS:
        if sample.has(name):
            columns.append((name, _DTYPES[name], _size(sample, name)))
    return sorted(columns, key=lambda column: -column[1].itemsize)


def _size(sample: AnySample, name: str) -> int:
    if isinstance(sample, Sample):
        return int(getattr(sample, name).numel())
    return math.prod(sample.shape(name))


def payload_size(sample: AnySample) -> int:
    """Size of `pack_payload` in bytes; known on every rank."""
    tensors = sum(dtype.itemsize * count for _, dtype, count in _columns(sample))
    return tensors + _LENGTH.itemsize * sample.num_images + sample.image_bytes


def pack_payload(sample: Sample) -> Tensor:
    """Serialise a sample without text and metadata: [n] uint8. The lengths of its images, which
    come last, are first, so that everything is aligned."""
    parts = _lengths(sample.images)
    for name, dtype, _ in _columns(sample):
        value = getattr(sample, name)
        tensor = torch.tensor(value) if name == "weight_versions" else value
        parts.append(tensor.to(dtype).contiguous().view(-1).view(torch.uint8))
    parts += [torch.frombuffer(bytearray(i.data), dtype=torch.uint8) for i in sample.images]
    return torch.cat(parts)


def _lengths(images: Sequence[EncodedImage]) -> list[Tensor]:
    lengths = torch.tensor([len(image.data) for image in images], dtype=_LENGTH)
    return [lengths.view(torch.uint8)] if images else []


def unpack_payload(remote: RemoteSample, payload: Tensor) -> Sample:
    """Inverse of `pack_payload`; the sample has no text and metadata.

    Args:
        remote: This rank's metadata of the sample.
        payload: [n] uint8; its memory is not referenced afterwards.
    """
    fields: dict[str, Any] = {}
    start = _LENGTH.itemsize * remote.num_images
    lengths = payload[:start].clone().view(_LENGTH).tolist()
    for name, dtype, count in _columns(remote):
        end = start + dtype.itemsize * count
        fields[name] = payload[start:end].clone().view(dtype)
        start = end
    images = []
    for length in lengths:
        images.append(EncodedImage(payload[start : start + length].numpy().tobytes()))
        start += length
    for name in OPTIONAL_TENSORS:
        if name in fields:
            fields[name] = fields[name].view(remote.shape(name))
    versions = fields.pop("weight_versions", None)
    if versions is None:
        (version,) = remote.version_counts if remote.versions_length else (0,)
        token_versions = (version,) * remote.versions_length
    else:
        token_versions = tuple(versions.tolist())
    sample = Sample(
        group_id=remote.group_id,
        sample_id=remote.sample_id,
        tokens=fields.pop("tokens").to(torch.int64),
        response_length=remote.response_length,
        loss_mask=fields.pop("loss_mask").view(torch.bool),
        reward=remote.reward,
        status=remote.status,
        weight_versions=token_versions,
        metadata=greedy_metadata(remote),
        images=tuple(images),
    )
    return replace(sample, **fields)


_TEXTS = ("text", "response", "label", "metadata", "branches")


def pack_texts(sample: Sample) -> Tensor:
    """Pickle text, metadata and branches to [n] uint8. Pickled, like all small objects between
    ranks, because user functions may put any object there."""
    data = pickle.dumps({name: getattr(sample, name) for name in _TEXTS})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def with_texts(sample: Sample, packed: Tensor) -> Sample:
    """Add the content of `pack_texts`. packed: from another rank of this job."""
    return replace(sample, **pickle.loads(packed.numpy().tobytes()))

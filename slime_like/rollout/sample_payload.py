"""The tensors of a sample as bytes, whose number follows from what all ranks know of it, and text
and metadata as bytes, for the few that ask for them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_like.sample_index import AnySample, RemoteSample, greedy_metadata
from slime_like.types import OPTIONAL_TENSORS, Sample, SampleStatus

_DTYPES = {
    "token_rewards": torch.float64,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "token_sets": torch.int32,
    "routes": torch.int16,
}


def _columns(sample: AnySample) -> list[tuple[str, torch.dtype, int]]:
    """Name, type and number of numbers of what travels of a sample, from the widest type on, so
    that each is aligned. Token ids fit into 32 bits; weight versions travel where a sample has
    several, tokens that the model did not write, or branches: their versions are counted too."""
    counts = sample.version_counts
    length = sample.response_length
    one = not sample.num_branches and list(counts.values()) == [length]
    mixed = sample.versions_length > 0 and not one
    columns = [("tokens", torch.int32, sample.total_length)]
    columns += [("weight_versions", torch.int32, length)] * mixed
    columns += [("loss_mask", torch.uint8, length)]
    for name in OPTIONAL_TENSORS:
        if sample.has(name):
            columns.append((name, _DTYPES[name], _size(sample, name)))
    return sorted(columns, key=lambda column: -column[1].itemsize)


def _size(sample: AnySample, name: str) -> int:
    if isinstance(sample, Sample):
        return int(getattr(sample, name).numel())
    size = 1
    for extent in sample.shape(name):
        size *= extent
    return size


def payload_size(sample: AnySample) -> int:
    """Bytes of `pack_payload`, on every rank."""
    return sum(dtype.itemsize * count for _, dtype, count in _columns(sample))


def pack_payload(sample: Sample) -> Tensor:
    """[n] uint8: everything but text and metadata."""
    parts = []
    for name, dtype, _ in _columns(sample):
        value = getattr(sample, name)
        tensor = torch.tensor(value) if name == "weight_versions" else value
        parts.append(tensor.to(dtype).contiguous().view(-1).view(torch.uint8))
    return torch.cat(parts)


def unpack_payload(known: RemoteSample, payload: Tensor) -> Sample:
    """The sample of `pack_payload`, without text and metadata. known: as this rank knew it before.
    payload: [n] uint8, of which nothing is kept."""
    found: dict[str, Any] = {}
    start = 0
    for name, dtype, count in _columns(known):
        end = start + dtype.itemsize * count
        found[name] = payload[start:end].clone().view(dtype)
        start = end
    for name in OPTIONAL_TENSORS:
        if name in found:
            found[name] = found[name].view(known.shape(name))
    versions = found.pop("weight_versions", None)
    if versions is None:
        (version,) = known.version_counts if known.versions_length else (0,)
        versions_of_tokens = (version,) * known.versions_length
    else:
        versions_of_tokens = tuple(versions.tolist())
    return Sample(
        group_id=known.group_id,
        sample_id=known.sample_id,
        tokens=found.pop("tokens").to(torch.int64),
        response_length=known.response_length,
        loss_mask=found.pop("loss_mask").view(torch.bool),
        reward=known.reward,
        status=known.status,
        weight_versions=versions_of_tokens,
        metadata=greedy_metadata(known),
        **found,
    )


_TEXTS = ("text", "response", "label", "metadata", "branches")


def pack_texts(sample: Sample) -> Tensor:
    """[n] uint8: text, metadata and branches, which may hold whatever a function of the user's put there, so
    that it is pickled, as everything small between ranks."""
    data = pickle.dumps({name: getattr(sample, name) for name in _TEXTS})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def with_texts(sample: Sample, packed: Tensor) -> Sample:
    """With what `pack_texts` was given. packed: from another rank of this job."""
    return replace(sample, **pickle.loads(packed.numpy().tobytes()))


def without_routes(samples: Sequence[AnySample]) -> list[AnySample]:
    """Where they are not replayed, so that they do not travel."""
    return [
        s.without("routes") if isinstance(s, RemoteSample) else replace(s, routes=None)
        for s in samples
    ]


def with_routes(
    samples: Sequence[AnySample], *, layers: int, topk: int, experts: int
) -> list[AnySample]:
    """The samples, with a route for each that this rank has, -1 in an aborted one without. layers:
    with experts. Raises ValueError naming a sample whose engine gave none, or of another network."""
    return [
        replace(s, routes=_checked_routes(s, layers, topk, experts)) if isinstance(s, Sample) else s
        for s in samples
    ]


def _checked_routes(sample: Sample, layers: int, topk: int, experts: int) -> Tensor:
    shape = (sample.total_length, layers, topk)
    if sample.routes is None:
        if sample.status == SampleStatus.ABORTED:
            return torch.full(shape, -1, dtype=torch.int16)
        raise ValueError(
            f"--use-rollout-routing-replay: sample {sample.sample_id} does not tell which experts its tokens went to; it was recorded without "
            "this flag, or its engine cannot tell"
        )
    routes = sample.routes
    if routes.shape != shape or not bool(((routes >= -1) & (routes < experts)).all()):
        raise ValueError(
            f"--use-rollout-routing-replay: the routes of sample {sample.sample_id} are {tuple(routes.shape)} with numbers from "
            f"{int(routes.min()) if routes.numel() else 0} to {int(routes.max()) if routes.numel() else 0}; expected (tokens, expert layers, "
            f"experts of a token) = {shape} with numbers from -1 to {experts - 1}"
        )
    return routes

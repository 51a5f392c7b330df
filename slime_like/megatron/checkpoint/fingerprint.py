"""Fingerprint of the exact bits of a network's state on one rank: saved with a checkpoint, and
compared after loading in the same layout. It detects a wrong resume without a training step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from slime_like.megatron.checkpoint.networks import (
    EXTRA_STATE,
    SavedNetwork,
    plain_optimizers,
)

COLUMNS = 4096
KIND = "names and words"  # scheme of the digests; fingerprints of other kinds are not compared
THREADS = 4


def fingerprint(network: SavedNetwork) -> dict[str, str]:
    """Digests by part: "weights", and for the optimizer "main_params", "exp_avg", "exp_avg_sq" and
    "step". Each is "<digest of parameter names and shapes>:<digest of the bits>"."""
    kind = hashlib.sha256(" ".join([KIND, *(name for name, _ in _weights(network))]).encode())
    shapes: dict[str, Any] = {}
    bits: dict[str, Any] = {}
    parts = list(_parts(network))
    with ThreadPoolExecutor(THREADS) as pool:  # torch releases the GIL
        for (part, tensor), sums in zip(
            parts, pool.map(lambda item: bit_sums(item[1]), parts), strict=True
        ):
            shapes.setdefault(part, kind.copy()).update(
                f"{tensor.dtype}{tuple(tensor.shape)}".encode()
            )
            bits.setdefault(part, hashlib.sha256()).update(sums)
    return {
        part: f"{shapes[part].hexdigest()[:8]}:{digest.hexdigest()[:24]}"
        for part, digest in bits.items()
    }


def differences(saved: dict[str, str], found: dict[str, str]) -> list[str]:
    """Parts with equal shapes and different bits. Parts with different names or shapes cannot be
    compared: in the same layout an optimizer may shard its tensors differently (distributed or not,
    other buckets), weights may have another precision, and modules other names (Transformer
    Engine's layers)."""
    return sorted(
        p
        for p in saved.keys() & found.keys()
        if saved[p] != found[p] and saved[p].split(":")[0] == found[p].split(":")[0]
    )


@torch.no_grad()
def bit_sums(tensor: Tensor) -> bytes:
    """Row and column sums of the tensor's bytes, viewed as 64-bit integers in rows of 4096. They
    detect any single changed element, and two swapped elements or rows. Reads the tensor twice,
    without a copy if it starts at a multiple of 8 bytes."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 8 // COLUMNS * COLUMNS * 8
    table = flat[:whole].view(torch.int64).view(-1, COLUMNS)
    sums = (table.sum(dim=0), table.sum(dim=1), flat[whole:])  # sums wrap around
    return b"".join(part.cpu().numpy().tobytes() for part in sums)


def _parts(network: SavedNetwork) -> Iterator[tuple[str, Tensor]]:
    for _, value in _weights(network):
        yield "weights", value
    for part in plain_optimizers(network.optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                yield "main_params", parameter
                yield from _tensors(part.state.get(parameter, {}).items())


def _weights(network: SavedNetwork) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of all chunks, sorted by name."""
    for chunk in network.chunks:
        named = sorted(
            (name, value)
            for name, value in chunk.state_dict().items()
            if not name.endswith(EXTRA_STATE)
        )
        yield from ((name, value) for name, value in named if isinstance(value, Tensor))


def _tensors(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Tensor]]:
    return ((str(name), value) for name, value in sorted(items) if isinstance(value, Tensor))

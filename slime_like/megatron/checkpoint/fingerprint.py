"""Fingerprint of the exact bits of a network's state on one rank: saved with a checkpoint, and
compared after loading in the same layout. It detects a wrong resume without a training step."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
    names = hashlib.sha256(" ".join([KIND, *(name for name, _ in _weights(network))]).encode())
    shapes: defaultdict[str, hashlib._Hash] = defaultdict(names.copy)
    bits: defaultdict[str, hashlib._Hash] = defaultdict(hashlib.sha256)
    parts = list(_parts(network))
    with ThreadPoolExecutor(THREADS) as pool:  # torch releases the GIL
        sums = pool.map(lambda item: bit_sums(item[1]), parts)
        for (part, tensor), digest in zip(parts, sums, strict=True):
            shapes[part].update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            bits[part].update(digest)
    return {
        part: f"{shapes[part].hexdigest()[:8]}:{digest.hexdigest()[:24]}"
        for part, digest in bits.items()
    }


def differences(saved: dict[str, str], loaded: dict[str, str]) -> list[str]:
    """Parts with equal shapes and different bits. Parts with different names or shapes cannot be
    compared: in the same layout an optimizer may shard its tensors differently (distributed or not,
    other buckets), weights may have another precision, and modules other names (Transformer
    Engine's layers)."""
    comparable = [
        part
        for part in saved.keys() & loaded.keys()
        if saved[part].split(":")[0] == loaded[part].split(":")[0]
    ]
    return sorted(part for part in comparable if saved[part] != loaded[part])


@torch.no_grad()
def bit_sums(tensor: Tensor) -> bytes:
    """Row and column sums of the tensor's bytes, viewed as 64-bit integers in rows of 4096. They
    detect any single changed element, and two swapped elements or rows. Reads the tensor twice,
    without a copy if it starts at a multiple of 8 bytes."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    flat = flat.view(torch.uint8)
    size = flat.numel() // 8 // COLUMNS * COLUMNS * 8  # bytes in complete rows
    table = flat[:size].view(torch.int64).view(-1, COLUMNS)
    sums = (table.sum(dim=0), table.sum(dim=1), flat[size:])  # sums wrap around
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
        state = chunk.state_dict()
        names = sorted(name for name in state if not name.endswith(EXTRA_STATE))
        yield from ((name, state[name]) for name in names if isinstance(state[name], Tensor))


def _tensors(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Tensor]]:
    return ((str(name), value) for name, value in sorted(items) if isinstance(value, Tensor))

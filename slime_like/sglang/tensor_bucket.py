"""Weights inside a request to SGLang's `update_weights_from_tensor` with load format
"flattened_bucket".

The request contains a pickle, which SGLang loads with an allow-list (`SafeUnpickler` in 0.5.23).
Metadata are plain namespaces, which are on that list, so the trainer does not need SGLang. The data
is the bytes themselves, or on a GPU a CUDA IPC handle made by torch's reductions. The server must
see that GPU under the same index. Handles are reference-counted, so every rank of a server gets its
own.
"""

from __future__ import annotations

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from slime_like.weights.buckets import Bucket


def tensor_update(bucket: Bucket, flat: Tensor, version: int, ranks: int) -> dict[str, Any]:
    """The request body of one bucket.

    Args:
        flat: Its bytes; on a GPU they must stay alive, see the module docstring.
        ranks: Server ranks, each of which opens its own entry.
    """
    body: dict[str, Any] = {
        "serialized_named_tensors": serialized(bucket, flat, ranks),
        "load_format": "flattened_bucket",
        "flush_cache": bucket.is_last,
    }
    if bucket.is_last:
        body["weight_version"] = str(version)
    return body


def serialized(bucket: Bucket, flat: Tensor, ranks: int) -> list[str]:
    """What each rank of a server opens; see `tensor_update`."""
    metadata: list[SimpleNamespace] = []
    start = 0
    for tensor in bucket.tensors:
        end = start + tensor.nbytes
        numel = tensor.nbytes
        entry = SimpleNamespace(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)
        entry.start_idx = start
        entry.end_idx = end
        entry.numel = numel
        metadata.append(entry)
        start = end
    content = {"flattened_tensor": flat, "metadata": metadata}
    if goes_as_handle(flat):
        return [_pickled(content, ForkingPickler) for _ in range(ranks)]
    return [_pickled(content, pickle.Pickler)] * ranks


def goes_as_handle(flat: Tensor) -> bool:
    """Whether other processes can open this memory."""
    return flat.is_cuda


def _pickled(content: dict[str, object], pickler: type[pickle.Pickler]) -> str:
    buffer = io.BytesIO()
    pickler(buffer).dump(content)
    return base64.b64encode(buffer.getvalue()).decode()

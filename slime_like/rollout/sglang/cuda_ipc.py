"""Weights to a server on the same GPU: handles of CUDA memory, in SGLang's own format for them.

Not run in our tests, which have no GPU beside a server; the shape of the message is SGLang 0.5's (`update_weights_from_tensor` with the load
format "flattened_bucket"). Handles are pickled by torch's reductions: the server must be one that this run started, on loopback.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from slime_like.rollout.sglang.buckets import Bucket


def tensor_update(bucket: Bucket, flat: Tensor, version: int, ranks: int) -> dict[str, Any]:
    """The body for one bucket, whose bytes are `flat`, on the GPU; `flat` must live until the server has answered. ranks: of the server, each
    of which opens the same handle."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, tensor in bucket.weights:
        end = start + tensor.nbytes
        metadata.append(
            FlattenedTensorMetadata(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes)
        )
        start = end
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    handle = base64.b64encode(buffer.getvalue()).decode()
    body: dict[str, Any] = {
        "serialized_named_tensors": [handle] * ranks,
        "load_format": "flattened_bucket",
        "flush_cache": bucket.is_last,
    }
    return body | ({"weight_version": str(version)} if bucket.is_last else {})

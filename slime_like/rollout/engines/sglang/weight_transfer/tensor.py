"""Weights within requests, in SGLang's own format for them: `update_weights_from_tensor` with the
load format "flattened_bucket".

The request holds a pickle, which SGLang opens with a list of what may be in it (`SafeUnpickler` in
0.5.23). Metadata are plain namespaces, which are on that list: the server reads their fields only,
and the trainer needs no SGLang. What stands for the bytes depends on where they are:

- on a GPU, a handle of its memory, made by torch's reductions (--update-weight-transport cuda_ipc).
  The server must see that GPU under the same number. Each handle is counted until who opened it has
  let go of it, so that every rank of a server gets one of its own. Not run in our tests, which have
  no GPU beside a server;
- on a CPU, the bytes themselves (--update-weight-transport tensor). Shared memory would need the
  two processes to share keys, or a helper process that outlives them.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_like.rollout.engines.sglang.server_pool import Worker
from slime_like.rollout.engines.sglang.weight_transfer.base import WeightTransport
from slime_like.weights.buckets import Bucket, WeightBuckets


class TensorTransport(WeightTransport):
    """Bucket by bucket; a server that fails with one gets no other."""

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        self.servers.in_session(workers, lambda ready: self._move(weights, version, ready))

    def _move(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        sizes = dict(zip(map(id, workers), self.servers.sizes(workers), strict=True))
        for bucket in weights.buckets():
            flat = self._placed(bucket.flat)

            def post(worker: Worker, bucket: Bucket = bucket, flat: Tensor = flat) -> None:
                body = tensor_update(bucket, flat, version, sizes[id(worker)])
                self.servers.call(worker, "/update_weights_from_tensor", body)

            workers = self.servers.on_each(workers, post, "a bucket of weights")
            if flat.is_cuda:
                torch.cuda.ipc_collect()  # the memory of handles that the servers have let go of
            del bucket, flat, post  # before the next one is made

    def _placed(self, flat: Tensor) -> Tensor:
        return flat.cpu()


class CudaIpcTransport(TensorTransport):
    def _placed(self, flat: Tensor) -> Tensor:
        return flat.to(self.servers.device)


def tensor_update(bucket: Bucket, flat: Tensor, version: int, ranks: int) -> dict[str, Any]:
    """The body for one bucket, whose bytes are `flat`; on a GPU it must live until the server has
    answered. ranks: of the server, each of which opens an entry of its own."""
    metadata: list[SimpleNamespace] = []
    start = 0
    for tensor in bucket.tensors:
        end = start + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        start = end
    content = {"flattened_tensor": flat, "metadata": metadata}
    entries = (
        [_pickled(content, ForkingPickler) for _ in range(ranks)]
        if flat.is_cuda
        else [_pickled(content, pickle.Pickler)] * ranks
    )
    body: dict[str, Any] = {
        "serialized_named_tensors": entries,
        "load_format": "flattened_bucket",
        "flush_cache": bucket.is_last,
    }
    return body | ({"weight_version": str(version)} if bucket.is_last else {})


def _pickled(content: dict[str, Any], pickler: type[pickle.Pickler]) -> str:
    buffer = io.BytesIO()
    pickler(buffer).dump(content)
    return base64.b64encode(buffer.getvalue()).decode()

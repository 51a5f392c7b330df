"""Tensor and CUDA IPC transports: weights inside requests, as bytes or as handles of GPU memory.

- on a GPU, a CUDA IPC handle (--update-weight-transport cuda_ipc). torch keeps the memory of a
  bucket until every server has closed it, and a server closes it once its stream has read it; in
  addition a bucket stays referenced here until every server has answered the next one (so has left
  the code that read it), and the last until the update has ended. Nothing is collected before that:
  two buckets at a time, so none is made while another is sent. Not covered on a GPU, which our
  tests do not have;
- on a CPU, the bytes themselves (--update-weight-transport tensor), while the next bucket is made.
  Shared memory would require common keys, or a helper process that outlives both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.servers.http import ControlClient, RequestFailed
from slime_like.servers.server_api import ServerApi
from slime_like.servers.server_pool import Worker
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.transports.base import WeightTransport
from slime_like.weight_sync.transports.overlap import send_while_made
from slime_like.weights.buckets import Bucket, WeightBuckets
from slime_like.weights.gather import WeightStream


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Order for the first rank of each node to send to the servers there."""

    # sending rank -> {server address: tensor-parallel size}
    targets: Mapping[int, Mapping[str, int]]
    version: int
    as_handles: bool  # CUDA IPC handles instead of bytes
    connect_s: float
    timeout_s: float
    api: ServerApi

    def assist(self, weights: WeightStream) -> None:
        self.execute(weights)

    def execute(self, weights: WeightStream) -> dict[str, str]:
        """Run on every rank. Returns errors of all ranks, keyed by server address."""
        received = weights.to_ranks(list(self.targets))
        failed = self.send(received, self.targets.get(dist.get_rank(), {}))
        errors: dict[str, str] = {}
        for rank_errors in gather(failed):
            errors |= rank_errors
        return errors

    def send(self, weights: WeightBuckets, targets: Mapping[str, int]) -> dict[str, str]:
        """Consume all weights and send them to the servers of `targets`. A server that fails gets
        no further buckets. Returns errors by address."""
        failed: dict[str, str] = {}
        control = ControlClient(self.connect_s)
        try:
            if self.as_handles:
                self._send_handles(control, weights.buckets(), targets, failed)
            else:
                send_while_made(
                    weights.buckets(),
                    lambda buckets: self._send_bytes(control, buckets, targets, failed),
                )
        finally:
            control.close()
        return failed

    def _send_bytes(
        self,
        control: ControlClient,
        buckets: Iterator[Bucket],
        targets: Mapping[str, int],
        failed: dict[str, str],
    ) -> None:
        """failed: errors by address, which this adds to."""
        for bucket in buckets:
            self._send(control, bucket, targets, failed)
            del bucket  # free it before the next one is taken

    def _send_handles(
        self,
        control: ControlClient,
        buckets: Iterator[Bucket],
        targets: Mapping[str, int],
        failed: dict[str, str],
    ) -> None:
        """As `_send_bytes`."""
        exported: Tensor | None = None  # the bucket before
        try:
            for bucket in buckets:
                self._send(control, bucket, targets, failed)
                exported = bucket.flat
                del bucket  # free it before the next one is built
        finally:
            on_gpu = exported is not None and exported.is_cuda
            del exported
            if on_gpu:
                torch.cuda.ipc_collect()  # what the servers closed after their last answer

    def _send(
        self,
        control: ControlClient,
        bucket: Bucket,
        targets: Mapping[str, int],
        failed: dict[str, str],
    ) -> None:
        """Send one bucket to the servers that have not failed. Errors are not raised, because this
        rank has to take part in the remaining buckets."""
        left = {url: ranks for url, ranks in targets.items() if url not in failed}
        if not left:
            return
        try:
            flat = bucket.flat if self.as_handles else bucket.flat.cpu()
        except RuntimeError as error:  # out of memory
            failed |= dict.fromkeys(left, str(error).splitlines()[0])
            return

        def post(url: str) -> str | None:
            try:
                call = self.api.bucket(bucket, flat, self.version, left[url])
                control.call(url + call.path, call.body, timeout_s=self.timeout_s)
            except (RequestFailed, RuntimeError) as error:
                return str(error)
            return None

        with ThreadPoolExecutor(len(left)) as threads:
            for url, problem in zip(left, threads.map(post, left), strict=True):
                if problem is not None:
                    failed[url] = problem


class TensorTransport(WeightTransport):
    """Sends buckets inside requests. A server that fails gets no further buckets; a server on
    another node gets them from a rank of that node."""

    as_handles = False

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """See `WeightTransport`. A server writes a bucket into the weights that it computes with,
        so only the first one is made before it pauses; memory is too scarce for that where handles
        are sent, to the same GPU."""
        workers = self.servers.pool.alive()
        if not self.as_handles and not self._sends_from_nodes(ranks, workers):
            ranks.gathered().make_first()

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """See `WeightTransport`."""

        def move(order: NodeOrder) -> dict[str, str]:
            return order.execute(ranks.order(order))

        if not ranks.are_gathered and self._sends_from_nodes(ranks, workers):
            self.servers.in_session(
                workers, version, lambda ready: self._move(move, version, ready)
            )
        else:
            self.send(ranks.gathered(), version, workers)

    def _sends_from_nodes(self, ranks: SendingRanks, workers: Sequence[Worker]) -> bool:
        return ranks.multiple_senders and any(sender_of(worker) for worker in workers)

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        """See `WeightTransport`."""

        def move(order: NodeOrder) -> dict[str, str]:
            every_server: dict[str, int] = {}
            for targets in order.targets.values():
                every_server.update(targets)
            return order.send(weights, every_server)

        self.servers.in_session(workers, version, lambda ready: self._move(move, version, ready))

    def _move(
        self, move: Callable[[NodeOrder], dict[str, str]], version: int, workers: Sequence[Worker]
    ) -> None:
        targets: dict[int, dict[str, int]] = {}
        for worker, size in zip(workers, self.servers.sizes(workers), strict=True):
            targets.setdefault(sender_of(worker), {})[worker.url] = size
        limits = self.servers.pool.connect_s, self.servers.settings.timeout_s
        failed = move(NodeOrder(targets, version, self.as_handles, *limits, self.servers.api))
        for worker in workers:
            if worker.url in failed:
                self.servers.pool.evict(worker, f"a bucket of weights: {failed[worker.url]}")
        if len(failed) == len(workers):
            self.servers.raise_none_left(
                "a bucket of weights failed on every engine: " + "; ".join(failed.values())
            )


class CudaIpcTransport(TensorTransport):
    as_handles = True


def sender_of(worker: Worker) -> int:
    """The rank that sends weights to this server: one on its node if the run started it."""
    return 0 if worker.process is None else worker.process.sender

"""A weight transport: a folder in this host's memory (/dev/shm), from which the servers on this
host load. It needs no process group and no disk."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from slime_like.servers.server_pool import Worker
from slime_like.weight_sync.transports.base import WeightTransport, register_weight_transport
from slime_like.weights.hf_save import write_hf


@register_weight_transport("shm", help="a folder in this host's memory.")
class SharedMemoryTransport(WeightTransport):
    def send(
        self, weights: Iterator[tuple[str, Tensor]], version: int, workers: Sequence[Worker]
    ) -> None:
        servers = self.servers
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            folder = Path(memory) / "weights"
            write_hf(folder, weights, Path(servers.hf_checkpoint))
            calls = servers.api.load_folder(folder, version)  # of SGLang or vLLM
            servers.on_each(  # a server that fails is evicted; the others continue
                workers,
                lambda worker: servers.call(worker, *calls),
                "loading weights from memory",
            )

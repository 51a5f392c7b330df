"""What moves new weights to servers: the transports of --update-weight-transport, one file each.

Rank 0 talks to the servers; see sending_ranks.py for the others. `WeightUpdater` (updater.py) has what all transports share: one update
at a time, who has which version, a server that comes back; a transport only moves tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from slime_like.registry import Registry

if TYPE_CHECKING:
    from slime_like.rollout.engines.sglang.server_pool import Worker
    from slime_like.rollout.engines.sglang.weight_transfer.sending_ranks import SendingRanks
    from slime_like.rollout.engines.sglang.weight_transfer.servers import Servers
    from slime_like.weights.gather import WeightBuckets


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """transport: how. buffer_bytes: of one message. timeout_s: for one message, or for a load from
    disk. disk_dir: shared with the servers; None: a temporary folder of this host. keep_copy: with
    broadcast, the weights stay in this process's memory for a server that comes late. delta: only
    what changed; local_dir: of this host's copy then, None: temporary; full_interval: updates from
    a full one to the next."""

    transport: str = "broadcast"
    buffer_bytes: int = 512 * 2**20
    timeout_s: float = 300.0
    disk_dir: str | None = None
    keep_files: bool = False
    keep_copy: bool = True
    delta: bool = False
    local_dir: str | None = None
    full_interval: int = 20


class WeightTransport:
    """One way to the servers, made once in a run.

    restores: whether a server that comes late can get the latest weights without the trainer.
    moved_bytes: of the latest update; None: all weights'.
    """

    restores = False
    moved_bytes: int | None = None

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """As `send`, where other ranks send too; those that leave it to rank 0 have
        `send`."""
        self.send(ranks.whole(), version, workers)

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        """Give the servers all weights: (Hugging Face name, full tensor) pairs, or buckets of them,
        of which the stream makes one at a time. Each server ends with ``weight_version`` `version`.

        Raises:
            UpdateIncomplete: when the update has to be made again, for those that are left.
            RunError: when no server is left.
        """
        raise NotImplementedError

    @property
    def latest(self) -> int | None:
        """The version that `restore` gives a server; None: only the next update can."""
        return None

    def restore(self, worker: Worker) -> None:
        """Give one server the latest weights; in the thread that watches the servers."""
        raise NotImplementedError

    def close(self) -> None:
        """The run ends."""


weight_transports: Registry[type[WeightTransport]] = Registry(
    "weight transport (--update-weight-transport)"
)
T = TypeVar("T", bound=type[WeightTransport])


def register_weight_transport(name: str, *, help: str = "") -> Callable[[T], T]:
    """Decorator that makes a class the transport of --update-weight-transport `name`. Raises
    ValueError when the name is taken."""

    def register(transport: T) -> T:
        weight_transports.add(name, transport, help=help)
        return transport

    return register


_HERE = "slime_like.rollout.engines.sglang.weight_transfer"
for _name, _path, _help in (
    ("broadcast", "broadcast:BroadcastTransport", "a process group with them, gloo or NCCL."),
    ("disk", "disk:DiskTransport", "a Hugging Face folder."),
    ("cuda_ipc", "tensor:CudaIpcTransport", "handles of GPU memory, with --colocate."),
    ("tensor", "tensor:TensorTransport", "in the requests themselves, which is slow."),
):
    weight_transports.add_lazy(_name, f"{_HERE}.{_path}", help=_help)

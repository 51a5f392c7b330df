"""Interface of weight transports (--update-weight-transport), one file each.

Rank 0 talks to the servers; senders.py describes the role of the other ranks. A transport
only moves tensors: `WeightUpdater` (updater.py) serialises updates, tracks versions and restores
servers that return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from slime_like.registry import Registry

if TYPE_CHECKING:
    from slime_like.servers.server_pool import Worker
    from slime_like.weight_sync.senders import SendingRanks
    from slime_like.weight_sync.servers import Servers
    from slime_like.weights.buckets import WeightBuckets


class WeightTransport:
    """Moves weights to servers; one instance per run.

    restores: whether a server that joins late can get the latest weights without the trainer.
    """

    restores = False
    moved_bytes: int | None = None  # bytes of the latest update; None: the size of all weights

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def before_stage(self, version: int) -> None:
        """Give up what `stage` overwrites, so that no server that returns gets it: `restore` may
        run beside `stage`, and not beside this."""

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """What `update` can do in advance, while servers go on sampling with the old weights: a
        transport through files writes them, the others make the first bucket."""

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """As `send`, but other ranks may send too. Transports that only send from rank 0 implement
        `send` instead."""
        self.send(ranks.gathered(), version, workers)

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        """Send all weights to the servers: (Hugging Face name, full tensor) pairs in buckets,
        produced one at a time. Afterwards each server reports ``weight_version`` `version`.

        Raises:
            UpdateIncomplete: The update has to be repeated for the remaining servers.
            RunError: No server is left.
        """
        raise NotImplementedError

    @property
    def latest(self) -> int | None:
        """The version that `restore` sends; None if it cannot and the next update has to."""
        return None

    def restore(self, worker: Worker) -> None:
        """Send the latest weights to one server; called in the health-check thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources at the end of the run."""


@dataclass(frozen=True, slots=True)
class TransportTraits:
    """What the rules of the command line must know about a transport before it is imported."""

    same_gpu: bool = False  # works between processes on one GPU only
    uses_folder: bool = False  # goes through a folder that trainer and servers share
    sends_deltas: bool = False  # works with --update-weight-mode delta
    overlaps: bool = False  # a bucket is sent while the next one is made
    keeps_copy: bool = False  # may keep a copy in host memory for servers that join late


weight_transports: Registry[type[WeightTransport]] = Registry(
    "weight transport (--update-weight-transport)"
)
_traits: dict[str, TransportTraits] = {}
T = TypeVar("T", bound=type[WeightTransport])


def transport_traits(name: str | None) -> TransportTraits:
    """The traits of --update-weight-transport `name`; the defaults for an unknown one."""
    return _traits.get(name or "", TransportTraits())


def register_weight_transport(
    name: str, *, help: str = "", traits: TransportTraits | None = None
) -> Callable[[T], T]:
    """Decorator that registers a class as --update-weight-transport `name`. Raises ValueError if
    the name is taken."""

    def register(transport: T) -> T:
        weight_transports.add(name, transport, help=help)
        _traits[name] = traits or TransportTraits()
        return transport

    return register


_HERE = "slime_like.weight_sync.transports"
for _name, _path, _help, _trait in (
    (
        "broadcast",
        "broadcast:BroadcastTransport",
        "a process group with them, gloo or NCCL.",
        TransportTraits(keeps_copy=True, overlaps=True),
    ),
    (
        "disk",
        "disk:DiskTransport",
        "a Hugging Face folder.",
        TransportTraits(uses_folder=True, sends_deltas=True),
    ),
    (
        "cuda_ipc",
        "tensor:CudaIpcTransport",
        "handles of GPU memory, with --colocate.",
        TransportTraits(same_gpu=True),
    ),
    (
        "tensor",
        "tensor:TensorTransport",
        "in the requests themselves, which is slow.",
        TransportTraits(overlaps=True),
    ),
):
    weight_transports.add_lazy(_name, f"{_HERE}.{_path}", help=_help)
    _traits[_name] = _trait

"""Settings of weight updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Of a LoRA adapter that is sent unmerged."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of weight updates."""

    transport: str = "broadcast"  # its name
    buffer_bytes: int = 512 * 2**20  # size of one bucket
    timeout_s: float = 300.0  # for one bucket, or for a load from disk
    # folder shared with the servers; None: a temporary folder on this host
    disk_dir: str | None = None
    keep_files: bool = False
    keep_copy: bool = True  # with broadcast, keep a copy in host memory for servers that join late
    delta: bool = False  # send only what changed
    local_dir: str | None = None  # folder of this host's copy then, None: temporary
    # servers hold the base model, and get adapters; None: they get the whole weights
    adapter: AdapterSettings | None = None
    full_interval: int = 20  # number of updates from one full update to the next

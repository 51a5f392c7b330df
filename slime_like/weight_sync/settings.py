"""Settings of weight updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of weight updates.

    transport: its name. buffer_bytes: size of one bucket. timeout_s: for one bucket, or for a load
    from disk. disk_dir: folder shared with the servers; None: a temporary folder on this host.
    keep_copy: with broadcast, keep a copy in host memory for servers that join late. delta: send
    only what changed; local_dir: folder of this host's copy then, None: temporary; full_interval:
    number of updates from one full update to the next.
    """

    transport: str = "broadcast"
    buffer_bytes: int = 512 * 2**20
    timeout_s: float = 300.0
    disk_dir: str | None = None
    keep_files: bool = False
    keep_copy: bool = True
    delta: bool = False
    local_dir: str | None = None
    full_interval: int = 20

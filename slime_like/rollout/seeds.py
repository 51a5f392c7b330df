"""The randomness of a sample: of the run's seed and the sample's own number."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, purpose: str, sample_id: int, position: int = 0) -> int:
    """A 63-bit seed that depends on its arguments alone. position: tokens that the response has
    already."""
    part = f"@{position}" if position else ""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{sample_id}{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

"""Settings of a rotary embedding that configurations and networks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Yarn:
    """Settings of a YaRN-scaled rotary embedding (arXiv 2309.00071) whose cosines and sines have no
    factor."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float

"""vLLM servers as a rollout engine."""

from __future__ import annotations

from slime_like.engines.served import ServedEngine


class VllmEngine(ServedEngine):
    """See `ServedEngine`."""

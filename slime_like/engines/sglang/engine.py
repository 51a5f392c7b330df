"""SGLang servers as a rollout engine."""

from __future__ import annotations

from slime_like.engines.served import ServedEngine


class SglangEngine(ServedEngine):
    """See `ServedEngine`."""

    takes_quantized = True
    takes_prediction_layers = True

"""What the workers computed, as clients read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_like.server import wire
from slime_like.server.errors import Failed
from slime_like.server.futures import PROTOBUF

REDUCTIONS = {"mean": "mean", "std": "mean", "sum": "sum", "min": "min", "max": "max"}


def pass_output(value: dict[str, Any], lengths: Sequence[int], *, critic: bool) -> tuple[bytes, str]:
    """Of forward_backward: `logprobs` (of a critic `values`) and `elementwise_loss` of every datum, and metrics `name:reduction`.

    value: scores and losses as float32 bytes, datum after datum, and metrics as {name: [kind, number]}. Raises Failed where the loss is not
    finite.
    """
    losses = np.frombuffer(value["losses"], dtype="<f4")
    total = float(losses.sum(dtype=np.float64))
    if not math.isfinite(total):
        raise Failed(
            f"the loss of this batch is {total}: see the metrics and the inputs; the gradients of this model are not usable", broken=False
        )
    metrics = {"loss:sum": total}
    for name, (kind, number) in value["metrics"].items():
        metrics[f"{_metric_name(name, critic=critic)}:{REDUCTIONS[kind]}"] = number
    if critic:
        metrics["critic_loss:sum"] = total
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    offsets = (np.concatenate([[0], np.cumsum(lengths)]) * 4).astype("<i8").tobytes()
    for name, data in (("values" if critic else "logprobs", value["scores"]), ("elementwise_loss", value["losses"])):
        tensor = record.fields[name]
        tensor.data, tensor.offsets, tensor.dtype = data, offsets, wire.DTYPE_FLOAT32
    return output.SerializeToString(), PROTOBUF


def _metric_name(name: str, *, critic: bool) -> str:
    """Exactly one colon separates a name from its reduction."""
    name = name.replace(":", "_")
    return {"value_clipfrac": "values_clipfrac"}.get(name, name) if critic else name


def sample_output(sequences: Sequence[dict[str, Any]], prompt_log_probs: bytes | None) -> tuple[bytes, str]:
    """Of asample. sequences: tokens as int32 and log_probs as float32 bytes, stopped: by a stop token or text. prompt_log_probs: float32, NaN
    for the first token."""
    response = wire.SampleResponse()
    for sequence in sequences:
        added = response.sequences.add(tokens=sequence["tokens"], logprobs=sequence["log_probs"])
        added.stop_reason = wire.STOP_REASON_STOP if sequence["stopped"] else wire.STOP_REASON_LENGTH
    if prompt_log_probs is not None:
        response.prompt_logprobs = prompt_log_probs
    return response.SerializeToString(), PROTOBUF

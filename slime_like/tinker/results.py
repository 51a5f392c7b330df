"""Encode the workers' results for clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_like.tinker import proto
from slime_like.tinker.errors import Failed
from slime_like.tinker.futures import PROTOBUF

if TYPE_CHECKING:
    from google.protobuf.message import Message


REDUCTIONS = {"mean": "mean", "std": "mean", "sum": "sum", "min": "min", "max": "max"}


def pass_output(
    value: dict[str, Any],
    lengths: Sequence[int],
    widths: Sequence[int] | None = None,
    *,
    critic: bool,
) -> tuple[bytes, str]:
    """Result of forward_backward: `logprobs` (`values` of a critic) and `elementwise_loss` of every
    datum, and metrics `name:reduction`.

    value: scores and losses as concatenated float32 bytes, and metrics as {name: [kind, number]}.
    widths: number of targets per token of each datum, if there are several; its `logprobs` are then
    [N, K]. Raises Failed if the loss is not finite.
    """
    losses = np.frombuffer(value["losses"], dtype="<f4")
    total = float(losses.sum(dtype=np.float64))
    if not math.isfinite(total):
        raise Failed(
            f"the loss of this batch is {total}: see the metrics and the inputs; the gradients of this model are not usable",
            broken=False,
        )
    metrics = {"loss:sum": total}
    for name, (kind, number) in value["metrics"].items():
        metrics[f"{_metric_name(name, critic=critic)}:{REDUCTIONS[kind]}"] = number
    if critic:
        metrics["critic_loss:sum"] = total
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    if widths is None:
        _add_record(
            output,
            lengths,
            {
                "values" if critic else "logprobs": value["scores"],
                "elementwise_loss": value["losses"],
            },
        )
        return output.SerializeToString(), PROTOBUF
    scores, start = np.frombuffer(value["scores"], dtype="<f4").reshape(-1, max(widths)), 0
    for length, width in zip(lengths, widths, strict=True):  # all datums of a record have equal K
        rows = slice(start, start + length)
        _add_record(
            output,
            [length],
            {
                "logprobs": scores[rows, :width].tobytes(),
                "elementwise_loss": losses[rows].tobytes(),
            },
            width,
        )
        start += length
    return output.SerializeToString(), PROTOBUF


def _add_record(
    output: Message, lengths: Sequence[int], fields: dict[str, bytes], width: int | None = None
) -> None:
    """Append a record with all datums concatenated. width: K, if `logprobs` are [N, K]."""
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for name, data in fields.items():
        tensor, wide = (
            record.fields[name],
            width if width is not None and name == "logprobs" else None,
        )
        tensor.data, tensor.dtype = data, proto.DTYPE_FLOAT32
        tensor.offsets = (ends * 4 * (wide or 1)).astype("<i8").tobytes()
        if wide is not None:
            tensor.trailing_shape.append(wide)


def _metric_name(name: str, *, critic: bool) -> str:
    """The name with its colons replaced; the API separates name and reduction by exactly one
    colon."""
    name = name.replace(":", "_")
    return {"value_clipfrac": "values_clipfrac"}.get(name, name) if critic else name


def sample_output(
    sequences: Sequence[dict[str, Any]],
    prompt_log_probs: bytes | None,
    top_prompt: dict[str, Any] | None = None,
) -> tuple[bytes, str]:
    """Result of asample. sequences: tokens as int32 bytes and log_probs as float32 bytes; stopped:
    ended by a stop token or text. prompt_log_probs: float32, NaN for the first token. top_prompt,
    and `top` of a sequence: the most likely tokens, see `sampler.top_of`."""
    response = proto.SampleResponse()
    for sequence in sequences:
        added = response.sequences.add(tokens=sequence["tokens"], logprobs=sequence["log_probs"])
        added.stop_reason = (
            proto.STOP_REASON_STOP if sequence["stopped"] else proto.STOP_REASON_LENGTH
        )
        if sequence.get("top") is not None:
            _add_top(added.topk_sampled_logprobs, sequence["top"])
    if top_prompt is not None:
        _add_top(response.topk_prompt_logprobs, top_prompt)
    if prompt_log_probs is not None:
        response.prompt_logprobs = prompt_log_probs
    return response.SerializeToString(), PROTOBUF


def _add_top(message: Message, top: dict[str, object]) -> None:
    message.token_ids, message.logprobs = top["tokens"], top["log_probs"]
    message.k, message.length = top["k"], top["length"]

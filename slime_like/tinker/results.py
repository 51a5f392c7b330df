"""Encode the workers' results for clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_like.tinker import proto
from slime_like.tinker.errors import Failed
from slime_like.tinker.futures import PROTOBUF
from slime_like.tinker.schemas import MISSING_LOG_PROB

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from slime_like.tinker.sampler import PromptSamples, TopTokens
    from slime_like.tinker.worker_backend import ForwardBackwardResult

REDUCTIONS = {"mean": "mean", "std": "mean", "sum": "sum", "min": "min", "max": "max"}


def forward_backward_output(
    value: ForwardBackwardResult,
    lengths: Sequence[int],
    widths: Sequence[int] | None = None,
    *,
    critic: bool,
) -> tuple[bytes, str]:
    """Result of forward_backward: `logprobs` (`values` of a critic) and `elementwise_loss` of every
    datum, and metrics `name:reduction`.

    widths: number of targets per token of each datum, if there are several; its `logprobs` are then
    [N, K]. Raises Failed if the loss is not finite.
    """
    losses = np.frombuffer(value["losses"], dtype="<f4")
    total = float(losses.sum(dtype=np.float64))
    if not math.isfinite(total):
        raise Failed(
            f"the loss of this batch is {total}: check the inputs; the gradients are not valid"
        )
    metrics = {"loss:sum": total}
    for name, (kind, number) in value["metrics"].items():
        metrics[f"{_metric_name(name, critic=critic)}:{REDUCTIONS[kind]}"] = number
    if critic:
        metrics["critic_loss:sum"] = total
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    if widths is None:
        scores = "values" if critic else "logprobs"
        fields = {scores: value["scores"], "elementwise_loss": value["losses"]}
        _add_record(output, lengths, fields)
        return output.SerializeToString(), PROTOBUF
    log_probs = np.frombuffer(value["scores"], dtype="<f4").reshape(-1, max(widths))
    start = 0
    for length, width in zip(lengths, widths, strict=True):  # all datums of a record have equal K
        rows = slice(start, start + length)
        fields = {
            "logprobs": log_probs[rows, :width].tobytes(),
            "elementwise_loss": losses[rows].tobytes(),
        }
        _add_record(output, [length], fields, width)
        start += length
    return output.SerializeToString(), PROTOBUF


def _add_record(
    output: Message, lengths: Sequence[int], fields: dict[str, bytes], width: int | None = None
) -> None:
    """Append a record with all datums concatenated. width: K, if `logprobs` are [N, K]."""
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for name, data in fields.items():
        tensor = record.fields[name]
        row_bytes = 4
        tensor.data = data
        tensor.dtype = proto.DTYPE_FLOAT32
        if width is not None and name == "logprobs":
            tensor.trailing_shape.append(width)
            row_bytes *= width
        tensor.offsets = (ends * row_bytes).astype("<i8").tobytes()


def _metric_name(name: str, *, critic: bool) -> str:
    """The name with its colons replaced; the API separates name and reduction by exactly one
    colon."""
    name = name.replace(":", "_")
    return {"value_clipfrac": "values_clipfrac"}.get(name, name) if critic else name


def sample_output(
    samples: PromptSamples, request: Mapping[str, Any] | None = None
) -> tuple[bytes, str]:
    """Result of asample. request: the body of `sampling.sample_body`."""
    request = request or {}
    response = proto.SampleResponse()
    for sequence in samples["sequences"]:
        added = response.sequences.add(tokens=sequence["tokens"], logprobs=sequence["log_probs"])
        stopped = sequence["stopped"]
        added.stop_reason = proto.STOP_REASON_STOP if stopped else proto.STOP_REASON_LENGTH
        _set_top(added.topk_sampled_logprobs, sequence.get("top"))
    last_n = request.get("last_n")
    _set_top(response.topk_prompt_logprobs, samples.get("top_prompt"), last_n)
    if samples["prompt_log_probs"] is not None:
        scores = np.frombuffer(samples["prompt_log_probs"], dtype="<f4")
        response.prompt_logprobs = _last(scores, last_n, np.nan)
    targets = samples.get("targets")
    if targets is not None:
        _set_targets(response.target_prompt_logprobs, targets, request["targets"]["layout"])
    alt = samples.get("alt")
    if alt is not None:
        _set_dense(response.prompt_alt_tokens.tokens, alt["tokens"], proto.DTYPE_INT64, alt["k"])
        log_probs = response.prompt_alt_tokens.logprobs
        _set_dense(log_probs, alt["log_probs"], proto.DTYPE_FLOAT32, alt["k"])
    return response.SerializeToString(), PROTOBUF


def _last(values: NDArray[Any], count: int | None, missing: float) -> bytes:
    """The values, with `missing` in place of all but the last `count`; None: all of them."""
    if count is not None:
        values = np.concatenate([np.full_like(values[:-count], missing), values[-count:]])
    return values.tobytes()


def _set_dense(tensor: Message, data: bytes, dtype: int, columns: int) -> None:
    tensor.dense = data
    tensor.dtype = dtype
    size = 8 if dtype == proto.DTYPE_INT64 else 4
    tensor.shape.extend([len(data) // (size * columns), columns])


def _set_targets(tensor: Message, scores: bytes, layout: Mapping[str, Any]) -> None:
    """Scores of the requested cells, in the request's shape and layout."""
    tensor.dtype = proto.DTYPE_FLOAT32
    tensor.shape.extend(layout["shape"])
    if "crow_indices" in layout:
        tensor.sparse_csr.values = scores
        tensor.sparse_csr.crow_indices = layout["crow_indices"]
        tensor.sparse_csr.col_indices = layout["col_indices"]
    else:
        tensor.dense = scores


def _set_top(message: Message, top: TopTokens | None, last_n: int | None = None) -> None:
    """last_n: the number of last positions that were asked for; None for all."""
    if top is not None:
        count = None if last_n is None else last_n * top["k"]
        message.token_ids = _last(np.frombuffer(top["tokens"], dtype="<i4"), count, 0)
        log_probs = np.frombuffer(top["log_probs"], dtype="<f4")
        message.logprobs = _last(log_probs, count, MISSING_LOG_PROB)
        message.k = top["k"]
        message.length = top["length"]

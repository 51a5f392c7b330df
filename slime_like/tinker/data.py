"""Parse and validate forward_backward bodies: protobuf to checked arrays for the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_like.tinker import proto
from slime_like.tinker.errors import HttpError, Refused
from slime_like.tinker.losses import (
    CRITIC_LOSS,
    FIELDS,
    INTEGERS,
    MASKS,
    SETS,
    SOFT_LOSS,
    ServedLoss,
    served_loss,
)
from slime_like.tinker.schemas import LARGEST

if TYPE_CHECKING:
    from google.protobuf.message import Message


Array = NDArray[Any]
_DTYPES: dict[int, np.dtype[Any]] = {
    proto.DTYPE_FLOAT32: np.dtype("<f4"),
    proto.DTYPE_INT64: np.dtype("<i8"),
    proto.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the model and the server. vocab_size and max_length in tokens."""

    vocab_size: int
    max_length: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ForwardBackwardInput:
    """A validated request. fields: by TrainSample field name, one array per datum with the datum's
    length; [N, K] for label sets."""

    loss: ServedLoss
    forward_only: bool
    tokens: list[Array]
    fields: dict[str, list[Array]]

    def command(self) -> dict[str, Any]:
        """The command for the workers, as plain values with datums concatenated. widths: K of each
        datum with label sets, which are padded to the largest K with labels of weight 0."""
        widths = [sets.shape[1] for sets in self.fields.get("label_sets", [])]
        told: dict[str, Any] = {"widths": widths} if widths else {}
        return told | {
            "loss": {
                "kind": self.loss.kind,
                "settings": dict(self.loss.settings),
                "entropy_coef": self.loss.entropy_coef,
            },
            "forward_only": self.forward_only,
            "lengths": [int(t.size) for t in self.tokens],
            "tokens": np.concatenate(self.tokens).astype("<i8").tobytes(),
            "fields": {
                name: np.concatenate(filled(arrays, widths))
                .astype("<i8" if name in ("labels", "label_sets") else "<f4")
                .tobytes()
                for name, arrays in self.fields.items()
            },
        }


def filled(arrays: list[Array], widths: Sequence[int]) -> list[Array]:
    """Pad arrays [N, K] to the largest K."""
    return [
        np.pad(a, ((0, 0), (0, max(widths) - a.shape[1]))) if a.ndim == 2 else a for a in arrays
    ]


def parse_request(body: bytes) -> Message:
    """Parse the protobuf message. Raises HttpError 400 for invalid bytes, or if model or sequence
    number are missing."""
    request = proto.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except proto.DecodeError as error:
        raise HttpError(400, f"the body is not a ForwardBackwardRequest: {error}") from error
    if not request.model_id:
        raise HttpError(400, "model_id is missing")
    if request.seq_id < 1:
        raise HttpError(400, f"seq_id is {request.seq_id}, must be at least 1")
    return request


def check_pass(request: Message, *, role: str, limits: Limits) -> ForwardBackwardInput:
    """Validate a request. role: of the model. Raises Refused naming the model and the datum."""
    who = f"model {request.model_id}"
    config = loss_config(request)
    loss = check_role(request.loss_fn, config, role, who)
    if not request.data:
        raise Refused(f"{who}: the batch is empty")
    tokens, tensors = [], []
    total = 0
    for index, datum in enumerate(request.data):
        where = f"{who}, datum {index}"
        inputs = model_input(datum.model_input, where, limits)
        tokens.append(inputs)
        tensors.append(
            check_tensors(
                datum.loss_fn_inputs,
                loss,
                int(inputs.size),
                where,
                limits,
                forward_only=request.forward_only,
            )
        )
        total += max(int(array.size) for array in (inputs, *tensors[-1].values()))
        if total > limits.max_tokens:
            raise Refused(
                f"{who}: the batch has more than {limits.max_tokens} tokens (--max-request-tokens); send it in parts"
            )
    names = sorted({name for datum in tensors for name in datum})
    if len({datum["target_tokens"].ndim for datum in tensors if "target_tokens" in datum}) > 1:
        raise Refused(
            f"{who}: some datums have one target a token and others several; send them in calls of their own"
        )
    if "weights" in names and all(
        "target_tokens" not in t or t["target_tokens"].ndim == 1 for t in tensors
    ):
        for inputs, given in zip(tokens, tensors, strict=True):
            given.setdefault("weights", np.ones(inputs.size, dtype=np.float32))
    if mixed := [name for name in names if any(name not in datum for datum in tensors)]:
        raise Refused(
            f"{who}: some datums have {', '.join(mixed)} and others do not; give all or none"
        )
    fields = {
        field_of(name, tensors[0][name]): [datum[name] for datum in tensors] for name in names
    }
    return ForwardBackwardInput(loss, bool(request.forward_only), tokens, fields)


def field_of(name: str, array: Array) -> str:
    return SETS[name] if array.ndim == 2 else FIELDS[name]


def loss_config(request: Message) -> dict[str, float | str]:
    """The loss configuration: loss_fn_config, overridden by loss_fn_config_v2."""
    config: dict[str, float | str] = dict(request.loss_fn_config.items())
    for key, value in request.loss_fn_config_v2.items():
        which = value.WhichOneof("value")
        if which is None:
            raise Refused(f"model {request.model_id}: loss_fn_config[{key!r}] has no value")
        config[key] = getattr(value, which)
    return config


def check_role(name: str, config: dict[str, float | str], role: str, who: str) -> ServedLoss:
    if role == "critic" and name != CRITIC_LOSS:
        raise Refused(
            f"{who} is a critic: a critic batch must use loss_fn {CRITIC_LOSS!r}, not {name!r}"
        )
    if role != "critic" and name == CRITIC_LOSS:
        raise Refused(f"{who} is a policy: loss_fn {CRITIC_LOSS!r} is only for critic models")
    try:
        return served_loss(name, config)
    except Refused as error:
        raise Refused(f"{who}: {error}") from None


def model_input(chunks: Sequence[Message], where: str, limits: Limits) -> Array:
    """Concatenate the chunks of a datum into token ids [N]."""
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise Refused(
                f"{where}: a chunk of kind {kind or 'none'}; only encoded_text is offered here"
            )
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise Refused(f"{where}: {len(data)} bytes of tokens are no int32 array")
        parts.append(np.frombuffer(data, dtype="<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    check_tokens(tokens, where, limits)
    return tokens


def check_tokens(tokens: Array, where: str, limits: Limits, *, room: int = 0) -> None:
    """Raise Refused for invalid token ids or too many of them. room: number of further tokens that
    must fit."""
    if tokens.size == 0:
        raise Refused(f"{where}: it has no tokens")
    if tokens.size + room > limits.max_length:
        more = f" and {room} new ones" if room else ""
        raise Refused(
            f"{where}: {tokens.size} tokens{more} exceed the longest sequence, {limits.max_length}"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0])
        raise Refused(
            f"{where}: token {bad} is outside the vocabulary, 0 to {limits.vocab_size - 1}"
        )


def check_tensors(
    inputs: Message,
    loss: ServedLoss,
    length: int,
    where: str,
    limits: Limits,
    *,
    forward_only: bool,
) -> dict[str, Array]:
    """Validate the tensors of one datum; returns them by name."""
    given = set(inputs)
    known = loss.required | loss.optional
    if loss.is_critic:
        _check_pair(given, where, forward_only=forward_only)
    if missing := sorted(loss.required - given):
        raise Refused(f"{where}: loss_fn {loss.name!r} needs {', '.join(missing)}")
    if unknown := sorted(given - known):
        raise Refused(
            f"{where}: unknown loss_fn_inputs {', '.join(unknown)} for loss_fn {loss.name!r}; known: {', '.join(sorted(known))}"
        )
    if loss.kind == SOFT_LOSS and len(inputs["target_tokens"].shape) == 2:
        return soft_targets(inputs, length, where, limits)
    tensors = {
        name: tensor(inputs[name], name, length, where, critic=loss.is_critic)
        for name in sorted(given)
    }
    if "target_tokens" in tensors:
        check_tokens(tensors["target_tokens"], f"{where}, target_tokens", limits)
    for name in MASKS & given:
        mask = tensors[name]
        if not np.isin(mask, (0, 1)).all():
            raise Refused(
                f"{where}: {name} holds {mask[~np.isin(mask, (0, 1))][0]:g}; it must be 0 or 1"
            )
        if not mask.any():
            raise Refused(f"{where}: {name} is 0 everywhere")
        if "advantages" in tensors and tensors["advantages"][mask == 0].any():
            raise Refused(f"{where}: advantages are not 0 where {name} is 0")
    return tensors


def _check_pair(given: set[str], where: str, *, forward_only: bool) -> None:
    pair = {"values", "returns"}
    if len(pair & given) == 1:
        raise Refused(
            f"{where}: it has {', '.join(pair & given)} alone; give both values and returns, or neither"
        )
    if not pair & given and not forward_only:
        raise Refused(
            f"{where}: values and returns are required for every response token; without them a critic can only be asked (forward)"
        )


def soft_targets(inputs: Message, length: int, where: str, limits: Limits) -> dict[str, Array]:
    """target_tokens and weights [N, K] from dense or sparse tensors; missing entries of sparse
    tensors are token 0 with weight 0."""
    width = int(inputs["target_tokens"].shape[1])
    if not 0 < width <= limits.vocab_size:
        raise Refused(
            f"{where}: target_tokens has {width} targets a token, must be 1 to {limits.vocab_size}"
        )
    if length * width > limits.max_tokens:
        raise Refused(
            f"{where}: {length} x {width} targets are more than {limits.max_tokens} (--max-request-tokens)"
        )
    if "mask" in inputs:
        raise Refused(f"{where}: mask does not go with several targets a token; give weights of 0")
    if "weights" not in inputs:
        raise Refused(f"{where}: several targets a token need weights of shape [{length}, {width}]")
    tensors = {
        name: tensor(inputs[name], name, length, where, critic=False, width=width)
        for name in ("target_tokens", "weights")
    }
    flat = tensors["target_tokens"].reshape(-1)
    if int(flat.min()) < 0 or int(flat.max()) >= limits.vocab_size:
        bad = int(flat[(flat < 0) | (flat >= limits.vocab_size)][0])
        raise Refused(
            f"{where}: target_tokens: token {bad} is outside the vocabulary, 0 to {limits.vocab_size - 1}"
        )
    return tensors


def tensor(
    message: Message, name: str, length: int, where: str, *, critic: bool, width: int | None = None
) -> Array:
    """Decode an array [length] or [length, width] of finite numbers: int64 for tokens, float32
    otherwise."""
    wanted = [length] if width is None else [length, width]
    shape = list(message.shape)
    dtype = _DTYPES.get(message.dtype)
    if dtype is None or (name in INTEGERS and dtype.kind == "f"):
        raise Refused(
            f"{where}: {name} has dtype {message.dtype}; {'int64' if name in INTEGERS else 'float32'} is wanted"
        )
    if len(shape) > 1 and shape != wanted:
        only = "several targets a token go with cross_entropy alone, and its weights have the shape of target_tokens; "
        raise Refused(f"{where}: {name} has shape {shape}; {only}{wanted} is wanted")
    if message.WhichOneof("encoding") == "sparse_csr":
        if width is None:
            raise Refused(
                f"{where}: {name} is a sparse tensor, which is offered for target_tokens and weights of shape [N, K] alone"
            )
        array = dense_of(message.sparse_csr, dtype, length, width, f"{where}: {name}")
    else:
        array = numbers(message.dense, dtype, f"{where}: {len(message.dense)} bytes of {name}")
    if array.size != math.prod(wanted) or (shape and shape != wanted):
        told = f"{name} has {array.size} entries" + (
            f" and shape {shape}" if shape and shape != [array.size] else ""
        )
        rule = (
            "values and returns are required for every response token"
            if critic and name in ("values", "returns")
            else "one a token is wanted"
        )
        raise Refused(f"{where}: {told}, the model input {length} tokens; {rule}")
    if name in INTEGERS:
        return array.reshape(wanted).astype(np.int64)
    if not np.isfinite(array).all() or (array.size and float(np.abs(array).max()) > LARGEST):
        raise Refused(f"{where}: {name} holds a number that is not finite, or above {LARGEST:g}")
    return array.reshape(wanted).astype(np.float32)


def numbers(data: bytes, dtype: np.dtype[Any], what: str) -> Array:
    if len(data) % dtype.itemsize:
        raise Refused(f"{what} are no array of {dtype.name}")
    return np.frombuffer(data, dtype=dtype)


def dense_of(csr: Message, dtype: np.dtype[Any], rows: int, columns: int, what: str) -> Array:
    """Convert a CSR matrix to dense [rows * columns]. Raises Refused for invalid indices."""
    index = np.dtype("<i8")
    values = numbers(csr.values, dtype, f"{what}: values")
    ends, places = (
        numbers(csr.crow_indices, index, f"{what}: crow_indices"),
        numbers(csr.col_indices, index, f"{what}: col_indices"),
    )
    counts = np.diff(ends)
    sound = (
        ends.size == rows + 1
        and ends[0] == 0
        and ends[-1] == places.size == values.size
        and (counts >= 0).all()
    )
    if not sound or (places.size and (int(places.min()) < 0 or int(places.max()) >= columns)):
        raise Refused(f"{what} is no sparse matrix of {rows} rows and {columns} columns")
    dense = np.zeros((rows, columns), dtype=dtype)
    where = np.repeat(np.arange(rows), counts)
    if np.unique(where * columns + places).size != places.size:
        raise Refused(f"{what} has an entry twice")
    dense[where, places] = values
    return dense.reshape(-1)

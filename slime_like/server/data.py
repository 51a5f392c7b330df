"""Bodies of forward_backward: protobuf -> arrays that are checked, so that nothing in them can surprise the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_like.server import wire
from slime_like.server.errors import HttpError, Refused
from slime_like.server.losses import CRITIC_LOSS, FIELDS, INTEGERS, MASKS, ServedLoss, served_loss

Array = NDArray[Any]
_DTYPES: dict[int, np.dtype[Any]] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
}
LARGEST = 1e18  # of any number: squares of larger ones are not finite in float32


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the server can take. vocab_size and max_length in tokens."""

    vocab_size: int
    max_length: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A checked request. fields: by the names of TrainSample, one array for each datum, as long as the datum."""

    loss: ServedLoss
    forward_only: bool
    tokens: list[Array]
    fields: dict[str, list[Array]]

    def command(self) -> dict[str, Any]:
        """As plain values, for the workers: datums one after another."""
        return {
            "loss": {"kind": self.loss.kind, "settings": dict(self.loss.settings)},
            "forward_only": self.forward_only,
            "lengths": [int(t.size) for t in self.tokens],
            "tokens": np.concatenate(self.tokens).astype("<i8").tobytes(),
            "fields": {
                name: np.concatenate(arrays).astype("<i8" if name == "labels" else "<f4").tobytes() for name, arrays in self.fields.items()
            },
        }


def parse_request(body: bytes) -> Any:
    """The message. Raises HttpError 400 for bytes that are none, or name no model and place in its sequence."""
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except wire.DecodeError as error:
        raise HttpError(400, f"the body is not a ForwardBackwardRequest: {error}") from error
    if not request.model_id:
        raise HttpError(400, "model_id is missing")
    if request.seq_id < 1:
        raise HttpError(400, f"seq_id is {request.seq_id}, must be at least 1")
    return request


def check_pass(request: Any, *, role: str, limits: Limits) -> Pass:
    """Raises Refused naming the model and the datum. role: of the model."""
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
        total += inputs.size
        if total > limits.max_tokens:
            raise Refused(f"{who}: the batch has more than {limits.max_tokens} tokens (--max-request-tokens); send it in parts")
        tokens.append(inputs)
        tensors.append(check_tensors(datum.loss_fn_inputs, loss, int(inputs.size), where, limits, forward_only=request.forward_only))
    names = sorted({name for datum in tensors for name in datum})
    if mixed := [name for name in names if any(name not in datum for datum in tensors)]:
        raise Refused(f"{who}: some datums have {', '.join(mixed)} and others do not; give all or none")
    fields = {FIELDS[name]: [datum[name] for datum in tensors] for name in names}
    return Pass(loss, bool(request.forward_only), tokens, fields)


def loss_config(request: Any) -> dict[str, float | str]:
    """The second form, where it is there, holds the first."""
    config: dict[str, float | str] = dict(request.loss_fn_config.items())
    for key, value in request.loss_fn_config_v2.items():
        which = value.WhichOneof("value")
        if which is None:
            raise Refused(f"model {request.model_id}: loss_fn_config[{key!r}] has no value")
        config[key] = getattr(value, which)
    return config


def check_role(name: str, config: dict[str, float | str], role: str, who: str) -> ServedLoss:
    if role == "critic" and name != CRITIC_LOSS:
        raise Refused(f"{who} is a critic: a critic batch must use loss_fn {CRITIC_LOSS!r}, not {name!r}")
    if role != "critic" and name == CRITIC_LOSS:
        raise Refused(f"{who} is a policy: loss_fn {CRITIC_LOSS!r} is only for critic models")
    try:
        return served_loss(name, config)
    except Refused as error:
        raise Refused(f"{who}: {error}") from None


def model_input(chunks: Sequence[Any], where: str, limits: Limits) -> Array:
    """Token ids [N] of the chunks of a datum."""
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise Refused(f"{where}: a chunk of kind {kind or 'none'}; only encoded_text is offered here")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise Refused(f"{where}: {len(data)} bytes of tokens are no int32 array")
        parts.append(np.frombuffer(data, dtype="<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    check_tokens(tokens, where, limits)
    return tokens


def check_tokens(tokens: Array, where: str, limits: Limits, *, room: int = 0) -> None:
    """Raises Refused. room: tokens that have to follow."""
    if tokens.size == 0:
        raise Refused(f"{where}: it has no tokens")
    if tokens.size + room > limits.max_length:
        more = f" and {room} new ones" if room else ""
        raise Refused(f"{where}: {tokens.size} tokens{more} exceed the longest sequence, {limits.max_length}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0])
        raise Refused(f"{where}: token {bad} is outside the vocabulary, 0 to {limits.vocab_size - 1}")


def check_tensors(inputs: Any, loss: ServedLoss, length: int, where: str, limits: Limits, *, forward_only: bool) -> dict[str, Array]:
    """The tensors of one datum by name."""
    given = set(inputs)
    known = loss.required | loss.optional
    if loss.is_critic:
        _check_pair(given, where, forward_only=forward_only)
    if missing := sorted(loss.required - given):
        raise Refused(f"{where}: loss_fn {loss.name!r} needs {', '.join(missing)}")
    if unknown := sorted(given - known):
        raise Refused(f"{where}: unknown loss_fn_inputs {', '.join(unknown)} for loss_fn {loss.name!r}; known: {', '.join(sorted(known))}")
    tensors = {name: tensor(inputs[name], name, length, where, critic=loss.is_critic) for name in sorted(given)}
    if "target_tokens" in tensors:
        check_tokens(tensors["target_tokens"], f"{where}, target_tokens", limits)
    for name in MASKS & given:
        mask = tensors[name]
        if not np.isin(mask, (0, 1)).all():
            raise Refused(f"{where}: {name} holds {mask[~np.isin(mask, (0, 1))][0]:g}; it must be 0 or 1")
        if not mask.any():
            raise Refused(f"{where}: {name} is 0 everywhere")
        if "advantages" in tensors and tensors["advantages"][mask == 0].any():
            raise Refused(f"{where}: advantages are not 0 where {name} is 0")
    return tensors


def _check_pair(given: set[str], where: str, *, forward_only: bool) -> None:
    pair = {"values", "returns"}
    if len(pair & given) == 1:
        raise Refused(f"{where}: it has {', '.join(pair & given)} alone; give both values and returns, or neither")
    if not pair & given and not forward_only:
        raise Refused(
            f"{where}: values and returns are required for every response token; without them a critic can only be asked (forward)"
        )


def tensor(message: Any, name: str, length: int, where: str, *, critic: bool) -> Array:
    """A dense array [length] of finite numbers: int64 for tokens, float32 otherwise."""
    if message.WhichOneof("encoding") == "sparse_csr":
        raise Refused(f"{where}: {name} is a sparse tensor; only dense ones are offered here")
    shape = list(message.shape)
    if len(shape) > 1:
        raise Refused(f"{where}: {name} has shape {shape}; several targets a token are not offered here, only [{length}]")
    dtype = _DTYPES.get(message.dtype)
    if dtype is None or (name in INTEGERS and dtype.kind == "f"):
        raise Refused(f"{where}: {name} has dtype {message.dtype}; {'int64' if name in INTEGERS else 'float32'} is wanted")
    if len(message.dense) % dtype.itemsize:
        raise Refused(f"{where}: {len(message.dense)} bytes of {name} are no array of {dtype.name}")
    array = np.frombuffer(message.dense, dtype=dtype)
    if array.size != length or (shape and shape != [length]):
        told = f"{name} has {array.size} entries" + (f" and shape {shape}" if shape and shape != [array.size] else "")
        rule = (
            "values and returns are required for every response token"
            if critic and name in ("values", "returns")
            else "one a token is wanted"
        )
        raise Refused(f"{where}: {told}, the model input {length} tokens; {rule}")
    if name in INTEGERS:
        return array.astype(np.int64)
    if not np.isfinite(array).all() or (array.size and float(np.abs(array).max()) > LARGEST):
        raise Refused(f"{where}: {name} holds a number that is not finite, or above {LARGEST:g}")
    return array.astype(np.float32)

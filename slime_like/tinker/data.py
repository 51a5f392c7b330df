"""Parse and validate forward_backward bodies: protobuf to arrays for the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_like.tinker import codec, proto
from slime_like.tinker.errors import HttpError, Refused
from slime_like.tinker.loss_graph import LossGraph
from slime_like.tinker.losses import (
    CRITIC_LOSS,
    CUSTOM_LOSS,
    FIELDS,
    INTEGERS,
    MASKS,
    SETS,
    SOFT_LOSS,
    ServedLoss,
    custom_loss,
    served_loss,
)
from slime_like.tinker.sample_records import SampleRecords, replay
from slime_like.tinker.schemas import LARGEST, MAX_SEQ_ID

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from slime_like.images.processor import ImageProcessor

Array = NDArray[Any]
DType = np.dtype[Any]
_DTYPES: dict[int, DType] = {
    proto.DTYPE_FLOAT32: np.dtype("<f4"),
    proto.DTYPE_INT64: np.dtype("<i8"),
    proto.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class DataLimits:
    """Limits of the model and the server. vocab_size and max_length in tokens."""

    vocab_size: int
    max_length: int
    max_tokens: int
    images: ImageProcessor | None = None  # None: model inputs have no images


@dataclass(frozen=True, slots=True)
class ForwardBackwardInput:
    """A validated request."""

    loss: ServedLoss
    forward_only: bool
    tokens: list[Array]
    # by TrainSample field name, one array per datum with the datum's length; [N, K] for label sets
    fields: dict[str, list[Array]]
    # inputs of a custom loss by name, one array per datum: [], [N] or [N, K]
    custom: dict[str, list[Array]] = field(default_factory=dict)
    sets: list[Array] | None = None  # sampling masks of all tokens
    images: list[list[bytes]] = field(default_factory=list)  # of each datum, as files

    def command(self) -> codec.Message:
        """The command for the workers, as plain values with datums concatenated. widths: K of each
        datum with label sets, which are padded to the largest K with labels of weight 0."""
        widths = [sets.shape[1] for sets in self.fields.get("label_sets", [])]
        command: codec.Message = {"widths": widths} if widths else {}
        fields = {}
        for name, arrays in self.fields.items():
            dtype = "<i8" if name in ("labels", "label_sets") else "<f4"
            fields[name] = np.concatenate(pad_to_widest(arrays)).astype(dtype).tobytes()
        loss: codec.Message = {
            "name": self.loss.name,
            "kind": self.loss.kind,
            "settings": dict(self.loss.settings),
            "entropy_coef": self.loss.entropy_coef,
            "kl_coef": self.loss.kl_coef,
        }
        if self.loss.graph is not None:
            loss["graph"] = self.loss.graph.plain()
            loss["widths"] = widths or None
            loss["inputs"] = [
                {
                    "dtype": arrays[0].dtype.str,
                    "shapes": [list(array.shape) for array in arrays],
                    "data": b"".join(array.tobytes() for array in arrays),
                }
                for arrays in self.custom.values()
            ]
        if self.sets is not None:
            command["sets"] = {
                "tokens": np.concatenate(self.sets).astype("<i4").tobytes(),
                "counts": np.array([each.size for each in self.sets], dtype="<i4").tobytes(),
            }
        if any(self.images):
            command["images"] = self.images
        return command | {
            "loss": loss,
            "forward_only": self.forward_only,
            "lengths": [int(t.size) for t in self.tokens],
            "tokens": np.concatenate(self.tokens).astype("<i8").tobytes(),
            "fields": fields,
        }


def pad_to_widest(arrays: list[Array]) -> list[Array]:
    """Pad arrays [N, K] to the largest K; arrays [N] are unchanged."""
    if arrays[0].ndim == 1:
        return arrays
    widest = max(array.shape[1] for array in arrays)
    return [np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in arrays]


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
    if not 1 <= request.seq_id <= MAX_SEQ_ID:
        raise HttpError(400, f"seq_id is {request.seq_id}, must be from 1 to {MAX_SEQ_ID}")
    return request


def no_graph(loss_id: str) -> LossGraph:
    raise Refused(f"custom loss {loss_id} does not exist")


def check_forward_backward(
    request: Message,
    *,
    role: str,
    limits: DataLimits,
    find_graph: Callable[[str], LossGraph] = no_graph,
    records: SampleRecords | None = None,
    session: str = "",
) -> ForwardBackwardInput:
    """Validate a request. Raises Refused naming the model and the datum.

    Args:
        role: of the model.
        find_graph: Looks up a custom loss by its id; raises Refused.
        records: of samples, for losses that replay them.
        session: of the model.
    """
    who = f"model {request.model_id}"
    config = loss_config(request)
    loss = check_role(request.loss_fn, config, role, who, find_graph)
    if not request.data:
        raise Refused(f"{who}: the batch is empty")
    tokens = []
    images = []
    tensors = []
    total = 0
    for index, datum in enumerate(request.data):
        where = f"{who}, datum {index}"
        inputs, files = model_input(datum.model_input, where, limits)
        arrays = check_tensors(
            datum.loss_fn_inputs,
            loss,
            int(inputs.size),
            where,
            limits,
            forward_only=request.forward_only,
        )
        tokens.append(inputs)
        images.append(files)
        tensors.append(arrays)
        total += max(int(array.size) for array in (inputs, *arrays.values()))
        if total > limits.max_tokens:
            raise Refused(
                f"{who}: the batch has more than {limits.max_tokens} tokens "
                "(--max-request-tokens); split it"
            )
    check_widths(tokens, tensors, who, limits)
    custom = {}
    if loss.graph is not None:
        for name, _ in loss.graph.data_inputs:
            custom[name] = one_dtype([datum[name] for datum in tensors], f"{who}: {name}")
        tensors = [{"target_tokens": datum["target_tokens"]} for datum in tensors]
    sets = None
    if loss.replays:
        assert records is not None
        sets = add_replays(request.data, tensors, who, records, session)
    fields = fields_of(tokens, tensors, who)
    if loss.kl_coef:
        fields["ref_log_probs"] = fields["old_log_probs"]
    forward_only = bool(request.forward_only)
    return ForwardBackwardInput(loss, forward_only, tokens, fields, custom, sets, images)


def check_widths(
    tokens: Sequence[Array], tensors: Sequence[dict[str, Array]], who: str, limits: DataLimits
) -> None:
    """Refuse label sets that are large only once they are padded; see `pad_to_widest`."""
    targets = [datum["target_tokens"] for datum in tensors if "target_tokens" in datum]
    widest = max((each.shape[1] for each in targets if each.ndim == 2), default=1)
    rows = sum(int(each.size) for each in tokens)
    if rows * widest > limits.max_tokens:
        raise Refused(
            f"{who}: {rows} tokens with the {widest} targets of the widest datum are more than "
            f"{limits.max_tokens} (--max-request-tokens); send datums with similar numbers of "
            "targets together"
        )


def add_replays(
    data: Sequence[Message],
    tensors: Sequence[dict[str, Array]],
    who: str,
    records: SampleRecords,
    session: str,
) -> list[Array] | None:
    """Add recorded log-probs and masks to the datums' tensors; returns the sampling masks of all
    tokens, if there are any. Raises Refused."""
    replays = []
    for index, (datum, arrays) in enumerate(zip(data, tensors, strict=True)):
        where = f"{who}, datum {index}"
        spans = datum.loss_fn_input_spans
        replays.append(replay(spans, arrays["target_tokens"], where, records, session))
        arrays["logprobs"] = replays[-1].log_probs
        arrays["mask"] = replays[-1].sampled
    with_sets = [each.sets for each in replays if each.sets is not None]
    if with_sets and len(with_sets) < len(replays):
        raise Refused(
            f"{who}: some datums were sampled with top_k or top_p and some without; send them in "
            "separate calls"
        )
    return [each for sets in with_sets for each in sets] if with_sets else None


def one_dtype(arrays: list[Array], what: str) -> list[Array]:
    if len({array.dtype for array in arrays}) > 1:
        raise Refused(f"{what} has integers in some datums and floats in others")
    return arrays


def fields_of(
    tokens: Sequence[Array], tensors: Sequence[dict[str, Array]], who: str
) -> dict[str, list[Array]]:
    """The datums' tensors by TrainSample field, with default weights. Raises Refused if the datums
    have different tensors."""
    dimensions = {datum["target_tokens"].ndim for datum in tensors if "target_tokens" in datum}
    if len(dimensions) > 1:
        raise Refused(
            f"{who}: some datums have one target per token, others several; send them in separate "
            "calls"
        )
    names = sorted(set[str]().union(*tensors))
    if "weights" in names and dimensions <= {1}:
        for inputs, datum in zip(tokens, tensors, strict=True):
            datum.setdefault("weights", np.ones(inputs.size, dtype=np.float32))
    fields = {}
    for name in names:
        arrays = [datum[name] for datum in tensors if name in datum]
        if len(arrays) < len(tensors):
            raise Refused(
                f"{who}: some datums have {name} and others do not; give it for all or none"
            )
        fields[SETS[name] if arrays[0].ndim == 2 else FIELDS[name]] = arrays
    return fields


def loss_config(request: Message) -> dict[str, float | str]:
    """The loss configuration: loss_fn_config, overridden by loss_fn_config_v2."""
    config: dict[str, float | str] = dict(request.loss_fn_config.items())
    for key, value in request.loss_fn_config_v2.items():
        which = value.WhichOneof("value")
        if which is None:
            raise Refused(f"model {request.model_id}: loss_fn_config[{key!r}] has no value")
        config[key] = getattr(value, which)
    return config


def check_role(
    name: str,
    config: dict[str, float | str],
    role: str,
    who: str,
    find_graph: Callable[[str], LossGraph],
) -> ServedLoss:
    if role == "critic" and name != CRITIC_LOSS:
        raise Refused(
            f"{who} is a critic: a critic batch must use loss_fn {CRITIC_LOSS!r}, not {name!r}"
        )
    if role != "critic" and name == CRITIC_LOSS:
        raise Refused(f"{who} is a policy: loss_fn {CRITIC_LOSS!r} is only for critic models")
    try:
        if name == CUSTOM_LOSS:
            return custom_loss(config, find_graph)
        return served_loss(name, config)
    except Refused as error:
        raise Refused(f"{who}: {error}") from None


def model_input(
    chunks: Sequence[Message], where: str, limits: DataLimits
) -> tuple[Array, list[bytes]]:
    """Token ids [N] of a datum, from its chunks, and the files of its images."""
    parts = []
    images = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "image" and limits.images is not None:
            image = chunk.image
            if image.HasField("override_dimensions"):
                raise Refused(f"{where}: override_dimensions of an image is not supported")
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            parts.append(image_tokens(image.data, expected, where, limits.images))
            images.append(image.data)
        elif kind == "encoded_text":
            data = chunk.encoded_text.tokens
            text = numbers(data, np.dtype("<i4"), f"{where}: tokens").astype(np.int64)
            check_text(text, where, limits)
            parts.append(text)
        else:
            raise Refused(unsupported_chunk(where, kind or "none", limits))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    check_tokens(tokens, where, limits)
    return tokens, images


def image_tokens(data: bytes, expected: int | None, where: str, processor: ImageProcessor) -> Array:
    """The placeholders that stand for an image in its model input, [F]. expected: F as the client
    has it. Raises Refused."""
    from slime_like.images.files import ImageProblem, image_size

    try:
        count = processor.num_tokens(*image_size(data, processor.limits))
    except ImageProblem as error:
        raise Refused(f"{where}: image: {error}") from None
    if expected not in (None, count):
        raise Refused(
            f"{where}: image: expected_tokens is {expected}, and the model has {count} tokens for "
            "an image of this size"
        )
    return np.full(count, processor.rule.image_token, dtype=np.int64)


def check_text(tokens: Array, where: str, limits: DataLimits) -> None:
    """Raise Refused for placeholders of images among the tokens of a text."""
    if limits.images is not None and (tokens == limits.images.rule.image_token).any():
        raise Refused(
            f"{where}: token {limits.images.rule.image_token} is the placeholder of images; give "
            "the image itself, as a chunk"
        )


def unsupported_chunk(where: str, kind: str, limits: DataLimits) -> str:
    """Why a chunk of a model input is refused."""
    supported = "encoded_text and image are" if limits.images is not None else "encoded_text is"
    remedy = "; images need a server with --serve-images" if kind == "image" else ""
    return f"{where}: a chunk of kind {kind}; only {supported} supported{remedy}"


def check_tokens(tokens: Array, where: str, limits: DataLimits, *, room: int = 0) -> None:
    """Raise Refused for invalid token ids or too many of them. room: number of further tokens that
    must fit."""
    if tokens.size == 0:
        raise Refused(f"{where}: no tokens")
    if tokens.size + room > limits.max_length:
        new = f" and {room} new ones" if room else ""
        raise Refused(
            f"{where}: {tokens.size} tokens{new} exceed the maximum sequence length, "
            f"{limits.max_length}"
        )
    check_vocabulary(tokens, where, limits)


def check_vocabulary(tokens: Array, where: str, limits: DataLimits) -> None:
    """Raise Refused for token ids outside the vocabulary."""
    invalid = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    if invalid.size:
        raise Refused(
            f"{where}: token {int(invalid[0])} is outside the vocabulary, 0 to "
            f"{limits.vocab_size - 1}"
        )


def check_tensors(
    inputs: Message,
    loss: ServedLoss,
    length: int,
    where: str,
    limits: DataLimits,
    *,
    forward_only: bool,
) -> dict[str, Array]:
    """Validate the tensors of one datum; returns them by name."""
    given = set(inputs)
    if loss.is_critic:
        _check_values_and_returns(given, where, forward_only=forward_only)
    if missing := sorted(loss.required - given):
        raise Refused(f"{where}: loss_fn {loss.name!r} needs {', '.join(missing)}")
    accepted = loss.required | loss.optional
    if unknown := sorted(given - accepted):
        raise Refused(
            f"{where}: unknown loss_fn_inputs {', '.join(unknown)} for loss_fn {loss.name!r}; "
            f"accepted: {', '.join(sorted(accepted))}"
        )
    if loss.graph is not None:
        return custom_tensors(inputs, loss.graph, length, where, limits)
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
                f"{where}: {name} has {mask[~np.isin(mask, (0, 1))][0]:g}, must be 0 or 1"
            )
        if not mask.any():
            raise Refused(f"{where}: {name} is 0 everywhere")
        if "advantages" in tensors and tensors["advantages"][mask == 0].any():
            raise Refused(f"{where}: advantages are not 0 where {name} is 0")
    return tensors


def custom_tensors(
    inputs: Message, graph: LossGraph, length: int, where: str, limits: DataLimits
) -> dict[str, Array]:
    """Targets [length] or [length, K], as the rank of the log-probs says, and the graph's inputs
    with their own dtype."""
    (_, target_rank), *data_inputs = graph.inputs
    shape = list(inputs["target_tokens"].shape)
    if max(1, len(shape)) != target_rank:
        raise Refused(
            f"{where}: target_tokens has rank {len(shape)}, but loss {graph.name!r} takes logprobs "
            f"of rank {target_rank}"
        )
    width = int(shape[1]) if target_rank == 2 else None
    if width is not None:
        check_width(width, length, where, limits)
    targets = tensor(
        inputs["target_tokens"], "target_tokens", length, where, critic=False, width=width
    )
    check_vocabulary(targets, f"{where}, target_tokens", limits)
    tensors = {
        name: custom_tensor(inputs[name], rank, length, f"{where}: {name}", limits)
        for name, rank in data_inputs
        if name != "target_tokens"
    }
    return {**tensors, "target_tokens": targets}


def custom_tensor(message: Message, rank: int, length: int, what: str, limits: DataLimits) -> Array:
    """Decode an input of a custom loss: [], [length] or [length, K], int64 or float32."""
    shape = [int(size) for size in message.shape]
    dtype = _DTYPES.get(message.dtype)
    if dtype is None or message.WhichOneof("encoding") == "sparse_csr":
        raise Refused(f"{what} must be dense, of dtype float32 or int64")
    array = numbers(message.dense, dtype, what)
    if not shape and rank == 1:  # the SDK leaves the shape of a list out
        shape = [array.size]
    legal = [[], [length], [length, *shape[1:2]]][rank]
    if shape != legal or array.size != math.prod(shape) or array.size > limits.max_tokens:
        expected = ["[]", f"[{length}]", f"[{length}, K]"][rank]
        raise Refused(f"{what} has {array.size} entries and shape {shape}, must be {expected}")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise Refused(f"{what} has a value that is not finite")
    return array.reshape(shape).astype("<f4" if dtype.kind == "f" else "<i8")


def _check_values_and_returns(given: set[str], where: str, *, forward_only: bool) -> None:
    present = given & {"values", "returns"}
    if len(present) == 1:
        raise Refused(
            f"{where}: only {', '.join(present)}; give both values and returns, or neither"
        )
    if not present and not forward_only:
        raise Refused(
            f"{where}: values and returns are required for every response token; without them a "
            "critic only supports forward"
        )


def soft_targets(inputs: Message, length: int, where: str, limits: DataLimits) -> dict[str, Array]:
    """target_tokens and weights [N, K] from dense or sparse tensors; missing entries of sparse
    tensors are token 0 with weight 0."""
    width = int(inputs["target_tokens"].shape[1])
    check_width(width, length, where, limits)
    if "mask" in inputs:
        raise Refused(
            f"{where}: mask does not support several targets per token; give weights of 0"
        )
    if "weights" not in inputs:
        raise Refused(
            f"{where}: several targets per token need weights of shape [{length}, {width}]"
        )
    tensors = {
        name: tensor(inputs[name], name, length, where, critic=False, width=width)
        for name in ("target_tokens", "weights")
    }
    check_vocabulary(tensors["target_tokens"], f"{where}, target_tokens", limits)
    return tensors


def check_width(width: int, length: int, where: str, limits: DataLimits) -> None:
    """Raise Refused for an illegal number of targets per token."""
    if not 0 < width <= limits.vocab_size:
        raise Refused(
            f"{where}: target_tokens has {width} targets per token, must be 1 to "
            f"{limits.vocab_size}"
        )
    if length * width > limits.max_tokens:
        raise Refused(
            f"{where}: {length} x {width} targets are more than {limits.max_tokens} "
            "(--max-request-tokens)"
        )


def tensor(
    message: Message, name: str, length: int, where: str, *, critic: bool, width: int | None = None
) -> Array:
    """Decode an array [length] or [length, width] of finite numbers: int64 for tokens, float32
    otherwise."""
    expected = [length] if width is None else [length, width]
    shape = list(message.shape)
    dtype = _DTYPES.get(message.dtype)
    if dtype is None or (name in INTEGERS and dtype.kind == "f"):
        legal = "int64" if name in INTEGERS else "float32"
        raise Refused(f"{where}: {name} has dtype {message.dtype}, must be {legal}")
    if len(shape) > 1 and shape != expected:
        raise Refused(
            f"{where}: {name} has shape {shape}, must be {expected}; only cross_entropy supports "
            "several targets per token, with weights of the same shape"
        )
    if message.WhichOneof("encoding") == "sparse_csr":
        if width is None:
            raise Refused(
                f"{where}: {name} is sparse; only target_tokens and weights of shape [N, K] may be"
            )
        array = dense_from_csr(message.sparse_csr, dtype, length, width, f"{where}: {name}")
    else:
        array = numbers(message.dense, dtype, f"{where}: {name}")
    if array.size != math.prod(expected) or (shape and shape != expected):
        actual = f"{name} has {array.size} entries"
        if shape and shape != [array.size]:
            actual += f" and shape {shape}"
        rule = "one per token is required"
        if critic and name in ("values", "returns"):
            rule = "values and returns are required for every response token"
        raise Refused(f"{where}: {actual}, the model input has {length} tokens; {rule}")
    if name in INTEGERS:
        return array.reshape(expected).astype(np.int64)
    if not np.isfinite(array).all() or (array.size and float(np.abs(array).max()) > LARGEST):
        raise Refused(f"{where}: {name} has a value that is not finite, or above {LARGEST:g}")
    return array.reshape(expected).astype(np.float32)


def numbers(data: bytes, dtype: DType, what: str) -> Array:
    """Decode an array [N]. Raises Refused for a size that is no multiple of the dtype's."""
    if len(data) % dtype.itemsize:
        raise Refused(f"{what}: {len(data)} bytes are not an array of {dtype.name}")
    return np.frombuffer(data, dtype=dtype)


def dense_from_csr(csr: Message, dtype: DType, rows: int, columns: int, what: str) -> Array:
    """Convert a CSR matrix to dense [rows * columns]. Raises Refused for invalid indices."""
    index = np.dtype("<i8")
    values = numbers(csr.values, dtype, f"{what}: values")
    row_ends = numbers(csr.crow_indices, index, f"{what}: crow_indices")
    column_of = numbers(csr.col_indices, index, f"{what}: col_indices")
    row_of = csr_rows(row_ends, column_of, rows, columns, values.size, what)
    dense = np.zeros((rows, columns), dtype=dtype)
    dense[row_of, column_of] = values
    return dense.reshape(-1)


def csr_rows(
    row_ends: Array, column_of: Array, rows: int, columns: int, count: int, what: str
) -> Array:
    """Row of each of `count` values of a CSR matrix. Raises Refused for invalid indices."""
    counts = np.diff(row_ends)
    valid = (
        row_ends.size == rows + 1
        and row_ends[0] == 0
        and row_ends[-1] == column_of.size == count
        and (counts >= 0).all()
        and ((column_of >= 0) & (column_of < columns)).all()
    )
    if not valid:
        raise Refused(f"{what} is not a valid CSR matrix of {rows} rows and {columns} columns")
    row_of = np.repeat(np.arange(rows), counts)
    if np.unique(row_of * columns + column_of).size != column_of.size:
        raise Refused(f"{what} has a duplicate entry")
    return row_of

"""Losses that a client sends as a graph, and that run on the server.

`ServiceClient.create_custom_loss` of Tinker's SDK traces a function of one datum with torch.fx and
sends the nodes as plain data. Nothing in it is executable: `check_graph` accepts only operations of
the lists below, which have no side effects and draw no random numbers, and `evaluate` calls them
one by one on the CPU, in float32 as the client would, within bounds on the size of every result and
on the work of a whole request.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from slime_like.lazy import Tensor, torch
from slime_like.tinker.errors import Refused

MAX_NODES = 1000
MAX_INPUTS = 16
MAX_VALUES = 10_000  # constants and references of all nodes
MAX_DEPTH = 8  # of nested arguments
MAX_ELEMENTS = 2**24  # of one result
MAX_WORK = 2**30  # elements of all results of a request's datums
LARGEST_INTEGER = 2**63
LARGEST_EXPONENT = 64  # of integers

LOG_PROBS = "logprobs"  # name of the first input
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# functions of torch that are also methods of a tensor, with the same meaning
_BOTH = _names(
    """
    abs absolute add sub subtract mul multiply div divide true_divide neg negative exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square pow sigmoid logit tanh sin cos tan asin acos atan sinh
    cosh asinh acosh atanh erf erfc reciprocal sign sgn ceil floor round trunc frac clamp clamp_min
    clamp_max clip where maximum minimum fmax fmin remainder fmod floor_divide lerp addcmul addcdiv
    logaddexp logaddexp2 xlogy nan_to_num isnan isinf isfinite eq ne gt ge lt le greater
    greater_equal less less_equal not_equal logical_and logical_or logical_not logical_xor
    masked_fill sum nansum mean nanmean prod std var amax amin max min median argmax argmin all any
    norm dot outer logsumexp softmax log_softmax cumsum cumprod cummax cummin logcumsumexp
    count_nonzero sort argsort topk kthvalue quantile flip roll reshape unsqueeze squeeze transpose
    permute flatten movedim gather index_select masked_select take_along_dim narrow select split
    chunk unbind diff tril triu relu detach clone broadcast_to square numel
    """
)
_METHODS = _names(
    """
    view view_as expand expand_as repeat reshape_as type_as to float double half bfloat16 long int
    bool size dim new_zeros new_ones new_full t contiguous
    """
)
_TORCH = _names(
    """
    stack cat concat zeros_like ones_like full_like zeros ones full arange linspace
    cosine_similarity softplus
    """
)
_FUNCTIONAL = _names(
    """
    relu softplus logsigmoid sigmoid tanh softmax log_softmax gelu silu elu leaky_relu hardtanh
    huber_loss smooth_l1_loss mse_loss l1_loss binary_cross_entropy kl_div pad normalize
    binary_cross_entropy_with_logits cosine_similarity
    """
)
_SPECIAL = _names("expit expm1 log1p xlogy xlog1py entr logsumexp log_softmax softmax logit")
_OPERATORS = _names(
    "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert getitem"
)
_MATH = _names("sqrt exp log log2 log10 log1p expm1 tanh fabs floor ceil pow fmod")
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "T", "mT")
_RESULT_FIELDS = ("values", "indices")  # of the pairs that max, sort and others return
# text that an operation may take: reductions, rounding, interpolation, padding
_TEXTS = _names(
    "none mean sum batchmean trunc floor tanh constant linear lower higher nearest midpoint"
)
_DTYPES = _names("float16 bfloat16 float32 float64 uint8 int8 int16 int32 int64 bool")
_OPS = ("placeholder", "call_function", "call_method", "output")


@dataclass(frozen=True, slots=True)
class LossGraph:
    """A traced loss of one datum."""

    name: str
    inputs: tuple[tuple[str, int], ...]  # name and rank of each; logprobs first
    nodes: tuple[Mapping[str, Any], ...]  # as the client sent them: op, name, target, args, kwargs

    @staticmethod
    def from_plain(value: Mapping[str, Any]) -> LossGraph:
        inputs = tuple((name, rank) for name, rank in value["inputs"])
        return LossGraph(value["name"], inputs, tuple(value["nodes"]))

    def plain(self) -> dict[str, Any]:
        """As plain values, for the journal and the workers."""
        return {
            "name": self.name,
            "inputs": [list(each) for each in self.inputs],
            "nodes": [dict(node) for node in self.nodes],
        }

    @property
    def data_inputs(self) -> tuple[tuple[str, int], ...]:
        """The inputs other than the log-probs: loss_fn_inputs of a datum."""
        return self.inputs[1:]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Keys of the metrics, with their reduction."""
        _, metrics = _output(self.nodes[-1])
        return tuple(metrics)


def check_graph(graph: LossGraph) -> None:
    """Raise Refused for a graph that is malformed, too large, or names an operation that is not
    allowed."""
    _check_inputs(graph)
    nodes = graph.nodes
    if not 0 < len(nodes) <= MAX_NODES:
        raise Refused(f"{_who(graph)}: {len(nodes)} nodes, must be 1 to {MAX_NODES}")
    placeholders = [node["target"] for node in nodes if node["op"] == "placeholder"]
    names = [name for name, _ in graph.inputs]
    if placeholders != names:
        raise Refused(f"{_who(graph)}: placeholders {placeholders} are not the inputs, {names}")
    if [node["op"] for node in nodes].count("output") != 1 or nodes[-1]["op"] != "output":
        raise Refused(f"{_who(graph)}: the last node, and no other, must be the output")
    known: set[str] = set()
    values = 0
    for node in nodes:
        where = f"{_who(graph)}, node {node['name']!r}"
        if node["name"] in known:
            raise Refused(f"{where}: the name is not unique")
        _check_target(node, where)
        arguments = [*node["args"], *node["kwargs"].values()]
        if out := sorted({"out", "inplace"} & node["kwargs"].keys()):
            raise Refused(f"{where}: argument {out[0]!r} is not allowed")
        values += sum(_check_argument(value, known, where, MAX_DEPTH) for value in arguments)
        if values > MAX_VALUES:
            raise Refused(f"{_who(graph)}: more than {MAX_VALUES} arguments")
        known.add(node["name"])
    _check_output(graph)


def _who(graph: LossGraph) -> str:
    return f"loss {graph.name!r}"


def _check_inputs(graph: LossGraph) -> None:
    inputs = graph.inputs
    if not inputs or inputs[0][0] != LOG_PROBS or inputs[0][1] not in (1, 2):
        raise Refused(f"{_who(graph)}: the first input must be {LOG_PROBS}, of rank 1 or 2")
    if len(inputs) > MAX_INPUTS or len({name for name, _ in inputs}) < len(inputs):
        raise Refused(f"{_who(graph)}: at most {MAX_INPUTS} inputs, each once")
    for name, _ in inputs:
        if not _INPUT.fullmatch(name):
            raise Refused(f"{_who(graph)}: {name!r} is not a name of an input")


def _check_target(node: Mapping[str, Any], where: str) -> None:
    op = node["op"]
    target = node["target"]
    if op not in _OPS:
        raise Refused(f"{where}: {op} is not supported; accepted: {', '.join(_OPS)}")
    if op == "call_method" and target not in (*_BOTH, *_METHODS):
        raise Refused(f"{where}: method {target!r} is not allowed")
    if op == "call_function" and target not in functions():
        raise Refused(f"{where}: function {target!r} is not allowed")
    if target in ("getattr", "builtins.getattr") and op == "call_function":
        legal = (*_ATTRIBUTES, *_RESULT_FIELDS)
        if len(node["args"]) != 2 or node["kwargs"] or node["args"][1] not in legal:
            raise Refused(f"{where}: only the attributes {', '.join(legal)} are allowed")


def _check_argument(value: Any, known: set[str], where: str, depth: int) -> int:
    """Validate an encoded argument; returns the number of its values."""
    if depth == 0:
        raise Refused(f"{where}: arguments are nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | float | str):
        return 1
    if isinstance(value, int):
        if abs(value) >= LARGEST_INTEGER:
            raise Refused(f"{where}: {value:.3g} is not an int64")
        return 1
    if isinstance(value, list):
        return 1 + sum(_check_argument(each, known, where, depth - 1) for each in value)
    if not isinstance(value, dict) or len(value) != 1:
        raise Refused(f"{where}: an argument of unknown form")
    ((kind, content),) = value.items()
    if kind == "ref":
        if not isinstance(content, str) or content not in known:
            raise Refused(f"{where}: {content!r} is no earlier node")
        return 1
    if kind in ("tuple", "slice") and isinstance(content, list):
        if kind == "slice" and len(content) != 3:
            raise Refused(f"{where}: a slice has three parts, not {len(content)}")
        return 1 + sum(_check_argument(each, known, where, depth - 1) for each in content)
    if kind == "dict" and isinstance(content, dict):
        return 1 + sum(_check_argument(each, known, where, depth - 1) for each in content.values())
    legal = {
        "ellipsis": (True,),
        "float": ("inf", "-inf", "nan"),
        "dtype": _DTYPES,
        "device": ("cpu",),
        "layout": ("strided",),
        "memory_format": ("contiguous_format", "preserve_format"),
    }
    if kind not in legal or content not in legal[kind]:
        raise Refused(f"{where}: argument {value!r:.200} is not supported")
    return 1


def _output(node: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The encoded loss and metrics of an output node. Raises Refused for another structure."""
    (value,) = node["args"] if len(node["args"]) == 1 else (None,)
    pair = value.get("tuple") if isinstance(value, dict) else value
    if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict):
        metrics = pair[1].get("dict")
        if isinstance(metrics, dict):
            return pair[0], metrics
    raise Refused("the output must be a pair of the loss and a dictionary of metrics")


def _check_output(graph: LossGraph) -> None:
    try:
        loss, metrics = _output(graph.nodes[-1])
    except Refused as error:
        raise Refused(f"{_who(graph)}: {error}") from None
    if not all(isinstance(each, dict) and "ref" in each for each in (loss, *metrics.values())):
        raise Refused(f"{_who(graph)}: loss and metrics must be results of nodes")
    for key in metrics:
        if not _METRIC.fullmatch(key):
            raise Refused(
                f"{_who(graph)}: metric {key!r} must be named custom/<name>:sum or "
                "custom/<name>:mean"
            )


@cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """The functions that a graph may call, by the names that torch.fx gives them."""
    named: dict[str, Callable[..., Any]] = {"getattr": _getattr, "builtins.getattr": _getattr}
    for name in (*_BOTH, *_TORCH):
        if hasattr(torch, name):
            named[f"torch.{name}"] = getattr(torch, name)
    for name in _FUNCTIONAL:
        function = getattr(torch.nn.functional, name)
        named[f"torch.nn.functional.{name}"] = function
        if not hasattr(function, "__code__"):  # compiled: fx names its module
            named[f"torch._C._nn.{function.__name__}"] = function
    for name in _SPECIAL:
        named[f"torch.special.{name}"] = getattr(torch.special, name)
        named[f"torch._C._special.special_{name}"] = getattr(torch.special, name)
    for name in _OPERATORS:
        named[f"operator.{name}"] = _checked_operator(getattr(operator, name))
    named["operator.getitem"] = _getitem
    named["operator.pow"] = _pow
    for name in _MATH:
        named[f"math.{name}"] = _of_numbers(getattr(math, name))
    return named


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _checked_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of tensors and numbers only: it would also repeat lists and format text."""

    def call(*operands: Any) -> Any:
        for value in operands:
            if not _is_number(value) and not isinstance(value, torch.Tensor):
                raise TypeError(f"{function.__name__} of a {type(value).__name__}")
        return function(*operands)

    return call


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        if not all(map(_is_number, operands)):
            raise TypeError(f"math.{function.__name__} takes numbers")
        return function(*operands)

    return call


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent of integers is {exponent}, at most {LARGEST_EXPONENT}")
    return _checked_operator(operator.pow)(base, exponent)


def _getattr(value: Any, name: str) -> Any:
    if name in _RESULT_FIELDS and isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor has no {name}")
    return getattr(value, name)


def _getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, torch.Tensor | tuple | list):
        raise TypeError(f"an index of a {type(value).__name__}")
    if isinstance(index, tuple | list) and any(map(_is_mask, index)):
        raise TypeError("a mask must be the only index")
    return value[index]


def _is_mask(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


class Work:
    """Bounds the elements that the losses of one request compute."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, elements: int) -> None:
        """Raises Refused above the bounds."""
        if elements > MAX_ELEMENTS:
            raise Refused(f"a result of {elements} elements, at most {MAX_ELEMENTS}")
        self._left -= elements
        if self._left < 0:
            raise Refused(f"more than {MAX_WORK} elements in total; send fewer datums a call")


def evaluate(
    graph: LossGraph, log_probs: Tensor, inputs: Sequence[Tensor], work: Work
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one datum and its metrics.

    Args:
        log_probs: [T] or [T, K] float32 on the CPU, usually with grad.
        inputs: in the order of `graph.data_inputs`: [], [T] or [T, K].

    Returns:
        The loss, 0-d, and 0-d metrics by key.

    Raises:
        Refused: An operation failed, a result is too large, or the results have the wrong form; it
            names the loss and the node.
    """
    by_input = dict(zip([name for name, _ in graph.inputs], [log_probs, *inputs], strict=True))
    results: dict[str, Any] = {}
    for node in graph.nodes[:-1]:
        if node["op"] == "placeholder":
            results[node["name"]] = by_input[node["target"]]
            continue
        try:
            results[node["name"]] = _call(node, results, work)
        except Exception as error:  # whatever torch raises for arguments of the wrong kind
            raise Refused(f"{_who(graph)}, node {node['name']!r}: {_reason(error)}") from None
    loss, metrics = _output(graph.nodes[-1])
    values = {key: results[each["ref"]] for key, each in metrics.items()}
    for what, value in {"the loss": results[loss["ref"]], **values}.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            form = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise Refused(f"{_who(graph)}: {what} must be a scalar tensor, is {form:.200}")
    return results[loss["ref"]], values


def differentiate(graph: LossGraph, loss: Tensor, log_probs: Tensor) -> Tensor:
    """Gradient of the loss, of the shape of the log-probs. Raises Refused if there is none."""
    gradient = None
    if loss.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(loss, log_probs, allow_unused=True)
        except RuntimeError as error:
            raise Refused(f"{_who(graph)}: {_reason(error)}") from None
    if gradient is None:
        raise Refused(f"{_who(graph)} does not depend on {LOG_PROBS}")
    return gradient


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0][:300]


def _call(node: Mapping[str, Any], results: Mapping[str, Any], work: Work) -> Any:
    """The result of a node, whose size is known before it is computed."""
    args = [_decode(value, results) for value in node["args"]]
    kwargs = {key: _decode(value, results) for key, value in node["kwargs"].items()}
    target = node["target"]
    if node["op"] == "call_method":
        if not isinstance(args[0], torch.Tensor):
            raise TypeError(f"method {target} of a {type(args[0]).__name__}")
        function: Callable[..., Any] = getattr(torch.Tensor, target)
    else:
        function = functions()[target]
    if function is not _getattr:
        _check_texts([*args, *kwargs.values()])
    work.spend(_elements_of_call(function, args, kwargs))
    result = function(*args, **kwargs)
    if isinstance(result, int) and abs(result) >= LARGEST_INTEGER:
        raise OverflowError("an integer beyond int64")
    return result


def _check_texts(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, str) and value not in _TEXTS:
            raise ValueError(f"text {value!r:.100} is not allowed")


def _elements_of_call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> int:
    """Upper bound of a call's elements, from its run on tensors without storage."""
    least = _broadcast_elements([*args, *kwargs.values()])
    by_mask = function is _getitem and _is_mask(args[1])
    if by_mask or function in (torch.masked_select, torch.Tensor.masked_select):
        # their sizes depend on values; a mask selects at most all
        return max(least, _elements([args[0], args[1]]))
    with torch.device("meta"), torch.no_grad():
        shapes = [_without_storage(value) for value in args]
        named = {key: _without_storage(value) for key, value in kwargs.items()}
        return max(least, _elements(function(*shapes, **named)))


def _broadcast_elements(values: Sequence[Any]) -> int:
    """Elements that a call may make before it reduces them, as mse_loss of [N, 1] and [N] does:
    those of the common shape of the tensors; 0 if they have none, or one of them has it already."""
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    try:
        elements = math.prod(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return 0
    return elements if elements > max(map(math.prod, shapes), default=1) else 0


def _without_storage(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)([_without_storage(each) for each in value])
    return value


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    if isinstance(value, list | tuple):
        return sum(_elements(each) for each in value)
    return 1


def _decode(value: Any, results: Mapping[str, Any]) -> Any:
    """The argument that `_check_argument` has accepted."""
    if isinstance(value, list):
        return [_decode(each, results) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        return results[content]
    if kind == "tuple":
        return tuple(_decode(each, results) for each in content)
    if kind == "slice":
        return slice(*(_decode(each, results) for each in content))
    if kind == "dict":
        return {key: _decode(each, results) for key, each in content.items()}
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float":
        return float(content)
    return torch.device(content) if kind == "device" else getattr(torch, content)

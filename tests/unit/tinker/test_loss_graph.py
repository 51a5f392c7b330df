"""Losses sent as a graph: the bits of the traced function, and refusals of everything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from torch import Tensor
from torch.nn import functional as F

from slime_like.tinker import loss_graph
from slime_like.tinker.errors import Refused
from slime_like.tinker.loss_graph import LossGraph, Work, check_graph, evaluate, functions

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss.sum(), {"custom/clipped:mean": (ratio != clipped).float().mean()}


def whitened(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    chosen = advantages[old < 0.0]
    scale = (chosen - chosen.mean()).square().mean().sqrt() + 1e-6
    n = math.sqrt(logprobs.shape[0])
    values = torch.where(old < 0.0, logprobs * advantages / scale, 0.0)
    return -values.sum() / n, {"custom/scale:sum": scale}


def sequence(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    ratio = (logprobs - old).mean().exp()
    k3 = torch.expm1(old - logprobs) - (old - logprobs)
    best = torch.topk(advantages, 2).values.sum()
    loss = -ratio * advantages[-1] + 0.1 * k3.sum() + F.softplus(-logprobs[::2].sum()) * best
    return loss, {"custom/k3/mean:mean": k3.mean().detach(), "custom/best:sum": best}


def ranked(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    order = advantages.argsort(descending=True)
    gap = logprobs.unsqueeze(0)[0, order].diff()
    margins = F.logsigmoid(gap).masked_fill(old[1:] > -0.5, 0.0)
    both = torch.stack([margins.sum(), margins.mean()])
    return -both.unbind(0)[0], {}


def cumulated(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    returns = advantages.flip(0).cumsum(0).flip(0)
    weights = torch.softmax(returns.view(1, -1).squeeze(0), dim=-1)
    return -(logprobs * weights).sum() * (logprobs.numel() ** 2 // 3), {}


def traced(loss: Loss, **ranks: Any) -> tuple[LossHandle, LossGraph]:
    """As the SDK traces and sends it."""
    given_ranks = ranks or {"logprobs": 1, "old": 1, "advantages": 1}
    handle = trace_loss(loss, given_ranks, "s")
    nodes = tuple(node.model_dump() for node in encode_graph(handle).nodes)
    return handle, LossGraph(handle.name, tuple((i.name, i.rank) for i in handle.inputs), nodes)


def inputs(length: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, generator=generator) - 1 for _ in range(3)]


@pytest.mark.parametrize("loss", [ppo, whitened, sequence, ranked, cumulated])
def test_a_graph_has_the_bits_of_its_function(loss: Loss) -> None:
    handle, graph = traced(loss)
    check_graph(graph)
    assert LossGraph.from_plain(graph.plain()) == graph
    log_probs, *others = inputs()
    mine = log_probs.clone().requires_grad_()
    theirs = log_probs.clone().requires_grad_()
    value, metrics = evaluate(graph, mine, others, Work())
    expected, expected_metrics = handle.graph(theirs, *others)
    value.backward()
    expected.backward()
    assert mine.grad is not None and theirs.grad is not None
    assert torch.equal(value, expected) and torch.equal(mine.grad, theirs.grad)
    assert metrics.keys() == expected_metrics.keys() == set(graph.metric_names)
    assert all(torch.equal(metrics[key], expected_metrics[key]) for key in metrics)


def test_every_allowed_function_exists_by_a_name_of_torch_fx() -> None:
    """What a graph may call is what the lists say; none is in place, random or leaves torch."""
    names = set(functions())
    assert {"torch.where", "operator.getitem", "math.sqrt", "torch._C._nn.softplus"} <= names
    assert all(hasattr(torch.Tensor, name) for name in (*loss_graph._BOTH, *loss_graph._METHODS))
    called = {name.rpartition(".")[2] for name in names} | set(loss_graph._METHODS)
    assert not [name for name in called if name.endswith("_") and name not in ("and_", "or_")]
    unsafe = {"rand", "dropout", "bernoulli", "load", "save", "item", "backward", "set", "apply"}
    assert not called & (unsafe | {"numpy", "tolist", "as_strided", "cuda", "matmul", "empty"})


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


START = node("placeholder", "logprobs", "logprobs")


def graph_of(*nodes: dict[str, Any], output: Any = None) -> LossGraph:
    """logprobs, these nodes, and as the loss the sum of the last."""
    last = nodes[-1]["name"] if nodes else "logprobs"
    end = [
        node("call_method", "loss", "sum", ref(last)),
        node("output", "output", "output", output or {"tuple": [ref("loss"), {"dict": {}}]}),
    ]
    return LossGraph("l", (("logprobs", 1),), (START, *nodes, *end))


def call(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("call_function", "x", target, *args, **kwargs)


L = ref("logprobs")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (node("call_module", "x", "net", L), "call_module is not supported"),
        (node("get_attr", "x", "weight"), "get_attr is not supported"),
        (call("os.system", "true"), "function 'os.system' is not allowed"),
        (call("torch.load", "/etc/passwd"), "function 'torch.load' is not allowed"),
        (call("torch.rand", 3), "function 'torch.rand' is not allowed"),
        (call("torch.matmul", L, L), "function 'torch.matmul' is not allowed"),
        (node("call_method", "x", "backward", L), "method 'backward' is not allowed"),
        (node("call_method", "x", "item", L), "method 'item' is not allowed"),
        (node("call_method", "x", "add_", L, 1), "method 'add_' is not allowed"),
        (node("call_method", "x", "__reduce__", L), "method '__reduce__' is not allowed"),
        (call("getattr", L, "__class__"), "only the attributes shape"),
        (call("getattr", L, "data"), "only the attributes shape"),
        (call("getattr", L, ref("logprobs")), "only the attributes shape"),
        (call("torch.exp", L, out=L), "argument 'out' is not allowed"),
        (call("torch.exp", ref("later")), "'later' is no earlier node"),
        (call("torch.exp", {"ref": "x"}), "'x' is no earlier node"),
        (call("torch.exp", {"device": "cuda"}), "is not supported"),
        (call("torch.exp", {"dtype": "load"}), "is not supported"),
        (call("torch.exp", {"ref": ["a"]}), "is no earlier node"),
        (call("torch.exp", {"slice": [1]}), "a slice has three parts"),
        (call("torch.exp", {"a": 1, "b": 2}), "an argument of unknown form"),
        (call("torch.exp", 2**64), "is not an int64"),
        (call("torch.exp", [[[[[[[[[1]]]]]]]]]), "nested deeper than 8"),
        (call("torch.stack", [1] * 10_001), "more than 10000 arguments"),
        (node("call_function", "logprobs", "torch.exp", L), "the name is not unique"),
    ],
)
def test_what_is_not_allowed_is_refused_before_it_runs(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message.replace("(", r"\(")):
        check_graph(graph_of(bad))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (ref("loss"), "a pair of the loss"),
        ({"tuple": [ref("loss")]}, "a pair of the loss"),
        ({"tuple": [1.0, {"dict": {}}]}, "must be results of nodes"),
        ({"tuple": [ref("loss"), {"dict": {"custom/a:sum": 1.0}}]}, "must be results of nodes"),
        ({"tuple": [ref("loss"), {"dict": {"loss:sum": ref("loss")}}]}, "metric 'loss:sum'"),
        ({"tuple": [ref("loss"), {"dict": {"custom/a:max": ref("loss")}}]}, "custom/a:max"),
    ],
)
def test_outputs_that_are_no_loss_and_metrics(output: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_graph(graph_of(output=output))


def test_structures_that_are_no_graph() -> None:
    good = graph_of(call("torch.exp", L))
    check_graph(good)
    for change, message in [
        ({"inputs": (("logprobs", 0),)}, "rank 1 or 2"),
        ({"inputs": (("logprobs", 1), ("a", 1))}, "are not the inputs"),
        ({"inputs": (("logprobs", 1), ("A b", 1))}, "not a name of an input"),
        ({"inputs": (("logprobs", 1), *((f"i{n}", 1) for n in range(16)))}, "at most 16 inputs"),
        ({"nodes": ()}, "0 nodes"),
        ({"nodes": good.nodes[:-1]}, "must be the output"),
        ({"nodes": (good.nodes[0], *good.nodes[2:], good.nodes[1])}, "must be the output"),
        ({"nodes": tuple(good.nodes) * 300}, "1200 nodes"),
    ]:
        with pytest.raises(Refused, match=message):
            check_graph(
                LossGraph(**{"name": "l", "inputs": good.inputs, "nodes": good.nodes, **change})
            )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([call("torch.zeros", 10**12)], "1000000000000 elements, at most 16777216"),
        ([call("torch.arange", 0, 1, 1e-12)], "elements, at most"),
        ([node("call_method", "x", "repeat", L, 10**9)], "elements, at most"),
        ([node("call_method", "x", "new_zeros", L, {"tuple": [10**6, 10**6]})], "at most"),
        ([call("operator.pow", 9, 9_999_999)], "the exponent of integers is 9999999"),
        ([call("operator.pow", 2**62, 64)], "an integer beyond int64"),
        ([call("operator.mul", [1, 2], 10**9)], "mul of a list"),
        ([call("operator.mod", "%09999999999d", 3)], "text '%09999999999d' is not allowed"),
        ([call("operator.getitem", "none", 0)], "an index of a str"),
        ([call("math.sqrt", -1.0)], "math domain error|nonnegative"),
        ([call("math.sqrt", L)], "takes numbers"),
        ([node("call_method", "x", "view", L, -1, 5)], "invalid for input"),
        ([node("call_method", "x", "to", L, "cuda")], "text 'cuda' is not allowed"),
        ([call("operator.truediv", 1, 0)], "division by zero"),
        ([call("operator.getitem", L, 99)], "out of bounds"),
        ([call("getattr", L, "values")], "a tensor has no values"),
        ([call("torch.where", L)], "meta"),
        (
            [
                call("getattr", L, "shape"),
                node("call_method", "y", "sum", ref("x")),
            ],
            "method sum of a Size",
        ),
    ],
)  # fmt: skip
def test_failures_name_the_node(nodes: list[dict[str, Any]], message: str) -> None:
    graph = graph_of(*nodes)
    check_graph(graph)
    with pytest.raises(Refused, match=message) as refusal:
        evaluate(graph, torch.zeros(7), [], Work())
    assert "loss 'l', node" in str(refusal.value)


def test_the_work_of_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(call("torch.exp", L))
    monkeypatch.setattr(loss_graph, "MAX_WORK", 20)
    work = Work()
    evaluate(graph, torch.zeros(9), [], work)
    with pytest.raises(Refused, match="more than 20 elements in total; send fewer datums"):
        evaluate(graph, torch.zeros(11), [], work)


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction")
@pytest.mark.parametrize(
    "reduction",
    [
        *(
            call(f"torch.nn.functional.{name}", ref("column"), L)
            for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
        ),
        call("torch.cosine_similarity", ref("column"), L),
        call("torch.masked_select", ref("column"), ref("mask")),
    ],
)
def test_what_a_call_broadcasts_is_bounded(
    reduction: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the result is small."""
    graph = graph_of(
        node("call_method", "column", "unsqueeze", L, 1),
        node("call_function", "mask", "operator.lt", L, 1.0),
        reduction,
    )
    monkeypatch.setattr(loss_graph, "MAX_ELEMENTS", 49)
    evaluate(graph, torch.zeros(7), [], Work())
    monkeypatch.setattr(loss_graph, "MAX_ELEMENTS", 48)
    with pytest.raises(Refused, match="49 elements, at most 48"):
        evaluate(graph, torch.zeros(7), [], Work())


def test_a_loss_that_is_no_scalar() -> None:
    graph = graph_of(
        node("call_method", "x", "exp", L),
        output={"tuple": [ref("x"), {"dict": {"custom/a:sum": ref("loss")}}]},
    )
    check_graph(graph)
    with pytest.raises(Refused, match=r"the loss must be a scalar tensor, is shape \[3\]"):
        evaluate(graph, torch.zeros(3), [], Work())


VALUES = st.recursive(
    st.sampled_from(
        [L, ref("x0"), ref("x1"), 0, 1, -1, 2**40, 0.5, 1e300, None, True, "none", "mean"]
    )
    | st.sampled_from([{"float": "nan"}, {"dtype": "int64"}, {"ellipsis": True}]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: {"tuple": v}) | st.lists(inner, max_size=3)
    ),
    max_leaves=4,
)
TARGETS = sorted({n for n in functions() if "getattr" not in n})
METHODS = sorted({*loss_graph._BOTH, *loss_graph._METHODS})


@st.composite
def graphs(draw: st.DrawFn) -> LossGraph:
    """Allowed operations with arguments of any kind."""
    nodes = []
    for i in range(draw(st.integers(1, 4))):
        by_method = draw(st.booleans())
        target = draw(st.sampled_from(METHODS if by_method else TARGETS))
        known = [L, *(ref(f"x{k}") for k in range(i))]
        first = draw(st.sampled_from(known))
        others = draw(st.lists(VALUES | st.sampled_from(known), max_size=3))
        op = "call_method" if by_method else "call_function"
        nodes.append(node(op, f"x{i}", target, first, *others))
    return graph_of(*nodes)


@pytest.mark.filterwarnings("ignore")
@given(graphs())
def test_allowed_operations_with_any_arguments(graph: LossGraph) -> None:
    """Either a scalar or a refusal, never another error."""
    log_probs = torch.linspace(-2, -0.1, 6).requires_grad_()
    try:
        check_graph(graph)
        loss, _ = evaluate(graph, log_probs, [], Work())
    except Refused:
        return
    assert loss.ndim == 0

"""Log-prob and entropy from hidden states, against autograd through the whole logits in float64.
Several ranks: tests/dist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_patches

megatron_patches.apply()

from slime_like.megatron.ops import fused_linear_logprob  # noqa: E402
from slime_like.megatron.ops.fused_linear_logprob import Projection, fused_linear_log_probs  # noqa: E402

T, H, COLUMNS = 13, 6, 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of columns, the last narrower, also at the sizes of a test."""
    monkeypatch.setattr(fused_linear_logprob, "MIN_COLUMNS", 7)
    monkeypatch.setattr(fused_linear_logprob, "BLOCK_ELEMENTS_CPU", 40)


def problem(
    vocab_size: int = COLUMNS, dtype: torch.dtype = torch.float64, *, bias: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = {
        "hidden": 2 * torch.randn(T, H, dtype=torch.float64),
        "weight": torch.randn(COLUMNS, H, dtype=torch.float64),
        "bias": torch.randn(COLUMNS, dtype=torch.float64) if bias else None,
    }
    leaves = {
        name: None if t is None else t.to(dtype).requires_grad_() for name, t in tensors.items()
    }
    return {**leaves, "labels": torch.randint(vocab_size, (T,)), "vocab_size": vocab_size}


def through_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, rows: Tensor | None = None, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if rows is not None:
        hidden, labels = hidden[rows], labels[rows]
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    banned = log_p == float("-inf")
    p_log_p = log_p.exp() * log_p.masked_fill(banned, 0.0)
    return log_p.gather(1, labels[:, None])[:, 0], -p_log_p.sum(-1)


def values_and_gradients(
    function: Any, arguments: dict[str, Any], uses: str = "both", **settings: Any
) -> list[Tensor]:
    """[log_probs, entropy, gradients by hidden, weight and bias] in float64, of a fixed weighting
    of the outputs."""
    leaves = [
        arguments[name] for name in ("hidden", "weight", "bias") if arguments[name] is not None
    ]
    log_probs, entropy = function(**arguments, **settings)
    weights = torch.linspace(-1.0, 2.0, 2 * log_probs.numel()).view(2, -1)
    loss = torch.zeros(())
    if uses in ("both", "log_probs"):
        loss = loss + (weights[0] * log_probs).sum()
    if uses in ("both", "entropy"):
        loss = loss + (weights[1] * entropy).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return [tensor.detach().double() for tensor in (log_probs, entropy, *gradients)]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("uses", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "vocab_size"), [(1.0, COLUMNS), (0.6, 33), (1.7, 1)])
def test_values_and_gradients_in_float64(
    temperature: float, vocab_size: int, bias: bool, uses: str
) -> None:
    arguments = problem(vocab_size, bias=bias)
    got = values_and_gradients(
        fused_linear_log_probs, arguments, uses, temperature=temperature, chunk_size=5
    )
    assert_same(
        got, values_and_gradients(through_logits, arguments, uses, temperature=temperature), 1e-12
    )
    assert (got[3][vocab_size:] == 0).all()


@pytest.mark.parametrize("uses", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize(("softcap", "temperature"), [(0.7, 1.0), (30.0, 0.6)])
def test_a_cap_of_logits(softcap: float, temperature: float, uses: str) -> None:
    """Before the temperature; far above and far below the logits."""
    arguments = problem(33)
    settings = {"softcap": softcap, "temperature": temperature}
    got = values_and_gradients(fused_linear_log_probs, arguments, uses, chunk_size=5, **settings)
    assert_same(got, values_and_gradients(through_logits, arguments, uses, **settings), 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 5, -1])
@pytest.mark.parametrize("vocab_size", [COLUMNS, 33, 1])
def test_the_sum_of_squared_probabilities(vocab_size: int, chunk_size: int) -> None:
    """Beside the others, which it does not change; with banned tokens, and over given rows."""
    arguments = problem(vocab_size, bias=True)
    arguments["bias"] = arguments["bias"].detach().clone()
    arguments["bias"][2:4] = float("-inf") if vocab_size > 4 else 0.0
    arguments["labels"] = arguments["labels"].clamp(min=min(4, vocab_size - 1))
    rows = torch.tensor([12, 0, 3, 7])
    squared = torch.empty(4, dtype=torch.float64)
    plain = fused_linear_log_probs(**arguments, rows=rows, temperature=0.7, chunk_size=chunk_size)
    found = fused_linear_log_probs(
        **arguments, rows=rows, temperature=0.7, chunk_size=chunk_size, squared_out=squared
    )
    assert torch.equal(plain[0], found[0]) and torch.equal(plain[1], found[1])
    logits = arguments["hidden"][rows] @ arguments["weight"].T + arguments["bias"]
    expected = (logits[:, :vocab_size] / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(squared, expected.detach(), rtol=1e-13, atol=0)
    assert not squared.requires_grad


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 12, 13, 1000, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunk_size_gives_the_same(dtype: torch.dtype, chunk_size: int) -> None:
    arguments = problem(33, dtype, bias=True)
    exact = {
        k: v.detach().double().requires_grad_() if k in ("hidden", "weight", "bias") else v
        for k, v in arguments.items()
    }
    got = values_and_gradients(
        fused_linear_log_probs, arguments, temperature=0.8, chunk_size=chunk_size
    )
    want = values_and_gradients(through_logits, exact, temperature=0.8)
    if dtype == torch.float32:
        assert_same(got, want, 2e-5)
    else:  # logits of size 10 are rounded to bf16, as by megatron-core's output layer
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() / b.norm() < 2e-2


def test_narrow_inputs_give_float32_and_gradients_of_their_own_kind() -> None:
    arguments = problem(dtype=torch.bfloat16)
    log_probs, entropy = fused_linear_log_probs(**arguments)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (log_probs.sum() + entropy.sum()).backward()
    assert arguments["hidden"].grad.dtype == arguments["weight"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
@pytest.mark.parametrize("rows", [[0, 2, 3, 7, 12], [5], [], list(range(T))])
def test_only_the_rows_asked_for(rows: list[int], chunk_size: int) -> None:
    arguments = problem()
    with torch.no_grad():
        arguments["hidden"][[i for i in range(T) if i not in rows]] = float(
            "nan"
        )  # must not be read
    chosen = torch.tensor(rows, dtype=torch.int64)
    got = values_and_gradients(
        fused_linear_log_probs, arguments, rows=chosen, chunk_size=chunk_size
    )
    assert_same(got, values_and_gradients(through_logits, arguments, rows=chosen), 1e-12)
    assert got[0].shape == (len(rows),)
    assert not got[2][[i for i in range(T) if i not in rows]].any()


def test_banned_tokens_leave_everything_finite() -> None:
    """A bias of -inf bans tokens: whole blocks of columns, the first among them, and parts of
    blocks."""
    arguments = problem(bias=True)
    with torch.no_grad():
        arguments["bias"][:9] = float("-inf")
        arguments["bias"][20:23] = float("-inf")
    arguments["labels"] = torch.arange(T) + 23
    got = values_and_gradients(fused_linear_log_probs, arguments, chunk_size=5)
    assert_same(got, values_and_gradients(through_logits, arguments), 1e-12)
    assert all(tensor.isfinite().all() for tensor in got)


def test_a_row_with_one_token_left() -> None:
    arguments = problem(bias=True)
    with torch.no_grad():
        arguments["bias"][:] = float("-inf")
        arguments["bias"][30] = 0.0
    arguments["labels"] = torch.full((T,), 30)
    log_probs, entropy, *gradients = values_and_gradients(fused_linear_log_probs, arguments)
    assert not log_probs.any()
    assert not entropy.any()
    assert all(bool((gradient.abs() < 1e-12).all()) for gradient in gradients)


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[1e4], [0.0], [-1e4]])
    log_probs, entropy = fused_linear_log_probs(hidden, weight, torch.tensor([1]), vocab_size=3)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == -1e4
    assert entropy.item() == 0.0
    assert hidden.grad is not None and hidden.grad.item() == -1e4


def test_a_row_that_is_not_finite_stays_alone() -> None:
    arguments = problem()
    with torch.no_grad():
        arguments["hidden"][4] = float("nan")
    log_probs, entropy = fused_linear_log_probs(**arguments, chunk_size=3)
    for values in (log_probs, entropy):
        assert values.isfinite().tolist() == [i != 4 for i in range(T)]


def test_a_frozen_weight_gets_no_gradient() -> None:
    arguments = problem()
    arguments["weight"].requires_grad_(False)
    want = values_and_gradients(fused_linear_log_probs, problem())[2]
    log_probs, entropy = fused_linear_log_probs(**arguments)
    weights = torch.linspace(-1.0, 2.0, 2 * T).view(2, -1)
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    torch.testing.assert_close(arguments["hidden"].grad, want)
    assert arguments["weight"].grad is None


def test_inputs_are_not_changed() -> None:
    arguments = problem(33, bias=True)
    before = {
        name: arguments[name].detach().clone() for name in ("hidden", "weight", "bias", "labels")
    }
    values_and_gradients(fused_linear_log_probs, arguments, temperature=0.5)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(
                    self.largest, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 64 rows x 512 tokens: besides the weight's own gradient nothing is
    larger than two blocks."""
    monkeypatch.setattr(fused_linear_logprob, "BLOCK_ELEMENTS_CPU", 1024)
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    with LargestTensor() as lean:
        log_probs, entropy = fused_linear_log_probs(
            hidden, weight, torch.arange(64), vocab_size=512
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert lean.largest == 2 * 1024
    with LargestTensor() as full_one:
        through_logits(hidden, weight, torch.arange(64), vocab_size=512)
    assert full_one.largest == 64 * 512


def test_the_slope_of_a_cap_needs_one_block() -> None:
    """As --preflight counts it."""
    head = Projection(torch.randn(8, 4), torch.randn(16, 4), None, 0.6, 16, -1, softcap=3.0)
    logits = torch.randn(8, 16)
    with BlocksMade(logits.numel()) as made:
        head.slope(logits)
    assert len(made.blocks) == 1


class BlocksMade(TorchDispatchMode):
    """The storages of one size that operations give."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements
        self.blocks: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self._elements:
            self.blocks.add(out.data_ptr())
            self._kept.append(out)
        return out


@pytest.mark.parametrize("uses", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("rows", [None, [0, 3, 4, 11]])
def test_token_sets_are_what_probabilities_are_over(rows: list[int] | None, uses: str) -> None:
    """As -inf at all other tokens does; a label outside its set joins it. Sets have 1 to 9 tokens."""
    arguments = problem(33)
    kept = torch.rand(T, 33) < 0.15
    kept[1] = False
    sets = torch.full((T, 9), -1, dtype=torch.int32)
    for i in range(T):
        members = kept[i].nonzero()[:9, 0]
        kept[i] = False
        kept[i, members] = True
        sets[i, : members.numel()] = members.flip(0)
    with_labels = kept.scatter(1, arguments["labels"][:, None], True)
    assert not kept.gather(1, arguments["labels"][:, None]).all() and with_labels.sum(1).min() == 1

    def reference(
        hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Any, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.arange(T) if rows is None else torch.tensor(rows)
        logits = (hidden @ weight[:vocab_size].T / 0.7).masked_fill(~with_labels, float("-inf"))[
            chosen
        ]
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)
        return log_p.gather(1, labels[chosen, None])[:, 0], entropy

    chosen = None if rows is None else torch.tensor(rows)
    got = values_and_gradients(
        fused_linear_log_probs,
        arguments,
        uses,
        temperature=0.7,
        chunk_size=5,
        sampling_mask=sets,
        rows=chosen,
    )
    assert_same(got, values_and_gradients(reference, arguments, uses), 1e-12)


def test_a_label_outside_the_set_keeps_a_probability() -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [2.0], [1.0], [0.0]])
    log_probs, entropy = fused_linear_log_probs(
        hidden, weight, torch.tensor([3]), vocab_size=4, sampling_mask=torch.tensor([[0, 1]])
    )
    log_p = torch.tensor([3.0, 2.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(log_probs, log_p[2:])
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum()[None])

"""MegatronBackend on two processes: non-finite gradients, guards, KL in the reward, bf16. And on
one, against plain transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import GROUP_SIZE, make_model, make_rollouts
from tests.dist import backend_worker as worker
from tests.dist.float64 import EXACT, settings

# layouts that `make test` tries; the extended tests try the others
POISONED = ("DP2 overlap", "PP2 distributed optimizer")
ONE_PASS = ("DP2", "CP2")


def split(every: Iterable[str], some: Sequence[str]) -> list[Any]:
    """Parameters of a test: `some` as one case, the others as an extended one."""
    others = [name for name in every if name not in some]
    return [
        pytest.param(some, id="some"),
        pytest.param(others, id="others", marks=pytest.mark.extended),
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("backend")
    make_model(folder / "model", seed=3)
    make_model(folder / "ref", seed=4)
    make_rollouts(str(folder / "model" / "rollout_{rollout_id}"))
    return {"model": str(folder / "model"), "ref": str(folder / "ref"), "out": str(folder / "out")}


def on_two(
    worker_function: str, files: dict[str, str], folder: Path, **more: Any
) -> list[dict[str, Any]]:
    """What both ranks return."""
    return run_ranks(
        f"tests.dist.backend_worker:{worker_function}", 2, folder, {**files, **more}, timeout_s=240
    )


@pytest.fixture(scope="module")
def two(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two("two_ranks", files, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("layouts", split(worker.POISONED, POISONED))
def test_a_poisoned_gradient_of_one_rank_makes_all_skip(
    files: dict[str, str], tmp_path: Path, layouts: list[str]
) -> None:
    for rank in on_two("poisoned", files, tmp_path, layouts=layouts):
        for seen in (rank[layout] for layout in layouts):
            assert seen["skipped"] == [True] * 3
            assert seen["same"] == [True] * 3, "weights and optimizer state stay bit by bit"
            assert seen["total"] == 3
            assert seen["lr"] == pytest.approx(1e-2), "a skipped step does not advance it"
            assert seen["warnings"][:2] == [None, None]
            assert [words.partition(": ")[0] for words in seen["warnings"][2:]] == [
                "optimizer step skipped"
            ] * 2
            assert (
                "3 in a row, 3 in total" in seen["stopped"]
                and "--max-consecutive-skipped-steps" in seen["stopped"]
            )
            assert seen["after"] == [False, True, True], (
                "the next good step is taken, and nothing is left of the poison"
            )


def test_old_log_probs_of_another_model_stop_the_run(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "differ from the recomputed old ones by" in rank["gate"]["error"]
        assert rank["gate"]["same"], "before any optimizer step"


@pytest.mark.parametrize("layouts", split(worker.ONE_PASS, ONE_PASS))
def test_one_forward_pass_does_where_the_policy_is_still_the_old_one(
    files: dict[str, str], tmp_path: Path, layouts: list[str]
) -> None:
    """The same as with a pass before the update, to the last bit: both pack samples alike."""
    for rank in on_two("one_pass", files, tmp_path, layouts=layouts):
        for seen in (rank[layout] for layout in layouts):
            assert seen["default"], "without anything that needs old log-probs before the update"
            assert seen["own"] == seen["apart"]
            assert seen["own"]["train/ratio_max"] == 1 and seen["same"]


def test_a_number_that_is_not_finite_on_one_rank_stops_all(two: list[dict[str, Any]]) -> None:
    """k3's clamp keeps the NaN out of the gradient, so that no step would be skipped."""
    for rank in two:
        seen = rank["non finite"]
        assert seen == two[0]["non finite"], "all ranks alike"
        assert "kl_loss nan" in seen["loss"]
        assert "the log-prob of the reference of sample" in seen["loss"]
        assert "is nan at token" in seen["loss"] and "(rank 1)" in seen["loss"]
        assert "the log-prob of the reference of sample" in seen["reference"]
        assert "is -inf at token" in seen["reference"] and "(rank 1)" in seen["reference"]
        assert seen["same"], "before the weights change"


def test_the_adaptive_entropy_bonus_rises_and_is_resumed(two: list[dict[str, Any]]) -> None:
    for rank in two:
        seen = rank["entropy"]
        assert seen["mean"] == pytest.approx((0.001 + 0.0015) / 2)
        assert seen["applied"] == pytest.approx(0.0015)
        assert seen["resumed"] == pytest.approx(0.002), "that of the next optimizer step"


def test_kl_in_the_reward(two: list[dict[str, Any]]) -> None:
    """Reward less 0.5 times the sample's summed log-ratio to the reference, over both ranks, then
    the group's mean and deviation."""
    count = sum(len(rank["kl"]["indices"]) for rank in two)
    penalties, found = [math.nan] * count, [[] for _ in range(count)]
    for rank in two:
        for i, penalty, advantage in zip(
            rank["kl"]["indices"], rank["kl"]["penalties"], rank["kl"]["advantages"], strict=True
        ):
            penalties[i], found[i] = penalty, advantage
    rewards = torch.tensor(two[0]["kl"]["rewards"], dtype=torch.float64) - 0.5 * torch.tensor(
        penalties, dtype=torch.float64
    )
    groups = rewards.view(-1, GROUP_SIZE)
    expected = (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    ).flatten()
    assert max(abs(p) for p in penalties) > 0.1
    for i, values in enumerate(found):
        if values:  # a sample without an active token has no advantage to show
            assert values[0] == pytest.approx(float(expected[i]), rel=1e-4)
    assert sum(map(bool, found)) >= count - 1
    for rank in two:
        assert rank["kl"]["reported"] == pytest.approx(
            sum(penalties) / rank["kl"]["active"], rel=1e-5
        )


def test_bf16_is_near_fp32(two: list[dict[str, Any]]) -> None:
    exact = two[0]["bf16"]["fp32"]
    for name in ("bf16", "bf16 dist"):
        half = two[0]["bf16"][name]
        assert two[1]["bf16"][name] == half
        for key, limit in (("losses", 0.05), ("grad_norms", 0.05)):
            assert half[key] == pytest.approx(exact[key], rel=limit, abs=2e-3), key
        assert 0 < half["distance"] < 0.02


def transformers_loss(
    folder: str, samples: list[Any], clip: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """The PPO loss written out over each sequence alone, and its gradient by Hugging Face name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    model.eval()
    total = torch.zeros(())
    for s in samples:
        logits = model(s.tokens[None]).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(1, s.tokens[1:, None])[-s.response_length :, 0]
        ratio = (log_probs - s.old_log_probs).exp()
        loss = torch.maximum(-s.advantages * ratio, -s.advantages * ratio.clamp(1 - clip, 1 + clip))
        total = total + (s.loss_mask * s.loss_weights * loss).sum()
    total.backward()
    return total.item(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_one_step_is_that_of_plain_autograd(
    alone: Any, files: dict[str, str], micro_batch_size: int
) -> None:
    """With plain gradient descent the change of the weights is the gradient: packing, the scale of
    the schedule and the conversion together give what transformers and a loss written by hand give.
    """
    flags = f"--optimizer sgd --sgd-momentum 0 --lr 0.1 --weight-decay 0 --clip-grad 0 --micro-batch-size {micro_batch_size}"
    backend = worker.MegatronBackend(settings(files["model"], flags), alone, total_steps=4)
    samples = worker.random_samples(1)
    before = worker.weights(backend)
    result = backend.update(worker.share(samples, alone))
    loss, gradient = transformers_loss(files["model"], samples, clip=0.2)
    after = worker.weights(backend)
    assert result.metrics["loss"] == pytest.approx(loss, rel=EXACT)
    assert result.grad_norm == pytest.approx(
        float(torch.stack([g.norm() for g in gradient.values()]).norm()), rel=EXACT
    )
    assert before.keys() == gradient.keys()
    for name, expected in gradient.items():
        moved = (before[name] - after[name]) / 0.1
        assert float((moved - expected).norm() / expected.norm()) < EXACT, name


@pytest.mark.usefixtures("float64")
def test_log_probs_are_those_of_transformers(alone: Any, files: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(files["model"], attn_implementation="eager")
    model.double().eval()
    backend = worker.MegatronBackend(
        settings(files["model"], "--rollout-temperature 0.7 --micro-batch-size 2"),
        alone,
        total_steps=4,
    )
    samples = worker.random_samples(2)
    for sample, found in zip(samples, backend.forward(samples), strict=True):
        with torch.no_grad():
            log_p = (model(sample.tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1)[
                -sample.response_length :
            ]
        expected = log_p.gather(1, sample.tokens[-sample.response_length :, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(
            found.log_probs, torch.where(sample.loss_mask, expected, 0.0), rtol=EXACT, atol=EXACT
        )
        torch.testing.assert_close(
            found.entropy, torch.where(sample.loss_mask, entropy, 0.0), rtol=EXACT, atol=EXACT
        )

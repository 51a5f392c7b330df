"""The critic on two processes, in every layout, against one process; and on one, against
transformers' model for classifying tokens. All in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model, make_rollouts
from slime_like.losses import ValueLossConfig
from tests.dist import critic_worker as worker
from tests.dist.float64 import EXACT

pytestmark = pytest.mark.usefixtures("float64")


def make_critic(folder: Path) -> None:
    """A value model of the policy's shape and with other weights."""
    from transformers import AutoConfig, Qwen3ForTokenClassification

    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = Qwen3ForTokenClassification(config)
    with torch.no_grad():
        model.score.bias.fill_(0.25)
    model.save_pretrained(folder / "critic")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("critic")
    make_model(folder / "model", seed=3)
    make_critic(folder / "model")
    make_rollouts(str(folder / "model" / "rollout_{rollout_id}"))
    (folder / "out").mkdir()
    return {"model": str(folder / "model"), "out": str(folder / "out")}


@pytest.fixture(scope="module")
def two(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of both ranks."""
    return run_ranks(
        "tests.dist.critic_worker:two_ranks",
        2,
        tmp_path_factory.mktemp("two"),
        files,
        timeout_s=300,
    )


@pytest.mark.extended
def test_layouts_train_the_critic_of_one_process(
    two: list[dict[str, Any]], alone: Any, files: dict[str, str]
) -> None:
    """Values, losses, gradient norms and the weights after three steps, in each tensor. Ranks
    hold different samples."""
    one = worker.train(files["model"], alone, "", f"{files['out']}/one.pt")
    assert (
        min(one["grad_norms"]) > 1e-2 and max(one["grad_norms"]) > 0.5 and max(one["clipped"]) > 0
    ), "clipped and not"
    assert one["lrs"] == pytest.approx([0.0, 3e-3, 3e-3])
    stored = torch.load(f"{files['out']}/one.pt")
    moved = {
        name: float((stored["after"][name] - stored["before"][name]).norm())
        for name in stored["before"]
    }
    assert (
        min(moved.values()) > 1e-4
        and {"score.weight", "score.bias", "model.embed_tokens.weight"} <= moved.keys()
    )
    assert "lm_head.weight" not in moved
    samples = worker.critic_samples(0)
    for name in worker.TWO_RANKS:
        for rank in two:
            seen = rank[name]
            assert seen["policy_is_untouched"]
            share = len(samples) // 2 if name.startswith("DP2") else len(samples)
            expected = one["values"][seen["dp_rank"] * share : (seen["dp_rank"] + 1) * share]
            for a, b in zip(seen["values"], expected, strict=True):
                assert a == pytest.approx(b, rel=EXACT, abs=EXACT), name
            for key in ("losses", "grad_norms"):
                assert seen[key] == pytest.approx(one[key], rel=EXACT), (name, key)
        weights = torch.load(f"{files['out']}/{name}.pt")["after"]
        assert weights.keys() == stored["after"].keys()
        apart = {
            key: float((weights[key] - tensor).norm() / tensor.norm())
            for key, tensor in stored["after"].items()
        }
        assert max(apart.values()) < EXACT, (name, max(apart, key=lambda key: apart[key]))


@pytest.mark.parametrize("layout", ["DP2 distributed optimizer", "TP2 SP", "PP2"])
def test_a_poisoned_gradient_of_one_rank_makes_all_skip(
    two: list[dict[str, Any]], layout: str
) -> None:
    for rank in two:
        seen = rank[f"poison {layout}"]
        assert (seen["skipped"], seen["same"], seen["policy_skipped"]) == (True, True, False)
        assert seen["warning"].startswith(
            "critic's optimizer step skipped: the gradient norm is NaN"
        )


def transformers_critic(folder: str) -> Any:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(
        f"{folder}/critic", attn_implementation="eager"
    )
    return model.double().eval()


def test_values_are_those_of_transformers(alone: Any, files: dict[str, str]) -> None:
    """The value of a state, the text up to a token, stands at the token that follows; the sampling
    temperature does not enter."""
    model = transformers_critic(files["model"])
    backend = worker.make_backend(
        files["model"], alone, "--rollout-temperature 0.7 --micro-batch-size 2"
    )
    samples = worker.critic_samples(2)
    for sample, found in zip(samples, backend.forward_critic(samples), strict=True):
        with torch.no_grad():
            expected = model(sample.tokens[None]).logits[0, :-1, 0][-sample.response_length :]
        torch.testing.assert_close(
            found, torch.where(sample.loss_mask, expected, 0.0), rtol=EXACT, atol=EXACT
        )


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_one_step_is_that_of_plain_autograd(
    alone: Any, files: dict[str, str], micro_batch_size: int
) -> None:
    """With plain gradient descent the change of the weights is the gradient, of the loss written
    out over transformers' values."""
    flags = f"--optimizer sgd --sgd-momentum 0 --critic-lr 0.1 --critic-lr-warmup-iters 0 --weight-decay 0 --clip-grad 0 --micro-batch-size {micro_batch_size}"
    backend = worker.make_backend(files["model"], alone, flags)
    samples = worker.critic_samples(1)
    before = worker.critic_weights(backend)
    result = backend.update_critic(worker.share(samples, alone))
    after = worker.critic_weights(backend)
    model, total, config = (
        transformers_critic(files["model"]),
        torch.zeros(()),
        ValueLossConfig(value_clip=0.1),
    )
    for s in samples:
        values = model(s.tokens[None]).logits[0, :-1, 0][-s.response_length :]
        clipped = s.values + (values - s.values).clamp(-config.value_clip, config.value_clip)
        loss = 0.5 * torch.maximum((values - s.returns) ** 2, (clipped - s.returns) ** 2)
        total = total + (s.loss_weights * loss)[s.loss_mask & ~s.returns.isnan()].sum()
    total.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    assert result.metrics["value_loss"] == pytest.approx(total.item(), rel=EXACT)
    assert result.grad_norm == pytest.approx(
        float(torch.stack([g.norm() for g in gradient.values()]).norm()), rel=EXACT
    )
    assert before.keys() == gradient.keys()
    for name, expected in gradient.items():
        moved = (before[name] - after[name]) / 0.1
        assert float((moved - expected).norm() / expected.norm()) < EXACT, name


def test_two_steps_with_frozen_attention_are_those_of_plain_autograd(
    alone: Any, files: dict[str, str]
) -> None:
    """The critic of SAO (arXiv 2607.07508, section 3.2): K = 2 steps on a batch, and nothing of the
    attention moves. Plain gradient descent, written out over transformers' values; the clip range
    is around the values before the first of the two."""
    flags = (
        "--optimizer sgd --sgd-momentum 0 --critic-lr 0.1 --critic-lr-warmup-iters 0 "
        "--weight-decay 0 --clip-grad 0 --critic-steps-per-policy-step 2 "
        "--critic-freeze-params-name-list self_attention"
    )
    backend = worker.make_backend(files["model"], alone, flags)
    assert backend.critic is not None
    samples = worker.critic_samples(1)
    model = transformers_critic(files["model"])
    optimizer = torch.optim.SGD(
        [p for name, p in model.named_parameters() if "self_attn" not in name], lr=0.1
    )
    start = worker.critic_weights(backend)
    for _ in range(2):
        result = backend.update_critic(worker.share(samples, alone))
        total = torch.zeros(())
        for s in samples:
            values = model(s.tokens[None]).logits[0, :-1, 0][-s.response_length :]
            clipped = s.values + (values - s.values).clamp(-0.1, 0.1)
            loss = 0.5 * torch.maximum((values - s.returns) ** 2, (clipped - s.returns) ** 2)
            total = total + (s.loss_weights * loss)[s.loss_mask & ~s.returns.isnan()].sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert result.metrics["value_loss"] == pytest.approx(total.item(), rel=EXACT)
    found = worker.critic_weights(backend)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).norm() / weight.norm()) < EXACT, name
        assert torch.equal(found[name], start[name]) == ("self_attn" in name), name


@pytest.mark.extended
def test_layouts_train_the_critic_with_frozen_attention(
    two: list[dict[str, Any]], alone: Any, files: dict[str, str]
) -> None:
    one = worker.train(files["model"], alone, worker.FROZEN, f"{files['out']}/frozen.pt")
    stored = torch.load(f"{files['out']}/frozen.pt")
    for layout in worker.FROZEN_LAYOUTS:
        name = f"frozen {layout}"
        for rank in two:
            for key in ("losses", "grad_norms"):
                assert rank[name][key] == pytest.approx(one[key], rel=EXACT), (name, key)
        weights = torch.load(f"{files['out']}/{name}.pt")
        for key, tensor in stored["after"].items():
            apart = float((weights["after"][key] - tensor).norm() / tensor.norm())
            assert apart < EXACT, (name, key)
            same = torch.equal(weights["after"][key], weights["before"][key])
            assert same == ("self_attn" in key), (name, key)


def test_a_fresh_critic_is_the_policy_with_a_head_of_zeros(
    alone: Any, files: dict[str, str]
) -> None:
    backend = worker.MegatronBackend(
        worker.settings(files["model"], worker.FLAGS), alone, total_steps=8
    )
    policy, critic = dict(backend.export_weights()), worker.critic_weights(backend)
    assert not critic.pop("score.weight").any() and not critic.pop("score.bias").any()
    policy.pop("lm_head.weight", None)
    assert policy.keys() == critic.keys() and all(
        torch.equal(policy[name], critic[name]) for name in policy
    )
    assert all(not v.any() for v in backend.forward_critic(worker.critic_samples(0)))
    assert backend.critic is not None
    backend.critic.load_hf(files["model"])  # a language model: the same, by way of the files
    again = worker.critic_weights(backend)
    assert (
        all(torch.equal(critic[name], again[name]) for name in critic)
        and not again["score.weight"].any()
    )


def test_a_classifier_of_sequences_has_no_bias(
    alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{files['model']}/critic/model.safetensors")
    (tmp_path / "config.json").write_text(
        (Path(files["model"]) / "critic" / "config.json")
        .read_text()
        .replace("TokenClassification", "SequenceClassification")
    )
    bias = weights.pop("score.bias")
    save_file(weights, tmp_path / "model.safetensors")
    backend = worker.make_backend(files["model"], alone, "")
    assert backend.critic is not None
    assert torch.equal(worker.critic_weights(backend)["score.bias"], bias)
    backend.critic.load_hf(str(tmp_path))
    found = worker.critic_weights(backend)
    assert not found["score.bias"].any() and torch.equal(
        found["score.weight"], weights["score.weight"]
    )
    save_file(
        {**weights, "score.weight": weights["score.weight"].repeat(2, 1)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"score.weight has shape \(2, 32\) in the file, the model needs \(1, 32\)"
    ):
        backend.critic.load_hf(str(tmp_path))


def test_a_policy_is_not_made_of_a_critic(
    alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """The config of the policy next to the tensors of the critic."""
    (tmp_path / "config.json").write_text((Path(files["model"]) / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(
        (Path(files["model"]) / "critic" / "model.safetensors").read_bytes()
    )
    backend = worker.make_backend(files["model"], alone, "")
    with pytest.raises(ValueError, match=r"unexpected tensors: score\.bias, score\.weight"):
        backend.policy.load_hf(str(tmp_path))

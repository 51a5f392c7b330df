"""A user's own loss; and what joins any loss: VAPO's positive NLL, the second name of pg_clipfrac,
the warning about scaled advantages."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_like.losses import LossTerms, policy_losses, total_loss
from slime_like.losses.custom import custom_loss
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES, doubles, make, value

SOURCE = """
import torch
from slime_like.losses import PolicyLossOutput
from slime_like.metrics.typed import masked_mean

def mine(inputs, config):
    ratio = inputs.log_ratio().exp()
    losses = -inputs.required("advantages") * ratio.clamp(max=1 + config.eps_clip)
    return PolicyLossOutput(losses, {"mine/ratio": masked_mean(ratio, inputs.loss_mask)})

def wrong_type(inputs, config):
    return inputs.log_probs

def wrong_shape(inputs, config):
    return PolicyLossOutput(inputs.log_probs.sum(), {})
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_loss.py"
    path.write_text(SOURCE)
    return path


def test_a_custom_loss_is_weighted_and_corrected_as_any_other(file: Path) -> None:
    log_ratio, advantages = doubles([0.3, -0.2, 0.1, 5.0], [1.0, -1.0, 2.0, 1.0])
    keep = torch.tensor([True, True, False, True])
    _leaf, inputs = make(log_ratio, advantages, keep_mask=keep)
    inputs = dataclasses.replace(inputs, loss_weights=0.25 * inputs.loss_weights)
    output = total_loss(
        inputs, custom_loss(f"{file}:mine"), SimpleNamespace(eps_clip=0.5), LossTerms()
    )
    expected = -0.25 * (log_ratio[0].exp() - log_ratio[1].exp() + 1.5)
    assert float(output.loss.detach()) == pytest.approx(float(expected))
    assert {"mine/ratio", "loss", "policy_loss"} <= output.metrics.keys()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}:wrong_type", "returned a Tensor, not a PolicyLossOutput"),
        ("{file}:wrong_shape", r"token_losses must be \[T\] = \(2,\), got \(\)"),
    ],
)
def test_a_wrong_result_is_named(file: Path, path: str, message: str) -> None:
    _, inputs = make(*doubles([0.3, -0.2], [1.0, -1.0]))
    with pytest.raises(ValueError, match=rf"--custom-loss-function-path .*{message}"):
        total_loss(
            inputs, custom_loss(path.format(file=file)), SimpleNamespace(eps_clip=0.2), LossTerms()
        )


@pytest.mark.parametrize("path", ["{file}:nothing", "nothing.at_all", "word"])
def test_a_path_without_a_function_is_refused(file: Path, path: str) -> None:
    with pytest.raises(ValueError, match="--custom-loss-function-path"):
        custom_loss(path.format(file=file))


def test_positive_nll_is_the_mean_over_the_steps_tokens_of_good_samples() -> None:
    """Two micro-batches; the weights hold the count of both. A rejected token keeps its term."""
    coef, losses = 0.3, []
    gradients = []
    rewards = [1.0, 1.0, -1.0, 1.0, 0.0]
    masks = [True, True, True, False, True]
    positive = [r > 0 and m for r, m in zip(rewards, masks)]
    log_ratio, advantages = doubles([0.1] * 5, [0.0] * 5)
    leaf, full = make(
        log_ratio,
        advantages,
        torch.tensor(masks),
        keep_mask=torch.tensor([False, True, True, True, True]),
    )
    weights = torch.tensor(positive, dtype=torch.float64) / sum(positive)
    for rows in (slice(0, 1), slice(1, 5)):
        changed = {
            f: getattr(full, f)[rows]
            for f in (
                "loss_mask",
                "loss_weights",
                "seq_ids",
                "advantages",
                "old_log_probs",
                "keep_mask",
            )
        }
        inputs = dataclasses.replace(
            full,
            log_probs=leaf[rows],
            rollout_log_probs=None,
            rewards=None,
            nll_weights=weights[rows],
            **changed,
        )
        output = total_loss(
            inputs,
            policy_losses.get("ppo"),
            policy_losses.get("ppo").config_type(),
            LossTerms(positive_nll_coef=coef),
        )
        losses.append(float(output.loss.detach()))
        gradients.append(torch.autograd.grad(output.loss, leaf)[0])
    expected = -sum(float(x) for x, p in zip(leaf.detach(), positive) if p) / sum(positive)
    assert sum(losses) == pytest.approx(coef * expected)
    torch.testing.assert_close(sum(gradients), -coef * weights)


def test_positive_nll_without_a_coefficient_is_only_reported() -> None:
    leaf, inputs = make(
        *doubles([0.0, 0.0], [1.0, 1.0]), nll_weights=torch.tensor([0.5, 0.5], dtype=torch.float64)
    )
    output = total_loss(inputs, policy_losses.get("gpg"), None, LossTerms())
    assert torch.autograd.grad(output.loss, leaf)[0].tolist() == [-1, -1]
    assert value(output.metrics["positive_nll"]) == pytest.approx(float(-leaf.detach().mean()))
    with pytest.raises(ValueError, match=r"positive_nll_coef 0.1 needs nll_weights"):
        total_loss(
            dataclasses.replace(inputs, nll_weights=None),
            policy_losses.get("gpg"),
            None,
            LossTerms(positive_nll_coef=0.1),
        )


def test_clip_ratio_is_pg_clipfrac_and_absent_where_nothing_is_clipped() -> None:
    _, inputs = make(*doubles([0.5, 0.0], [1.0, 1.0]))
    for name in OF_SINGLE_RESPONSES:
        loss = policy_losses.get(name)
        metrics = total_loss(
            inputs,
            loss,
            loss.config_type(**({"dro_beta": 1.0} if name == "dro" else {})),
            LossTerms(),
        ).metrics
        assert ("clip_ratio" in metrics) == ("pg_clipfrac" in metrics), name
    ppo = policy_losses.get("ppo")
    assert (
        value(total_loss(inputs, ppo, ppo.config_type(), LossTerms()).metrics["clip_ratio"]) == 0.5
    )
    sapo = policy_losses.get("sapo")
    assert "clip_ratio" not in total_loss(inputs, sapo, sapo.config_type(), LossTerms()).metrics


def test_scaled_advantages_warn_once_with_a_loss_that_is_not_homogeneous() -> None:
    _, inputs = make(
        *doubles([0.5, 0.0], [1.0, 1.0]), policy_weights=torch.ones(2, dtype=torch.float64)
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for name in ("kimi", "kimi", "ppo", "sapo"):
            total_loss(
                inputs, policy_losses.get(name), policy_losses.get(name).config_type(), LossTerms()
            )
    assert [("policy loss kimi" in str(w.message)) for w in seen] == [True]


def test_observations_are_predicted_whatever_the_cut() -> None:
    """A loop in float64 over the tokens of a step: the same loss and gradient from one micro-batch
    and from three, one of which has no observation. What the policy term sees is not changed."""
    coef, generator = 0.3, torch.Generator().manual_seed(3)
    mask = torch.tensor([True, False, False, True, True, False, True, True])
    observed = torch.tensor([False, True, True, False, False, False, False, False])
    log_ratio, advantages = torch.randn(2, 8, generator=generator, dtype=torch.float64).unbind(0)
    leaf, full = make(log_ratio * 0.1, advantages, mask)
    full = dataclasses.replace(
        full, observation_weights=observed.double() / int(observed.sum()), rollout_log_probs=None
    )
    terms, ppo = LossTerms(observation_loss_coef=coef), policy_losses.get("ppo")
    tensors = [f.name for f in dataclasses.fields(full) if torch.is_tensor(getattr(full, f.name))]
    for cut in ([slice(0, 8)], [slice(0, 2), slice(2, 4), slice(4, 8)]):
        total, metric = torch.zeros((), dtype=torch.float64), 0.0
        without = torch.zeros((), dtype=torch.float64)
        for rows in cut:
            part = dataclasses.replace(full, **{n: getattr(full, n)[rows] for n in tensors})
            output = total_loss(part, ppo, ppo.config_type(), terms)
            total, metric = total + output.loss, metric + value(output.metrics["observation_loss"])
            part = dataclasses.replace(part, observation_weights=None)
            without = without + total_loss(part, ppo, ppo.config_type(), LossTerms()).loss
        mean = -float(leaf.detach()[1:3].sum()) / 2
        assert metric == pytest.approx(mean, rel=1e-12)
        assert float((total - without).detach()) == pytest.approx(coef * mean, rel=1e-9)
        (gradient,) = torch.autograd.grad(total - without, leaf)
        torch.testing.assert_close(gradient, -coef * observed.double() / 2)
    with pytest.raises(ValueError, match=r"observation_loss_coef 0.3 needs observation_weights"):
        total_loss(
            dataclasses.replace(full, observation_weights=None), ppo, ppo.config_type(), terms
        )

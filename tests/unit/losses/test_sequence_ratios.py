"""Losses with a ratio of the whole sequence, and the sequence mask, against loops over sequences,
in float64; with and without correction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.config import SettingsError
from slime_like.losses import LossInputs, LossTerms, policy_losses, total_loss
from slime_like.losses.gmpo import GMPOConfig
from slime_like.losses.gspo import GSPOConfig
from slime_like.losses.luspo import LUSPOConfig
from slime_like.losses.opsm import opsm_keep
from slime_like.losses.ppo import PPOConfig
from slime_like.losses.sapo import SAPOConfig
from slime_like.losses.vespo import VESPOConfig
from tests.unit.losses.loss_cases import clamp20, doubles, gradient, make, value

SEQ_IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1]).bool()
LOG_RATIO, ADVANTAGES, WEIGHTS = doubles(
    [0.3, 9.0, -0.7, 0.5, 50.0, -50.0, 1.0, 0.1, 0.2, 0.3, -0.9, -0.45],
    [1.5, 1.0, -0.7, 0.9, -2.0, 1.0, 3.0, 0.0, 1.0, 1.0, -0.5, -0.8],
    [0.5, 1.0, 1.5, 0.7, 0.2, 2.0, 1.0, 0.9, 1.0, 1.0, 0.3, 0.6],
)
KEEP = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]).bool()


def inputs_of(**fields: Any) -> tuple[Tensor, LossInputs]:
    return make(LOG_RATIO, ADVANTAGES, MASK, SEQ_IDS, **fields)


def active(sequence: int, keep: Tensor | None = None) -> list[int]:
    return [
        t for t in range(12) if SEQ_IDS[t] == sequence and MASK[t] and (keep is None or keep[t])
    ]


def assert_matches(
    name: str,
    config: Any,
    inputs: LossInputs,
    leaf: Tensor,
    losses: list[float],
    grads: list[float],
) -> None:
    expected, expected_grads = doubles(losses, grads)
    loss = policy_losses.get(name)
    torch.testing.assert_close(
        inputs.masked(loss.fn(inputs, config).token_losses).detach(),
        expected,
        rtol=1e-11,
        atol=1e-12,
    )
    torch.testing.assert_close(
        gradient(loss, config, leaf, inputs), expected_grads, rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize(
    "config",
    [GSPOConfig(), GSPOConfig(eps_clip=3e-4, eps_clip_high=4e-4), GSPOConfig(0.2, 0.3, 1.05)],
)
def test_gspo_is_the_formula(config: GSPOConfig) -> None:
    leaf, inputs = inputs_of()
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    losses, grads, clipped = [0.0] * 12, [0.0] * 12, 0
    for sequence in range(5):
        tokens = active(sequence)
        mean = sum(clamp20(float(LOG_RATIO[t]))[0] for t in tokens) / max(len(tokens), 1)
        s = math.exp(min(mean, 10.0))
        for t in tokens:
            a = float(ADVANTAGES[t])
            losses[t], grads[t] = -a * s, -a * s
            bounded = -a * min(max(s, 1 - config.eps_clip), 1 + high)
            if bounded > losses[t]:
                losses[t], grads[t], clipped = bounded, 0.0, clipped + 1
            if config.eps_clip_c is not None and a < 0 and losses[t] > -config.eps_clip_c * a:
                losses[t], grads[t] = -config.eps_clip_c * a, 0.0
    assert_matches("gspo", config, inputs, leaf, losses, grads)
    metrics = policy_losses.get("gspo").fn(inputs, config).metrics
    assert value(metrics["pg_clipfrac"]) == pytest.approx(clipped / int(MASK.sum())) and clipped > 0


def test_gspo_differentiates_as_the_mean_does_where_the_advantage_is_constant() -> None:
    """GSPO proper: one loss for each sequence, its gradient through the geometric mean."""
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0, 0.3], dtype=torch.float64)[SEQ_IDS]
    leaf, inputs = make(0.01 * LOG_RATIO, advantages, MASK, SEQ_IDS)
    old = inputs.old_log_probs
    assert old is not None
    count = torch.tensor([len(active(i)) for i in range(5)], dtype=torch.float64).clamp(min=1)
    proper = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        if tokens := active(i):
            proper = proper - advantages[tokens[0]] * torch.exp((leaf[tokens] - old[tokens]).mean())
    token_form = (
        inputs.masked(policy_losses.get("gspo").fn(inputs, GSPOConfig(10.0, 10.0)).token_losses)
        / count[SEQ_IDS]
    ).sum()
    torch.testing.assert_close(token_form, proper)
    torch.testing.assert_close(
        torch.autograd.grad(token_form, leaf)[0], torch.autograd.grad(proper, leaf)[0]
    )


@pytest.mark.parametrize("config", [LUSPOConfig(), LUSPOConfig(0.2, 0.3), LUSPOConfig(10.0, 10.0)])
def test_luspo_is_the_mean_over_sequences_of_length_times_loss(config: LUSPOConfig) -> None:
    """The paper's objective, its gradient through the geometric mean, as TRL has it: one advantage
    and one loss for each sequence."""
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0, -0.3], dtype=torch.float64)
    leaf, inputs = make(0.01 * LOG_RATIO, advantages[SEQ_IDS], MASK, SEQ_IDS)
    old = inputs.old_log_probs
    assert old is not None
    low, high = config.bounds
    paper = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        if tokens := active(i):
            s = torch.exp((leaf[tokens] - old[tokens]).mean())
            clipped = s.clamp(low, high)
            paper = paper + len(tokens) * torch.maximum(
                -advantages[i] * s, -advantages[i] * clipped
            )
    paper = paper / 5
    count = inputs.seq_sum(torch.ones(12, dtype=torch.float64)).clamp(min=1)
    weights = 1 / (5 * count)  # sequence_mean
    output = policy_losses.get("luspo").fn(inputs, config)
    ours = (weights * inputs.masked(output.token_losses)).sum()
    torch.testing.assert_close(ours, paper, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaf)[0], torch.autograd.grad(paper, leaf)[0], rtol=1e-13, atol=0
    )
    some_are_clipped = 0 < value(output.metrics["pg_clipfrac"]) < 1
    assert some_are_clipped == (config.eps_clip < 0.01)


def test_luspo_is_gspo_under_a_sum_over_tokens_divided_by_a_constant() -> None:
    _, inputs = inputs_of()
    count = inputs.seq_sum(torch.ones(12, dtype=torch.float64)).clamp(min=1)
    config = GSPOConfig(0.2, 0.3)
    by_length = policy_losses.get("luspo").fn(inputs, LUSPOConfig(0.2, 0.3)).token_losses
    plain = policy_losses.get("gspo").fn(inputs, config).token_losses
    torch.testing.assert_close(inputs.masked(by_length / count), inputs.masked(plain))


def test_gspo_is_capped() -> None:
    leaf, inputs = make(
        torch.full((3,), 19.0, dtype=torch.float64), -torch.ones(3, dtype=torch.float64)
    )
    output = policy_losses.get("gspo").fn(inputs, GSPOConfig())
    assert value(output.metrics["ratio_max"]) == pytest.approx(math.exp(10), rel=1e-5)
    assert torch.equal(
        gradient(policy_losses.get("gspo"), GSPOConfig(), leaf, inputs),
        torch.zeros(3, dtype=torch.float64),
    )


def gmpo_loop(
    config: GMPOConfig, keep: Tensor | None, weights: Tensor | None
) -> tuple[list[float], list[float]]:
    """Token losses, and the gradient of their sum: -rho S / n for each unclipped token."""
    losses, grads = [0.0] * 12, [0.0] * 12
    for sequence in range(5):
        tokens = active(sequence, keep)
        n = max(len(tokens), 1)
        exponent, moving = 0.0, []
        for t in tokens:
            (d, stopped), a = clamp20(float(LOG_RATIO[t])), float(ADVANTAGES[t])
            e = (
                min(d, config.gmpo_eps_high)
                if a > 0
                else max(d, -config.gmpo_eps_low)
                if a < 0
                else 0.0
            )
            exponent += e
            if e == d and not stopped and a != 0:
                moving.append(t)
        rho = math.exp(exponent / n)
        if weights is not None:
            rho *= math.exp(sum(math.log(float(weights[t])) for t in tokens) / n)
        total = sum(float(ADVANTAGES[t]) for t in tokens)
        for t in tokens:
            losses[t] = -float(ADVANTAGES[t]) * rho
        for t in moving:
            grads[t] = -rho * total / n
    return losses, grads


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize(
    "weights",
    [None, WEIGHTS, torch.tensor([0.5, 1.2, 2.0, 1.0, 0.7], dtype=torch.float64)[SEQ_IDS]],
)
@pytest.mark.parametrize("config", [GMPOConfig(), GMPOConfig(0.6, 0.1)])
def test_gmpo_is_the_formula(
    config: GMPOConfig, weights: Tensor | None, keep: Tensor | None
) -> None:
    """One weight for the whole sequence, or the geometric mean of its tokens' weights."""
    leaf, inputs = inputs_of(importance_weights=weights, keep_mask=keep)
    assert_matches("gmpo", config, inputs, leaf, *gmpo_loop(config, keep, weights))


def test_gmpo_passes_gradcheck_inside_its_range() -> None:
    leaf, inputs = make(0.01 * LOG_RATIO, ADVANTAGES, MASK, SEQ_IDS)
    gmpo = policy_losses.get("gmpo")
    assert torch.autograd.gradcheck(
        lambda x: inputs.masked(
            gmpo.fn(dataclasses.replace(inputs, log_probs=x), GMPOConfig()).token_losses
        ),
        (leaf,),
    )


def test_gmpo_counts_a_clip_on_the_side_where_it_acts() -> None:
    log_ratio, advantages = doubles(
        [0.5, 0.5, -0.5, -0.5, 0.5, 0.1], [1.0, -1.0, 1.0, -1.0, 0.0, 1.0]
    )
    metrics = policy_losses.get("gmpo").fn(make(log_ratio, advantages)[1], GMPOConfig()).metrics
    shares = {
        name: value(metrics[name])
        for name in ("pg_clipfrac", "pg_clipfrac_high", "pg_clipfrac_low")
    }
    assert shares == pytest.approx(
        {"pg_clipfrac": 2 / 6, "pg_clipfrac_high": 1 / 6, "pg_clipfrac_low": 1 / 6}
    )


def test_rejected_tokens_leave_gmpos_survivors_with_the_policy_gradient() -> None:
    keep = torch.tensor([True, False, True, False, True])
    advantages = torch.full((5,), 1.7, dtype=torch.float64)
    leaf, inputs = make(torch.zeros(5, dtype=torch.float64), advantages, keep_mask=keep)
    torch.testing.assert_close(
        gradient(policy_losses.get("gmpo"), GMPOConfig(), leaf, inputs),
        torch.where(keep, -advantages, 0.0),
    )


def vespo_loop(
    config: VESPOConfig, keep: Tensor | None, weights: Tensor | None, level: str
) -> tuple[list[float], list[float], float]:
    log_probs = inputs_of()[0].detach()
    losses, grads, phis = [0.0] * 12, [0.0] * 12, []
    for sequence in range(5):
        tokens, kept = active(sequence), active(sequence, keep)
        log_w = sum(clamp20(float(LOG_RATIO[t]))[0] for t in tokens)
        if weights is not None and kept:
            log_w += (
                math.log(float(weights[kept[0]]))
                if level == "sequence"
                else sum(math.log(float(weights[t])) for t in kept)
            )
        log_w = min(max(log_w, math.log(1e-8)), 20.0)
        of_sequence = []
        for t in tokens:
            a = float(ADVANTAGES[t])
            k, decay = (
                (config.vespo_k_pos, config.vespo_lambda_pos)
                if a >= 0
                else (config.vespo_k_neg, config.vespo_lambda_neg)
            )
            phi = math.exp(decay + k * log_w - decay * math.exp(log_w))
            of_sequence.append(phi)
            if keep is None or keep[t]:
                losses[t], grads[t] = -phi * a * float(log_probs[t]), -phi * a
        if tokens:
            phis.append(sum(of_sequence) / len(of_sequence))
    return losses, grads, sum(phis) / len(phis)


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize(
    ("weights", "level"),
    [
        (None, "token"),
        (WEIGHTS, "token"),
        (torch.tensor([0.5, 1.2, 2.0, 1.0, 0.7], dtype=torch.float64)[SEQ_IDS], "sequence"),
    ],
)
@pytest.mark.parametrize("config", [VESPOConfig(), VESPOConfig(1.0, 0.5, 0.7, 2.5)])
def test_vespo_is_the_formula(
    config: VESPOConfig, weights: Tensor | None, level: str, keep: Tensor | None
) -> None:
    leaf, inputs = inputs_of(importance_weights=weights, importance_level=level, keep_mask=keep)
    losses, grads, phi = vespo_loop(config, keep, weights, level)
    assert_matches("vespo", config, inputs, leaf, losses, grads)
    assert value(
        policy_losses.get("vespo").fn(inputs, config).metrics["vespo/phi_seq_mean"]
    ) == pytest.approx(phi, rel=1e-5)


def test_vespos_weight_is_one_on_policy_and_largest_at_k_over_lambda() -> None:
    config = VESPOConfig()
    vespo = policy_losses.get("vespo")

    def phi(log_w: float, advantage: float) -> float:
        leaf, inputs = make(*doubles([log_w], [advantage]))
        return abs(float(gradient(vespo, config, leaf, inputs)))

    for sign, best in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert phi(0.0, sign) == 1
        assert phi(math.log(best), sign) > max(
            phi(math.log(best) + 0.01, sign), phi(math.log(best) - 0.01, sign)
        )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["gmpo", "vespo"])
def test_a_rejected_sequence_may_hold_anything(name: str, poison: float) -> None:
    """The correction drops a sequence whose log-probs are not finite: it gets no gradient, and the
    others keep theirs."""
    rejected = SEQ_IDS == 0
    old = inputs_of()[1].old_log_probs
    assert old is not None
    loss = policy_losses.get(name)
    leaf, clean = inputs_of(keep_mask=~rejected, importance_weights=WEIGHTS)
    expected = gradient(loss, loss.config_type(), leaf, clean)
    spoilt = {
        "old_log_probs": torch.where(rejected, poison, old),
        "importance_weights": torch.where(rejected, poison, WEIGHTS),
    }
    leaf, dirty = inputs_of(keep_mask=~rejected, **spoilt)
    actual = gradient(loss, loss.config_type(), leaf, dirty)
    torch.testing.assert_close(actual, expected)
    assert not actual[rejected].any()


def test_opsm_drops_what_the_policy_has_moved_away_from() -> None:
    """A < 0 and mean(o - l) > delta, over the original mask; against a loop, and within a loss."""
    leaf, inputs = inputs_of()
    for delta in (1e-4, 0.5, 0.69):
        expected, hit = [True] * 12, set()
        for sequence in range(5):
            tokens = active(sequence)
            moved = sum(-float(LOG_RATIO[t]) for t in tokens) / max(len(tokens), 1)
            for t in tokens:
                if ADVANTAGES[t] < 0 and moved > delta:
                    expected[t] = False
                    hit.add(sequence)
        keep, share = opsm_keep(inputs, delta)
        assert keep[MASK].tolist() == torch.tensor(expected)[MASK].tolist()
        assert value(share) == pytest.approx(len(hit) / 4)
        output = total_loss(
            inputs, policy_losses.get("importance_sampling"), None, LossTerms(opsm_delta=delta)
        )
        plain = gradient(policy_losses.get("importance_sampling"), None, leaf, inputs)
        torch.testing.assert_close(
            torch.autograd.grad(output.loss, leaf)[0],
            torch.where(torch.tensor(expected), plain, 0.0),
        )
        assert value(output.metrics["opsm_clipfrac"]) == pytest.approx(len(hit) / 4)
    assert opsm_keep(inputs, 0.1)[0].sum() == 10 and opsm_keep(inputs, 0.69)[0].all()


def test_opsm_joins_the_mask_of_the_correction_before_the_loss_sees_it() -> None:
    """gmpo's mean is over what is left of both."""
    _leaf, inputs = inputs_of(keep_mask=KEEP)
    gmpo = policy_losses.get("gmpo")
    output = total_loss(inputs, gmpo, GMPOConfig(), LossTerms(opsm_delta=1e-4))
    both = dataclasses.replace(inputs, keep_mask=KEEP & opsm_keep(inputs, 1e-4)[0])
    assert not torch.equal(both.kept, inputs.kept)
    torch.testing.assert_close(output.loss, total_loss(both, gmpo, GMPOConfig(), LossTerms()).loss)


def test_opsm_drops_a_sequence_without_a_finite_divergence() -> None:
    _leaf, inputs = make(*doubles([math.nan, 0.0], [-1.0, -1.0]), seq_ids=torch.tensor([0, 1]))
    assert opsm_keep(inputs, 1.0)[0].tolist() == [False, True]


def test_cross_entropy_takes_no_sequence_mask() -> None:
    _, inputs = inputs_of()
    with pytest.raises(ValueError, match="cross_entropy takes no off-policy sequence mask"):
        total_loss(inputs, policy_losses.get("cross_entropy"), None, LossTerms(opsm_delta=0.1))


def test_sequence_losses_are_told_apart_from_ppo() -> None:
    """With one token in each sequence gspo is ppo; with more it is not."""
    log_ratio, advantages = doubles([0.3, -0.2, 0.05], [1.0, -1.0, 0.5])
    ppo, gspo = policy_losses.get("ppo"), policy_losses.get("gspo")
    for seq_ids, same in ((torch.arange(3), True), (torch.zeros(3, dtype=torch.long), False)):
        _, inputs = make(log_ratio, advantages, seq_ids=seq_ids)
        by_sequence = gspo.fn(inputs, GSPOConfig(eps_clip=0.2)).token_losses
        assert torch.allclose(ppo.fn(inputs, PPOConfig()).token_losses, by_sequence) == same


@pytest.mark.parametrize(
    ("make_config", "flag", "message"),
    [
        (lambda: GSPOConfig(eps_clip=-1e-4), "--eps-clip", "must be >= 0"),
        (lambda: GMPOConfig(gmpo_eps_low=-0.1), "--gmpo-eps-low", "must be >= 0"),
        (lambda: GMPOConfig(gmpo_eps_high=-0.1), "--gmpo-eps-high", "must be >= 0"),
        (lambda: VESPOConfig(vespo_lambda_pos=0.0), "--vespo-lambda-pos", "must be > 0"),
        (lambda: VESPOConfig(vespo_lambda_neg=-1.0), "--vespo-lambda-neg", "must be > 0"),
    ],
)
def test_illegal_settings_are_named(
    make_config: Callable[[], Any], flag: str, message: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        make_config()
    (problem,) = raised.value.problems
    assert problem.flag == flag and message in problem.message


# two answers, one, none and one, of four sequences; sequences 1 and 2 adjoin
TURN_MASK = torch.tensor([c == "1" for c in "0110111111100011"])
TURN_SEQ_IDS = torch.tensor([int(c) for c in "0000000112233444"])
TURNS = [[1, 2], [4, 5, 6], [7, 8], [9, 10], [14, 15]]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gspo", GSPOConfig(10.0, 10.0, gspo_ratio_level="turn")),
        ("sapo", SAPOConfig(0.8, 0.8, "turn")),
    ],
)
def test_the_ratio_of_a_turn_is_that_of_its_tokens(name: str, config: object) -> None:
    """One ratio per answer; an answer as a separate sequence has the same losses and gradients."""
    generator = torch.Generator().manual_seed(3)
    log_ratio, advantages = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    found, grads = [], []
    for cut in (TURN_SEQ_IDS, None):
        rows = torch.tensor([t for turn in TURNS for t in turn])
        ids = torch.tensor([i for i, turn in enumerate(TURNS) for _ in turn])
        if cut is not None:
            rows, ids = torch.arange(16), cut
        leaf, inputs = make(log_ratio[rows], advantages[rows], TURN_MASK[rows], ids)
        losses = inputs.masked(policy_losses.get(name).fn(inputs, config).token_losses)
        active = TURN_MASK[rows]
        found.append(losses[active])
        grads.append(torch.autograd.grad(losses.sum(), leaf)[0][active])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(grads[0], grads[1])
    for i, turn in enumerate(TURNS):
        s = math.exp(sum(float(log_ratio[t]) for t in turn) / len(turn))
        for t, loss in zip(turn, found[0].detach()[sum(map(len, TURNS[:i])) :]):
            a = float(advantages[t])
            gate = 1 / (1 + math.exp(-0.8 * (s - 1)))
            assert float(loss) == pytest.approx(-a * s if name == "gspo" else -a * 4 / 0.8 * gate)

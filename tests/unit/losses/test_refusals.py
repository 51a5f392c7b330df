"""The functions of losses and advantages refuse what the command line refuses, and what no command
line could say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from arguments.schema import AlgorithmConfig, RolloutConfig, ScheduleConfig
from slime_like.advantages import (
    AdvantageSettings,
    Outcomes,
    compute_advantages,
    discounted_returns,
    estimate_advantages,
    gae,
    teacher_gaps,
    token_kl,
    token_rewards,
    whiten,
)
from slime_like.engines.base import SamplingParams
from slime_like.losses import (
    LossTerms,
    OffPolicyConfig,
    ValueInputs,
    ValueLossConfig,
    compute_off_policy_correction,
    compute_policy_loss,
    kl_estimate,
    policy_losses,
    prescale_advantages,
    reduction_weights,
    token_weights,
    value_loss,
)
from slime_like.losses.cispo import CISPOConfig
from slime_like.losses.dppo import DPPOConfig
from slime_like.losses.ppo import PPOConfig
from slime_like.losses.sapo import SAPOConfig
from slime_like.tinker.schemas import SamplingParams as ClientSampling
from tests.unit.losses.loss_cases import with_needed

NAN, INF = math.nan, math.inf
ONES = torch.ones(2, 3)


def loss(name: str = "ppo", **changes: Any) -> Any:
    """A loss of 2 x 3 tokens with one thing changed."""
    given = {
        "log_probs": -ONES,
        "loss_mask": ONES,
        "loss_weights": ONES / 6,
        "advantages": ONES,
        "old_log_probs": -ONES,
        "rollout_log_probs": -ONES,
        "rewards": ONES,
        **changes,
    }
    return compute_policy_loss(name, **given)


def with_value(value: float) -> torch.Tensor:
    """Ones with one other element."""
    tensor = ONES.clone()
    tensor[1, 2] = value
    return tensor


def correct(old: Any = -ONES, rollout: Any = -ONES, mask: Any = ONES, **settings: Any) -> Any:
    return compute_off_policy_correction(OffPolicyConfig(**settings), old, rollout, mask)


def advantages(**changes: Any) -> Any:
    given = {
        "rewards": torch.tensor([1.0, 0.0, 1.0]),
        "group_ids": torch.tensor([0, 0, 1]),
        "lengths": torch.tensor([2, 2, 2]),
        **changes,
    }
    return compute_advantages("grpo", **given)


MASKS = [torch.tensor([True, False, True])]
THREE = [torch.ones(3)]

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nan cap": (
        lambda: correct(token_tis_ratio_clip_high=NAN),
        "token_tis_ratio_clip_high=nan must be a finite number",
    ),
    "more than float32 holds": (
        lambda: correct(token_tis_ratio_clip_high=1e39),
        r"token_tis_ratio_clip_high=1e\+39 must be a number that float32 holds",
    ),
    "0 in float32": (
        lambda: loss("sapo", config=SAPOConfig(sapo_tau_pos=1e-50)),
        "sapo_tau_pos=1e-50 must be a number that float32 holds",
    ),
    "a denormal": (
        lambda: ValueLossConfig(value_clip=1e-40),
        "value_clip=1e-40 must be a number that float32 holds",
    ),
    "a coefficient that is infinite": (
        lambda: LossTerms(entropy_coef=1e39),
        "entropy_coef=1e.39 must be a number that float32 holds",
    ),
    "an integer of 400 digits": (
        lambda: AdvantageSettings("grpo", kl_coef=10**400),
        "kl_coef=1000.* must be an integer of 64 bits",
    ),
    "a group of settings": (
        lambda: ScheduleConfig(lr_warmup_init=1e39),
        "ScheduleConfig: lr_warmup_init=1e.39",
    ),
    "another group": (
        lambda: AlgorithmConfig(gamma=1.5, kl_coef=1e-60),
        "gamma=1.5 must be 0 <= x <= 1; kl_coef=1e-60 must be a number",
    ),
    "a temperature of nearly 0": (
        lambda: SamplingParams(temperature=1e-30),
        "temperature is 1e-30, must be finite, and 0 .greedy. or >= 1e-06",
    ),
    "the flag's temperature": (
        lambda: RolloutConfig(rollout_temperature=1e-30),
        "rollout_temperature=1e-30 must be >= 1e-06",
    ),
    "a client's temperature": (
        lambda: ClientSampling(temperature=1e-30),
        "temperature is 0 .greedy. or >= 1e-06",
    ),
    "bool for a number": (lambda: correct(token_tis_ratio_clip_high=True), "must be a number"),
    "word for a number": (
        lambda: correct(geo_mask_low="0.9"),
        "geo_mask_low='0.9' must be a number",
    ),
    "none for a number": (lambda: correct(geo_mask_low=None), "geo_mask_low=None needs a value"),
    "bounds swapped": (lambda: correct(geo_mask_low=2.0), "geo_mask_low=2.0 must not be above"),
    "one side": (
        lambda: correct(token_mask_is_threshold_low=0.5),
        "without --token-mask-is-threshold-high",
    ),
    "NaN of the trainer": (lambda: correct(old=with_value(NAN)), r"old_log_probs\[1, 2\] is nan"),
    "no old": (lambda: correct(old=None), "old_log_probs is NoneType"),
    "no rollout": (lambda: correct(rollout=None), "rollout_log_probs is NoneType"),
    "no mask": (lambda: correct(mask=None), "loss_mask is NoneType"),
    "old of another shape": (lambda: correct(old=-ONES[:1]), "old_log_probs has shape"),
    "mask of a half": (lambda: correct(mask=with_value(0.5)), r"loss_mask\[1, 2\] is 0.5"),
    "mask below 0": (lambda: loss(loss_mask=with_value(-1.0)), r"loss_mask\[5\] is -1"),
    "mask of NaN": (
        lambda: token_weights("token_mean", with_value(NAN)),
        r"loss_mask\[1, 2\] is nan",
    ),
    "keep mask of a half": (lambda: loss(keep_mask=with_value(0.5)), r"keep_mask\[5\] is 0.5"),
    "dual clip without": (
        lambda: loss("dual_clip", config=PPOConfig()),
        "dual_clip implies eps_clip_c=3.0",
    ),
    "dppo_kl as tv": (
        lambda: loss("dppo_kl", config=DPPOConfig()),
        "dppo_kl implies dppo_type='binary_kl'",
    ),
    "another loss's": (
        lambda: loss("gspo", config=PPOConfig()),
        "gspo takes a GSPOConfig, not a PPOConfig",
    ),
    "level": (
        lambda: loss(importance_level="bogus"),
        "importance_level 'bogus'; legal values: token, sequence",
    ),
    "entropy of NaN": (lambda: LossTerms(entropy_coef=NAN), "entropy_coef=nan must be a finite"),
    "NaN advantage": (lambda: loss(advantages=with_value(NAN)), r"advantages\[5\] is nan"),
    "inf old": (lambda: loss(old_log_probs=with_value(-INF)), r"old_log_probs\[5\] is -inf"),
    "NaN log-prob": (lambda: loss(log_probs=with_value(NAN)), r"log_probs\[5\] is nan"),
    "NaN weight": (lambda: loss(loss_weights=with_value(NAN)), r"loss_weights\[5\] is nan"),
    "no log-probs": (lambda: loss(log_probs=None), "log_probs is NoneType"),
    "no weights": (lambda: loss(loss_weights=None), "loss_weights is NoneType"),
    "negative ids": (
        lambda: compute_policy_loss(
            "gpg", ONES[0], ONES[0], ONES[0], advantages=ONES[0], seq_ids=torch.tensor([0, -1, 0])
        ),
        "seq_ids holds -1",
    ),
    "float ids": (
        lambda: token_weights("token_mean", ONES[0], seq_ids=ONES[0]),
        "seq_ids is of torch.float32",
    ),
    "short ids": (
        lambda: (
            correct(mask=ONES, old=ONES)
            and compute_off_policy_correction(
                OffPolicyConfig(),
                ONES[0],
                ONES[0],
                ONES[0],
                seq_ids=torch.zeros(2, dtype=torch.long),
            )
        ),
        r"seq_ids has shape \(2,\)",
    ),
    "values short": (
        lambda: ValueInputs(ONES[0], ONES, ONES, ONES.bool(), ONES),
        "values has shape",
    ),
    "reduction": (
        lambda: reduction_weights("bogus", active_tokens=torch.tensor([1])),
        "unknown loss reduction 'bogus'",
    ),
    "prompt ids": (
        lambda: token_weights("prompt_mean", ONES, prompt_ids=torch.tensor([0])),
        r"prompt_ids has shape \(1,\); it must be \[2\]",
    ),
    "rollout ids": (
        lambda: token_weights("rollout_mean", ONES, rollout_ids=torch.arange(3)),
        "rollout_ids has shape",
    ),
    "rollout_is without the sampler": (
        lambda: loss("rollout_is", rollout_log_probs=None),
        "rollout_log_probs.*let the sampler return log-probs",
    ),
    "cispo against the sampler without it": (
        lambda: loss("cispo", config=CISPOConfig(cispo_anchor="rollout"), rollout_log_probs=None),
        "rollout_log_probs.*let the sampler return log-probs",
    ),
    "topr without rewards": (lambda: loss("topr", rewards=None), "needs rewards"),
    "norm length": (
        lambda: token_weights("seq_mean_token_sum_norm", ONES, loss_norm_length=0.5),
        "loss-norm-length",
    ),
    "negative lengths": (
        lambda: reduction_weights("token_mean", active_tokens=torch.tensor([-1, 2])),
        "active_tokens holds -1",
    ),
    "prescaled NaN": (
        lambda: prescale_advantages("token_mean", with_value(NAN), ONES),
        r"advantages\[1, 2\] is nan",
    ),
    "kl shapes": (lambda: kl_estimate("k1", ONES, ONES[0]), "ref_log_probs has shape"),
    "group ids": (
        lambda: advantages(group_ids=torch.tensor([0])),
        r"group_ids has shape \(1,\); it must be \[3\]",
    ),
    "lengths": (lambda: advantages(lengths=torch.tensor([2])), "lengths has shape"),
    "lengths below 0": (lambda: advantages(lengths=torch.tensor([2, -2, 2])), "lengths holds -2"),
    "singleton": (
        lambda: advantages(singleton="bogus"),
        "singleton 'bogus'; legal values: zero, reward",
    ),
    "gamma of gae": (lambda: gae(THREE, THREE, MASKS, NAN, 1.0), "gamma is nan"),
    "lambda of gae": (lambda: gae(THREE, THREE, MASKS, 1.0, 2.0), "lambd is 2.0"),
    "values of gae": (lambda: gae(THREE, [], MASKS, 1.0, 1.0), "values has 0 samples, masks 1"),
    "returns' shape": (
        lambda: discounted_returns([torch.ones(2)], MASKS, 1.0),
        r"rewards\[0\] has shape",
    ),
    "penalties": (lambda: token_rewards([1.0], MASKS, []), "penalties has 0 samples"),
    "whiten's masks": (lambda: whiten(THREE, [torch.ones(3)]), "it must be .R. bool"),
    "ref samples": (lambda: token_kl("k1", THREE, [], MASKS), "ref_log_probs has 0 samples"),
    "teacher shape": (
        lambda: teacher_gaps(THREE, [torch.ones(1)], MASKS),
        r"teacher_log_probs\[0\] has shape",
    ),
    "outcomes": (
        lambda: Outcomes(torch.ones(2), torch.zeros(1).long(), torch.ones(2)),
        "group_ids has shape",
    ),
    "values of estimate": (
        lambda: estimate_advantages(
            AdvantageSettings("ppo"),
            Outcomes(torch.ones(1), torch.zeros(1).long(), torch.ones(1).long()),
            local_indices=[0],
            masks=MASKS,
            critic_values=[],
        ),
        "critic_values has 0 samples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_illegal_is_a_value_error_that_names_it(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", policy_losses.names(with_aliases=True))
def test_an_empty_batch_is_a_loss_of_0(name: str, shape: tuple[int, int]) -> None:
    leaf = torch.zeros(shape, requires_grad=True)
    constant = torch.zeros(shape)
    names = (
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "rewards",
        "ref_log_probs",
        "entropy",
    )
    tensors = with_needed(dict.fromkeys(names, constant), constant)
    settings = (
        {"dro_beta": 0.1} if name == "dro" else policy_losses.get(name).alias_defaults.get(name, {})
    )
    config = policy_losses.get(name).config_type(**settings)
    for reduction in ("token_mean", "sequence_mean", "rollout_mean", "prompt_mean"):
        u = (
            token_weights(reduction, constant, prompt_ids=torch.arange(shape[0]))
            if reduction == "prompt_mean"
            else token_weights(reduction, constant)
        )
        terms = LossTerms(kl_loss_coef=0.1, entropy_coef=0.1, opsm_delta=None)
        output = compute_policy_loss(name, leaf, constant, u, config=config, terms=terms, **tensors)
        assert output.loss.item() == 0
        output.loss.backward()
    assert leaf.grad is not None and leaf.grad.shape == shape


def test_an_empty_batch_of_the_other_functions() -> None:
    empty = torch.zeros(0, 3, requires_grad=True)
    inputs = ValueInputs(empty, empty, empty, empty.bool(), empty)
    assert value_loss(inputs, ValueLossConfig()).loss.item() == 0
    correction = compute_off_policy_correction(
        OffPolicyConfig(
            tis_ratio_type="sequence", m2po_threshold=0.1, sequence_mask_metric="product"
        ),
        empty,
        empty,
        empty,
    )
    assert correction.importance_weights is not None and correction.importance_weights.shape == (
        0,
        3,
    )
    norm = {"loss_norm_length": 4, "micro_batch_size": 1}
    for reduction in ("seq_mean_token_sum_norm", "token_mean_legacy"):
        assert token_weights(reduction, empty, **norm).shape == (0, 3)
    assert gae([], [], [], 1.0, 1.0) == ([], [])


def test_a_reward_that_is_not_finite_at_a_masked_token_is_nobodys() -> None:
    mask = [torch.tensor([True, False, True, False])]
    values = [torch.tensor([0.1, NAN, 0.2, INF])]
    clean = [torch.tensor([1.0, 0.0, 2.0, 0.0])]
    for poison in (NAN, INF, -INF):
        rewards = [torch.tensor([1.0, poison, 2.0, poison])]
        for got, wanted in zip(
            gae(rewards, values, mask, 0.9, 0.8), gae(clean, values, mask, 0.9, 0.8)
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        torch.testing.assert_close(
            discounted_returns(rewards, mask, 0.9),
            discounted_returns(clean, mask, 0.9),
            rtol=0,
            atol=0,
        )
    moved = discounted_returns([torch.tensor([0.0, 3.0, 0.0, 0.0])], mask, 0.5)[0]
    assert moved.tolist() == [3.0, 0.0, 0.0, 0.0]  # a finite one still joins the token before it


def test_what_an_alias_stands_for_is_taken() -> None:
    dual = loss("dual_clip", config=PPOConfig(eps_clip_c=2.0))
    torch.testing.assert_close(dual.loss, loss("ppo", config=PPOConfig(eps_clip_c=2.0)).loss)
    kl = loss("dppo_kl", config=DPPOConfig(dppo_type="binary_kl"))
    torch.testing.assert_close(kl.loss, loss("dppo_kl").loss)

"""The command line of policy losses: which one is chosen and how, their settings, and what is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.run_config import RunConfig
from slime_like.config import Problem
from slime_like.losses import LOSS_REDUCTIONS, policy_losses
from slime_like.megatron.factory import make_objective
from tests.unit.command_lines import (
    TWO_STEPS,
    assert_refused,
    parse_flags,
    problems_of_flags,
    refused,
)


def parse(folder: Path, flags: str) -> RunConfig:
    return parse_flags(folder, TWO_STEPS + flags)


def problems_of(folder: Path, flags: str) -> tuple[Problem, ...]:
    return problems_of_flags(folder, TWO_STEPS + flags)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in policy_losses.names(with_aliases=True)
        if policy_losses.canonical(n) not in ("cross_entropy", "dro")
        and not policy_losses.get(n).pairs
        and not policy_losses.get(n).mismatched
    ],
)
def test_every_loss_is_chosen_by_its_names(tmp_path: Path, name: str) -> None:
    """With its own defaults, and without a warning under the default reduction."""
    config = parse(tmp_path, f"--policy-loss-type {name}")
    loss = policy_losses.get(name)
    assert config.algorithm.policy_loss_type == loss.name
    assert config.policy_loss == loss.config_type(**loss.alias_defaults.get(name, {}))
    assert not config.warnings
    objective = make_objective(config)
    assert (objective.policy_loss, objective.policy_config) == (loss, config.policy_loss)


# flags -> settings of the chosen loss
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("--policy-loss-type dro --dro-beta 0.5", {"dro_beta": 0.5}),
    (
        "--policy-loss-type gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
        {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
    ),
    (
        "--policy-loss-type gmpo --gmpo-eps-low 0.3 --gmpo-eps-high 0.5",
        {"gmpo_eps_low": 0.3, "gmpo_eps_high": 0.5},
    ),
    (
        "--policy-loss-type cispo --cispo-anchor rollout --cispo.cispo-eps-clip-high 3",
        {"cispo_anchor": "rollout", "cispo_eps_clip_high": 3.0},
    ),
    (
        "--policy-loss-type clip_cov --clip_cov.clip_ratio 0.1 --clip-cov.clip-cov-lb -1",
        {"clip_cov_ratio": 0.1, "clip_cov_lb": -1.0},
    ),
    (
        "--policy-loss-type kl_cov --kl_cov.kl_cov_frac 0.1 --kl_cov.ppo_kl_coef 2",
        {"kl_cov_frac": 0.1, "kl_cov_coef": 2.0},
    ),
    (
        "--policy-loss-type dppo_kl --dppo.delta_high 0.1",
        {"dppo_type": "binary_kl", "dppo_delta_low": None, "dppo_delta_high": 0.1},
    ),
    ("--policy-loss-type dppo --dppo.dppo-type binary_kl", {"dppo_type": "binary_kl"}),
    (
        "--policy-loss-type topr --topr-negative-weight 0",
        {"topr_positive_weight": 1.0, "topr_negative_weight": 0.0},
    ),
    ("--policy-loss-type kimi15 --kimi-tau 1", {"kimi_tau": 1.0}),
    (
        "--policy-loss-type vespo --vespo-k-pos 1 --vespo-lambda-neg 4",
        {"vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0, "vespo_k_neg": 3.0},
    ),
    ("--policy-loss-type rollout_is --eps-clip 0.5", {"eps_clip": 0.5, "bounds": (0.5, 1.5)}),
    ("--policy-loss-type sapo --advantage-estimator gspo", {"sapo_ratio_level": "sequence"}),
    (
        "--policy-loss-type sapo --advantage-estimator gspo --sapo-ratio-level token",
        {"sapo_ratio_level": "token"},
    ),
    ("--policy-loss-type sapo", {"sapo_ratio_level": "token"}),
]


@pytest.mark.parametrize(("flags", "settings"), SETTINGS)
def test_settings_of_the_chosen_loss(tmp_path: Path, flags: str, settings: dict[str, Any]) -> None:
    """slime's, SkyRL's and our spellings."""
    config = parse(tmp_path, flags)
    assert {name: getattr(config.policy_loss, name) for name in settings} == settings
    assert not config.warnings


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_slimes_estimator_chooses_a_loss(tmp_path: Path, name: str) -> None:
    for flags in (
        f"--advantage-estimator {name}",
        f"--advantage-estimator {name} --policy-loss-type {name}",
    ):
        config = parse(tmp_path, flags)
        assert (config.algorithm.advantage_estimator, config.algorithm.policy_loss_type) == (
            "grpo",
            name,
        )


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("gspo", "cispo"),
        ("cispo", "gspo"),
        ("cispo", "sapo"),
        ("gspo", "ppo"),
        ("gspo", "geo_mean"),
    ],
)
def test_an_estimator_that_contradicts_the_loss(tmp_path: Path, estimator: str, loss: str) -> None:
    (found,) = problems_of(tmp_path, f"--advantage-estimator {estimator} --policy-loss-type {loss}")
    assert found.flag == "--advantage-estimator" and found.value == estimator
    assert f"--policy-loss-type {policy_losses.canonical(loss)}" in found.message


def test_slimes_cispo_takes_eps_clip(tmp_path: Path) -> None:
    config = parse(tmp_path, "--advantage-estimator cispo --eps-clip 0.2 --eps-clip-high 0.28")
    assert (config.policy_loss.cispo_eps_clip_low, config.policy_loss.cispo_eps_clip_high) == (
        0.2,
        0.28,
    )
    assert len(config.warnings) == 1 and "--cispo-eps-clip-low 1" in config.warnings[0]
    config = parse(tmp_path, "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 5")
    assert (config.policy_loss.cispo_eps_clip_low, config.policy_loss.cispo_eps_clip_high) == (
        1.0,
        5.0,
    ) and not config.warnings
    config = parse(tmp_path, "--advantage-estimator cispo --eps-clip 1")
    assert config.policy_loss.cispo_eps_clip_high == 1.0
    config = parse(
        tmp_path,
        "--advantage-estimator cispo --eps-clip 0.2 --cispo-eps-clip-low 1 --cispo-eps-clip-high 4",
    )
    assert (config.policy_loss.cispo_eps_clip_low, config.policy_loss.cispo_eps_clip_high) == (
        1.0,
        4.0,
    ) and not config.warnings
    config = parse(tmp_path, "--policy-loss-type cispo --eps-clip 0.2")
    assert config.policy_loss.cispo_eps_clip_low == 1.0
    assert len(config.warnings) == 1 and "--eps-clip has no effect" in config.warnings[0]


LENGTH = {"seq_mean_token_sum_norm": "--loss-norm-length 9"}
# rule or "", flags, the flag that is named, words of the message
REFUSED: list[tuple[str, str, str, str]] = [
    ("", "--policy-loss-type dppo_kl --dppo-type binary_tv", "--dppo-type",
     "conflicts with --policy-loss-type dppo_kl"),
    ("", "--policy-loss-type geo_mean --calculate-per-token-loss", "--loss-reduction",
     "requires rollout_mean or sequence_mean"),
    *[("", f"--policy-loss-type gmpo --loss-reduction {kind} {LENGTH.get(kind, '')}",
     "--loss-reduction", "requires rollout_mean or sequence_mean")
      for kind in LOSS_REDUCTIONS if kind not in ("rollout_mean", "sequence_mean")],
    ("", "--policy-loss-type dro", "--dro-beta", "required"),
    ("check_loss_masks", "--opsm-delta 0.1", "--opsm-delta", "without --use-opsm"),
    ("check_loss_masks", "--use-opsm --loss-type sft_loss", "--use-opsm", "no old policy"),
    ("check_loss_masks", "--estr-threshold 0.5 --loss-type sft_loss", "--estr-threshold", "no old policy"),
    ("", "--estr-entropy-floor 0.1", "--estr-entropy-floor", "without --estr-threshold"),
    ("", "--estr-threshold 0", "--estr-threshold", "> 0"),
    ("", "--positive-nll-coef 0.1 --loss-type sft_loss", "--positive-nll-coef",
     "--loss-type sft_loss"),
    ("check_entropy_bounds", "--entropy-ctrl-type adaptive --entropy-coef-min 0.01",
     "--entropy-coef-min", "must not be above"),
    ("check_entropy_bounds", "--entropy-ctrl-type adaptive --entropy-coef 0.01", "--entropy-coef",
     "from 0 to 0.005"),
    ("check_legacy_reduction", "--loss-reduction token_mean_legacy --micro-batch-size 3",
     "--loss-reduction", "use token_mean"),
    ("", "--custom-loss-function-path {folder}/mine.py:mine --policy-loss-type sapo",
     "--custom-loss-function-path", "conflicts with --policy-loss-type sapo"),
    ("", "--custom-loss-function-path {folder}/mine.py:mine --loss-type sft_loss",
     "--custom-loss-function-path", "remove it"),
    ("", "--custom-loss-function-path {folder}/mine.py:other", "--custom-loss-function-path",
     "has no 'other'"),
    ("", "--loss-type custom_loss", "--custom-loss-function-path", "required"),
]  # fmt: skip


@refused(REFUSED)
def test_what_is_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    (tmp_path / "mine.py").write_text("def mine(inputs, config): ...\n")
    assert_refused(problems_of(tmp_path, row[1]), row)


def test_a_loss_against_the_sampler_takes_masks(tmp_path: Path) -> None:
    for loss in ("rollout_is", "dppo", "cispo --cispo-anchor rollout"):
        assert (
            parse(
                tmp_path, f"--policy-loss-type {loss} --sequence-mask-metric geometric"
            ).off_policy.sequence_mask_metric
            == "geometric"
        )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--policy-loss-type gspo --eps-clip 0.2", "geometric mean"),
        ("--policy-loss-type gspo --eps-clip-high 0.02", "geometric mean"),
        ("--policy-loss-type gspo --loss-reduction token_mean", "is meant for --loss-reduction"),
        ("--policy-loss-type kimi --sapo-tau-pos 2", "--sapo-tau-pos has no effect"),
        ("--policy-loss-type sapo --loss-reduction prompt_mean", "is meant for --loss-reduction"),
    ],
)
def test_warnings(tmp_path: Path, flags: str, expected: str) -> None:
    (warning,) = parse(tmp_path, flags).warnings
    assert expected in warning


KL = "--use-kl-loss --ref-load {folder}/hf --kl-loss-coef 0.1"


@pytest.mark.parametrize(
    "flags",
    [
        "--policy-loss-type gspo --eps-clip 0.01",
        "--policy-loss-type gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
        "--policy-loss-type sapo --loss-reduction sequence_mean",
        "--policy-loss-type sapo --loss-reduction rollout_mean",
        KL,
        f"{KL} --kl-loss-type k1 --use-unbiased-kl",
        "--n-samples-per-prompt 1 --singleton-advantage reward",
    ],
)
def test_what_is_right_is_not_warned_about(tmp_path: Path, flags: str) -> None:
    assert parse(tmp_path, flags).warnings == ()


def test_the_terms_of_the_loss(tmp_path: Path) -> None:
    terms = make_objective(
        parse(tmp_path, "--use-opsm --opsm-delta 0.01 --positive-nll-coef 0.1")
    ).terms
    assert (terms.opsm_delta, terms.positive_nll_coef) == (0.01, 0.1)
    assert make_objective(parse(tmp_path, "")).terms.opsm_delta is None
    assert make_objective(parse(tmp_path, "")).terms.estr_threshold is None
    terms = make_objective(parse(tmp_path, "--estr-threshold 0.5 --estr-entropy-floor 0.1")).terms
    assert (terms.estr_threshold, terms.estr_entropy_floor) == (0.5, 0.1)
    assert make_objective(parse(tmp_path, "--use-opsm")).terms.opsm_delta == 1e-4


@pytest.mark.parametrize("also", ["", "--loss-type custom_loss"])
def test_a_custom_loss(tmp_path: Path, also: str) -> None:
    """It sees the settings of all losses, as given or by default."""
    (tmp_path / "mine.py").write_text("def mine(inputs, config): ...\n")
    config = parse(
        tmp_path,
        f"--custom-loss-function-path {{folder}}/mine.py:mine --eps-clip 0.3 --dppo-delta-high 0.1 "
        f"{also}",
    )
    assert not config.warnings
    assert config.algorithm.loss_type == "policy_loss"
    assert (
        config.policy_loss.eps_clip,
        config.policy_loss.dppo_delta_high,
        config.policy_loss.sapo_tau_neg,
    ) == (0.3, 0.1, 1.05)
    objective = make_objective(config)
    assert objective.policy_loss.name == "custom" and objective.policy_config is config.policy_loss


def test_the_legacy_reduction_is_accepted_with_whole_micro_batches(tmp_path: Path) -> None:
    assert (
        parse(
            tmp_path, "--loss-reduction token_mean_legacy --micro-batch-size 2"
        ).algorithm.loss_reduction
        == "token_mean_legacy"
    )

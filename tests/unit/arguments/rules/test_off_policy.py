"""The off-policy correction on the command line: keys, aliases of slime and SkyRL, errors,
warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arguments.run_config import RunConfig
from slime_like.config import Problem
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.registry import policy_losses
from tests.unit.command_lines import (
    TWO_STEPS,
    assert_refused,
    parse_flags,
    problems_of_flags,
    refused,
    write_files,
)


def parse(folder: Path, flags: str) -> RunConfig:
    return parse_flags(folder, TWO_STEPS + flags)


def problems_of(folder: Path, flags: str) -> tuple[Problem, ...]:
    return problems_of_flags(folder, TWO_STEPS + flags)


def test_off_by_default(tmp_path: Path) -> None:
    assert parse(tmp_path, "").off_policy == OffPolicyConfig()


TOKEN = {"tis_ratio_type": "token"}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("--tis-ratio-type token --token-tis-ratio-clip-high 3 --token-tis-ratio-clip-low 0.1",
     {**TOKEN, "token_tis_ratio_clip_high": 3.0, "token_tis_ratio_clip_low": 0.1}),
    ("--tis-ratio-type sequence --sequence-tis-ratio-clip-high 4",
     {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 4.0}),
    ("--sequence-mask-metric geometric --geo-mask-low 0.9 --geo-mask-high 1.1",
     {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}),
    ("--sequence_mask_metric product --product_mask_low 0.2 --product_mask_high 3",
     {"sequence_mask_metric": "product", "product_mask_low": 0.2, "product_mask_high": 3.0}),
    ("--outlier-token-is-threshold-low 1e-4 --outlier-token-is-threshold-high 100",
     {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}),
    ("--outlier-token-is-threshold-high 100", {"outlier_token_is_threshold_high": 100.0}),
    ("--token-mask-is-threshold-low 0.5 --token-mask-is-threshold-high 2",
     {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}),
    ("--m2po-threshold 0.04", {"m2po_threshold": 0.04}),
    # slime
    ("--use-tis", TOKEN),
    ("--use-tis --tis-clip 4 --tis-clip-low 0.5",
     {**TOKEN, "token_tis_ratio_clip_high": 4.0, "token_tis_ratio_clip_low": 0.5}),
    ("--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function "
     "--tis-clip 2.5 --tis-clip-low 0.4",
     {**TOKEN, "token_tis_ratio_clip_high": 2.5, "token_tis_ratio_clip_low": 0.4,
      "token_mask_is_threshold_high": 2.5, "token_mask_is_threshold_low": 0.4}),
    ("--use-tis --custom-tis-function-path x.icepop_function",
     {**TOKEN, "token_mask_is_threshold_high": 2.0, "token_mask_is_threshold_low": 0.0}),
    ("--use-tis --custom-tis-function-path json.dumps --tis-clip 3",
     {**TOKEN, "custom_tis_function_path": "json.dumps", "token_tis_ratio_clip_high": 3.0}),
    # SkyRL
    ("--trainer.algorithm.off_policy_correction.tis_ratio_type token", TOKEN),
    ("--off-policy-correction.sequence-mask-metric=product", {"sequence_mask_metric": "product"}),
    ("--algorithm.off_policy_correction.m2po_threshold=0.1", {"m2po_threshold": 0.1}),
    ("--trainer.algorithm.use_tis=false", {}),
    ("--use_tis=false", {}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "expected"), ACCEPTED, ids=[flags[:60] for flags, _ in ACCEPTED])
def test_accepted(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    config = parse(tmp_path, flags)
    assert config.off_policy == OffPolicyConfig(**expected)
    assert config.off_policy.enabled is bool(expected)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--get-mismatch-metrics", "always computed"),
        ("--use-tis --tis-imp-ratio-cap 3",
         "--tis-imp-ratio-cap is deprecated; use --token-tis-ratio-clip-high"),
        ("--trainer.algorithm.use_tis=true", "is deprecated; use --tis-ratio-type token"),
        ("--tis-clip 3",
         "--token-tis-ratio-clip-high has no effect without --tis-ratio-type token"),
        ("--tis-ratio-type sequence --tis-clip-low 0.2",
         "--token-tis-ratio-clip-low has no effect"),
        ("--tis-ratio-type token --sequence-tis-ratio-clip-high 3",
         "without --tis-ratio-type sequence"),
        ("--sequence-mask-metric product --geo-mask-high 1.2",
         "without --sequence-mask-metric geometric"),
        ("--sequence-mask-metric geometric --product-mask-high 1.2",
         "without --sequence-mask-metric product"),
    ],
)  # fmt: skip
def test_warnings(tmp_path: Path, flags: str, message: str) -> None:
    warnings = parse(tmp_path, flags).warnings
    assert len(warnings) == 1 and message in warnings[0]


def test_skyrl_names_are_deprecated_and_work(tmp_path: Path) -> None:
    config = parse(
        tmp_path, "--trainer.algorithm.use_tis=true --trainer.algorithm.tis_imp_ratio_cap=3"
    )
    assert config.off_policy == OffPolicyConfig(
        tis_ratio_type="token", token_tis_ratio_clip_high=3.0
    )
    assert sum("deprecated" in w for w in config.warnings) == 2


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("trainer:\n  algorithm:\n    use_tis: true", "trainer.algorithm.use_tis"),
        ("trainer.algorithm.use_tis: true", "trainer.algorithm.use_tis"),
        ("algorithm.use_tis: true", "algorithm.use_tis"),
    ],
)
def test_deprecated_names_of_a_run_file_are_called_as_it_has_them(
    tmp_path: Path, text: str, spelling: str
) -> None:
    """Nested, SkyRL's name was taken for slime's, which is not deprecated."""
    write_files(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    config = parse(tmp_path, f"--config {tmp_path / 'run.yaml'}")
    assert config.off_policy.tis_ratio_type == "token"
    assert config.warnings == (f"--{spelling} is deprecated; use --tis-ratio-type token",)


def test_a_name_of_slime_in_a_run_file_is_not_deprecated(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "run.yaml").write_text("use_tis: true")
    assert parse(tmp_path, f"--config {tmp_path / 'run.yaml'}").warnings == ()


def test_run_file_of_skyrl(tmp_path: Path) -> None:
    write_files(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer:\n  algorithm:\n    use_tis: false\n    off_policy_correction:\n      "
        "tis_ratio_type: sequence\n"
        "      sequence_tis_ratio_clip_high: 3\n      sequence_mask_metric: null\n      "
        "outlier_token_is_threshold_low: 1e-4\n"
    )
    config = parse(tmp_path, f"--config {file}")
    assert config.off_policy == OffPolicyConfig(
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high=3.0,
        outlier_token_is_threshold_low=1e-4,
    )


# by the flag that turns it on
ONE_OF_EACH = {
    "--tis-ratio-type": "--use-tis",
    "--sequence-mask-metric": "--sequence-mask-metric product",
    "--outlier-token-is-threshold-low": "--outlier-token-is-threshold-low 1e-4",
    "--outlier-token-is-threshold-high": "--outlier-token-is-threshold-high 100",
    "--token-mask-is-threshold-low":
        "--token-mask-is-threshold-low 0.5 --token-mask-is-threshold-high 2",
    "--m2po-threshold": "--m2po-threshold 1",
}  # fmt: skip
# name of the rule, or "" for what reading finds; flags; the flag that is named; words
REFUSED = [
    ("", "--use-tis --tis-clip 0", "--tis-clip", "must be > 0"),
    ("", "--use-tis --tis-imp-ratio-cap -1", "--tis-imp-ratio-cap", "must be > 0"),
    ("", "--use-tis --tis-clip nan", "--tis-clip", "finite"),
    ("", "--tis-cap 3", "--tis-cap", "unknown flag"),
    ("", "--token-mask-is-threshold-low 0.5",
     "--token-mask-is-threshold-low", "without --token-mask-is-threshold-high"),
    ("", "--token-mask-is-threshold-high 2",
     "--token-mask-is-threshold-high", "without --token-mask-is-threshold-low"),
    ("", "--use-tis --tis-clip 1 --tis-clip-low 1.5",
     "--token-tis-ratio-clip-low", "must not be above"),
    ("", "--sequence-mask-metric geometric --geo-mask-low 1.5",
     "--geo-mask-low", "--geo-mask-high 1.01"),
    ("", "--sequence-mask-metric product --product-mask-high 0.1",
     "--product-mask-low", "--product-mask-high 0.1"),
    ("", "--token-mask-is-threshold-low 3 --token-mask-is-threshold-high 2",
     "--token-mask-is-threshold-low", "not be above"),
    ("",
     "--outlier-token-is-threshold-low 3 --outlier-token-is-threshold-high 2",
     "--outlier-token-is-threshold-low", "above"),
    *[("check_correction_policies", f"--use-rollout-logprobs {flags}", "--use-rollout-logprobs",
     flag) for flag, flags in ONE_OF_EACH.items()],
    *[("check_correction_loss", f"--loss-type sft_loss {flags}", flag, "no old policy")
      for flag, flags in ONE_OF_EACH.items()],
    ("check_custom_tis", "--custom-tis-function-path json.dumps", "--custom-tis-function-path",
     "add it"),
    ("check_custom_tis", "--tis-ratio-type sequence --custom-tis-function-path json.dumps",
     "--custom-tis-function-path", "add it"),
    ("check_custom_tis", "--use-tis --custom-tis-function-path json.nothing",
     "--custom-tis-function-path", "nothing"),
    ("check_custom_tis", "--use-tis --custom-tis-function-path json.dumps --m2po-threshold 1",
     "--custom-tis-function-path", "remove --m2po-threshold"),
    ("", "--custom-tis-function-path x.icepop_function", "--custom-tis-function-path", "add it"),
    ("", "--use-tis --custom-tis-function-path x.icepop_function --token-mask-is-threshold-high 3",
     "--token-mask-is-threshold-high", "conflicts with"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of(tmp_path, row[1]), row)


ANCHORED = (
    "--policy-loss-type rollout_is",
    "--policy-loss-type dppo",
    "--policy-loss-type cispo --cispo-anchor rollout",
)


@pytest.mark.parametrize("loss", ANCHORED)
@pytest.mark.parametrize(
    "weights",
    ["--use-tis", "--tis-ratio-type sequence", "--use-tis --custom-tis-function-path json.dumps"],
)
def test_a_loss_anchored_on_the_sampler_takes_masks_only(
    tmp_path: Path, loss: str, weights: str
) -> None:
    found = problems_of(tmp_path, f"{loss} {weights}")
    assert [p.flag for p in found] == ["--tis-ratio-type"] and "count double" in str(found[0])
    assert parse(tmp_path, f"{loss} --sequence-mask-metric geometric").off_policy.enabled


@pytest.mark.parametrize(
    "name",
    [name for name, loss in policy_losses.items() if loss.correction in ("outer", "internal")],
)
def test_every_other_loss_takes_weights_and_masks(tmp_path: Path, name: str) -> None:
    needed = {
        "gmpo": "--loss-reduction sequence_mean",
        "luspo": "--loss-reduction sequence_mean",
        "dro": "--dro-beta 0.1",
    }.get(name, "")
    config = parse(
        tmp_path, f"--policy-loss-type {name} {needed} --use-tis --sequence-mask-metric product"
    )
    assert config.off_policy == OffPolicyConfig(
        tis_ratio_type="token", sequence_mask_metric="product"
    )


def test_the_table_of_combinations() -> None:
    taking = {
        loss.correction: {
            n for n, other in policy_losses.items() if other.correction == loss.correction
        }
        for _, loss in policy_losses.items()
    }
    assert (
        taking["internal"] == {"gmpo", "vespo"}
        and taking["masks"] == {"rollout_is", "dppo", "ipo"}
        and taking["forbidden"] == {"cross_entropy", "dpo", "kto", "orpo", "bradley_terry"}
    )

"""Command lines that learn from pairs of answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from arguments.schema import DataConfig
from slime_like.data.prompts import PromptSource
from slime_like.losses.bradley_terry import BradleyTerryConfig
from slime_like.losses.dpo import DPOConfig
from slime_like.losses.kto import KTOConfig
from slime_like.losses.orpo import ORPOConfig
from tests.unit.command_lines import complete, problems_of

WITHOUT = ("--n-samples-per-prompt", "--rm-type", "--label-key")
REF = "--ref-load {folder}/hf"


def words(folder: Path, flags: str) -> list[str]:
    argv = complete(folder, *flags.replace("{folder}", str(folder)).split(), without=WITHOUT)
    (folder / "prompts.jsonl").write_text('{"input": "1+1=", "chosen": "2", "rejected": "3"}\n')
    return argv


def parse(folder: Path, flags: str) -> RunConfig:
    return parse_args(words(folder, flags), 1)


def test_what_follows_from_the_loss(tmp_path: Path) -> None:
    config = parse(tmp_path, f"--loss-type dpo_loss {REF} --dpo-beta 0.3 --rpo-alpha 0.5")
    algorithm = config.algorithm
    assert (algorithm.loss_type, algorithm.policy_loss_type) == ("sft_loss", "dpo")
    assert config.policy_loss == DPOConfig(dpo_beta=0.3, dpo_nll_coef=0.5)
    assert config.rollout.n_samples_per_prompt == 2 and algorithm.loss_reduction == "sequence_mean"
    assert algorithm.global_batch_size == 8 and algorithm.samples_together == 2
    assert config.log_prob_temperature == 1.0 and not config.learns_conversations
    assert config.rollout.rollout_max_response_len == 511, "answers are cut where positions end"
    assert algorithm.needs_reference and not config.warnings
    same = parse(tmp_path, f"--loss-type sft_loss --policy-loss-type dpo {REF} --dpo-beta 0.3 "
                           "--dpo-nll-coef 0.5")  # fmt: skip
    assert same.algorithm == algorithm and same.policy_loss == config.policy_loss


def test_a_reward_model_needs_no_reference(tmp_path: Path) -> None:
    config = parse(tmp_path, "--loss-type rm_loss --center-rewards-coefficient 0.01")
    assert config.policy_loss == BradleyTerryConfig(rm_center_coef=0.01) and not config.warnings
    assert config.algorithm.trains_reward_model and not config.algorithm.needs_reference
    assert config.rollout.n_samples_per_prompt == 2 and not config.trains_critic


def test_one_sample_at_a_time_becomes_one_pair(tmp_path: Path) -> None:
    config = parse(tmp_path, f"--loss-type dpo_loss {REF} --qkv-format bshd")
    assert config.algorithm.micro_batch_size == 2 and not config.algorithm.use_dynamic_batch_size


def test_an_adapter_is_compared_with_its_base(tmp_path: Path) -> None:
    config = parse(tmp_path, "--loss-type dpo_loss --lora-rank 4 --transformer-impl local")
    assert config.reference_is_base and config.algorithm.needs_reference


DPO = "--loss-type dpo_loss"
CASES = {
    "no reference": (DPO, "--ref-load", "required with --policy-loss-type dpo"),
    "another loss": (f"{DPO} {REF} --policy-loss-type ppo", "--policy-loss-type",
        "conflicts with --loss-type dpo_loss"),
    "a label": (f"{DPO} {REF} --label-key chosen", "--label-key", "has no effect with pairs"),
    "group": (f"{DPO} {REF} --n-samples-per-prompt 4", "--n-samples-per-prompt", "must be 2"),
    "half pairs": (f"{DPO} {REF} --micro-batch-size 1", "--micro-batch-size", "must be even"),
    "half pairs forward": (f"{DPO} {REF} --log-probs-micro-batch-size 1",
        "--log-probs-micro-batch-size", "must be even"),
    "half steps": (f"{DPO} {REF} --num-steps-per-rollout 8", "--rollout-batch-size",
        "must be even"),
    "half batches": (f"{DPO} {REF} --global-batch-size 1", "--global-batch-size", "must be even"),
    "reduction": (f"{DPO} {REF} --loss-reduction token_mean", "--loss-reduction", "sequence_mean"),
    "correction": (f"{DPO} {REF} --use-tis", "--tis-ratio-type",
        "cannot be combined with the loss"),
    "keys": (f"{DPO} {REF} --chosen-key best", "--chosen-key", "no such key in"),
    "idle smoothing": (f"{DPO} {REF} --dpo-loss-type ipo --dpo-label-smoothing 0.1",
        "--dpo-label-smoothing", "has no effect without --dpo-loss-type sigmoid"),
    "rewards": (f"{DPO} {REF} --rm-type math", "--rm-type", "has no effect"),
    "a task": (f"{DPO} {REF} --prompt-data reasoning_gym:spell_backward?size=9&seed=1",
        "--prompt-data", "has no pairs of answers"),
    "not supervised": ("--policy-loss-type dpo --rm-type zero", "--policy-loss-type",
        "use --loss-type sft_loss"),
    "no pairs": ("--chosen-key best --rm-type zero --n-samples-per-prompt 4", "--chosen-key",
        "only valid with --loss-type dpo_loss, orpo_loss or rm_loss"),
}  # fmt: skip


RM = "--loss-type rm_loss"
CASES |= {
    "single answers not supervised": ("--policy-loss-type kto --rm-type zero", "--policy-loss-type",
        "use --loss-type sft_loss"),
    "a reward model's vocabulary": (
        f"{RM} --eval-interval 1 --eval-prompt-data a {{folder}}/prompts.jsonl --rm-type zero",
        "--eval-interval", "--policy-loss-type bradley_terry"),
    "a reward model's adapter": (f"{RM} --lora-rank 4 --transformer-impl local", "--lora-rank",
        "trains all weights"),
    "margins of dpo": (f"{DPO} {REF} --margin-key m", "--margin-key",
        "only valid with --policy-loss-type bradley_terry"),
    "two types": (f"{RM} --policy-loss-type dpo", "--policy-loss-type", "selects bradley_terry"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    flags, flag, message = CASES[name]
    (found,) = problems_of(words(tmp_path, flags))
    assert found.flag == flag and message in found.message


def kto_words(folder: Path, flags: str, row: str = '"chosen": "2", "good": true') -> list[str]:
    common = f"--loss-type kto_loss {REF} --label-key chosen --desirable-key good "
    argv = complete(folder, *(common + flags).replace("{folder}", str(folder)).split(), without=WITHOUT)  # fmt: skip
    (folder / "prompts.jsonl").write_text(f'{{"input": "1+1=", {row}}}\n')
    return argv


def test_single_answers_come_with_mismatched_ones(tmp_path: Path) -> None:
    config = parse_args(kto_words(tmp_path, "--kto-beta 0.3"), 1)
    algorithm = config.algorithm
    assert (algorithm.loss_type, algorithm.policy_loss_type) == ("sft_loss", "kto")
    assert config.policy_loss == KTOConfig(kto_beta=0.3) and not config.warnings
    assert algorithm.scores_mismatches and algorithm.pair_loss is None
    assert algorithm.samples_together == 2 and algorithm.global_batch_size == 8
    assert algorithm.needs_reference and not config.learns_conversations


def test_odds_need_no_reference(tmp_path: Path) -> None:
    config = parse(tmp_path, "--loss-type orpo_loss --orpo-lambda 0.2")
    assert config.policy_loss == ORPOConfig(orpo_lambda=0.2) and not config.warnings
    assert not config.algorithm.needs_reference and config.algorithm.samples_together == 2


KTO_CASES = {
    "one row": ("--rollout-batch-size 1", "--rollout-batch-size", "must be above 1"),
    "two steps": ("--num-steps-per-rollout 2", "--num-steps-per-rollout", "must be 1"),
    "no verdict": ("--desirable-key best", "--desirable-key", "no such key in"),
    "a task": ("--prompt-data reasoning_gym:spell_backward?size=9&seed=1", "--prompt-data",
        "does not say which answers are desirable"),
    "half": ("--micro-batch-size 1", "--micro-batch-size", "must be even"),
    "reduction": ("--loss-reduction token_mean", "--loss-reduction", "sequence_mean"),
    "group": ("--n-samples-per-prompt 4", "--n-samples-per-prompt", "a row is an answer and a"),
}  # fmt: skip


@pytest.mark.parametrize("name", KTO_CASES)
def test_what_kto_refuses(tmp_path: Path, name: str) -> None:
    flags, flag, message = KTO_CASES[name]
    (found,) = problems_of(kto_words(tmp_path, flags))
    assert found.flag == flag and message in found.message


def test_kto_needs_a_verdict_and_other_losses_have_none(tmp_path: Path) -> None:
    argv = kto_words(tmp_path, "")
    at = argv.index("--desirable-key")
    (found,) = problems_of([*argv[:at], *argv[at + 2 :]])
    assert found.flag == "--desirable-key" and "required with --loss-type kto_loss" in found.message
    (found,) = problems_of(words(tmp_path, f"{DPO} {REF} --desirable-key chosen"))
    assert found.flag == "--desirable-key" and "only valid with" in found.message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"chosen": "2"', "missing key 'good' (--desirable-key)"),
        ('"chosen": "2", "good": "yes"', "must be true or false, or 1 or 0, not 'yes'"),
        ('"chosen": "2", "good": null', "is null"),
    ],
)
def test_a_row_without_a_verdict_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"input": "1+1=", {row}}}\n')
    config = DataConfig(prompt_data=str(path), label_key="chosen", desirable_key="good")
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptSource(config, cast(Any, None), trains_labels=True)


def test_a_rank_without_a_pair_is_refused(tmp_path: Path) -> None:
    argv = words(tmp_path, f"{DPO} {REF} --rollout-batch-size 1")
    assert any("fewer than 2 ranks" in p.message for p in problems_of(argv, world_size=2))

"""The validation table of the algorithms, row by row: each condition is made on the command line,
and the error names the flag, what was given, and the words that a user needs. The same for the
warnings, which are given once.

What the command line cannot see, because it depends on what a library caller or a recorded rollout
brings, is refused where it is first seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from slime_like.advantages import advantage_estimators, compute_advantages
from slime_like.advantages.estimate import AdvantageSettings, Outcomes, estimate_advantages
from slime_like.config import ConfigError
from slime_like.losses import (
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    compute_policy_loss,
    policy_losses,
    prescale_advantages,
    reduction_weights,
    token_weights,
)
from tests.unit.command_lines import complete

TWO_STEPS = ("--num-steps-per-rollout", "2")  # with one, there is a warning of its own
KL = "--use-kl-loss --ref-load {folder}/hf"

# row: cases of (flags, the flag that is named, its value or None, words that are told)
ROWS: dict[str, list[tuple[str, str, Any, tuple[str, ...]]]] = {
    "unknown loss": [("--policy-loss-type reinforce", "--policy-loss-type", "reinforce",
    tuple(policy_losses.names()))],
    "unknown reduction": [("--loss-reduction token_sum", "--loss-reduction", "token_sum",
    LOSS_REDUCTIONS)],
    "unknown estimator": [("--advantage-estimator grop", "--advantage-estimator", "grop",
    tuple(advantage_estimators.names()))],
    "unknown KL type": [(f"{KL} --kl-loss-type k4", "--kl-loss-type", "k4", KL_ESTIMATORS)],
    "estimator and loss contradict": [
        ("--advantage-estimator gspo --policy-loss-type cispo", "--advantage-estimator", "gspo",
         ("--policy-loss-type cispo",)),
        ("--advantage-estimator cispo --policy-loss-type sapo", "--advantage-estimator", "cispo",
         ("--policy-loss-type sapo",)),
    ],
    "tau, beta, lambda <= 0": [
        ("--policy-loss-type sapo --sapo-tau-pos 0", "--sapo-tau-pos", 0.0, ("must be > 0",)),
        ("--policy-loss-type sapo --sapo-tau-neg -1", "--sapo-tau-neg", -1.0, ("must be > 0",)),
        ("--policy-loss-type dro --dro-beta 0", "--dro-beta", 0.0, ("must be > 0",)),
        ("--policy-loss-type kimi --kimi-tau -0.1", "--kimi-tau", -0.1, ("must be > 0",)),
        ("--policy-loss-type vespo --vespo-lambda-pos 0", "--vespo-lambda-pos", 0.0,
         ("must be > 0",)),
        ("--policy-loss-type vespo --vespo-lambda-neg 0", "--vespo-lambda-neg", 0.0,
         ("must be > 0",)),
    ],
    "eps < 0": [
        ("--eps-clip -0.2", "--eps-clip", -0.2, ("must be >= 0",)),
        ("--eps-clip-high -0.2", "--eps-clip-high", -0.2, ("must be >= 0",)),
        ("--policy-loss-type gmpo --gmpo-eps-low -0.4", "--gmpo-eps-low", -0.4, ("must be >= 0",)),
        ("--policy-loss-type cispo --cispo-eps-clip-high -1", "--cispo-eps-clip-high", -1.0,
         ("must be >= 0",)),
    ],
    "eps-clip-c <= 1": [("--eps-clip-c 1", "--eps-clip-c", 1.0, ("must be > 1",))],
    "gmpo with another reduction": [
        (f"--policy-loss-type gmpo --loss-reduction {kind}"
         + (" --loss-norm-length 9" if "norm" in kind else ""),
         "--loss-reduction", kind, ("sequence_mean", "rollout_mean"))
        for kind in LOSS_REDUCTIONS if kind not in ("sequence_mean", "rollout_mean")
    ],
    "seq_mean_token_sum_norm without length": [
        ("--loss-reduction seq_mean_token_sum_norm", "--loss-norm-length", None,
         ("required", "seq_mean_token_sum_norm")),
    ],
    "token_mean_legacy with a remainder": [
        ("--loss-reduction token_mean_legacy --micro-batch-size 3", "--loss-reduction",
         "token_mean_legacy", ("use token_mean",)),
    ],
    "token_mean_legacy with dynamic batches": [
        ("--loss-reduction token_mean_legacy --use-dynamic-batch-size --max-tokens-per-gpu 100",
         "--loss-reduction", "token_mean_legacy", ("use token_mean",)),
    ],
    "--use-opd without type or teacher": [
        ("--use-opd", "--opd-type", None, ("required",)),
        ("--use-opd --opd-type megatron", "--opd-teacher-load", None, ("required",)),
    ],
    "critic settings without a critic": [
        ("--critic-lr 1e-5", "--critic-lr", None, ("--advantage-estimator ppo",)),
        ("--lambd 0.9", "--lambd", None, ("--advantage-estimator ppo",)),
    ],
    "a teacher without --use-opd": [
        ("--opd-teacher-load {folder}/hf", "--opd-teacher-load", None,
         ("without --use-opd", "add the switch")),
    ],
    "TIS with a rollout-anchored loss": [
        *[(f"--policy-loss-type {loss} {tis}", "--tis-ratio-type", kind, ("double",))
          for loss in ("rollout_is", "dppo", "cispo --cispo-anchor rollout")
          for tis, kind in (("--use-tis", "token"), ("--tis-ratio-type sequence", "sequence"))],
        ("--policy-loss-type rollout_is --use-tis --custom-tis-function-path json.dumps",
         "--tis-ratio-type", "token", ("double",)),
    ],
    "any correction with cross_entropy": [
        (f"--loss-type sft_loss {flags}", flags.split()[0], None, ("no old policy",))
        for flags in ("--sequence-mask-metric product", "--outlier-token-is-threshold-high 100",
        "--m2po-threshold 0.1", "--use-opsm",
                      "--token-mask-is-threshold-low 0.5 --token-mask-is-threshold-high 2",
                      "--tis-ratio-type token")
    ],
    "--use-rollout-logprobs with any correction": [
        (f"--use-rollout-logprobs {flags}", "--use-rollout-logprobs", None, (flags.split()[0],))
        for flags in ("--sequence-mask-metric product", "--outlier-token-is-threshold-low 1e-4",
        "--outlier-token-is-threshold-high 100",
                      "--m2po-threshold 0.1",
                      "--token-mask-is-threshold-low 0.5 --token-mask-is-threshold-high 2",
                      "--tis-ratio-type token")
    ],
    "--kl-coef and --kl-loss-coef": [(f"{KL} --kl-coef 0.1 --kl-loss-coef 0.2", "--kl-coef", 0.1,
    ("--kl-loss-coef 0.2", "choose one"))],
    "a KL without --ref-load": [
        ("--kl-coef 0.1", "--ref-load", None, ("--kl-coef",)),
        ("--use-kl-loss", "--ref-load", None, ("--use-kl-loss",)),
    ],
    "--kl-loss-coef without --use-kl-loss": [("--kl-loss-coef 0.1", "--kl-loss-coef", 0.1,
    ("--use-kl-loss", "add the switch"))],
    "reinforce_plus_plus* without --normalize-advantages": [
        (f"--advantage-estimator {name}", "--normalize-advantages", None, ("required", name))
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ],
    "rollout temperature <= 0": [
        (f"--rollout-temperature {value:g}", "--rollout-temperature", value,
         ("must be >= 1e-06",)) for value in (0.0, -1.0)
    ],
    "correction bounds": [
        ("--tis-ratio-type token --token-tis-ratio-clip-high 0", "--token-tis-ratio-clip-high", 0.0,
         ("must be > 0",)),
        ("--use-tis --tis-clip -1", "--tis-clip", -1.0, ("must be > 0",)),
        ("--tis-ratio-type sequence --sequence-tis-ratio-clip-high -1",
         "--sequence-tis-ratio-clip-high", -1.0, ("must be > 0",)),
        ("--tis-ratio-type prompt", "--tis-ratio-type", "prompt", ("token", "sequence")),
        ("--sequence-mask-metric mean", "--sequence-mask-metric", "mean", ("geometric", "product")),
        ("--token-mask-is-threshold-low 0.5", "--token-mask-is-threshold-low", 0.5,
         ("--token-mask-is-threshold-high",)),
        ("--sequence-mask-metric product --product-mask-low 3", "--product-mask-low", 3.0,
         ("--product-mask-high 2",)),
    ],
}  # fmt: skip
CASES = [(row, *case) for row, cases in ROWS.items() for case in cases]


def argv(folder: Path, flags: str) -> list[str]:
    return complete(folder, *TWO_STEPS, *flags.replace("{folder}", str(folder)).split())


@pytest.mark.parametrize(
    ("row", "flags", "flag", "value", "said"),
    CASES,
    ids=[f"{case[0]}: {case[1]}" for case in CASES],
)
def test_row(
    tmp_path: Path, row: str, flags: str, flag: str, value: Any, said: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        parse_args(argv(tmp_path, flags), 1)
    assert isinstance(caught.value, ConfigError)
    named = [
        p
        for p in caught.value.problems
        if p.flag == flag and all(words in p.message for words in said)
    ]
    assert named, caught.value
    if value is not None:
        (given,) = {p.value for p in named}
        assert given == value or str(given) == f"{value:g}", "what was given is told as it was"
        assert repr(given) in str(caught.value)


# --- what depends on the batch: a library call, a recorded rollout --------------------------------


def loss_without(name: str, missing: str) -> Callable[[], Any]:
    row = torch.zeros(1, 2)
    tensors = {
        key: row
        for key in ("advantages", "old_log_probs", "rollout_log_probs", "rewards")
        if key != missing
    }
    loss = policy_losses.get(name)
    config = loss.config_type(**({"cispo_anchor": "rollout"} if name == "cispo" else {}))
    return lambda: compute_policy_loss(name, row, row + 1, row + 1, config=config, **tensors)


def estimate(estimator: str) -> Any:
    """Of one sample with a reward, and nothing else that the estimator may need."""
    outcomes = Outcomes(
        torch.ones(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.long),
        torch.ones(1, dtype=torch.long),
    )
    return estimate_advantages(
        AdvantageSettings(estimator),
        outcomes,
        local_indices=[0],
        masks=[torch.ones(1, dtype=torch.bool)],
    )


BATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt_mean without ids": (
        lambda: reduction_weights("prompt_mean", active_tokens=torch.ones(2)), "prompt_ids"),
    "rollout_is without m": (loss_without("rollout_is", "rollout_log_probs"),
        "rollout_log_probs.*let the sampler return log-probs"),
    "cispo rollout without m": (loss_without("cispo", "rollout_log_probs"),
        "rollout_log_probs.*let the sampler return log-probs"),
    "topr without rewards": (loss_without("topr", "rewards"), "needs rewards"),
    "remax without greedy rewards": (lambda: estimate("remax"), "greedy"),
    "ppo without a critic's values": (lambda: estimate("ppo"), "values"),
    "no finite reward": (
        lambda: compute_advantages("grpo", rewards=torch.tensor([float("nan")]),
        group_ids=torch.zeros(1), lengths=torch.ones(1)), "finite",
    ),
    "token_mean_legacy with a remainder": (
        lambda: reduction_weights("token_mean_legacy", active_tokens=torch.ones(5),
        micro_batch_size=2), "use token_mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", BATCHES)
def test_row_of_a_batch(row: str) -> None:
    call, said = BATCHES[row]
    with pytest.raises(ValueError, match=said):
        call()


# --- warnings, once each --------------------------------------------------------------------------

WARNINGS: dict[str, tuple[str, str]] = {
    "sapo with token_mean": (
        "--policy-loss-type sapo --loss-reduction token_mean",
        "is meant for --loss-reduction",
    ),
    "sapo with prompt_mean": (
        "--policy-loss-type sapo --loss-reduction prompt_mean",
        "is meant for --loss-reduction",
    ),
    "gspo with token_mean": (
        "--policy-loss-type gspo --loss-reduction token_mean",
        "is meant for --loss-reduction",
    ),
    "gspo with eps 0.2": ("--policy-loss-type gspo --eps-clip 0.2", "geometric mean"),
    "gspo with a high eps": ("--policy-loss-type gspo --eps-clip-high 0.011", "geometric mean"),
    "k1 in the loss": (f"{KL} --kl-loss-coef 0.1 --kl-loss-type k1", "only noise"),
    "singleton groups": ("--n-samples-per-prompt 1", "every advantage is 0"),
    "SkyRL's deprecated use_tis": ("--trainer.algorithm.use_tis=true", "deprecated"),
}
SILENT = (
    "--policy-loss-type sapo --loss-reduction sequence_mean",
    "--policy-loss-type sapo --loss-reduction rollout_mean",
    "--policy-loss-type gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
    "--policy-loss-type sapo --advantage-estimator gspo",
    f"{KL} --kl-loss-coef 0.1",
    f"{KL} --kl-loss-coef 0.1 --kl-loss-type k1 --use-unbiased-kl",
    "--n-samples-per-prompt 1 --singleton-advantage reward",
)


@pytest.mark.parametrize("row", WARNINGS)
def test_warning(tmp_path: Path, row: str) -> None:
    flags, said = WARNINGS[row]
    found = [words for words in parse_args(argv(tmp_path, flags), 1).warnings if said in words]
    assert len(found) == 1


@pytest.mark.parametrize("flags", SILENT)
def test_no_warning(tmp_path: Path, flags: str) -> None:
    assert parse_args(argv(tmp_path, flags), 1).warnings == ()


def test_warnings_of_a_batch_are_given_once() -> None:
    """dppo that falls back to the old policy; advantages that are scaled already with a loss that
    is not homogeneous in them."""
    row, mask = torch.zeros(1, 2), torch.ones(1, 2)
    scaled = prescale_advantages("token_mean", row + 1, mask)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            compute_policy_loss(
                "dppo",
                row,
                mask,
                token_weights("token_mean", mask),
                advantages=row,
                old_log_probs=row,
            )
            compute_policy_loss(
                "kimi", row, mask, scaled.loss_weights, old_log_probs=row, **scaled.tensors
            )
            compute_policy_loss(
                "ppo", row, mask, scaled.loss_weights, old_log_probs=row, **scaled.tensors
            )
    assert sorted(str(w.message).split()[0] for w in seen) == ["dppo:", "policy"]
    assert "kimi" in " ".join(str(w.message) for w in seen)

"""On-policy distillation: the arithmetic, and its command line. Runs are in
tests/e2e/test_distillation_runs.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from arguments.parse import parse_args
from arguments.rules.distillation import server_url
from slime_like.advantages import AdvantageSettings, Outcomes, estimate_advantages, teacher_gaps
from tests.unit.command_lines import HF_CONFIG, assert_refused, complete, problems_of, refused

STEPS = ("--num-steps-per-rollout", "2")
MASKS = [
    torch.tensor([True, False, True]),
    torch.tensor([True, True]),
    torch.tensor([False]),
    torch.tensor([True]),
]
OLD = [
    torch.tensor([-1.0, math.nan, -3.0]),
    torch.tensor([-0.5, -2.0]),
    torch.tensor([-1.0]),
    torch.tensor([-4.0]),
]
TEACHER = [
    torch.tensor([-2.0, -math.inf, -1.0]),
    torch.tensor([-0.5, -1.0]),
    torch.tensor([-9.0]),
    torch.tensor([-3.0]),
]
REWARDS = [1.0, 0.0, 0.5, 0.0]


def outcomes() -> Outcomes:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    return Outcomes(
        rewards=rewards,
        group_ids=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([int(m.sum()) for m in MASKS]),
    )


def estimate(**settings: object) -> tuple[list[list[float]], dict[str, float]]:
    output = estimate_advantages(
        AdvantageSettings("grpo", normalize_std=False, **settings),  # type: ignore[arg-type]
        outcomes(),
        local_indices=range(4),
        masks=MASKS,
        teacher_gap=teacher_gaps(OLD, TEACHER, MASKS),
    )
    return [value.tolist() for value in output.values], dict(output.metrics)


def test_the_gap_weighs_less_the_further_the_response_has_gone() -> None:
    """IW-OPD, algorithm 1, by a loop over active tokens; without a gap nothing weighs."""
    g = torch.Generator().manual_seed(1)
    masks = [torch.rand(9, generator=g) < 0.7 for _ in range(4)]
    old, teacher = (
        [-torch.rand(9, generator=g, dtype=torch.float64) for _ in masks] for _ in range(2)
    )
    teacher[2] = old[2]
    rewards = outcomes()
    batch = Outcomes(
        rewards.rewards, rewards.group_ids, torch.tensor([int(m.sum()) for m in masks])
    )
    plain, weighted = (
        estimate_advantages(
            AdvantageSettings("grpo", distillation_coef=0.7, prefix_gamma=gamma),
            batch,
            local_indices=range(4),
            masks=masks,
            teacher_gap=teacher_gaps(old, teacher, masks),
        )
        for gamma in (0.0, 0.5)
    )
    assert plain.metrics == weighted.metrics, "the reported KL has no weights"
    for i, mask in enumerate(masks):
        active = mask.nonzero().squeeze(1).tolist()
        sizes = [abs(float(teacher[i][t] - old[i][t])) for t in active]
        for place, t in enumerate(active):
            before = sum(sizes[:place]) / sum(sizes) if sum(sizes) else 0.0
            added = 0.7 * 0.5 * (1 - before) * float(teacher[i][t] - old[i][t])
            assert float(weighted.values[i][t]) == pytest.approx(
                float(plain.values[i][t]) + added, abs=1e-6
            )
        assert not weighted.values[i][~mask].any()
    assert not torch.allclose(plain.values[0], weighted.values[0])


def test_the_gap_comes_off_each_active_token() -> None:
    """A = (R - mean) - coef (old - teacher), written out."""
    values, metrics = estimate(distillation_coef=2.0)
    assert values[0] == pytest.approx([0.5 - 2 * (-1.0 + 2.0), 0.0, 0.5 - 2 * (-3.0 + 1.0)])
    assert values[1] == pytest.approx([-0.5 - 2 * 0.0, -0.5 - 2 * (-2.0 + 1.0)])
    assert values[2] == [0.0], "nothing is trained there"
    assert values[3] == pytest.approx([-0.25 - 2 * (-4.0 + 3.0)])
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx((1.0 - 2.0 + 0.0 - 1.0 - 1.0) / 5)
    assert metrics["rollout/opd_nonfinite"] == 0


def test_whitening_comes_after() -> None:
    plain, _ = estimate(distillation_coef=2.0)
    active = torch.tensor(
        [v for value, mask in zip(plain, MASKS) for v, m in zip(value, mask.tolist()) if m],
        dtype=torch.float64,
    )
    wanted = (active - active.mean()) / (active.var() + 1e-8).sqrt()
    values, _ = estimate(distillation_coef=2.0, normalize=True)
    found = [v for value, mask in zip(values, MASKS) for v, m in zip(value, mask.tolist()) if m]
    assert found == pytest.approx(wanted.tolist(), rel=1e-5)


def test_a_token_that_the_teacher_cannot_say_leaves_its_sample_out() -> None:
    broken = [TEACHER[0], torch.tensor([-0.5, -math.inf]), *TEACHER[2:]]
    output = estimate_advantages(
        AdvantageSettings("grpo", normalize=True, distillation_coef=1.0),
        outcomes(),
        local_indices=range(4),
        masks=MASKS,
        teacher_gap=teacher_gaps(OLD, broken, MASKS),
    )
    assert output.values[1].tolist() == [0.0, 0.0] and all(
        bool(torch.isfinite(v).all()) for v in output.values
    )
    assert output.metrics["rollout/opd_nonfinite"] == 1 and math.isfinite(
        output.metrics["rollout/opd_reverse_kl"]
    )


def teacher(folder: Path, **changes: object) -> str:
    path = folder / "teacher"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    return str(path)


def distil(folder: Path, *more: str, **changes: object) -> list[str]:
    return complete(
        folder,
        *STEPS,
        "--use-opd",
        "--opd-type",
        "megatron",
        "--opd-teacher-load",
        teacher(folder, **changes),
        *more,
    )


def test_a_teacher_of_another_shape(tmp_path: Path) -> None:
    config = parse_args(
        distil(
            tmp_path,
            "--opd-kl-coef",
            "0.5",
            num_hidden_layers=6,
            hidden_size=96,
            num_attention_heads=6,
            vocab_size=384,
        ),
        1,
    )
    assert (
        config.distillation.opd_kl_coef == 0.5
        and config.teacher is not None
        and config.warnings == ()
    )
    shape = config.teacher.transformer
    assert (
        shape.num_layers,
        shape.hidden_size,
        shape.num_attention_heads,
        config.teacher.gpt.vocab_size,
    ) == (6, 96, 6, 384)
    assert (config.megatron.transformer.num_layers, config.gpt.vocab_size) == (4, 320), (
        "the policy keeps its own"
    )


def test_pure_distillation_needs_one_sample_of_a_prompt_and_no_reward(tmp_path: Path) -> None:
    config = parse_args(distil(tmp_path, "--rm-type", "zero", "--n-samples-per-prompt", "1"), 1)
    assert config.reward.rm_type == "zero" and config.warnings == ()
    alone = parse_args(complete(tmp_path, *STEPS, "--rm-type", "zero"), 1)
    assert len(alone.warnings) == 1 and "nothing to learn" in alone.warnings[0]


SERVED = "--use-opd --opd-type sglang --opd-teacher-url http://10.0.0.7:30000 "
SELF = "--use-opd --opd-type self --opd-demonstration-key label "
# name of the rule; flags; the flag that is named; words
REFUSED = [
    ("", "--use-opd", "--opd-type", "required"),
    ("", "--use-opd --opd-type megatron", "--opd-teacher-load", "required"),
    ("", "--opd-teacher-load {folder}/hf", "--opd-teacher-load", "--use-opd"),
    ("", "--opd-kl-coef 2", "--opd-kl-coef", "--use-opd"),
    ("", "--use-opd --loss-type sft_loss", "--use-opd", "sft_loss"),
    ("check_teacher_model", "--use-opd --opd-type megatron --opd-teacher-load {folder}/nowhere",
     "--opd-teacher-load", "config.json"),
    ("check_teacher_servers", "--use-opd --opd-type sglang", "--opd-teacher-url", "required"),
    ("check_teacher_servers", "--use-opd --opd-type sglang --opd-teacher-url 10.0.0.7:30000",
     "--opd-teacher-url", "must be http://host:port"),
    ("", SERVED + "--opd-teacher-load {folder}/hf", "--opd-teacher-load",
     "--opd-type sglang, whose servers --opd-teacher-url names"),
    ("check_teacher_servers",
     "--use-opd --opd-type megatron --opd-teacher-load {folder}/hf --opd-teacher-timeout-s 5",
     "--opd-teacher-timeout-s", "--opd-type megatron"),
    ("", SERVED + "--rollout-temperature 0.7", "--rollout-temperature",
     "must be 1"),
    ("", SERVED + "--rollout-top-k 5 --renormalize-sampled-log-probs",
     "--renormalize-sampled-log-probs", "--opd-type sglang"),
    ("check_slime_opd_reward", "--custom-rm-path slime.rollout.on_policy_distillation.reward_func",
     "--custom-rm-path", "is built in"),
    ("check_self_teacher_context", "--use-opd --opd-type self", "--opd-type",
     "--opd-success-reward"),
    (
        "check_self_teacher_context",
        SELF.replace("--opd-demonstration-key label", "--opd-success-reward 1")
        + "--n-samples-per-prompt 1",
        "--opd-type",
        "--n-samples-per-prompt above 1",
    ),
    ("check_self_teacher_context", SELF + "--opd-prompt-template {demonstration}",
     "--opd-prompt-template", "must contain {prompt}"),
    ("check_self_teacher", SELF + "--lora-rank 4", "--opd-self-teacher",
     "legal values: live, base"),
    ("", SELF + "--opd-topk 321", "--opd-topk", "320"),
    ("", SELF + "--opd-topk 8 --use-rollout-logprobs", "--opd-topk", "--use-rollout-logprobs"),
    ("", SELF + "--opd-teacher-load {folder}/hf", "--opd-teacher-load", "--opd-type self"),
    ("", SELF + "--opd-self-teacher live --opd-ema-rate 0.1", "--opd-ema-rate", "ema"),
    ("", "--use-opd --opd-type megatron --opd-teacher-load {folder}/hf --opd-success-reward 1",
     "--opd-success-reward", "--opd-type self"),
    ("", "--use-opd --opd-type megatron --opd-teacher-load {folder}/hf --opd-kl-coef 0",
     "--opd-kl-coef", "> 0"),
    ("", "--opd-teacher-ckpt-step 3", "--opd-teacher-ckpt-step", "--opd-teacher-load"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    words = row[1].replace("{folder}", str(tmp_path)).split()
    assert_refused(problems_of(complete(tmp_path, *STEPS, *words)), row)


def test_a_teacher_of_itself_needs_rows(tmp_path: Path) -> None:
    argv = complete(tmp_path, *STEPS, *SELF.split(), "--data-source-path", "a.b")
    assert any("rows of --prompt-data" in str(p) for p in problems_of(argv))


@pytest.mark.parametrize(
    "flags",
    [
        "--opd-teacher-url http://10.0.0.7:30000 http://[::1]:9",
        "--rm-url http://10.0.0.7:30000/generate",
    ],
)
def test_the_address_of_a_served_teacher(tmp_path: Path, flags: str) -> None:
    """Ours, several servers; or slime's --rm-url, with any reward that is not one of a server."""
    config = parse_args(
        complete(tmp_path, *STEPS, "--use-opd", "--opd-type", "sglang", *flags.split()), 1
    ).distillation
    assert (
        config.served
        and config.opd_teacher_url is not None
        and server_url(config.opd_teacher_url[0]) == "http://10.0.0.7:30000"
    )


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        (
            dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=96),
            "--tensor-model-parallel-size 2",
            "3 attention heads",
        ),
        (dict(num_hidden_layers=5), "--pipeline-model-parallel-size 2", "5 layers"),
        (dict(vocab_size=100), "", "100 tokens"),
        (dict(hidden_act="relu"), "", "hidden_act 'relu'"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, object], flags: str, message: str
) -> None:
    found = problems_of(distil(tmp_path, *flags.split(), **changes), 2 if flags else 1)
    assert {p.flag for p in found} == {"--opd-teacher-load"} and any(
        message in str(p) for p in found
    )

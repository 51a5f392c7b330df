"""--renormalize-sampled-log-probs: trainer and sampler agree under top-k and top-p, in every pass and
layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of, sampled
from tests.e2e.programs import TrainServer

TEMPLATE = "rollout_{rollout_id}"
TRUNCATED = {
    "top-k": {"rollout_top_k": 5},
    "top-p": {"rollout_top_p": 0.6},
    "both": {"rollout_top_k": 9, "rollout_top_p": 0.8},
}
LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2": "--context-parallel-size 2",
    "DP2": "--use-dynamic-batch-size --max-tokens-per-gpu 100",
}
DIFFERENCE = "rollout/train_rollout_log_prob_diff_mean"


def flags(work: Workspace, out: Path, **changes: str | int | float | Path | None) -> list[str]:
    """With a reference that is the initial policy, so that the gate of the first step sees whether
    both are over the same tokens."""
    settings = dict(
        rollout_temperature=0.8, policy_loss_type="ppo", use_kl_loss="", kl_loss_coef=0.05, ref_load=work.model, entropy_coef=0.01,
        save_debug_rollout_data=out / TEMPLATE, renormalize_sampled_log_probs="", max_train_rollout_diff=1e-4,
        train_rollout_diff_patience=1,
    )  # fmt: skip
    return work.flags(out, **(settings | changes))


@pytest.fixture(scope="module")
def one(server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sets")
    server.train(flags(work, out, rollout_top_k=9, rollout_top_p=0.8), out / "log").ok()
    return out


@pytest.mark.parametrize("kind", [pytest.param("top-k", marks=pytest.mark.extended), "top-p"])
def test_trainer_and_sampler_agree(
    server: TrainServer, work: Workspace, tmp_path: Path, kind: str
) -> None:
    done = server.train(flags(work, tmp_path / "with", **TRUNCATED[kind]), tmp_path / "log").ok()
    assert "warning" not in done.out
    for row in rows_of(tmp_path / "with"):
        assert row[DIFFERENCE] < 1e-5
        assert row["train/grad_norm"] > 1e-3 and row["train/entropy"] > 0.1
    sets = [
        s.sampling_mask
        for g in load_rollout(str(tmp_path / "with" / TEMPLATE), 1)
        for s in g.samples
    ]
    sizes = torch.cat([(ids >= 0).sum(1) for ids in sets if ids is not None])
    assert (sizes == 5).all() if kind == "top-k" else sizes.unique().numel() > 3

    without = flags(
        work,
        tmp_path / "without",
        **TRUNCATED[kind],
        renormalize_sampled_log_probs=None,
        max_train_rollout_diff=None,
        num_rollout=1,
    )
    done = server.train(without, tmp_path / "log2").ok()
    assert "--renormalize-sampled-log-probs" in done.out  # in the warning
    # the same responses, whose log-probs were higher by the mass outside of the sets
    assert sampled(tmp_path / "with" / TEMPLATE, 0) == sampled(tmp_path / "without" / TEMPLATE, 0)
    renormalized, full_run = (
        torch.cat(
            [
                s.rollout_log_probs
                for g in load_rollout(str(tmp_path / name / TEMPLATE), 0)
                for s in g.samples
            ]
        )
        for name in ("with", "without")
    )
    assert (renormalized - full_run).min() > -1e-6 and (renormalized - full_run).mean() > 0.1


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(
    server: TrainServer, work: Workspace, one: Path, tmp_path: Path, layout: str
) -> None:
    dynamic = {"micro_batch_size": None} if layout == "DP2" else {}
    argv = flags(work, tmp_path, **TRUNCATED["both"], **dynamic)
    server.train([*argv, *LAYOUTS[layout].split()], tmp_path / "log", ranks=2).ok()
    for rollout in range(2):
        assert sampled(tmp_path / TEMPLATE, rollout) == sampled(one / TEMPLATE, rollout)
    for actual, base in zip(rows_of(tmp_path), rows_of(one), strict=True):
        assert actual[DIFFERENCE] < 1e-5
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy"):
            assert actual[name] == pytest.approx(base[name], rel=1e-4, abs=1e-6), name


def test_recorded_sets_train_alike_and_are_not_dropped(
    server: TrainServer, work: Workspace, one: Path, tmp_path: Path
) -> None:
    replay = dict(
        debug_train_only="", load_debug_rollout_data=one / TEMPLATE, save_debug_rollout_data=None, prompt_data=None, custom_rm_path=None,
        rm_num_workers=None,
    )  # fmt: skip
    server.train(flags(work, tmp_path, **TRUNCATED["both"], **replay), tmp_path / "log").ok()
    assert [row["train/loss"] for row in rows_of(tmp_path)] == [
        row["train/loss"] for row in rows_of(one)
    ]
    argv = flags(
        work, tmp_path / "b", **TRUNCATED["both"], **replay, renormalize_sampled_log_probs=None
    )
    assert (
        "was recorded with --renormalize-sampled-log-probs"
        in server.train(argv, tmp_path / "log2").error()
    )


def test_a_teacher_is_restricted_too(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """The initial policy is its own teacher: over the same tokens, there is nothing to learn in the
    first rollout."""
    argv = flags(
        work,
        tmp_path,
        rollout_top_k=5,
        num_rollout=1,
        use_opd="",
        opd_type="megatron",
        opd_teacher_load=work.model,
    )
    server.train(argv, tmp_path / "log").ok()
    (row,) = rows_of(tmp_path)
    assert abs(row["rollout/opd_reverse_kl"]) < 1e-6

"""fp16 through train.py: the loss scale and what it skipped are in the metrics of policy and critic,
resumed runs go on with it, and a scale that can't be found stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.programs import TrainServer

PPO: dict[str, Any] = dict(
    advantage_estimator="ppo", use_distributed_optimizer="", max_train_rollout_diff=1
)


def fp16(**scale: object) -> list[str]:
    return ["--allow-untested", "fp16:true", *(f"{k}:{v}" for k, v in scale.items())]


def test_an_overflow_is_counted_and_a_resumed_run_keeps_the_scale(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    scale = fp16(initial_loss_scale=2**30, hysteresis=1)
    flags = dict(max_consecutive_skipped_steps=30, lr_decay_iters=6, **PPO)
    whole, parts, saved = (tmp_path / name for name in ("whole", "parts", "saved"))
    done = server.train([*work.flags(whole, num_rollout=3, **flags), *scale], whole / "log").ok()
    rows = rows_of(whole)
    for prefix in ("", "critic_"):
        skipped = [row[f"train/{prefix}skipped_steps"] for row in rows]
        scales = [row[f"train/{prefix}loss_scale"] for row in rows]
        assert skipped[-1] > 0
        assert scales == [2.0 ** (30 - count) for count in skipped], "halved once a skipped step"
    assert "optimizer step skipped" in done.out + done.err
    assert "the loss scale is 5.36871e+08 now" in done.out + done.err
    for rollouts in (1, 3):  # the first saves before a step is taken
        words = work.flags(
            parts, num_rollout=rollouts, save=saved, load=saved, save_interval=1, **flags
        )
        server.train([*words, *scale], parts / f"log{rollouts}").ok()

    # as text: norms of skipped steps are NaN
    assert repr(same_numbers(rows_of(parts))) == repr(same_numbers(rows))
    for name in ("train/loss_scale", "train/critic_loss_scale", "train/skipped_steps"):
        assert [row[name] for row in rows_of(parts)] == [row[name] for row in rows]


def test_without_overflows_the_run_is_that_of_float32_in_half_precision(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    found = {}
    for name, words in (("fp16", fp16()), ("float32", [])):
        out = tmp_path / name
        server.train([*work.flags(out, num_rollout=1, **PPO), *words], out / "log").ok()
        (found[name],) = rows_of(out)
    assert found["fp16"]["train/skipped_steps"] == 0
    assert found["fp16"]["train/loss_scale"] == found["fp16"]["train/critic_loss_scale"] == 2**16
    assert "train/loss_scale" not in found["float32"]
    for name in ("train/grad_norm", "train/critic_grad_norm", "train/value_loss"):
        assert abs(found["fp16"][name] / found["float32"][name] - 1) < 0.01, name


def test_a_scale_that_always_overflows_stops_the_run(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    words = [*work.flags(tmp_path, num_rollout=5), "--max-train-rollout-diff", "1"]
    done = server.train([*words, *fp16(loss_scale=2**60)], tmp_path / "log")
    assert done.status != 0
    said = done.out + done.err
    assert "3 in a row, 3 in total" in said
    assert "the loss scale is 1.15292e+18 now; see --max-consecutive-skipped-steps" in said


def test_a_run_in_another_layout_goes_on_with_the_scale(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    scale = fp16(initial_loss_scale=2**30, hysteresis=1)
    flags = dict(max_consecutive_skipped_steps=30, save=tmp_path / "saved", load=tmp_path / "saved")
    words = work.flags(tmp_path, num_rollout=1, max_train_rollout_diff=1, **flags)
    server.train([*words, *scale], tmp_path / "one").ok()
    words = work.flags(tmp_path, num_rollout=2, max_train_rollout_diff=1, **flags)
    tp2 = ["--tensor-model-parallel-size", "2"]
    server.train([*words, *scale, *tp2], tmp_path / "two", ranks=2).ok()
    first, second = rows_of(tmp_path)
    assert first["train/skipped_steps"] > 0
    for row in (first, second):
        assert row["train/loss_scale"] == 2.0 ** (30 - row["train/skipped_steps"])

"""A run that is killed and taken up ends as one that was not: bit by bit in the same layout, up to the order of sums in another one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.layouts import LAYOUTS
from tests.e2e.programs import TrainServer

FAST = ("one process", "DP2 distributed optimizer")
FAST_CHANGES = (("one process", "TP2"), ("TP2", "DP2 distributed optimizer"), ("DP2 distributed optimizer", "PP2"), ("PP2", "one process"))
SCHEDULE = dict(lr_decay_style="linear", lr_decay_iters=14, lr_warmup_iters=1, weight_decay=0.1)
ADAPTIVE_KL = dict(
    advantage_estimator="reinforce_plus_plus", normalize_advantages="", kl_coef=0.05, kl_ctrl_type="adaptive", kl_horizon=100
)


def slow_unless(fast: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if fast else (pytest.mark.slow,)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=slow_unless(name in FAST)) for name in LAYOUTS])
def test_three_a_kill_and_three_are_six(server: TrainServer, work: Workspace, tmp_path: Path, layout: str) -> None:
    """Reinforcement learning with an adaptive KL penalty; SIGKILL to the last rank within the fifth rollout. Weights, sampled tokens and
    numbers of all six rollouts, and with them the first gradient norm after the resume."""
    extra, ranks = LAYOUTS[layout]

    def argv(out: Path, **changes: str | int | Path) -> list[str]:
        kept = {"save_debug_rollout_data": out / "rollout_{rollout_id}", "save_hf": out / "hf", "num_rollout": 6, "ref_load": work.model}
        return [*work.flags(out, **{**SCHEDULE, **ADAPTIVE_KL, **kept, **changes}), *extra.split()]  # type: ignore[arg-type]

    whole, parts, root = tmp_path / "whole", tmp_path / "parts", tmp_path / "checkpoints"
    server.train(argv(whole), tmp_path / "log1", ranks=ranks).ok()
    again = argv(parts, save=root, load=root, save_interval=3)
    killed = server.train(again, tmp_path / "log2", ranks=ranks, hook=f"tests.e2e.faults:signal_in_step SIGKILL 9 {ranks - 1}")
    assert killed.status in (-signal.SIGKILL, 1)
    assert [row["step"] for row in rows_of(parts)] == [1, 2, 3, 4]
    server.train(again, tmp_path / "log3", ranks=ranks).ok()
    numbers, found = same_numbers(rows_of(whole)), same_numbers(rows_of(parts))
    assert len({row["train/lr"] for row in numbers}) == 6, "a schedule that stands still would hide a lost position"
    assert min(row["train/grad_norm"] for row in numbers) > 1e-3
    assert found == numbers
    for rollout in range(6):
        assert sampled(parts / "rollout_{rollout_id}", rollout) == sampled(whole / "rollout_{rollout_id}", rollout)
    expected, ended = weights_of(whole / "hf"), weights_of(parts / "hf")
    assert [name for name in expected if not torch.equal(expected[name], ended[name])] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and checkpoints that the tests below share, made by the first that needs one."""
    return tmp_path_factory.mktemp("layouts")


def supervised(work: Workspace, out: Path, layout: str, **changes: str | int | Path) -> list[str]:
    values = {
        **SCHEDULE, "num_steps_per_rollout": 1, "loss_type": "sft_loss", "policy_loss_type": None, "n_samples_per_prompt": None,
        "custom_rm_path": None, "rm_num_workers": None, "rollout_max_response_len": 64, "micro_batch_size": 2,
    }  # fmt: skip
    return [*work.flags(out, **{**values, **changes}), *LAYOUTS[layout][0].split()]  # type: ignore[arg-type]


def checkpoints_of(server: TrainServer, work: Workspace, folder: Path, layout: str) -> Path:
    name = layout.replace(" ", "-")
    root = folder / name
    if not root.exists():
        argv = supervised(work, folder / f"{name}-first", layout, num_rollout=3, save=root)
        server.train(argv, folder / f"{name}-log", ranks=LAYOUTS[layout][1]).ok()
    return root


def whole_run(server: TrainServer, work: Workspace, folder: Path) -> list[dict[str, float]]:
    out = folder / "whole"
    if not out.exists():
        server.train(supervised(work, out, "one process", num_rollout=6), folder / "whole-log").ok()
    return rows_of(out)


CHANGES = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]


@pytest.mark.parametrize(("before", "after"), [pytest.param(a, b, marks=slow_unless((a, b) in FAST_CHANGES)) for a, b in CHANGES])
def test_into_another_layout(server: TrainServer, work: Workspace, folder: Path, tmp_path: Path, before: str, after: str) -> None:
    """The three steps after the change are those of one process that never stopped, up to the order of sums."""
    root = checkpoints_of(server, work, folder, before)
    ranks = LAYOUTS[after][1]
    done = server.train(supervised(work, tmp_path, after, num_rollout=6, load=root), tmp_path / "log", ranks=ranks).ok()
    same_world = LAYOUTS[before][1] == ranks and ("parallel-size" in LAYOUTS[before][0] + LAYOUTS[after][0]) is False
    assert ("the checkpoint's random states are for" in done.out) is not same_world
    expected = {int(row["step"]): row for row in whole_run(server, work, folder)}
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [4, 5, 6]
    for row in rows:
        other = expected[int(row["step"])]
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert row[name] == pytest.approx(other[name], rel=2e-4), (row["step"], name)


def test_without_random_states_there_is_no_warning(server: TrainServer, work: Workspace, folder: Path, tmp_path: Path) -> None:
    root = checkpoints_of(server, work, folder, "TP2")
    argv = supervised(work, tmp_path, "one process", num_rollout=4, load=root, no_load_rng="")
    assert "warning" not in server.train(argv, tmp_path / "log").ok().out


def test_a_reference_from_a_checkpoint(server: TrainServer, work: Workspace, folder: Path, tmp_path: Path) -> None:
    """--ref-load of checkpoints: the KL of a policy to itself vanishes, and to the first model it does not."""
    root = checkpoints_of(server, work, folder, "TP2")
    kl = dict(load=root, finetune="", use_kl_loss="", kl_loss_coef=0.1, num_rollout=1, num_steps_per_rollout=1)
    server.train(work.flags(tmp_path / "same", ref_load=root, ref_ckpt_step=3, **kl), tmp_path / "log1").ok()  # type: ignore[arg-type]
    server.train(work.flags(tmp_path / "other", ref_load=work.model, **kl), tmp_path / "log2").ok()  # type: ignore[arg-type]
    assert abs(rows_of(tmp_path / "same")[0]["train/kl"]) < 1e-9
    assert rows_of(tmp_path / "other")[0]["train/kl"] > 1e-5

"""Self-distillation through train.py: the policy learns what it says when it is shown more."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer


def sdft(work: Workspace, out: Path, **changes: Any) -> list[str]:
    """Demonstrations of the data, the whole distribution, no reward."""
    settings = dict(
        use_opd="", opd_type="self", opd_demonstration_key="answer", opd_topk=32, opd_self_teacher="base", rm_type="zero",
        custom_rm_path=None, rollout_batch_size=16, n_samples_per_prompt=2, micro_batch_size=8, num_steps_per_rollout=1,
        policy_loss_type="importance_sampling", loss_reduction="token_mean", lr=1e-3,
    )  # fmt: skip
    return work.flags(out, **(settings | changes))


def sdpo(work: Workspace, out: Path, **changes: Any) -> list[str]:
    """Successful responses of the group, with the sampled token alone; the policy loss has the
    teacher alone."""
    settings = dict(
        use_opd="", opd_type="self", opd_success_reward=0.5, opd_only="", num_steps_per_rollout=2,
        policy_loss_type="importance_sampling", loss_reduction="token_mean",
    )  # fmt: skip
    return work.flags(out, **(settings | changes))


def test_the_policy_learns_what_its_teacher_was_shown(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    server.train(sdft(work, tmp_path, num_rollout=8), tmp_path / "log").ok()
    rows = rows_of(tmp_path)
    gaps = [row["train/opd_divergence"] for row in rows]
    assert all(row["rollout/opd_untaught"] == 0 == row["train/policy_loss"] for row in rows)
    assert sum(gaps[-2:]) / 2 < 0.5 * gaps[0], gaps


LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "CP2": "--context-parallel-size 2",
    "DP2": "",
}


@pytest.mark.extended
@pytest.mark.parametrize("recipe", [sdft, sdpo])
def test_every_layout_trains_alike(
    server: TrainServer, work: Workspace, tmp_path: Path, recipe: Any
) -> None:
    """Groups are sampled on two ranks then, which show each other what succeeded."""
    alone = tmp_path / "alone"
    server.train(recipe(work, alone), alone / "log").ok()
    for name, flags in LAYOUTS.items():
        out = tmp_path / name
        server.train([*recipe(work, out), *flags.split()], out / "log", ranks=2).ok()
        for one, two in zip(rows_of(alone), rows_of(out), strict=True):
            for metric in ("rollout/opd_reverse_kl", "train/loss", "train/grad_norm"):
                assert two[metric] == pytest.approx(one[metric], rel=5e-4, abs=1e-6), (name, metric)
            assert two["rollout/opd_untaught"] == one["rollout/opd_untaught"]


@pytest.mark.extended
@pytest.mark.parametrize("teacher", ["base", "live"])
def test_an_adapter_teaches_itself(
    server: TrainServer, work: Workspace, tmp_path: Path, teacher: str
) -> None:
    """Or the model without it does; both say the same before the first step."""
    line = sdft(work, tmp_path, lora_rank=4, opd_self_teacher=teacher, num_rollout=4)
    server.train(line, tmp_path / "log").ok()
    gaps = [row["train/opd_divergence"] for row in rows_of(tmp_path)]
    assert 0 < gaps[-1] < gaps[0], gaps


@pytest.mark.extended
def test_the_average_of_the_weights_is_resumed(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """In bf16, where it is kept in float32; with sampling ahead of the training. Both runs save
    after each rollout, which waits for the sampling ahead: otherwise new weights take effect
    wherever in a response the sampling has got to."""
    flags = dict(
        bf16="", opd_ema_rate=0.3, num_rollout=5, async_rollout="", max_staleness=1, save_interval=1
    )
    full_run = tmp_path / "whole"
    line = sdpo(work, full_run, **flags, save=tmp_path / "whole_c", save_hf=tmp_path / "whole_hf")
    server.train(line, tmp_path / "log1").ok()
    root, parts = tmp_path / "checkpoints", tmp_path / "parts"
    again = sdpo(work, parts, **flags, save=root, load=root, save_hf=tmp_path / "hf")
    killed = server.train(
        again, tmp_path / "log2", hook="tests.e2e.faults:signal_in_step SIGKILL 5 0"
    )
    assert killed.status in (-signal.SIGKILL, 1)
    server.train(again, tmp_path / "log3").ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows_of(full_run))
    gaps = [[row["rollout/opd_reverse_kl"] for row in rows_of(out)] for out in (parts, full_run)]
    assert gaps[0] == gaps[1]
    expected, found = weights_of(tmp_path / "whole_hf"), weights_of(tmp_path / "hf")
    assert all(bool((expected[name] == found[name]).all()) for name in expected)

"""A run that is killed and taken up ends as one that was not: bit by bit in the same layout, up to
the order of sums in another one."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.layouts import KINDS, MEMORY
from tests.e2e.programs import TrainServer

FAST = (("dense", "one process"),)
EXTENDED = (("dense", "DP2 distributed optimizer"),)
FAST_CHANGES = (("dense", "TP2", "DP2 distributed optimizer"),)
EXTENDED_CHANGES = (
    ("dense", "one process", "TP2"),
    ("dense", "DP2 distributed optimizer", "PP2"),
    ("dense", "PP2 VP2, written out", "CP2"),
    ("experts", "EP2 distributed optimizer", "one process"),
)
SCHEDULE = dict(lr_decay_style="linear", lr_decay_iters=14, lr_warmup_iters=1, weight_decay=0.1)
ADAPTIVE_KL = dict(
    advantage_estimator="reinforce_plus_plus",
    normalize_advantages="",
    kl_coef=0.05,
    kl_ctrl_type="adaptive",
    kl_horizon=100,
)
PPO = dict(
    advantage_estimator="ppo", policy_loss_type="ppo", normalize_advantages="", lambd=0.95, gamma=0.99, critic_lr=2e-3, value_clip=0.05,
    critic_lr_warmup_iters=1,
)  # fmt: skip
SUPERVISED = {
    "num_steps_per_rollout": 1, "loss_type": "sft_loss", "policy_loss_type": None, "n_samples_per_prompt": None,
    "custom_rm_path": None, "rm_num_workers": None, "rollout_max_response_len": 64, "micro_batch_size": 2,
}  # fmt: skip
OF_THE_CRITIC = (
    "train/value_loss",
    "train/critic_grad_norm",
    "train/critic_lr",
    "rollout/values_mean",
)


def marks_of(fast: bool, extended: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if fast else (pytest.mark.extended if extended else pytest.mark.slow,)


def flags(work: Workspace, out: Path, kind: str, layout: str, **changes: Any) -> list[str]:
    """A run of `kind` in `layout`."""
    own = {"hf_checkpoint": work.expert_model, "micro_batch_size": 1} if kind == "experts" else {}
    return [*work.flags(out, **{**SCHEDULE, **changes, **own}), *KINDS[kind][layout][0].split()]


def numbers_of(out: Path, kind: str) -> list[dict[str, float]]:
    """What must be equal, of each rollout."""
    rows = rows_of(out)
    more = OF_THE_CRITIC if kind == "critic" else ()
    return [
        same | {name: row[name] for name in more}
        for same, row in zip(same_numbers(rows), rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=marks_of((kind, name) in FAST, (kind, name) in EXTENDED))
        for kind, layouts in KINDS.items()
        for name in layouts
    ],
)
def test_three_a_kill_and_three_are_six(
    server: TrainServer, work: Workspace, tmp_path: Path, kind: str, layout: str
) -> None:
    """Reinforcement learning with an adaptive KL penalty, or PPO with a critic; SIGKILL to the last
    rank within the fifth rollout. Weights, sampled tokens and numbers of all six rollouts, and with
    them the first gradient norm after the resume."""
    ranks = KINDS[kind][layout][1]

    def argv(out: Path, **changes: Any) -> list[str]:
        model = work.expert_model if kind == "experts" else work.model
        own = PPO if kind == "critic" else {**ADAPTIVE_KL, "ref_load": model}
        kept = {
            "save_debug_rollout_data": out / "rollout_{rollout_id}",
            "save_hf": out / "hf",
            "num_rollout": 6,
        }
        return flags(work, out, kind, layout, **{**own, **kept, **changes})

    full_run, parts, root = tmp_path / "whole", tmp_path / "parts", tmp_path / "checkpoints"
    server.train(argv(full_run), tmp_path / "log1", ranks=ranks).ok()
    again = argv(parts, save=root, load=root, save_interval=3)
    killed = server.train(
        again,
        tmp_path / "log2",
        ranks=ranks,
        hook=f"tests.e2e.faults:signal_in_step SIGKILL 9 {ranks - 1}",
    )
    assert killed.status in (-signal.SIGKILL, 1)
    assert [row["step"] for row in rows_of(parts)] == [1, 2, 3, 4]
    server.train(again, tmp_path / "log3", ranks=ranks).ok()
    numbers, found = numbers_of(full_run, kind), numbers_of(parts, kind)
    assert len({row["train/lr"] for row in numbers}) == 6, (
        "a schedule that stands still would hide a lost position"
    )
    assert min(row["train/grad_norm"] for row in numbers) > 1e-3
    assert found == numbers
    for rollout in range(6):
        assert sampled(parts / "rollout_{rollout_id}", rollout) == sampled(
            full_run / "rollout_{rollout_id}", rollout
        )
    expected, ended = weights_of(full_run / "hf"), weights_of(parts / "hf")
    assert [name for name in expected if not torch.equal(expected[name], ended[name])] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and checkpoints that the tests below share, made by the first that needs one."""
    return tmp_path_factory.mktemp("layouts")


def steady(work: Workspace, out: Path, kind: str, layout: str, **changes: Any) -> list[str]:
    """A run whose numbers depend on its layout by rounding only: supervised, or, with a critic, on
    recorded rollouts."""
    own = PPO if kind == "critic" else SUPERVISED
    return flags(work, out, kind, layout, **{**own, **changes})


def checkpoints_of(
    server: TrainServer, work: Workspace, folder: Path, kind: str, layout: str
) -> Path:
    name = f"{kind}-{layout}".replace(" ", "-")
    root = folder / name
    if not root.exists():
        more = replayed(server, work, folder) if kind == "critic" else {}
        argv = steady(
            work, folder / f"{name}-first", kind, layout, num_rollout=3, save=root, **more
        )
        server.train(argv, folder / f"{name}-log", ranks=KINDS[kind][layout][1]).ok()
    return root


def replayed(server: TrainServer, work: Workspace, folder: Path) -> dict[str, Any]:
    """Rollouts of one process, so that no sampled token can distinguish the layouts."""
    recorded = folder / "rollouts" / "rollout_{rollout_id}"
    if not recorded.parent.exists():
        argv = steady(
            work,
            folder / "recorded",
            "critic",
            "one process",
            num_rollout=6,
            save_debug_rollout_data=recorded,
        )
        server.train(argv, folder / "recorded-log").ok()
    return {"load_debug_rollout_data": recorded}


def whole_run(
    server: TrainServer, work: Workspace, folder: Path, kind: str
) -> list[dict[str, float]]:
    out = folder / f"{kind}-whole"
    if not out.exists():
        more = replayed(server, work, folder) if kind == "critic" else {}
        server.train(
            steady(work, out, kind, "one process", num_rollout=6, **more),
            folder / f"{kind}-whole-log",
        ).ok()
    return rows_of(out)


def sizes_of(words: str, ranks: int) -> tuple[int, list[str]]:
    """What random states belong to; a layout that is written out has virtual stages."""
    return ranks, sorted(re.findall(r"--\S+-parallel-(?:size \d+|layout \S+)", words))


CHANGES = [
    (kind, a, b)
    for kind, layouts in KINDS.items()
    if kind != "memory"
    for a in layouts
    for b in layouts
    if a != b
]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(*change, marks=marks_of(change in FAST_CHANGES, change in EXTENDED_CHANGES))
        for change in CHANGES
    ],
)
def test_into_another_layout(
    server: TrainServer,
    work: Workspace,
    folder: Path,
    tmp_path: Path,
    kind: str,
    before: str,
    after: str,
) -> None:
    """The three steps after the change are those of one process that never stopped, up to the order
    of sums."""
    layouts = KINDS[kind]
    root = checkpoints_of(server, work, folder, kind, before)
    ranks = layouts[after][1]
    more = replayed(server, work, folder) if kind == "critic" else {}
    done = server.train(
        steady(work, tmp_path, kind, after, num_rollout=6, load=root, **more),
        tmp_path / "log",
        ranks=ranks,
    ).ok()
    assert ("the checkpoint's random states are for" in done.out) is (
        sizes_of(*layouts[before]) != sizes_of(*layouts[after])
    )
    expected = {int(row["step"]): row for row in whole_run(server, work, folder, kind)}
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [4, 5, 6]
    for row in rows:
        other = expected[int(row["step"])]
        for name in (
            "train/loss",
            "train/grad_norm",
            "train/lr",
            *(OF_THE_CRITIC if kind == "critic" else ()),
        ):
            assert row[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), (row["step"], name)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in MEMORY for b in MEMORY if a != b])
def test_into_another_kind_of_optimizer_state(
    server: TrainServer, work: Workspace, folder: Path, tmp_path: Path, before: str, after: str
) -> None:
    """Within what bf16 state may differ by, where a fresh optimizer would not be."""
    full_run = folder / "memory-whole"
    if not full_run.exists():
        server.train(
            steady(work, full_run, "memory", "fp32 state", num_rollout=6),
            folder / "memory-whole-log",
            ranks=2,
        ).ok()
    root = checkpoints_of(server, work, folder, "memory", before)
    server.train(
        steady(work, tmp_path, "memory", after, num_rollout=6, load=root), tmp_path / "log", ranks=2
    ).ok()
    rows, expected = rows_of(tmp_path), rows_of(full_run)[3:]
    assert [row["step"] for row in rows] == [4, 5, 6]
    for row, other in zip(rows, expected, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=0.03), (row["step"], name)


def test_without_random_states_there_is_no_warning(
    server: TrainServer, work: Workspace, folder: Path, tmp_path: Path
) -> None:
    root = checkpoints_of(server, work, folder, "dense", "TP2")
    argv = steady(work, tmp_path, "dense", "one process", num_rollout=4, load=root, no_load_rng="")
    assert "warning" not in server.train(argv, tmp_path / "log").ok().out


@pytest.mark.extended
def test_a_reference_from_a_checkpoint(
    server: TrainServer, work: Workspace, folder: Path, tmp_path: Path
) -> None:
    """--ref-load of checkpoints: the KL of a policy to itself vanishes, and to the first model it does
    not."""
    root = checkpoints_of(server, work, folder, "dense", "TP2")
    kl = dict(
        load=root,
        finetune="",
        use_kl_loss="",
        kl_loss_coef=0.1,
        num_rollout=1,
        num_steps_per_rollout=1,
    )
    server.train(
        work.flags(tmp_path / "same", ref_load=root, ref_ckpt_step=3, **kl), tmp_path / "log1"
    ).ok()  # type: ignore[arg-type]
    server.train(work.flags(tmp_path / "other", ref_load=work.model, **kl), tmp_path / "log2").ok()  # type: ignore[arg-type]
    assert abs(rows_of(tmp_path / "same")[0]["train/kl"]) < 1e-9
    assert rows_of(tmp_path / "other")[0]["train/kl"] > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one process", "DP2 distributed optimizer"])
@pytest.mark.parametrize(("before", "after"), [("--bf16", ""), ("", "--bf16")])
def test_into_another_precision(
    server: TrainServer, work: Workspace, tmp_path: Path, before: str, after: str, layout: str
) -> None:
    """The fp32 numbers that the optimizer has in half precision are the weights of a run in fp32,
    and the other way round: on each rank the bits of what the optimizer works on are those that
    were saved, which the load itself checks."""
    root, ranks = tmp_path / "ck", KINDS["dense"][layout][1]
    first = [
        *steady(work, tmp_path / "first", "dense", layout, num_rollout=3, save=root),
        *before.split(),
    ]
    server.train(first, tmp_path / "log1", ranks=ranks).ok()
    again = [
        *steady(work, tmp_path / "same", "dense", layout, num_rollout=6, load=root),
        *before.split(),
    ]
    server.train(again, tmp_path / "log2", ranks=ranks).ok()
    other = [
        *steady(work, tmp_path / "other", "dense", layout, num_rollout=6, load=root),
        *after.split(),
    ]
    server.train(other, tmp_path / "log3", ranks=ranks).ok()
    for actual, theirs in zip(rows_of(tmp_path / "other"), rows_of(tmp_path / "same"), strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert actual[name] == pytest.approx(theirs[name], rel=2e-2), (actual["step"], name)

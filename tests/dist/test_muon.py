"""--optimizer muon where the package emerging_optimizers is installed: its step, every layout, a
critic, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cells import TP2, Layout
from benchmarks.parity.models import make_model, make_moe_model
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import LAYOUTS, ONE_PROCESS, Result, compare, make_rollouts, run_layout
from tests.dist.muon_worker import EXACT

pytest.importorskip("emerging_optimizers")

LIMIT = 1e-5
ALONE = LAYOUTS[ONE_PROCESS]
# (a, b, c) of the five Newton-Schulz steps: Jordan's modded-nanogpt
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
LR, MOMENTUM, DECAY, SCALE = 0.01, 0.9, 0.1, 0.5
SETTINGS = (
    f"{EXACT} --lr {LR} --lr-decay-style constant --weight-decay {DECAY} --clip-grad 0 "
    f"--muon-momentum {MOMENTUM} --muon-extra-scale-factor {SCALE} --adam-eps 1e-6"
)
SP, EP2 = "--sequence-parallel", "--expert-model-parallel-size 2"
# by number of processes: name -> (model, flags)
CASES: dict[int, dict[str, tuple[str, str]]] = {
    1: {"one": ("dense", ""), "one, experts": ("experts", "")},
    2: {
        "TP2": ("dense", TP2),
        "TP2 SP distributed": ("dense", f"{TP2} {SP} --muon-tp-mode distributed"),
        "PP2": ("dense", "--pipeline-model-parallel-size 2"),
        "CP2": ("dense", "--context-parallel-size 2"),
        "DP2 overlap": ("dense", "--overlap-grad-reduce"),
        "EP2": ("experts", EP2),
        "TP2 EP2": ("experts", f"{TP2} {SP} {EP2} --expert-tensor-parallel-size 1"),
        "ETP2": ("experts", f"{TP2} {SP}"),
    },
    4: {"TP2 PP2": ("dense", f"{TP2} --pipeline-model-parallel-size 2")},
}


def orthogonalised(matrix: Tensor) -> Tensor:
    """Newton-Schulz in float64, over the smaller side."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return orthogonalised(matrix.T).T
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """The weight after these steps, in float64: a running mean of gradients, orthogonalised, times
    sqrt(max(out, in)) (Liu et al. 2025, "Muon is scalable for LLM training")."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = MOMENTUM * mean + (1 - MOMENTUM) * gradient
        update = SCALE * max(weight.shape) ** 0.5 * orthogonalised(mean)
        weight = weight * (1 - LR * DECAY) - LR * update
    return weight


def adamw(weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    decay = DECAY if weight.dim() > 1 else 0.0
    optimizer = torch.optim.AdamW([parameter], LR, (0.9, 0.999), 1e-6, decay)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def test_two_steps_are_those_of_the_paper(tmp_path: Path) -> None:
    """From the run's own gradients, by Hugging Face name: queries, keys and values apart, gate and
    up projection as one matrix, embedding and norms by AdamW."""
    make_model(tmp_path / "model", seed=3)
    arguments = {"model": str(tmp_path / "model"), "flags": SETTINGS, "out": f"{tmp_path}/out.pt"}
    run_ranks("tests.dist.muon_worker:two_steps", 1, tmp_path / "run", arguments, 120)
    found = {
        part: {name: tensor.double() for name, tensor in tensors.items()}
        for part, tensors in torch.load(tmp_path / "out.pt").items()
    }
    kinds = set()
    for name in found["before"]:
        names = [name]
        if ".gate_proj." in name:
            names.append(name.replace(".gate_proj.", ".up_proj."))
        if ".up_proj." in name:
            continue
        before, after, *gradients = (
            torch.cat([found[part][n] for n in names])
            for part in ("before", "after", "gradients 1", "gradients 2")
        )
        step = muon if before.dim() == 2 and "layers" in name else adamw
        kinds.add(step)
        moved = step(before, gradients) - before
        # float32's rounding of weights of size 1 that moved by 0.01, and of the iteration
        assert float((after - before - moved).norm() / moved.norm()) < 1e-4, name
    assert kinds == {muon, adamw}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With what one process makes of each next to it."""
    folder = tmp_path_factory.mktemp("models")
    made = {"dense": str(folder / "dense"), "experts": str(folder / "experts")}
    make_model(folder / "dense", seed=3)
    make_moe_model(folder / "experts")
    in_layouts(1, made, folder / "one")
    return made


def in_layouts(
    ranks: int, models: dict[str, str], folder: Path
) -> list[dict[str, dict[str, float]]]:
    cases = {name: (models[model], flags) for name, (model, flags) in CASES[ranks].items()}
    target = "tests.dist.muon_worker:layouts"
    return run_ranks(target, ranks, folder, {"cases": cases}, timeout_s=400)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_has_the_numbers_of_one_process(
    models: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    for rank in in_layouts(ranks, models, tmp_path):
        for name, apart in rank.items():
            assert max(apart.values()) < LIMIT, (name, apart)


def test_blocks_depend_on_the_layout(models: dict[str, str], tmp_path: Path) -> None:
    """Which a warning says."""
    arguments = {"cases": {"TP2": (models["dense"], f"{TP2} --muon-tp-mode blockwise")}}
    found = run_ranks("tests.dist.muon_worker:layouts", 2, tmp_path, arguments, timeout_s=120)
    assert all(rank["TP2"]["all_weights"] > 100 * LIMIT for rank in found)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("model", 3), ("ref", 4)):
        make_model(folder / name, seed=seed)
    make_rollouts(str(folder / "rollout_{rollout_id}"))
    return folder


@pytest.fixture(scope="module")
def full_run(work: Path) -> Result:
    """A run that is never stopped."""
    return run_layout(ONE_PROCESS, ALONE, work, EXACT.split())


def in_parts(work: Path, names: Sequence[str]) -> Result:
    """Each step continues from the checkpoint of the one before it."""
    folder = str(work / "-".join(names))
    parts = [
        run_layout(
            f"{folder} {step}",
            LAYOUTS[name],
            work,
            [*EXACT.split(), "--num-rollout", str(step), "--save", folder, "--load", folder],
        )
        for step, name in enumerate(names, start=1)
    ]
    return Result(
        [loss for part in parts for loss in part.losses],
        [norm for part in parts for norm in part.grad_norms],
        parts[-1].weights,
    )


def test_a_run_that_was_stopped_continues_with_the_same_bits(work: Path, full_run: Result) -> None:
    parts = in_parts(work, [ONE_PROCESS] * 3)
    assert (parts.losses, parts.grad_norms) == (full_run.losses, full_run.grad_norms)
    assert all(torch.equal(parts.weights[name], w) for name, w in full_run.weights.items())


def test_a_checkpoint_continues_in_other_layouts(work: Path, full_run: Result) -> None:
    parts = in_parts(work, ["TP2", "PP2", "DP2"])
    row = compare("TP2, PP2, DP2", full_run, parts)
    assert row.holds, row


def test_the_state_of_another_optimizer_is_refused(work: Path) -> None:
    folder = str(work / "muon alone")
    saving = ["--num-rollout", "1", "--save", folder]
    run_layout("saves", ALONE, work, [*EXACT.split(), *saving])
    message = "optimizer state of muon, not of adam: give --optimizer muon, or --no-load-optim"
    with pytest.raises(RuntimeError, match=message):
        run_layout("loads", ALONE, work, ["--load", folder])
    run_layout("afresh", ALONE, work, ["--load", folder, "--no-load-optim"])


def test_a_critic_has_it_too(work: Path) -> None:
    flags = "--advantage-estimator ppo --critic-lr 1e-3 --critic-lr-warmup-iters 0"
    one = run_layout("critic", ALONE, work, [*EXACT.split(), *flags.split()])
    two = run_layout("critic TP2", Layout(2, TP2), work, [*EXACT.split(), *flags.split()])
    row = compare("critic TP2", one, two)
    assert row.holds, row

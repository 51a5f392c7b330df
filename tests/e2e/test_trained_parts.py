"""Runs that train a part of the parameters, and runs with a reference model that follows the
policy."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer

# an optimizer without state for what is frozen, and no gradient buffer
COUNT = """
def count(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    named = [p for chunk in model for p in chunk.parameters()]
    trained = [p for p in named if p.requires_grad]
    assert 0 < len(trained) < len(named)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert sum(len(group["params"]) for part in parts for group in part.param_groups) == len(trained)
    assert all(hasattr(p, "main_grad") == p.requires_grad for p in named)
"""
KL = {"use_kl_loss": "", "kl_loss_coef": 0.5, "kl_loss_type": "k2"}


def changed(before: Path, after: Path) -> set[str]:
    """Names of the weights that the run changed."""
    start, end = weights_of(before), weights_of(after)
    return {name for name in start if not torch.equal(start[name], end[name].to(start[name].dtype))}


@pytest.mark.parametrize(
    ("flag", "patterns", "trained", "layout"),
    [
        ("only_train", r"layers\.1\..*mlp", r"layers\.1\.(mlp|post_attention)", {}),
        ("freeze", "embedding layers.0", r"layers\.1\.|model\.norm", {"tensor_model_parallel_size": 2, "sequence_parallel": ""}),
        ("freeze", "embedding", r"layers\.|model\.norm", {"pipeline_model_parallel_size": 2}),
    ],
)  # fmt: skip
def test_what_the_patterns_leave_is_trained_and_nothing_else(
    server: TrainServer,
    work: Workspace,
    tmp_path: Path,
    flag: str,
    patterns: str,
    trained: str,
    layout: dict[str, Any],
) -> None:
    """In every layout a layer has the number that it has in the model; the embedding is tied to the
    output layer, also on the last stage."""
    ranks = 2 if layout else 1
    more = {f"{flag}_params_name_list": patterns, "save_hf": tmp_path / "hf", **layout}
    counter = tmp_path / "count.py"
    counter.write_text(COUNT)
    more["custom_megatron_before_train_step_hook_path"] = f"{counter}:count"
    if "layers" in patterns:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        more |= {"recompute_num_layers": 1}
    argv = work.flags(tmp_path / "out", **more)
    server.train(argv, tmp_path / "log", ranks=ranks).ok()
    found = changed(work.model, tmp_path / "hf")
    names = set(weights_of(work.model))
    expected = {name for name in names if re.search(trained, name)}
    assert expected and found == expected, (found - expected, expected - found)


@pytest.mark.parametrize("more", [{}, {"use_distributed_optimizer": "", "bf16": ""}])
def test_a_layer_that_is_frozen_and_a_run_in_parts(
    server: TrainServer, work: Workspace, tmp_path: Path, more: dict[str, str]
) -> None:
    """Layers that are all alike are one tensor in a checkpoint, and the optimizer has state of some
    of them only."""
    flags = {"only_train_params_name_list": r"layers\.1\..*mlp", "weight_decay": 0.1, **more}
    whole, root = tmp_path / "whole", tmp_path / "checkpoints"
    argv = work.flags(whole, **flags, save_hf=whole / "hf")
    server.train(argv, tmp_path / "log").ok()
    for rollouts in (1, 2):
        out = tmp_path / f"part_{rollouts}"
        own = {"save": root, "load": root, "num_rollout": rollouts, "save_hf": out / "hf"}
        server.train(work.flags(out, **flags, **own), tmp_path / f"log_{rollouts}").ok()
    expected, found = weights_of(whole / "hf"), weights_of(out / "hf")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_patterns_that_match_nothing(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    more = {"freeze_params_name_list": "embedding linear_qvk"}
    error = server.train(work.flags(tmp_path / "out", **more), tmp_path / "log").error()
    assert "--freeze-params-name-list: 'linear_qvk' matches no parameter; their names are" in error


@pytest.mark.extended
def test_a_reference_that_follows_the_policy(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """After two rollouts the KL starts from 0 again; a killed run ends as one that was not."""
    flags = {**KL, "ref_load": work.model, "num_rollout": 5, "ref_update_interval": 2}
    flags |= {"num_steps_per_rollout": 1, "save_hf": tmp_path / "whole_hf"}
    full_run = tmp_path / "whole"
    server.train(work.flags(full_run, **flags), tmp_path / "log1").ok()
    divergences = [row["train/kl_loss"] for row in rows_of(full_run)]
    assert [kl < 1e-9 for kl in divergences] == [True, False, True, False, True]

    root, parts = tmp_path / "checkpoints", tmp_path / "parts"
    again = work.flags(
        parts,
        **{**flags, "save": root, "load": root, "save_interval": 3, "save_hf": tmp_path / "hf"},
    )
    killed = server.train(
        again, tmp_path / "log2", hook="tests.e2e.faults:signal_in_step SIGKILL 4 0"
    )
    assert killed.status in (-signal.SIGKILL, 1)
    server.train(again, tmp_path / "log3").ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows_of(full_run))
    expected, found = weights_of(tmp_path / "whole_hf"), weights_of(tmp_path / "hf")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []

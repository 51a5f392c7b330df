"""train.py with a critic in its own layout: the run of one process, resuming bit by bit, and
resuming in other layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_critic_runs import flags, of_the_critic

pytestmark = pytest.mark.extended

TP2, PP2, OWN = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--critic-tensor-model-parallel-size",
)
# name: flags, ranks
PAIRS = {
    "DP2, critic TP2": (f"{OWN} 2 --critic-sequence-parallel --use-distributed-optimizer", 2),
    "TP2, critic DP2": (
        f"{TP2} {OWN} 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        2,
    ),
    "PP2, critic TP2": (f"{PP2} --critic-pipeline-model-parallel-size 1 {OWN} 2", 2),
    "TP2, critic PP2": (f"{TP2} {OWN} 1 --critic-pipeline-model-parallel-size 2", 2),
    "DP2, critic CP2, balanced": (
        "--critic-context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 64",
        2,
    ),
    "TP2 DP2, critic PP2 DP2": (f"{TP2} {OWN} 1 --critic-pipeline-model-parallel-size 2", 4),
    "DP4, critic TP2 PP2": (
        f"{OWN} 2 --critic-pipeline-model-parallel-size 2 --use-distributed-optimizer",
        4,
    ),
}
FAST = ("DP2, critic TP2", "TP2, critic DP2")
LAYOUTS = {
    "DP2, critic TP2": ("TP1 PP1 CP1 DP2", "TP2 PP1 CP1 DP1"),
    "PP2, critic TP2": ("TP1 PP2 CP1 DP1", "TP2 PP1 CP1 DP1"),
}


def marked(names: tuple[str, ...] | list[str], fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """2 rollouts on one process, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("ppo")
    argv = flags(
        work,
        out,
        num_rollout=2,
        save=out / "checkpoints",
        save_interval=1,
        save_debug_rollout_data=out / "rollout_{rollout_id}",
    )
    server.train(argv, out / "log").ok()
    return out


@pytest.mark.parametrize("pair", marked(list(PAIRS), FAST))
def test_the_second_half_of_a_run_of_one_process(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, pair: str
) -> None:
    """Resumed with policy and critic in other layouts, up to the order of sums: samples, values,
    losses, gradient norms, weights."""
    words, ranks = PAIRS[pair]
    recorded = tmp_path / "rollout_{rollout_id}"
    changes: dict[str, Any] = dict(
        load=full_run / "checkpoints", ckpt_step=1, save_debug_rollout_data=recorded
    )
    changes["micro_batch_size"] = None if "--use-dynamic-batch-size" in words else 2
    done = server.train(
        [*flags(work, tmp_path, num_rollout=2, **changes), *words.split()],
        tmp_path / "log",
        ranks=ranks,
    ).ok()
    policy, critic = layouts_of(done.out)
    assert (
        policy != critic
        and "random states are for TP1 PP1 CP1 DP1" in done.out
        and f"this run is {critic} for the critic" in done.out
    )
    assert sampled(recorded, 1) == sampled(full_run / "rollout_{rollout_id}", 1)
    names = ("train/loss", "train/grad_norm", "rollout/kl_abs")
    expected, found = rows_of(full_run)[1], rows_of(tmp_path)[0]
    for name in (*(n for n in names if n in expected), *of_the_critic(full_run)[1]):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert found["rollout/values_mean"] != 0
    for name, tensor in weights_of(full_run / "hf").items():
        torch.testing.assert_close(weights_of(tmp_path / "hf")[name], tensor, rtol=1e-4, atol=1e-5)


def layouts_of(out: str) -> tuple[str, str]:
    policy, critic = (re.search(rf"{who}: (TP.*? DP\d+)", out) for who in ("slime_like", "critic"))
    assert policy is not None and critic is not None, out
    return policy[1], critic[1]


@pytest.mark.parametrize("pair", marked(list(LAYOUTS), FAST))
def test_one_and_one_are_two_in_both_layouts(
    server: TrainServer, work: Workspace, tmp_path: Path, pair: str
) -> None:
    """Bit by bit, dropout included: each layout has its own random states."""
    words, ranks = PAIRS[pair]
    one, two, root = tmp_path / "one", tmp_path / "two", tmp_path / "checkpoints"

    def train(out: Path, rollouts: int, **changes: Any) -> str:
        argv = [
            *flags(
                work,
                out,
                num_rollout=rollouts,
                hidden_dropout=0.1,
                attention_dropout=0.1,
                **changes,
            ),
            *words.split(),
        ]
        return server.train(argv, tmp_path / f"log_{out.name}_{rollouts}", ranks=ranks).ok().out

    train(one, 2, save=root, save_interval=1)
    message = train(two, 2, load=root, ckpt_step=1)
    assert layouts_of(message) == LAYOUTS[pair] and "random states" not in message
    assert (
        same_numbers(rows_of(two)) == same_numbers(rows_of(one))[1:]
        and of_the_critic(two) == of_the_critic(one)[1:]
    )
    assert of_the_critic(one)[1]["train/value_diff_abs"] > 1e-4, (
        "values without dropout, training with it"
    )
    expected, found = weights_of(one / "hf"), weights_of(two / "hf")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    state = json.loads((root / "iter_0000001" / "trainer.json").read_text())
    assert (state["layout"], state["networks"]["critic"]["layout"]) == LAYOUTS[pair]
    assert state["random_states"] == dict(zip(("policy", "critic"), LAYOUTS[pair]))

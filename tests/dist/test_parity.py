"""Every layout gives the numbers of one process: losses, gradient norms and exported weights of
three optimizer steps, to 1e-5.

The runs are those of benchmarks/parity_table.py: `train.py` on recorded rollouts of uneven lengths,
with a KL and an entropy term, Adam, weight decay and clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.parity_table import (
    LAYOUTS,
    LIMIT,
    ONE_PROCESS,
    Result,
    compare,
    make_model,
    make_rollouts,
    run_layout,
)

SEVERAL = [name for name in LAYOUTS if name != ONE_PROCESS]
IN_MAKE_TEST = (
    "TP2 SP",
)  # a run of train.py for each; tests/dist/test_parity_matrix.py has more layouts, in processes that serve them all
SAPO = ("--policy-loss-type", "sapo")
PPO = ("--policy-loss-type", "ppo")
# besides the two losses, what changes how token losses are made, weighted or summed
VARIANTS = {
    "dual clip": (*PPO, "--eps-clip-c", "1.5"),
    "sequence_mean": (*SAPO, "--loss-reduction", "sequence_mean"),
    "token_mean": (*PPO, "--loss-reduction", "token_mean"),
    "k3 unbiased": (*PPO, "--kl-loss-type", "k3", "--use-unbiased-kl"),
}
RunOnce = Callable[[str, tuple[str, ...]], Result]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """`run_layout`, each run made once."""
    work: dict[tuple[str, ...], Path] = {}
    done: dict[tuple[str, tuple[str, ...]], Result] = {}

    def get(name: str, flags: tuple[str, ...]) -> Result:
        if flags not in work:
            work[flags] = tmp_path_factory.mktemp("parity")
            make_model(work[flags] / "model", seed=3)
            make_model(work[flags] / "ref", seed=4)
            make_rollouts(str(work[flags] / "rollout_{rollout_id}"))
        if (name, flags) not in done:
            done[name, flags] = run_layout(name, LAYOUTS[name], work[flags], list(flags))
        return done[name, flags]

    return get


def check(run_once: RunOnce, name: str, flags: tuple[str, ...]) -> None:
    base = run_once(ONE_PROCESS, flags)
    assert min(base.grad_norms) > 1e-3, "a vanishing gradient would agree with anything"
    row = compare(name, base, run_once(name, flags))
    assert row.holds, f"{row} exceeds {LIMIT:g}"


@pytest.mark.extended
@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_layouts_with_sapo(run_once: RunOnce, name: str) -> None:
    check(run_once, name, SAPO)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SEVERAL if name not in IN_MAKE_TEST])
def test_further_layouts_with_sapo(run_once: RunOnce, name: str) -> None:
    check(run_once, name, SAPO)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_layouts_with_ppo(run_once: RunOnce, name: str) -> None:
    check(run_once, name, PPO)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DP2 overlap", "TP2 PP2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_loss(run_once: RunOnce, variant: str, name: str) -> None:
    check(run_once, name, VARIANTS[variant])


@pytest.mark.slow
def test_another_loss_is_distinguished(run_once: RunOnce) -> None:
    """The comparison can fail: a run with another KL weight is far outside the limit."""
    base = run_once(ONE_PROCESS, SAPO)
    assert not compare(
        "other", base, run_once(ONE_PROCESS, (*SAPO, "--kl-loss-coef", "0.11"))
    ).holds

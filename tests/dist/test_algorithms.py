"""Every loss, reduction and off-policy correction on Megatron: two data-, tensor-, pipeline- or
context-parallel ranks give the loss and the gradient of every parameter of one process, in float64.
The ratios are those of a rollout's second optimizer step, with a KL to another model and an entropy
bonus.

All combinations, on pure functions: tests/unit/losses/test_invariance.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.ranks import run_ranks
from benchmarks.parity_table import make_model, make_rollouts
from slime_like.losses import LOSS_REDUCTIONS
from tests.dist.algorithms_worker import LAYOUTS, SUPERVISED
from tests.dist.float64 import EXACT
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES
from tests.unit.losses.test_invariance import (
    CORRECTIONS,
    NEEDS_A_SEQUENCE_REDUCTION,
    SEQUENCE_REDUCTIONS,
    VARIANTS,
    WITHOUT_AN_OLD_POLICY,
    flags_of,
    legal,
)

# The recorded sampler is further from the model than the bounds of the unit test allow for.
WIDER = {
    "geometric mask": "--sequence-mask-metric geometric --geo-mask-low 0.9 --geo-mask-high 1.3",
    "product mask": "--sequence-mask-metric product --product-mask-low 0.05 --product-mask-high 20",
    "outlier": "--outlier-token-is-threshold-high 4.5",
    "token mask": "--token-mask-is-threshold-low 0.4 --token-mask-is-threshold-high 2.5",
    "M2PO": "--m2po-threshold 0.08",
    "all at once": "--tis-ratio-type token --outlier-token-is-threshold-high 6 --sequence-mask-metric product --product-mask-low 0.05 "
    "--product-mask-high 20 --m2po-threshold 0.08 --use-opsm "
    "--estr-threshold 0.2",
}


def covering_cases() -> dict[str, tuple[str, str, str]]:
    """A case for each variant of each loss, each with the legal reduction and correction that have
    been used least."""
    reductions, corrections, cases = Counter[str](), Counter[str](), {}
    for variant in VARIANTS:
        if (
            variant in WITHOUT_AN_OLD_POLICY or variant == "gspo_wide"
        ):  # gspo, where nothing is clipped
            continue
        allowed = [
            r
            for r in LOSS_REDUCTIONS
            if variant not in NEEDS_A_SEQUENCE_REDUCTION or r in SEQUENCE_REDUCTIONS
        ]
        reduction = min(allowed, key=lambda r: reductions[r])
        correction = min(
            (c for c in CORRECTIONS if legal(variant, c)), key=lambda c: corrections[c]
        )
        reductions[reduction] += 1
        corrections[correction] += 1
        cases[f"{variant}, {reduction}, {correction}"] = (variant, reduction, correction)
    return cases


CASES = covering_cases()


def flags_of_case(variant: str, reduction: str, correction: str) -> str:
    words = [
        *flags_of(variant),
        "--loss-reduction",
        reduction,
        WIDER.get(correction, CORRECTIONS[correction][0]),
    ]
    if reduction == "seq_mean_token_sum_norm":
        words.append("--loss-norm-length 30")
    if variant.startswith("luspo"):
        words.append("--lr 0.1")  # its gradient is that of others times the length
    return " ".join(words)


def chosen(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Cases by layout, of this module's tests that are to run."""
    found: dict[str, list[str]] = {layout: [] for layout in LAYOUTS}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_two_ranks:
            layout, case = (str(item.callspec.params[key]) for key in ("layout", "case"))
            found[layout].append(case)
    return found


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one process, and of both ranks of two."""
    folder: Path = tmp_path_factory.mktemp("algorithms")
    make_model(folder / "model", seed=3)
    make_model(folder / "ref", seed=4)
    make_rollouts(str(folder / "model" / "rollout_{rollout_id}"))
    terms = f"--use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --ref-load {folder}/ref"
    cases = {name: f"{terms} {flags_of_case(*case)}" for name, case in CASES.items()}
    cases["cross_entropy"] = SUPERVISED
    layouts = chosen(request)
    arguments = {
        "model": str(folder / "model"),
        "out": str(folder),
        "cases": {name: cases[name] for names in layouts.values() for name in names},
        "layouts": layouts,
    }
    (one,) = run_ranks(
        "tests.dist.algorithms_worker:one_rank", 1, folder / "one", arguments, timeout_s=300
    )
    return one, run_ranks(
        "tests.dist.algorithms_worker:two_ranks", 2, folder / "two", arguments, timeout_s=500
    )


def each_case_and_layout() -> Iterator[Any]:
    """Every second case in one layout, in turn, is quick; the sweep over all of them is for more
    time."""
    for number, case in enumerate([*CASES, "cross_entropy"]):
        for place, layout in enumerate(LAYOUTS):
            quick = number % (2 * len(LAYOUTS)) == 2 * place
            yield pytest.param(case, layout, marks=() if quick else pytest.mark.extended)


@pytest.mark.parametrize(("case", "layout"), each_case_and_layout())
def test_two_ranks(
    results: tuple[dict[str, Any], list[dict[str, Any]]], case: str, layout: str
) -> None:
    """They give the gradient and the metrics of one process."""
    one, two = results
    for rank in two:
        found = rank[f"{case} | {layout}"]
        assert found["apart"] <= EXACT, found["worst"]
        for name, value in one[case].items():
            if name != "gradient" and not name.startswith(
                "perf/"
            ):  # how a step is cut differs between layouts
                assert found["metrics"][name] == pytest.approx(value, rel=EXACT, abs=EXACT), name


def test_the_cases_show_something(results: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """No gradient vanishes, ratios are off 1, and masks reject some tokens and not all."""
    one, _ = results
    for case, metrics in one.items():
        assert metrics["gradient"] > 1e-3, case
        if "ratio_max" in metrics:
            assert metrics["ratio_max"] > 1.02, case
        assert abs(metrics["policy_loss"]) > 1e-3, f"{case}: everything was rejected"
    assert len({metrics["loss"] for metrics in one.values()}) == len(one), (
        "each case is another loss"
    )


def test_everything_is_covered() -> None:
    variants, reductions, corrections = (set(column) for column in zip(*CASES.values()))
    assert {VARIANTS[v][0] for v in variants} | WITHOUT_AN_OLD_POLICY == set(OF_SINGLE_RESPONSES)
    assert reductions == set(LOSS_REDUCTIONS) and corrections == set(CORRECTIONS)

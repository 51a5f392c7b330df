"""However samples are shared by ranks and cut into micro-batches, the numbers are those of one
process with one sample at a time: losses, gradient norms and weights of two optimizer steps, to
1e-5. Old log-probs are recomputed, so that their order is checked too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.parity.ranks import run_ranks
from tests.dist import micro_batch_worker as worker
from tests.dist.float64 import EXACT

FIXED = "--micro-batch-size 1"
DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu"
PADDED = "--micro-batch-size 3 --qkv-format bshd"
TOKEN_MEAN, PROMPT_MEAN = "--loss-reduction token_mean", "--loss-reduction prompt_mean"
OBSERVED = "--observation-loss-coef 0.3"
TWO_RANKS: dict[str, str] = {
    "DP2 balanced": f"{DYNAMIC} 40",
    "DP2 unbalanced": f"{DYNAMIC} 40 --no-balance-data",
    "DP2 one micro-batch": f"{DYNAMIC} 1000",
    "DP2 a row for each": f"{DYNAMIC} 1 --log-probs-max-tokens-per-gpu 30",
    "DP2 token mean": f"{DYNAMIC} 25 {TOKEN_MEAN}",
    "DP2 prompt mean": f"{DYNAMIC} 25 {PROMPT_MEAN} --use-distributed-optimizer",
    "DP2 observations": f"{DYNAMIC} 40 {OBSERVED}",
    "CP2 observations": f"{DYNAMIC} 20 {OBSERVED} --context-parallel-size 2",
    "PP2 observations": f"{DYNAMIC} 40 {OBSERVED} --pipeline-model-parallel-size 2",
    "TP2 SP observations": f"{DYNAMIC} 40 {OBSERVED} --tensor-model-parallel-size 2 --sequence-parallel",
    "TP2 SP": f"{DYNAMIC} 40 --tensor-model-parallel-size 2 --sequence-parallel",
    "TP2 SP padded": f"{PADDED} --tensor-model-parallel-size 2 --sequence-parallel",
    "CP2": f"{DYNAMIC} 20 --context-parallel-size 2",
    "PP2": f"{DYNAMIC} 40 --pipeline-model-parallel-size 2",
    "PP2 VP2": f"{DYNAMIC} 70 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "PP2 VP2 written out": f"{DYNAMIC} 70 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|L",
}
# those whose kind of cut another one of TWO_RANKS has, or tests/dist/test_algorithms.py
IN_EXTENDED = {"DP2 one micro-batch", "DP2 token mean", "DP2 prompt mean", "TP2 SP", "CP2", "PP2",
               "CP2 observations", "PP2 observations", "TP2 SP observations"}  # fmt: skip
ONE_RANK: dict[str, str] = {
    "fixed": FIXED,
    "fixed token mean": f"{FIXED} {TOKEN_MEAN}",
    "fixed prompt mean": f"{FIXED} {PROMPT_MEAN}",
    "fixed observations": f"{FIXED} {OBSERVED}",
    "dynamic": f"{DYNAMIC} 40",
    "dynamic observations": f"{DYNAMIC} 40 {OBSERVED}",
    "padded": PADDED,
    "all at once": f"{DYNAMIC} 1000 {TOKEN_MEAN}",
}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return worker.make_files(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="module")
def one(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("one")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with worker.groups_of("") as layout:
            return {
                name: worker.train(files["folder"], layout, flags, out / name)
                for name, flags in ONE_RANK.items()
            }
    finally:
        dist.destroy_process_group()


def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The cases of this module's tests that are to run."""
    return {
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_two_ranks
    }


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest,
    files: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Results]:
    out = tmp_path_factory.mktemp("two")
    cases = {
        name: flags
        for name, flags in TWO_RANKS.items()
        if name not in IN_EXTENDED or name in chosen(request)
    }
    arguments = {**files, "out": str(out), "cases": cases}
    return run_ranks(
        "tests.dist.micro_batch_worker:on_ranks", 2, out / "launch", arguments, timeout_s=300
    )


def reference_of(one: Results, flags: str) -> dict[str, Any]:
    kinds = {TOKEN_MEAN: " token mean", PROMPT_MEAN: " prompt mean", OBSERVED: " observations"}
    return one["fixed" + "".join(kind for flag, kind in kinds.items() if flag in flags)]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    names = {"train/loss", "train/grad_norm", "train/kl_loss", "train/entropy"}
    for name in names | (expected["rows"][0].keys() & {"train/observation_loss"}):
        for a, b in zip(found["rows"], expected["rows"], strict=True):
            assert a[name] == pytest.approx(b[name], rel=EXACT), name
    weights, reference = load_file(found["weights"]), load_file(expected["weights"])
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert float((weights[name] - tensor).norm() / tensor.norm()) <= EXACT, name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended if name in IN_EXTENDED else ())
        for name in TWO_RANKS
    ],
)
def test_two_ranks(one: Results, two: list[Results], name: str) -> None:
    assert_same(two[0][name], reference_of(one, TWO_RANKS[name]))


@pytest.mark.parametrize("name", list(ONE_RANK)[4:])
def test_one_rank(one: Results, name: str) -> None:
    assert_same(one[name], reference_of(one, ONE_RANK[name]))


def test_reductions_differ(one: Results) -> None:
    """The comparisons above can fail."""
    losses = {round(one[name]["rows"][0]["train/loss"], 5) for name in list(ONE_RANK)[:4]}
    assert len(losses) == 4


def test_what_is_reported(one: Results, two: list[Results]) -> None:
    tokens = sum(worker.RESPONSES) + 3 * (2 + 3 + 4)
    row = one["all at once"]["rows"][0]
    assert row["perf/micro_batches"] == 1 and row["perf/padding_frac"] == 0
    assert row["perf/token_budget_used"] == pytest.approx(tokens / 1000)
    assert row["perf/rank_work_max_over_mean"] == 1 and row["perf/balance_s"] > 0
    fixed = one["fixed"]["rows"][0]
    computed = sum(3 * max(worker.RESPONSES[i : i + 3]) + 3 * (2 + i // 3) for i in (0, 3, 6))
    assert one["padded"]["rows"][0]["perf/padding_frac"] == pytest.approx(1 - tokens / computed)
    assert (
        fixed["perf/micro_batches"] == 9
        and "perf/token_budget_used" not in fixed
        and "perf/balance_s" not in fixed
    )
    alone = two[0]["DP2 a row for each"]["rows"][0]
    assert alone["perf/micro_batches"] > 9 / 2, "the fuller rank decides"
    assert 0 < alone["perf/padding_frac"] < 0.1, (
        "the other rank fills up with micro-batches of one padding token"
    )
    level, uneven = (two[0][f"DP2 {name}"]["rows"][0] for name in ("balanced", "unbalanced"))
    assert (
        level["perf/rank_tokens_max_over_mean"] < 1.25
        and "perf/rank_tokens_max_over_mean" not in uneven
    )
    interleaved = two[0]["PP2 VP2"]["rows"][0]
    assert interleaved["perf/micro_batches"] % 2 == 0
    for name in two[0]:
        a, b = (
            [
                {k: v for k, v in row.items() if not k.endswith("_s") and "rss" not in k}
                for row in rank[name]["rows"]
            ]
            for rank in two
        )
        assert a == b, "all ranks report the same"


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with worker.groups_of("") as layout:
            yield layout
    finally:
        dist.destroy_process_group()


def test_a_sequence_beyond_the_budget_is_reported_once(
    alone: Any, files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker.train(files["folder"], alone, f"{DYNAMIC} 20", tmp_path)
    assert caplog.text.count("gets its own micro-batch") == 1
    caplog.clear()
    worker.train(files["folder"], alone, f"{DYNAMIC} 64", tmp_path)
    assert "its own micro-batch" not in caplog.text


def test_a_wrong_order_would_be_seen(
    alone: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old log-probs given back in the order of the micro-batches, not of the samples, do not fit
    the samples."""
    from slime_like.megatron.packing import MicroBatches

    monkeypatch.setattr(MicroBatches, "restore_order", lambda self, values: list(values))
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        worker.train(files["folder"], alone, f"{DYNAMIC} 40", tmp_path)
    assert torch.is_grad_enabled()

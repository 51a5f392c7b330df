"""slime_like/weights/gather.py: weights of many experts leave their ranks in buckets, few
collectives and little memory, whoever they go to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.parity.ranks import run_ranks
from slime_like.weights.buckets import as_buckets, in_buckets
from slime_like.weights.export_plan import Parameter, TensorPlan, plan_buckets
from tests.dist.convert_worker import stored_weights
from tests.dist.test_convert_moe import make_models

EXPERTS = 64
BUCKET_BYTES = 2**17
# tensor, pipeline, virtual, expert, expert-tensor
LAYOUTS = [(1, 2, 2, 2, 1)]
MORE_LAYOUTS = [(2, 1, 1, 2, 1), (2, 2, 1, 1, 2)]
WIDE = [(2, 2, 1, 4, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = make_models(tmp_path_factory.mktemp("model"), ["qwen3-moe"], num_experts=EXPERTS)
    return made["qwen3-moe"]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(4, LAYOUTS, id="four"),
        pytest.param(4, MORE_LAYOUTS, id="four in other layouts", marks=pytest.mark.extended),
        pytest.param(8, WIDE, id="eight", marks=pytest.mark.extended),
    ],
)
def test_buckets_of_every_way(
    folder: str, tmp_path: Path, ranks: int, layouts: list[tuple[int, ...]]
) -> None:
    arguments = {"folder": folder, "layouts": layouts, "bucket_bytes": BUCKET_BYTES}
    results = run_ranks(
        "tests.dist.weight_gather_worker:check_layouts", ranks, tmp_path, arguments, timeout_s=240
    )
    stored = stored_weights(folder)
    size = sum(tensor.nbytes for tensor in stored.values())
    assert len(stored) > 700 and size > 16 * BUCKET_BYTES
    assert len(results[0]) == 4 * len(layouts)
    for case in results[0]:
        of_ranks = [result[case] for result in results]
        held = [sorted(rank["names"]) for rank in of_ranks]
        if case.endswith("everywhere"):
            assert all(names == sorted(stored) for names in held), case
        elif case.endswith("two nodes"):
            assert held[1] == held[3] == sorted(stored), case
            assert not any(names for rank, names in enumerate(held) if rank not in (1, 3)), case
        else:  # each on one rank
            assert sorted(name for names in held for name in names) == sorted(stored), case
        if case.endswith("rank zero"):
            assert not any(held[1:]), case
        if case.endswith("own"):
            stages, experts = (2 if "PP2" in case else 1), (4 if "EP4" in case else 2)
            senders = stages * (experts if "EP" in case and "EP1" not in case else 1)
            assert sum(bool(names) for names in held) == senders, case
        calls = sum(rank["calls"] for rank in of_ranks)
        messages = of_ranks[0]["messages"] if case.endswith("own") else 0  # which leave the ranks
        # where experts are cut too, what is gathered and what is sent on are as many
        hops = (1 if "ETP1" in case else 2) + case.endswith("two nodes")
        assert calls + messages <= hops * size / BUCKET_BYTES + 20, case
        if case.endswith("own"):
            assert calls <= size / BUCKET_BYTES + 20, case
        assert of_ranks[0]["largest"] <= BUCKET_BYTES
        # what is made while nothing is held: shards of a bucket, and the bucket; each of gloo's two
        # threads may have its last message a moment longer (test_weight_plane.py has it exactly)
        assert max(rank["peak"] for rank in of_ranks) <= 4 * BUCKET_BYTES + 2**10, case


def test_buckets_are_the_senders_own_and_aligned() -> None:
    def parameter(name: str, expert: int | None, rows: int, dtype: torch.dtype) -> Parameter:
        output = TensorPlan(name, (rows,), dtype)
        return Parameter(name, 0, expert, (rows,), dtype, False, (output,))

    half, full = torch.bfloat16, torch.float32
    parameters = [
        parameter("a", None, 5, half),
        parameter("b", None, 1, full),  # cannot begin behind 10 bytes
        parameter("c", 0, 6, half),
        parameter("d", None, 3, half),  # behind b
        parameter("e", 1, 5, half),  # of another sender than c
        parameter("f", None, 100, half),  # larger than a bucket
    ]
    plan = plan_buckets(parameters, {(0, None): 0, (0, 0): 0, (0, 1): 1}, 1, 24)
    found = [(bucket.sender, [p.name for p in bucket.parameters]) for bucket in plan]
    assert found == [(0, ["a"]), (0, ["b", "d"]), (0, ["c"]), (1, ["e"]), (0, ["f"])]


def test_a_stream_of_single_weights_in_buckets() -> None:
    weights = {"a": torch.arange(5.0), "b": torch.ones(3, 2).bfloat16(), "c": torch.zeros(0)}
    weights |= {"d": torch.tensor([7], dtype=torch.int8), "e": torch.full((2,), 9.0)}
    buckets = list(in_buckets(iter(weights.items()), 40))
    assert [bucket.names for bucket in buckets] == [["a", "b", "c", "d"], ["e"]]
    assert [bucket.is_last for bucket in buckets] == [False, True]
    stream = as_buckets(iter(weights.items()), 40)
    taken = dict(stream)
    assert taken.keys() == weights.keys() == stream.shapes.keys()
    assert all(
        torch.equal(taken[name], weights[name]) and taken[name].dtype == weights[name].dtype
        for name in weights
    )
    assert stream.nbytes == sum(tensor.nbytes for tensor in weights.values())
    assert as_buckets(stream, 1) is stream

"""The weight plane's simulated ranks against gloo processes: the same collectives and messages, the
same bytes, and as much held, on every rank and in every way to engines. And their turns on a
simulated link to servers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import bench_update_pause
from benchmarks.bench_update_pause import MODES, OVERLAPPED, of_simulated_ranks
from benchmarks.bench_weight_plane import MIB, WAYS, Case, count_simulated
from benchmarks.bench_weights import make_config
from benchmarks.parity.ranks import run_ranks
from benchmarks.simulated_ranks import LayoutSizes

HIDDEN, BUCKET_BYTES = 32, 2**15
LARGEST = 4096 * HIDDEN * 2  # the embedding, in its own bucket


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    make_config(made, experts=16, layers=2, hidden=HIDDEN)
    return str(made)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(2, LayoutSizes(tp=2), marks=pytest.mark.extended),
        pytest.param(2, LayoutSizes(pp=2), marks=pytest.mark.extended),
        pytest.param(4, LayoutSizes(tp=2, pp=2, ep=2, etp=1)),
        pytest.param(8, LayoutSizes(tp=2, pp=2, ep=4, etp=1), marks=pytest.mark.extended),
        pytest.param(8, LayoutSizes(tp=2, ep=2, etp=2), marks=pytest.mark.extended),
        pytest.param(16, LayoutSizes(tp=2, pp=2, ep=4, etp=1), marks=pytest.mark.slow),
        pytest.param(32, LayoutSizes(tp=4, pp=2, ep=8, etp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_simulated_ranks_count_what_processes_do(
    folder: str, tmp_path: Path, world: int, sizes: LayoutSizes
) -> None:
    arguments = {"folder": folder, "sizes": asdict(sizes), "bucket_bytes": BUCKET_BYTES}
    real = run_ranks(
        "benchmarks.bench_weight_plane:count_real", world, tmp_path, arguments, timeout_s=900
    )
    simulated = count_simulated(folder, sizes, world, BUCKET_BYTES, timeout_s=900)
    for rank, (expected, found) in enumerate(zip(real, simulated, strict=True)):
        assert found.keys() == {"set-up", *WAYS}
        for way, counted in found.items():
            same = asdict(counted) | {"sent": None, "received": None}
            held = expected[way].pop("peak") - same.pop("peak")
            assert same == expected[way], (rank, way)
            assert counted.peak <= 2 * LARGEST  # shards of a bucket, and the bucket
            # each of gloo's two threads may have its last message a moment longer
            assert 0 <= held <= 2 * LARGEST, (rank, way)


def test_every_bucket_of_simulated_ranks_goes_over_the_link_in_its_turn(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without overlap: all buckets of all senders, each at its place in the plan."""
    sizes = LayoutSizes(tp=2, pp=2, ep=4, etp=1)
    monkeypatch.setitem(bench_update_pause.CASES, "small", Case(Path(folder), 0, {8: sizes}))
    sent: list[int] = []
    send = bench_update_pause.Wire.send

    def noted(wire: bench_update_pause.Wire, nbytes: int) -> None:
        sent.append(nbytes)
        send(wire, nbytes)

    monkeypatch.setattr(bench_update_pause.Wire, "send", noted)
    given = Namespace(
        model="small", ranks=8, bucket_mib=BUCKET_BYTES / MIB, link=0.01, making=0.01, answer_ms=1.0
    )
    rows = of_simulated_ranks(given)
    assert [row["mode"] for row in rows] == list(MODES)
    overlapped = next(row for row in rows if row["mode"] == OVERLAPPED)
    assert overlapped["senders"] == 8 and overlapped["messages"] > 8
    half = len(sent) // 2
    assert sent[:half] == sent[half:] and half == overlapped["messages"]
    assert sum(sent[:half]) == overlapped["bytes"]
    assert all(row["pause_s"] >= row["wire_s"] for row in rows)

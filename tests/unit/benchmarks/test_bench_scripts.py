"""The benchmarks: every script starts, those of packing, balancing, attention, head and losses run
at sizes that take no time, targets that are missed are reported. Those of checkpoints and conversions
are in test_bench_checkpoint.py."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    bench_attention,
    bench_balancing,
    bench_packing,
    bench_served_adapters,
    bench_server,
    bench_training_step,
    plot_costs,
)
from benchmarks.bench_common import LENGTHS, fastest, growth_exponent, write_json
from slime_like.distributed.seqlen_balancing import imbalance

SCRIPTS = Path(bench_packing.__file__).parent
BENCHES = sorted(path.stem for path in SCRIPTS.glob("bench_*.py") if path.stem != "bench_common")


def call(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> int:
    """The exit status of a script's `main` on this command line."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    try:
        return importlib.import_module(f"benchmarks.{name}").main() or 0
    except SystemExit as end:
        return int(end.code or 0)


def results(path: Path) -> Any:
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_has_help_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert call(monkeypatch, name, "--help") == 0
    assert "--json" in capsys.readouterr().out
    assert "sys.path.insert(0, " in (SCRIPTS / f"{name}.py").read_text(), (
        "a script finds the repository by itself"
    )


def test_a_benchmark_starts_from_any_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        sys.executable,
        str(SCRIPTS / "bench_packing.py"),
        "--repeats",
        "1",
        "--json",
        "found.json",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "found.json")
    assert len(found["table"]) == 2 and all(row["ms"] > 0 for row in found["growth"])


def test_costs_are_drawn_from_what_the_benchmarks_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_balancing, "SIZES", ((256, 4),))
    for module in (bench_balancing, bench_packing):
        monkeypatch.setattr(module, "GROWTH", (256, 512))
    files = {name: tmp_path / f"{name}.json" for name in ("head", "packing", "balancing")}
    head = "--tokens 16 --vocab 128 --hidden 8 --repetitions 1 --threads 1 --clock processor"
    assert call(monkeypatch, "bench_head", f"{head} --curve 8 16 --json {files['head']}") == 0
    assert {"lean", "lean, half of the rows"} < results(files["head"])["table"].keys()
    assert call(monkeypatch, "bench_packing", f"--repeats 1 --json {files['packing']}") == 0
    assert call(monkeypatch, "bench_balancing", f"--repeats 1 --json {files['balancing']}") == 0
    picture = tmp_path / "costs.png"
    plot_costs.main([*(f"--{name}={path}" for name, path in files.items()), f"--output={picture}"])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    found = plot_costs.curves(*(results(path) for path in files.values()))
    assert [list(curve.sizes) for curve in found] == [[8, 16], [256, 512], [256, 512]]
    last = results(files["balancing"])["growth"][1]["ms"]
    assert plot_costs.rows(found)[1].startswith("| 16 | ") and plot_costs.rows(found)[1].endswith(
        f"| 512 | {last:.1f} | {1e3 * last / 512:.2f} |"
    )
    with pytest.raises(ValueError, match="--curve"):
        plot_costs.curves({}, {}, {})


def test_growth_exponent() -> None:
    assert growth_exponent([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(1.5)


def test_attention_runs_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        call(
            monkeypatch,
            "bench_attention",
            f"--tokens 256 --repeats 1 --json {tmp_path / 'found.json'}",
        )
        == 0
    )
    assert [(row["sequences"], row["cp"]) for row in results(tmp_path / "found.json")] == [
        (n, cp) for n in (1, 8, 32) for cp in (2, 4)
    ]


def test_losses_run_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = f"--losses gspo --repetitions 1 --json {tmp_path / 'found.json'}"
    assert call(monkeypatch, "bench_losses", f"{words} --limit 100") == 0
    (row,) = results(tmp_path / "found.json")
    assert row["loss"] == "gspo" and 0 < row["share"] < 100


def test_missed_targets_are_reported() -> None:
    good = {
        "sequences": 16384,
        "load": "work",
        "lengths": "bimodal",
        "ours": {"max_over_mean": 1.0009, "ms": 99.0},
    }
    uneven = {**good, "ours": {"max_over_mean": 1.002, "ms": 99.0}}
    slow = {**good, "ours": {"max_over_mean": 1.0, "ms": 120.0}}
    assert (
        not bench_balancing.missed([good])
        and len(bench_balancing.missed([good, uneven, slow])) == 2
    )
    steps = {"packed by tokens": 2.1, "padded": 1.0, "Hugging Face, one by one": 1.5}
    one = {name: {"speed": speed} for name, speed in steps.items()}
    assert not bench_training_step.missed(one)
    assert len(bench_training_step.missed({**one, "packed by tokens": {"speed": 1.4}})) == 2


def test_karmarkar_karp_gives_equal_counts_and_levels() -> None:
    """What ours is compared with is the real method: on continuous lengths it is nearly perfect,
    and every item is in one part."""
    costs = LENGTHS["lognormal"](512).astype(np.float64)
    parts = bench_balancing.karmarkar_karp(costs, 8)
    assert sorted(np.concatenate(parts).tolist()) == list(range(512)) and {
        len(part) for part in parts
    } == {64}
    loads = np.array([costs[part].sum() for part in parts])
    contiguous = np.array([costs[part].sum() for part in bench_balancing.contiguous(costs, 8)])
    assert imbalance(loads) < 1.001 < imbalance(contiguous)


def test_karmarkar_karp_by_hand() -> None:
    """8, 7, 6, 5, 4, 3 in two: tuples (8, 7), (6, 5), (4, 3) of difference 1 each leave 1, the best
    there is."""
    parts = bench_balancing.karmarkar_karp(np.array([8.0, 7, 6, 5, 4, 3]), 2)
    assert sorted(float(np.array([8, 7, 6, 5, 4, 3])[part].sum()) for part in parts) == [16, 17]


@pytest.mark.parametrize("method", bench_balancing.METHODS)
def test_every_method_is_measured(method: str) -> None:
    found = bench_balancing.measure(
        method, LENGTHS["bimodal"](256).astype(np.float64), 4, repeats=1
    )
    assert 1 <= found["max_over_mean"] < 2 and found["ms"] > 0


def test_packing_against_rows_of_a_number() -> None:
    lengths = LENGTHS["bimodal"](64)
    found = bench_packing.packed(lengths, repeats=1)
    assert (
        found["bound"] <= found["rows"] <= found["bound"] + 1
        and found["emptiest"] <= found["fullest"] <= bench_packing.BUDGET
    )
    fixed = bench_packing.by_number(np.array([1, 9, 4, 4]), 2)
    assert fixed == {"rows": 2, "largest": 10, "padding_frac": pytest.approx(1 - 18 / 26)}


def test_samples_of_the_training_step() -> None:
    """Equal in every process, whole groups, one of about ten long."""
    sizes = bench_training_step.Sizes(64, 2, 100, 40, 20, 220, 8, 256, 1)
    samples, old, advantages = bench_training_step.make_samples(sizes)
    again = bench_training_step.make_samples(sizes)[0]
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in again]
    assert all(
        o.numel() == a.numel() == s.response_length
        for s, o, a in zip(samples, old, advantages, strict=True)
    )
    assert 1 <= sum(s.response_length > 100 for s in samples) <= 10


def test_shares_of_attention_are_those_of_the_whole() -> None:
    """`shares` raises when a rank computes other rows than the whole attention has."""
    found = bench_attention.shares([16, 8, 32], 2, repeats=1)
    assert len(found["over_fair_share"]) == 2 and min(found["over_fair_share"]) > 0


@pytest.mark.slow
def test_methods_of_the_training_step_compute_the_same() -> None:
    """Packed, padded, two ranks, experts on two, and the loop that is written by hand: `compare`
    raises when a loss or a gradient norm differs."""
    sizes = bench_training_step.Sizes(64, 2, 128, 16, 12, 130, 8, 128, 1)
    for names in ([*bench_training_step.ONE_PROCESS, "DP2"], [bench_training_step.EXPERTS, "EP2"]):
        found = bench_training_step.compare(names, sizes, rounds=1)
        assert all(r["core_s"] > 0 and r["memory_mib"] > 0 for r in found.values())


@pytest.mark.slow
def test_a_server_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way answers, every client is served, and one that floods takes nothing from the
    others."""
    monkeypatch.setattr(
        "sys.argv",
        [
            "bench",
            "--repeats",
            "2",
            "--seconds",
            "2",
            "--clients",
            "3",
            "--json",
            str(tmp_path / "out.json"),
        ],
    )
    assert bench_server.main() == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert all(
        row["http"] > 0 and row["sdk"] > 0 and row["direct"] > 0
        for row in found["latency"].values()
    )
    flooded = found["shares"][f"one keeps {bench_server.FLOOD} waiting"]["calls"]
    assert min(flooded[1:]) > 0.5 * flooded[0] - 2, "no more to the one that asks for more"
    assert "| one token |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2])
def test_served_adapters_are_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    clients: int,
) -> None:
    """Every way does the rounds of all clients, one of the command line included. Of a client alone
    the server's CPU time is in the table."""
    sizes = {"hidden-size": 64, "num-layers": 2, "clients": clients, "again": 1, "blocks": 1, "rounds": 1, "samples": 2, "tokens": 4}  # fmt: skip
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    more = ["--way", "one copy=--max-sampler-engines 1", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["bench", *flags, *more])
    assert bench_served_adapters.main() == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(found) == [*bench_served_adapters.ways_of(bench_served_adapters.WAYS), "one copy"]
    assert all(value > 0 for row in found.values() for value in row.values())
    assert all(("again, core s" in row) == (clients == 1) for row in found.values())
    assert "| one copy |" in capsys.readouterr().out


def test_ways_of_serving_have_names() -> None:
    assert bench_served_adapters.ways_of(["a=--b 1 --c"]) == {"a": ["--b", "1", "--c"]}
    for texts in (["--flag"], ["=--flag"], ["a=", "a="]):
        with pytest.raises(ValueError, match="NAME=FLAGS"):
            bench_served_adapters.ways_of(texts)


def test_results_are_written_with_the_machine(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "results.json", {"a": 1})
    found = json.loads((tmp_path / "new" / "results.json").read_text())
    assert found["results"] == {"a": 1} and found["machine"]["cores"] >= 1
    calls: list[int] = []
    seconds, last = fastest(lambda: len(calls.append(1) or calls), repeats=3, warm_up=2)  # type: ignore[func-returns-value]
    assert last == 5 and seconds >= 0

"""Rollouts sampled ahead of the training: with a bound of 0 the synchronous run bit by bit; with 1,
tokens that are one version old."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bound_of_0_is_the_synchronous_run(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int
) -> None:
    flags = dict(
        num_rollout=3,
        micro_batch_size=2,
        eval_interval=2,
        eval_prompt_data=f"few {work.prompts}@[0:4]",
        skip_eval_before_train="",
    )
    outs = [tmp_path / "plain", tmp_path / "ahead"]
    for out, more in zip(outs, ({}, {"async_rollout": "", "max_staleness": 0})):
        saved = {"save_hf": out / "hf", "save_debug_rollout_data": out / "r_{rollout_id}"}
        server.train(work.flags(out, **flags, **saved, **more), out / "log", ranks=ranks).ok()
    plain, ahead = outs
    assert same_numbers(rows_of(ahead)) == same_numbers(rows_of(plain))
    assert [row.get("eval/few/mean") for row in rows_of(ahead)] == [
        row.get("eval/few/mean") for row in rows_of(plain)
    ]
    for rollout in range(3):
        assert sampled(ahead / "r_{rollout_id}", rollout) == sampled(
            plain / "r_{rollout_id}", rollout
        )
    expected, found = weights_of(plain / "hf"), weights_of(ahead / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []
    assert all(row["rollout/staleness_max"] == 0 for row in rows_of(ahead))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_version_behind(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int
) -> None:
    """Prompts are those of the synchronous run, tokens are never older than the bound, and a
    resumed run leaves no prompt out."""
    out = tmp_path / "out"
    flags = dict(micro_batch_size=2, async_rollout="", tis_ratio_type="token", save=out / "c",
                 save_debug_rollout_data=out / "r_{rollout_id}")  # fmt: skip
    server.train(work.flags(out, **flags, num_rollout=3), out / "log", ranks=ranks).ok()
    server.train(
        work.flags(out, **flags, num_rollout=5, load=out / "c"), out / "log2", ranks=ranks
    ).ok()
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    for row in rows:
        assert row["perf/sampling_s"] > 0 and row["perf/step_s"] > row["perf/generate_s"]
        shares = [
            value for name, value in row.items() if name.startswith("rollout/staleness_frac_")
        ]
        assert sum(shares) == pytest.approx(1)
    for rollout in range(5):
        assert sorted(sampled(out / "r_{rollout_id}", rollout)) == list(
            range(16 * rollout, 16 * rollout + 16)
        )


def test_a_slow_engine_samples_the_same(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """How long the engine takes for a token does not decide which weights sample it."""
    outs = [tmp_path / "fast", tmp_path / "slow"]
    for out, hook in zip(outs, ("", "tests.e2e.faults:slow_tokens 0.3")):
        flags = work.flags(
            out, num_rollout=4, micro_batch_size=2, async_rollout="", tis_ratio_type="token"
        )
        server.train(flags, out / "log", hook=hook).ok()
    fast, slow = outs
    assert max(row["rollout/staleness_max"] for row in rows_of(slow)) == 1
    assert same_numbers(rows_of(slow)) == same_numbers(rows_of(fast))


@pytest.mark.extended
def test_a_resumed_run_trains_on_what_was_sampled_ahead(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Stopped after two rollouts and resumed, the run is the one that was not stopped, bit by bit:
    what was sampled a version ahead is in the checkpoint."""
    outs = [tmp_path / "straight", tmp_path / "stopped"]
    for out in outs:
        flags = work.flags(
            out,
            num_rollout=4,
            micro_batch_size=2,
            async_rollout="",
            max_staleness=1,
            tis_ratio_type="token",
            save=out / "c",
            save_interval=1,
            save_hf=out / "hf",
        )
        if out is outs[1]:
            server.train([*flags, "--exit-interval", "2"], out / "log").ok()
            flags += ["--load", str(out / "c")]
        server.train(flags, out / "log2").ok()
    straight, stopped = outs
    assert max(row["rollout/staleness_max"] for row in rows_of(straight)) == 1
    assert same_numbers(rows_of(stopped)) == same_numbers(rows_of(straight))
    expected, found = weights_of(straight / "hf"), weights_of(stopped / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.mark.extended
def test_samples_are_delivered_in_the_thread_that_samples(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """With them the run is bit by bit that in which the training delivers them."""
    flags = dict(num_rollout=4, micro_batch_size=2, async_rollout="", max_staleness=0,
                 tensor_model_parallel_size=2, sample_buffer_size=4096)  # fmt: skip
    outs = [tmp_path / "ahead", tmp_path / "in_front"]
    for out, hook in zip(outs, ("count_deliveries", "deliver_in_front")):
        argv = work.flags(out, **flags, save_hf=out / "hf")
        server.train(argv, out / "log", ranks=2, hook=f"tests.e2e.faults:{hook} {out}").ok()
    ahead, in_front = outs
    assert (ahead / "threads").read_text() == "rollouts\n" * 4
    assert (in_front / "threads").read_text() == "MainThread\n" * 4
    assert same_numbers(rows_of(ahead)) == same_numbers(rows_of(in_front))
    expected, found = weights_of(in_front / "hf"), weights_of(ahead / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []

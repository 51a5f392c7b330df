"""Phase timers, plain lines and the live display."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from slime_like.logs import RankHandler
from slime_like.metrics.progress import Progress, sparkline
from slime_like.metrics.timers import PhaseTimer, phase_seconds


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("slime_like.metrics.progress.time", clock)
    monkeypatch.setattr("slime_like.metrics.timers.time", clock)
    return clock


def test_phases_add_up_and_start_anew(clock: Clock) -> None:
    timer = PhaseTimer()
    for name, seconds in (("generate", 2.0), ("train", 3.0), ("generate", 0.5)):
        with timer.phase(name):
            assert timer.current == name
            clock.now += seconds
        clock.now += 0.25
    assert timer.take() == {"perf/generate_s": 2.5, "perf/train_s": 3.0, "perf/step_s": 6.25}
    clock.now += 1
    assert timer.take() == {"perf/step_s": 1.0}


def test_a_phase_that_raises_is_timed_and_left(clock: Clock) -> None:
    timer = PhaseTimer()

    def fail() -> None:
        with timer.phase("train"):
            clock.now += 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timer.current is None
    assert timer.take()["perf/train_s"] == 4.0


def test_phase_seconds_are_distinguished_from_rates_and_the_step() -> None:
    metrics = {
        "perf/save_s": 1.0,
        "perf/odd_s": 2.0,
        "perf/generate_s": 3.0,
        "perf/step_s": 9.0,
        "perf/sampling_s": 8.0,  # of another thread
        "perf/tokens_per_s": 50.0,
        "train/loss_s": 1.0,
    }
    assert list(phase_seconds(metrics).items()) == [("generate", 3.0), ("save", 1.0), ("odd", 2.0)]


def _run(clock: Clock, rollouts: int, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=bool(options.pop("terminal", False)), width=120)
    with Progress(rollouts, console=console, **options) as progress:
        for step in range(rollouts):
            with progress.phase("generate"):
                clock.now += 2
            metrics = {
                "rollout/reward_mean": step / 4,
                "train/kl": float("nan"),
            } | progress.take_seconds()
            if step == 0:
                metrics["eval/sums/mean"] = 0.125
            progress.rollout_done(step, metrics)
    return stream.getvalue()


def test_plain_lines_are_aligned_and_complete(clock: Clock) -> None:
    lines = _run(clock, 12, show=True).splitlines()
    assert len(lines) == 12
    assert len(set(map(len, lines))) == 1
    assert re.match(
        r"rollout  2/12  reward +0\.2500  kl +nan nat  step_s +2\.00  eval/sums +0\.1250  "
        r"eta +0:00:20  \[generate 2\.00\]$",
        lines[1],
    )


def test_numbers_have_their_units(clock: Clock) -> None:
    """Either the label has it (tok/s, step_s), or it follows the number; scores have none."""
    stream = io.StringIO()
    with Progress(1, show=True, console=Console(file=stream)) as progress:
        metrics = {"train/ppo_kl": 4.63e-3, "train/entropy": 1.372, "train/grad_norm": 1.869}
        progress.rollout_done(0, {"rollout/response_length_mean": 5.0, **metrics})
    assert (
        "ppo_kl 4.63e-03 nat  entropy    1.372 nat  grad    1.869 L2  len      5.0 tok  eta"
        in stream.getvalue()
    )


def test_log_interval_keeps_the_last_line(clock: Clock) -> None:
    lines = _run(clock, 7, show=True, log_interval=3).splitlines()
    assert [line.split("  ")[0].split()[-1] for line in lines] == ["3/7", "6/7", "7/7"]


def test_other_ranks_are_silent_but_timed(clock: Clock) -> None:
    assert _run(clock, 3, show=False) == ""
    assert _run(clock, 3, show=False, terminal=True) == ""


def test_live_display_on_a_terminal(clock: Clock) -> None:
    shown = _run(clock, 3, show=True, terminal=True)
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "rollout 3/3" in plain
    assert "reward 0.5000 ▁▅█" in plain
    assert "eval/sums 0.1250" in plain
    assert "\x1b[" not in _run(clock, 3, show=True, terminal=True, plain=True)


def test_the_log_is_printed_above_the_live_display_as_it_is(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not wrapped at the terminal's width, not read as markup; on stdout before and after."""
    stream, long = io.StringIO(), "gate [bold] at [red]rank 0 " + 40 * "word "
    record = logging.LogRecord("slime_like", logging.WARNING, "", 0, long, None, None)
    handler = RankHandler(0)
    with Progress(1, show=True, console=Console(file=stream, force_terminal=True, width=60)):
        handler.handle(record)
    assert capsys.readouterr().out == ""
    assert f"warning: {long}\n" in stream.getvalue()
    handler.handle(record)
    assert capsys.readouterr().out == f"warning: {long}\n"
    with Progress(1, show=True, plain=True, console=Console(file=stream)):
        handler.handle(record)
    assert capsys.readouterr().out == f"warning: {long}\n"


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([0, float("nan"), 1, float("inf")]) == "▁?█?"
    assert sparkline([]) == ""


def test_engines_side_by_side() -> None:
    """benchmarks/engine_table.py: seconds are sums over the run, and what was sampled while the
    training continued is reported."""
    from benchmarks.engine_table import HEAD, table_row

    rows = [
        {"eval/heldout/mean": 0.4, "perf/sync_s": 1.0, "perf/eval_s": 2.0, "perf/step_s": 3.5},
        {
            "rollout/reward_mean": 0.4,
            "perf/generate_s": 4.0,
            "perf/train_s": 1.0,
            "perf/log_probs_s": 0.5,
            "perf/step_s": 6.0,
        },
        {
            "rollout/reward_mean": 0.5,
            "perf/generate_s": 2.0,
            "perf/train_s": 1.0,
            "perf/step_s": 3.0,
            "eval/heldout/mean": 0.9,
        },
    ]
    reported = dict(zip(HEAD, table_row("plain", rows), strict=True))
    assert reported == {
        "run": "plain", "rollouts": "2", "score": "0.400 -> 0.900", "whole": "12.5",
        "sampling": "6.0", "waiting": "6.0", "training": "2.5",
        "weights": "1.0", "evaluation": "2.0", "overlap": "0%",
    }  # fmt: skip
    ahead = [row | {"perf/sampling_s": 5.0} for row in rows if "rollout/reward_mean" in row]
    assert dict(zip(HEAD, table_row("ahead", ahead), strict=True))["overlap"] == "40%"

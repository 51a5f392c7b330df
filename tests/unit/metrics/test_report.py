"""The plot and the table, from synthetic metrics."""

from __future__ import annotations

import io
import math
import struct
import sys
from pathlib import Path

import pytest
from rich.console import Console

from slime_like.metrics import plot
from slime_like.metrics.health import HealthMonitor
from slime_like.metrics.logger import MetricsLogger, read_metrics
from slime_like.metrics.plot import series, smoothed, write_plot
from slime_like.metrics.report import main, summary_table, write_report
from slime_like.metrics.timers import PHASES


def _log(folder: Path, rollouts: int, *, everything: bool = True) -> Path:
    with MetricsLogger(folder) as logger:
        for step in range(rollouts):
            values = {"rollout/reward_mean": step / rollouts, "perf/step_s": 3.0}
            if everything:
                values |= {
                    "rollout/reward_std": 0.1,
                    "train/kl": float("nan") if step == 2 else 0.01 * step,
                    "train/ppo_kl": 0.0,
                    "train/entropy": 3.0 - step / rollouts,
                    "rollout/train_rollout_log_prob_diff_mean": 1e-6,
                    "perf/generate_s": 1.0,
                    "perf/train_s": 1.5,
                    "perf/tokens_per_s": 4000.0,
                }
                if step % 5 == 0:
                    values |= {"eval/sums/mean": 0.5 - step / 100, "eval/sums/pass@4": 0.7}
            logger.log(step, values)
    return logger.path


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def _text(rows: list[dict[str, float]], width: int = 100) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(summary_table(rows))
    return [line.split() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("rollouts", [1, 12, 60])
def test_report_renders(tmp_path: Path, rollouts: int) -> None:
    pytest.importorskip("matplotlib")
    stream = io.StringIO()
    path = write_report(_log(tmp_path, rollouts), console=Console(file=stream, width=100))
    assert path == tmp_path / "report.png"
    assert _png_size(path) == (1944, 912)  # two rows of three
    assert f"plot: {path}" in stream.getvalue().replace("\n", "")


def test_panels_without_data_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = read_metrics(_log(tmp_path, 3, everything=False))
    assert _png_size(write_plot(rows, tmp_path / "sub" / "small.png")) == (
        1296,
        480,
    )  # reward, seconds


def test_drawn_curves_are_the_logged_ones(tmp_path: Path) -> None:
    """What the axes hold, rather than what they look like."""
    figure_module = pytest.importorskip("matplotlib.figure")
    rows = read_metrics(_log(tmp_path, 12))
    axis = figure_module.Figure().subplots()
    plot._draw_panel(axis, plot.PANELS[1], rows)
    (kl, ppo_kl) = axis.get_lines()
    assert kl.get_xydata().tolist()[1] == [1.0, 0.01]
    assert math.isnan(kl.get_ydata()[2])  # a gap, not a zero
    assert ppo_kl.get_ydata().tolist() == [0.0] * 12
    assert axis.get_title(loc="left") == "KL (1 not finite)"

    axis = figure_module.Figure().subplots()
    plot._draw_phases(axis, rows)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "other",
        "train",
        "generate",
    ]
    tops = [collection.get_datalim(axis.transData).ymax for collection in axis.collections]
    assert tops == pytest.approx([1.0, 2.5, 3.0])  # stacked up to perf/step_s


def test_an_evaluation_before_training_is_no_rollout(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/sums/mean": 0.1},
        *({**row, "step": row["step"] + 1} for row in read_metrics(_log(tmp_path, 4))),
    ]
    assert _text(rows)[0] == ["4", "rollouts"]


def test_table(tmp_path: Path) -> None:
    rows = {line[0]: line[1:] for line in _text(read_metrics(_log(tmp_path, 12))) if line}
    assert rows["rollout/reward_mean"] == ["0", "0.9167", "0.9167", "11"]
    assert rows["eval/sums/mean"] == ["0.5", "0.4", "0.5", "0"]
    assert rows["eval/sums/pass@4"] == ["0.7", "0.7", "0.7", "0"]
    assert rows["train/kl"] == ["(1", "not", "finite)", "0", "0.11"]
    assert rows["perf/step_s"] == ["3", "3", "3", "0"]
    assert rows["rollout/train_rollout_log_prob_diff_mean"] == [
        "1.00e-06",
        "1.00e-06",
        "1.00e-06",
        "0",
    ]
    assert "train/lr" not in rows


def test_numbers_survive_a_narrow_terminal(tmp_path: Path) -> None:
    rows = read_metrics(_log(tmp_path, 12))
    assert any(
        line[-4:] == ["1.00e-06", "1.00e-06", "1.00e-06", "0"] for line in _text(rows, width=80)
    )


def test_series_and_smoothing() -> None:
    rows = [{"step": 0.0, "a": 1.0}, {"step": 1.0}, {"step": 2.0, "a": math.inf}]
    assert series(rows, "a") == [(0, 1.0), (2, math.inf)]
    assert smoothed([0.0, 3.0, 6.0, math.nan]) == [1.5, 3.0, 4.5, 6.0]
    assert all(map(math.isnan, smoothed([math.nan, math.inf])))
    assert smoothed([2.0] * 100) == [2.0] * 100


def test_without_matplotlib_the_table_and_a_hint_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = _log(tmp_path, 3)
    stream = io.StringIO()
    assert write_report(path, console=Console(file=stream, width=100)) is None
    assert "rollout/reward_mean" in stream.getvalue()
    assert "[tasks]'" in stream.getvalue()
    with pytest.raises(ModuleNotFoundError, match="tasks"):
        write_plot(read_metrics(path), tmp_path / "x.png")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(_log(tmp_path, 3)), "--output", str(tmp_path / "mine.png")]) == 0
    assert _png_size(tmp_path / "mine.png")[0] > 0
    chosen = ["--output", str(tmp_path / "one.png"), "--panels", "reward"]
    assert main([str(tmp_path / "metrics.jsonl"), *chosen]) == 0
    assert _png_size(tmp_path / "one.png") == (648, 480)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "metrics.jsonl"), *chosen[:-1], "rewrad"])
    assert "rewrad" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("garbage\n")
    for argument, words in (("metrics.jsonl", "metrics.jsonl:1"), ("absent.jsonl", "absent.jsonl")):
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path / argument)])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    stream = io.StringIO()
    assert write_report(_log(tmp_path, 0), console=Console(file=stream)) is None
    assert "no rollout was logged" in stream.getvalue().replace("\n", " ")
    with pytest.raises(ValueError, match="no rollout"):
        write_plot([], tmp_path / "x.png")


def _titles(rows: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch, path: Path) -> list[str]:
    titles: list[str] = []
    finish = plot._finish
    monkeypatch.setattr(
        plot, "_finish", lambda axis, title: (titles.append(title), finish(axis, title))
    )
    write_plot(rows, path)
    return titles


def test_sources_of_a_mix_have_panels_of_their_own(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        for step in range(3):
            values = {"rollout/reward_mean": 0.5, "eval/sums/mean": 0.1}
            for name in ("easy", "hard.2"):
                values |= {f"rollout/{name}/reward_mean": 0.1, f"rollout/{name}/pass_rate": 0.2}
            logger.log(step, values)
    panels = {each.title: each for each in plot._panels_with_data(read_metrics(logger.path), ())}
    labels = {title: [label for label, *_ in panel.curves] for title, panel in panels.items()}
    assert labels["Reward by source"] == labels["Pass rate by source"] == ["easy", "hard.2"]
    assert labels["Evaluation score"] == ["sums"] and len(labels["Reward"]) == 1
    titles = [
        panel.title for panel in plot._panels_with_data(read_metrics(_log(tmp_path / "b", 3)), ())
    ]
    assert not any("source" in title for title in titles)


def test_panels_of_length_truncation_gradient_and_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "step": float(step),
            "rollout/response_length_mean": 20.0 + step,
            "rollout/truncated_frac": 0.5,
            "train/grad_norm": 1.0,
            "train/critic_grad_norm": 2.0,
            "train/value_loss": 0.1,
            "rollout/explained_variance": 0.3,
        }
        for step in range(3)
    ]
    assert _titles(rows, monkeypatch, tmp_path / "all.png") == [
        "Response length, tokens",
        "Truncated, special tokens, no spread",
        "Gradient norm before clipping",
        "Critic: value loss",
        "Critic: explained variance of returns",
    ]


def _phase_colours(names: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    figure_module = pytest.importorskip("matplotlib.figure")
    axis = figure_module.Figure().subplots()
    plot._draw_phases(axis, [{"step": 0.0, **{f"perf/{name}_s": 1.0 for name in names}}])
    return {c.get_label(): tuple(c.get_facecolor()[0]) for c in axis.collections}


def test_a_phase_has_one_colour_in_every_plot() -> None:
    few = _phase_colours(("generate", "train"))
    many = _phase_colours(PHASES)
    assert set(few.items()) <= set(many.items())
    assert len(set(many.values())) == len(PHASES) + 1  # and one for what no phase claims
    local = _phase_colours(("mine", "train"))["mine"]
    assert local == _phase_colours((*PHASES, "mine"))["mine"]
    assert local != many["other"]


def test_the_warnings_of_a_run_are_repeated_at_its_end(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        monitor = HealthMonitor()
        for step in range(1, 7):
            row = {"rollout/reward_mean": 0.5, "rollout/truncated_frac": 0.9}
            logger.log(step, row | monitor.check(row)[0])
    stream = io.StringIO()
    write_report(tmp_path / "metrics.jsonl", console=Console(file=stream, width=100))
    (line,) = [text for text in stream.getvalue().splitlines() if text.startswith("warning: ")]
    assert line.startswith("warning: health/truncation held in 2 rollouts, first in rollout 5: ")
    assert "90% of the responses are cut" in line and "--custom-rm-path" in line
    assert "health/warnings" not in stream.getvalue()


def test_a_warning_that_is_over_is_no_warning_at_the_end(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        monitor = HealthMonitor()
        for step in range(1, 16):
            row = {"rollout/reward_mean": 0.5, "rollout/truncated_frac": 0.9 if step < 6 else 0.0}
            logger.log(step, row | monitor.check(row)[0])
    stream = io.StringIO()
    write_report(tmp_path / "metrics.jsonl", console=Console(file=stream, width=100))
    (line,) = [text for text in stream.getvalue().splitlines() if "health/truncation held" in text]
    assert line.startswith("over: health/truncation held in ")
    assert ", and no more since rollout " in line and "are cut" in line
    assert "warning: " not in stream.getvalue()

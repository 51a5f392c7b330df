"""Progress output: a live display on a terminal, or one aligned line per rollout."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime_like.logs import show_through
from slime_like.metrics.timers import STEP_SECONDS, PhaseTimer, phase_seconds

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
ETA_WINDOW = 20  # the remaining time is estimated from the median of this many rollouts
# label, metric, format, unit (nat: natural logarithm; L2: norm of the gradient before clipping;
# tok: tokens), which a label may have already; shown by both displays
_COLUMNS = (
    ("reward", "rollout/reward_mean", "{:.4f}", ""),
    ("kl", "train/kl", "{:.2e}", " nat"),
    ("ppo_kl", "train/ppo_kl", "{:.2e}", " nat"),
    ("entropy", "train/entropy", "{:.3f}", " nat"),
    ("grad", "train/grad_norm", "{:.3f}", " L2"),
    ("len", "rollout/response_length_mean", "{:.1f}", " tok"),
    ("tok/s", "perf/tokens_per_s", "{:.0f}", ""),
    ("step_s", STEP_SECONDS, "{:.2f}", ""),
)


class Progress:
    """Times the phases of every rollout on every rank, and shows them if `show` (rank 0).

        with Progress(num_rollouts, show=rank == 0) as progress:
            for step in range(num_rollouts):
                with progress.phase("generate"): ...
                metrics |= progress.take_seconds()
                progress.rollout_done(step, metrics)

    Args:
        plain: Print lines instead of the live display; always the case if stdout is not a terminal.
        log_interval: Rollouts between two plain lines; the last rollout always has one.
        on_phase: Called with every phase that begins, and at the start of the time after it.
    """

    def __init__(
        self,
        num_rollouts: int,
        *,
        show: bool,
        plain: bool = False,
        log_interval: int = 1,
        console: Console | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._timer = PhaseTimer()
        self._on_phase = on_phase
        self._num_rollouts = num_rollouts
        self._log_interval = log_interval
        self._console = console or Console()
        self._show = show
        self._done = 0
        self._latest: dict[str, float] = {}
        # replaced, not mutated: the display's thread reads it
        self._rewards: tuple[float, ...] = ()
        self._durations: deque[float] = deque(maxlen=ETA_WINDOW)
        self._started = self._step_started = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if show and not plain and self._console.is_terminal:
            # Live calls _render from a separate thread, which only reads.
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                transient=False,
            )

    def start_at(self, rollout: int) -> None:
        """Set the first rollout, above 0 for a resumed run."""
        self._done = rollout

    def __enter__(self) -> Progress:
        self._timer.take()
        self._started = self._step_started = time.monotonic()
        if self._live is not None:
            self._live.start()
            show_through(self._print_above)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            show_through(None)
            self._live.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` and add the time inside to ``perf/<name>_s``. Phases do not nest."""
        self._on_phase(name)
        with self._timer.phase(name):
            yield
        self._on_phase(f"after {name}")

    def take_seconds(self) -> dict[str, float]:
        """``perf/<phase>_s`` and ``perf/step_s`` since the last call."""
        return self._timer.take()

    def rollout_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of rollout `step` (from 0). Metrics that are not logged every rollout,
        such as evaluations, stay visible until they are updated."""
        now = time.monotonic()
        self._durations.append(now - self._step_started)
        self._step_started = now
        self._done = step + 1
        self._latest = {**self._latest, **metrics}
        if "rollout/reward_mean" in metrics:
            self._rewards = (*self._rewards, metrics["rollout/reward_mean"])[-SPARK_WIDTH:]
        due = self._done % self._log_interval == 0 or self._done == self._num_rollouts
        if self._show and self._live is None and due:
            self._console.print(
                self._plain_line(metrics), soft_wrap=True, highlight=False, markup=False
            )

    def _print_above(self, line: str) -> None:
        """Print a log line above the live display verbatim: without wrapping and markup."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _remaining_s(self) -> float | None:
        if not self._durations:
            return None
        return statistics.median(self._durations) * max(self._num_rollouts - self._done, 0)

    def _numbers(self) -> list[tuple[str, str, str]]:
        """(label, value, unit) of the columns seen so far, then the mean of each evaluation set."""
        latest = self._latest
        numbers = [
            (label, form.format(latest[name]), unit)
            for label, name, form, unit in _COLUMNS
            if name in latest
        ]
        for name in sorted(latest):
            if name.startswith("eval/") and name.endswith("/mean"):
                numbers.append((name.removesuffix("/mean"), f"{latest[name]:.4f}", ""))
        return numbers

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        width = len(str(self._num_rollouts))
        numbers = "  ".join(f"{label} {value:>8}{unit}" for label, value, unit in self._numbers())
        phases = " ".join(f"{name} {value:.2f}" for name, value in phase_seconds(metrics).items())
        return (
            f"rollout {self._done:>{width}}/{self._num_rollouts}  {numbers}  eta "
            f"{_clock(self._remaining_s()):>8}  [{phases}]"
        )

    def _render(self) -> RenderableType:
        activity = "done" if self._done >= self._num_rollouts else "..."
        if phase := self._timer.current:
            phase_s = time.perf_counter() - self._timer.current_since
            activity = f"{phase.replace('_', '-')} {phase_s:.1f} s"
        head = Table.grid(padding=(0, 2))
        self._spinner.update(text=Text(f"{activity:<18}", style="bold cyan"))
        head.add_row(
            self._spinner,
            ProgressBar(total=max(self._num_rollouts, 1), completed=self._done, width=16),
            Text(f"rollout {self._done}/{self._num_rollouts}"),
            Text(
                f"{_clock(time.monotonic() - self._started)} eta {_clock(self._remaining_s())}",
                style="dim",
            ),
        )
        body = Text("  ")
        for label, value, unit in self._numbers():
            body.append(f"{label} ", style="dim")
            is_score = label == "reward" or label.startswith("eval/")
            body.append(value, style="bold green" if is_score else "")
            body.append(unit, style="dim")
            if label == "reward":
                body.append(f" {sparkline(self._rewards)}", style="green")
            body.append("   ")
        return Group(head, body)


def sparkline(values: Sequence[float]) -> str:
    """One character per value, lowest to highest; a question mark for a non-finite value."""
    finite = list(filter(math.isfinite, values))
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        SPARKS[round((value - low) * scale)] if math.isfinite(value) else "?" for value in values
    )


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

"""torch.profiler traces of a few rollouts, and CUDA memory snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from arguments.schema import ProfilingConfig
from slime_like.checkpoints.files import writes_to
from slime_like.metrics.timeline import BETWEEN

logger = logging.getLogger(__name__)
FOLDER = "profile"  # in the output folder
MEMORY_EVENTS = 1_000_000  # newest allocations and frees that are kept


def profiler_of(config: ProfilingConfig, output_dir: Path, rank: int) -> Profiler | None:
    """The profiler of this rank; None if the rank is not profiled."""
    if rank not in config.profile_ranks or not (config.profile or config.record_memory_history):
        return None
    return Profiler(config, output_dir / FOLDER, rank)


class Profiler:
    """Profiles rollouts of one rank. Adds no computation and no communication.

    Traces name the rollouts (``rollout 12``, counted from 1) and their phases (``phase train``).
    """

    def __init__(self, config: ProfilingConfig, folder: Path, rank: int) -> None:
        self._config = config
        self._folder = folder
        self._rank = rank
        self._trace: profile | None = None
        self._first = self._done = 0  # rollouts done at the start of the trace, and now
        self._phase = ExitStack()  # of the current phase
        self._records_memory = config.record_memory_history
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
            attach(self._out_of_memory)

    def enter(self, phase: str) -> None:
        """Callback of `Progress`: the phase's name at its start, "after <name>" at its end."""
        self._phase.close()
        if self._trace is not None and not phase.startswith(BETWEEN):
            self._phase.enter_context(record_function(f"phase {phase}"))

    @contextmanager
    def rollout(self, step: int) -> Iterator[None]:
        """Wrap one rollout. step: number of finished rollouts."""
        config = self._config
        self._done = step
        if config.profile and config.profile_step_start <= step < config.profile_step_end:
            if self._trace is None:
                self._first = step
                self._trace = self._start()
            with record_function(f"rollout {step + 1}"):
                yield
        else:
            yield
        self._done = step + 1
        if self._trace is not None and step + 1 == config.profile_step_end:
            self._write_trace()
        if self._records_memory and step + 1 == config.memory_snapshot_num_steps:
            self._write_memory()

    def close(self) -> None:
        """Write pending traces, e.g. of a rollout that failed. Idempotent."""
        self._phase.close()
        if self._trace is not None:
            self._write_trace()
        if self._records_memory and self._config.memory_snapshot_num_steps is None:
            self._write_memory()

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        trace = profile(
            activities=activities,
            record_shapes=self._config.pytorch_profiler_collect_shapes,
            with_stack=self._config.pytorch_profiler_collect_callstack,
        )
        trace.start()
        return trace

    def _write_trace(self) -> None:
        trace = self._trace
        self._trace = None
        assert trace is not None
        trace.stop()
        last = max(self._done, self._first + 1)
        path = self._folder / f"rank{self._rank}_rollouts{self._first + 1}-{last}.json.gz"
        self._write("--output-dir", path, lambda: trace.export_chrome_trace(str(path)))

    def _write_memory(self) -> None:
        self._records_memory = False
        self._dump_memory("")
        torch.cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        """Out-of-memory hook of torch, called before the error is raised. Sizes in bytes."""
        logger.error(
            "out of memory on device %d: %d bytes were requested, %d were free",
            device,
            alloc,
            device_free,
        )
        self._dump_memory("_out_of_memory")

    def _dump_memory(self, suffix: str) -> None:
        name = Path(self._config.memory_snapshot_path)
        given = self._config.memory_snapshot_dir
        folder = self._folder if given is None else Path(given)
        path = folder / f"{name.stem}_rank{self._rank}{suffix}{name.suffix}"
        self._write(
            "--memory-snapshot-dir", path, lambda: torch.cuda.memory._dump_snapshot(str(path))
        )

    def _write(self, flag: str, path: Path, write: Callable[[], object]) -> None:
        """Write a trace; a failure is only a warning."""
        try:
            with writes_to(flag, path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: %s", self._rank, error)
        else:
            logger.info("profile: %s", path)

"""Traces and memory snapshots of a part of a run, and what its devices are able to do."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class ProfilingConfig(CheckedSettings):
    profile: bool = arg(
        False,
        "Trace the rollouts after --profile-step-start with torch.profiler, to profile/ in the output folder; ui.perfetto.dev opens the files.",
        aliases=("--use-pytorch-profiler",),
    )
    profile_step_start: int = arg(
        10,
        "Rollouts that are done when the trace begins; 0 traces the first one.",
        legal=NON_NEGATIVE,
        needs="profile",
    )
    profile_step_end: int = arg(
        12,
        "Rollouts that are done when the trace ends.",
        legal=AT_LEAST_ONE,
        needs="profile",
    )
    profile_ranks: list[int] = arg(
        [0],
        "Ranks that are recorded.",
        nargs="+",
        needs="profile|record_memory_history",
    )
    pytorch_profiler_collect_shapes: bool = arg(
        False, "Put the shapes of operators' inputs into traces.", needs="profile"
    )
    pytorch_profiler_collect_callstack: bool = arg(
        False,
        "Put Python's call stacks into traces, which makes them several times as large.",
        needs="profile",
    )
    record_memory_history: bool = arg(
        False,
        "Record which line allocated what on the GPU, and write it when a rank runs out of memory and at the end of the run (see "
        "--memory-snapshot-num-steps); pytorch.org/memory_viz opens the files.",
    )
    memory_snapshot_path: str = arg(
        "snapshot.pickle",
        "Name of these files, to which the rank is added.",
        needs="record_memory_history",
    )
    memory_snapshot_dir: str | None = arg(
        None,
        "Their folder; default profile/ in the output folder.",
        needs="record_memory_history",
    )
    memory_snapshot_num_steps: int | None = arg(
        None,
        "Rollouts after which memory is written and no longer recorded, in place of the end of the run.",
        legal=AT_LEAST_ONE,
        needs="record_memory_history",
    )
    device_peak_tflops: float | None = arg(
        None,
        "What a device of the trainer reaches at most, in TFLOP/s: perf/mfu is the share of it. Default: the data sheet's dense bf16 number, by "
        "the GPU's name; none for a CPU.",
        legal=POSITIVE,
    )

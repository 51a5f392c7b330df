"""Traces and memory snapshots of a part of a run, and peak performance of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class ProfilingConfig(CheckedSettings):
    profile: bool = arg(
        False,
        "Trace the rollouts after --profile-step-start with torch.profiler, to profile/ in the "
        "output folder; ui.perfetto.dev opens the files.",
        aliases=("--use-pytorch-profiler",),
    )
    profile_step_start: int = arg(
        10,
        "Number of finished rollouts at which the trace starts; 0 includes the first rollout.",
        legal=NON_NEGATIVE,
        needs="profile",
        below="num_rollout",
    )
    profile_step_end: int = arg(
        12,
        "Number of finished rollouts at which the trace ends.",
        legal=AT_LEAST_ONE,
        needs="profile",
        above="profile_step_start",
    )
    profile_ranks: list[int] = arg(
        [0],
        "Ranks to profile.",
        nargs="+",
        needs="profile|record_memory_history",
    )
    pytorch_profiler_collect_shapes: bool = arg(
        False, "Record operator input shapes in traces.", needs="profile"
    )
    pytorch_profiler_collect_callstack: bool = arg(
        False,
        "Record Python stacks in traces, which makes them several times larger.",
        needs="profile",
    )
    record_memory_history: bool = arg(
        False,
        "Record GPU allocations with their stacks, and write a snapshot when a rank runs out of "
        "memory and at the end of the run (see --memory-snapshot-num-steps); "
        "pytorch.org/memory_viz opens the files.",
        needs="@cuda, see the metric perf/peak_rss_gb instead",
    )
    memory_snapshot_path: str = arg(
        "snapshot.pickle",
        "File name of memory snapshots; the rank is appended.",
        needs="record_memory_history",
    )
    memory_snapshot_dir: str | None = arg(
        None,
        "Folder of memory snapshots; default profile/ in the output folder.",
        needs="record_memory_history",
    )
    memory_snapshot_num_steps: int | None = arg(
        None,
        "Write the snapshot and stop recording after this many rollouts instead of at the end of "
        "the run.",
        legal=AT_LEAST_ONE,
        needs="record_memory_history",
    )
    device_peak_tflops: float | None = arg(
        None,
        "Peak TFLOP/s of one trainer device, the denominator of perf/mfu. Default: the dense bf16 "
        "peak of the GPU's data sheet, by its name; none for a CPU.",
        legal=POSITIVE,
    )

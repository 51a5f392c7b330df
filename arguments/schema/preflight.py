"""A look at a command line before the job is queued: whether it starts, fits and is balanced."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class PreflightConfig(CheckedSettings):
    preflight: bool = arg(
        False,
        "Check the command line, report what each rank holds and sends in the job, and end; no GPU and no process group is needed. Exit status: "
        "0 fits, 1 does not.",
    )
    preflight_world_size: int | None = arg(
        None,
        "Processes of the job, one a GPU. Default: --nodes times --gpus-per-node, else those that run now.",
        legal=AT_LEAST_ONE,
        aliases=("--world-size",),
        needs="preflight",
    )
    preflight_nodes: int | None = arg(
        None,
        "Nodes of the job.",
        legal=AT_LEAST_ONE,
        aliases=("--nodes",),
        needs="preflight",
        excludes="preflight_world_size",
    )
    preflight_gpus_per_node: int = arg(
        8, "GPUs of each node.", legal=AT_LEAST_ONE, aliases=("--gpus-per-node",), needs="preflight"
    )
    preflight_memory_gb: float = arg(
        80.0, "Memory of each GPU, in GB (10^9 bytes).", legal=POSITIVE, needs="preflight"
    )
    preflight_machine: str = arg(
        "gpu",
        "What the job runs on. gpu: GPUs with Transformer Engine and NCCL. here: what this machine has.",
        choices=("gpu", "here"),
        needs="preflight",
    )
    preflight_all_ranks: bool = arg(
        False,
        "Look at a rank of every pipeline stage, in place of the first, the last and the heaviest.",
        needs="preflight",
    )
    preflight_lengths: str = arg(
        "uniform",
        "Lengths of responses: uniform (1 to --rollout-max-response-len), full (all that long), or lognormal:MEDIAN:SIGMA, cut there.",
        needs="preflight",
    )
    preflight_search: bool = arg(
        False,
        "Also try other layouts of as many GPUs, and print the flags of the best five that fit.",
        needs="preflight",
    )
    preflight_json: str | None = arg(
        None, "Write everything to this file, as JSON.", needs="preflight"
    )

    @property
    def world_size(self) -> int | None:
        """Processes of the planned job, where the flags say it."""
        if self.preflight_nodes is not None:
            return self.preflight_nodes * self.preflight_gpus_per_node
        return self.preflight_world_size

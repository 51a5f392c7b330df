"""Preflight: check a command line before the job is queued: whether it starts, fits in memory and
is balanced."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class PreflightConfig(CheckedSettings):
    preflight: bool = arg(
        False,
        "Check the command line, report each rank's memory and communication in the planned job, "
        "and exit; needs no GPU and no process group. Exit status: 0 fits, 1 does not.",
    )
    preflight_world_size: int | None = arg(
        None,
        "Processes of the planned job, one per GPU. Default: --nodes times --gpus-per-node, "
        "otherwise the current number.",
        legal=AT_LEAST_ONE,
        aliases=("--world-size",),
        needs="preflight",
    )
    preflight_nodes: int | None = arg(
        None,
        "Nodes of the planned job.",
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
    preflight_gpu_hour_price: float | None = arg(
        None,
        "Price of one GPU for one hour, in any currency: the report then says what the training "
        "costs.",
        legal=POSITIVE,
        aliases=("--gpu-hour-price",),
        needs="preflight",
    )
    preflight_machine: str = arg(
        "gpu",
        "Target of the planned job. gpu: GPUs with Transformer Engine and NCCL. here: what this "
        "machine has.",
        choices=("gpu", "here"),
        needs="preflight",
    )
    preflight_all_ranks: bool = arg(
        False,
        "Report a rank of every pipeline stage instead of the first, the last and the one with "
        "most memory.",
        needs="preflight",
    )
    preflight_lengths: str = arg(
        "uniform",
        "Distribution of response lengths: uniform (1 to --rollout-max-response-len), full (all of "
        "maximum length), or lognormal:MEDIAN:SIGMA, truncated there.",
        needs="preflight",
    )
    preflight_search: bool = arg(
        False,
        "Also try other layouts of the same number of GPUs, and print the flags of the best five "
        "that fit.",
        needs="preflight",
    )
    preflight_json: str | None = arg(
        None, "Write the complete result to this JSON file.", needs="preflight"
    )

    @property
    def world_size(self) -> int | None:
        """Processes of the planned job, if there is one and the flags say so."""
        if not self.preflight:
            return None
        if self.preflight_nodes is not None:
            return self.preflight_nodes * self.preflight_gpus_per_node
        return self.preflight_world_size

"""Rules about flags of slime's launch scripts."""

from __future__ import annotations

import os

from arguments.rules.base import Rule, Settings, problem
from arguments.slime_launch import LAUNCH, SLIME_GPUS_PER_NODE
from slime_like.config import Problem


def world_is_slimes(s: Settings) -> list[Problem]:
    """--actor-num-nodes times --actor-num-gpus-per-node must be the number of processes; in a job
    that may continue with fewer nodes it is the maximum."""
    given = [name for name in LAUNCH if name in s.given]
    if not given:
        return []
    nodes = s.slime.actor_num_nodes or 1
    per_node = s.slime.actor_num_gpus_per_node or SLIME_GPUS_PER_NODE
    found = []
    shrunk = s.world_size < nodes * per_node and continues_with_fewer()
    if nodes * per_node != s.world_size and not shrunk:
        found += problem(
            given[-1],
            getattr(s.slime, given[-1]),
            f"asks for {nodes} x {per_node} processes, and {s.world_size} run; start them with: torchrun --nnodes {nodes} "
            f"--nproc-per-node {per_node} train.py ..., or look with --preflight",
        )
    there = s.slime.num_gpus_per_node
    if there is not None and there < per_node:
        found += problem(
            "num_gpus_per_node", there, f"is fewer than --actor-num-gpus-per-node {per_node}"
        )
    return found


def continues_with_fewer() -> bool:
    """Whether the launcher restarts the job on the remaining nodes: torchrun with --max-restarts,
    or the SLURM scripts with MIN_NODES."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return restarts not in ("", "0") or bool(os.environ.get("MIN_NODES"))


SLIME_RULES: tuple[Rule, ...] = (world_is_slimes,)

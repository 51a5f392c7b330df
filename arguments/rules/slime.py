"""Rules about flags of slime's launch scripts."""

from __future__ import annotations

import os

from arguments.rules.base import Rule, Settings, problem
from arguments.translate.slime import LAUNCH, SLIME_GPUS_PER_NODE
from slime_like.config import Problem


def check_slime_world_size(s: Settings) -> list[Problem]:
    """--actor-num-nodes times --actor-num-gpus-per-node must be the number of processes; in a job
    that may continue with fewer nodes it is the maximum."""
    flags = [name for name in LAUNCH if name in s.given]
    if not flags:
        return []
    nodes = s.slime.actor_num_nodes or 1
    per_node = s.slime.actor_num_gpus_per_node or SLIME_GPUS_PER_NODE
    problems = []
    shrunk = s.world_size < nodes * per_node and continues_with_fewer()
    if nodes * per_node != s.world_size and not shrunk:
        message = (
            f"asks for {nodes} x {per_node} processes, and {s.world_size} run; use torchrun "
            f"--nnodes {nodes} --nproc-per-node {per_node} train.py ..., or add --preflight"
        )
        problems += problem(flags[-1], getattr(s.slime, flags[-1]), message)
    gpus = s.slime.num_gpus_per_node
    if gpus is not None and gpus < per_node:
        message = f"must be at least --actor-num-gpus-per-node {per_node}"
        problems += problem("num_gpus_per_node", gpus, message)
    return problems


def continues_with_fewer() -> bool:
    """Whether the launcher restarts the job on the remaining nodes: torchrun with --max-restarts,
    or the SLURM scripts with MIN_NODES."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return restarts not in ("", "0") or bool(os.environ.get("MIN_NODES"))


SLIME_RULES: tuple[Rule, ...] = (check_slime_world_size,)

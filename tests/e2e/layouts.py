"""The layouts in which runs are interrupted and taken up. A new one is one line."""

from __future__ import annotations

# name: flags, ranks
LAYOUTS = {
    "one process": ("", 1),
    "DP2 distributed optimizer": ("--use-distributed-optimizer", 2),
    "DP2 overlap": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
    "DP2": ("", 2),
    "TP2": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
    "CP2": ("--context-parallel-size 2 --use-distributed-optimizer", 2),
    "TP2 PP2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer", 4),
}

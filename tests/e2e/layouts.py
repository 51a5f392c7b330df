"""Layouts in which runs are interrupted and resumed, by what is trained; one line each."""

from __future__ import annotations

# name: flags, ranks
LAYOUTS = {
    "one process": ("", 1),
    "DP2 distributed optimizer": ("--use-distributed-optimizer", 2),
    "DP2 overlap": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
    "DP2": ("", 2),
    "TP2": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
    "PP2 VP2, written out": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|t|L",
        2,
    ),
    "CP2": ("--context-parallel-size 2 --use-distributed-optimizer", 2),
    "TP2 PP2": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
        4,
    ),
}
_EP2 = "--expert-model-parallel-size 2"
EXPERT_LAYOUTS = {
    "one process": ("", 1),
    "DP2 distributed optimizer": ("--use-distributed-optimizer", 2),
    "EP2": (_EP2, 2),
    "EP2 distributed optimizer": (f"{_EP2} --use-distributed-optimizer", 2),
    "TP2 EP2": (
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 {_EP2}",
        2,
    ),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
    "EP4 distributed optimizer": ("--expert-model-parallel-size 4 --use-distributed-optimizer", 4),
}
CRITIC_LAYOUTS = {
    name: LAYOUTS[name]
    for name in ("one process", "DP2 distributed optimizer", "TP2", "PP2", "CP2")
}
_BF16 = "--bf16 --use-distributed-optimizer --adam-beta2 0.98"
_PRECISE = f"{_BF16} --use-precision-aware-optimizer"
# of the optimizer's state: what a checkpoint holds is the same
MEMORY = {
    "fp32 state": (_BF16, 2),
    "bf16 state": (
        f"{_PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
        2,
    ),
    "state on the CPU": (f"{_PRECISE} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", 2),
}
KINDS = {"dense": LAYOUTS, "experts": EXPERT_LAYOUTS, "critic": CRITIC_LAYOUTS, "memory": MEMORY}

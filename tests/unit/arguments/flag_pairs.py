"""Features of layout, rows, recompute, head, memory and MoE, for tests that combine any two of
them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

WORLD_SIZE = 4

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
BUDGET = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
SAME_NUMBERS = {  # whatever they are combined with
    "TP2": TP2,
    "TP2 SP": f"{TP2} --sequence-parallel",
    "PP2": PP2,
    "PP2 VP2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
    "CP2": "--context-parallel-size 2",
    "distributed optimizer": "--use-distributed-optimizer",
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "micro-batch 2": "--micro-batch-size 2",
    "padded": "--qkv-format bshd",
    "budgets": BUDGET,
    "budgets, not balanced": f"{BUDGET} --no-balance-data",
    "budget of log-probs": f"{BUDGET} --log-probs-max-tokens-per-gpu 30",
    "micro-batches of log-probs": "--log-probs-micro-batch-size 4",
    "full recompute": f"{FULL} --recompute-method uniform --recompute-num-layers 1",
    "recompute by block": f"{FULL} --recompute-method block --recompute-num-layers 1",
    "distributed activations": f"{TP2} {FULL} --recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations",
    "recompute attention": f"{SELECTIVE} core_attn",
    "recompute norms": f"{SELECTIVE} layernorm",
    "recompute networks": f"{SELECTIVE} mlp",
    "small blocks of the head": "--log-probs-chunk-size 8",
    "one block of the head": "--log-probs-chunk-size -1",
    "offloaded reference": "--ref-offload",
    "torch's attention": "--attention-backend local",
}
SAME_NUMBERS_OF_EXPERTS = {
    "EP2": "--expert-model-parallel-size 2",
    "EP2 ETP1": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "allgather": "--moe-token-dispatcher-type allgather",
    "recompute experts": f"{SELECTIVE} moe",
    "router in fp64": "--moe-router-dtype fp64",
}
OTHERS = {
    "bf16": "--bf16",
    "fp16": "--fp16",
    "sampler's tokens": "--rollout-top-p 0.9 --renormalize-sampled-log-probs",
    "adapters": "--lora-rank 4",
    "critic": "--advantage-estimator ppo",
    "flash attention": "--attention-backend flash",
    "token_mean_legacy": "--loss-reduction token_mean_legacy",
    "dropout": "--hidden-dropout 0.1",
}
OTHERS_OF_EXPERTS = {
    "replay of routed_experts": "--use-routing-replay",
    "replay of the sampler's routed_experts": "--use-rollout-routing-replay",
    "auxiliary loss": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "balance by sequence": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "balance by step": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    "expert bias": "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "capacity": "--moe-expert-capacity-factor 1.0",
    "grouped GEMM": "--moe-grouped-gemm",
    "permute fusion": "--moe-permute-fusion",
}
# Those that one rules out in the other's presence, in addition to what megatron-core has on this machine no
# kernels for
BUDGETS = ("budgets", "budgets, not balanced", "budget of log-probs")
FULL_RECOMPUTE = ("full recompute", "recompute by block", "distributed activations")
SELECTIVE_RECOMPUTE = (
    "recompute attention",
    "recompute norms",
    "recompute networks",
    "recompute experts",
)
APART = {
    *product(
        ("micro-batch 2", "padded", "micro-batches of log-probs", "token_mean_legacy"), BUDGETS
    ),
    *product(FULL_RECOMPUTE, SELECTIVE_RECOMPUTE),
    ("TP2 SP", "distributed activations"),
    ("PP2", "allgather"),
    ("CP2", "dropout"),
    ("offloaded reference", "adapters"),
}
DENSE = SAME_NUMBERS | OTHERS
EXPERTS = DENSE | SAME_NUMBERS_OF_EXPERTS | OTHERS_OF_EXPERTS


def pairs(features: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every two features, and each with itself: alone."""
    yield from ((name, name) for name in features)
    yield from combinations(features, 2)


def flags_of(pair: tuple[str, str], features: dict[str, str]) -> str:
    """The flags of both, each once; the last counts where both set it."""
    return " ".join(features[name] for name in dict.fromkeys(pair))

"""Random runs: a family, features that change its numbers, a number of processes, and layouts and
features that must not change them, on the oldest or the newest megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from benchmarks.parity.cells import LOSSES
from tests.dist.test_families import CASES
from tests.dist.test_prediction import CASES as PREDICTING
from tests.unit.arguments.flag_pairs import BUDGET, FULL, SAME_NUMBERS, SELECTIVE

BALANCED = "--moe-router-load-balancing-type {} --moe-aux-loss-coeff 0.1"
OF_MICRO_BATCHES = {
    "balanced": BALANCED.format("aux_loss"),
    "balanced by sequence": BALANCED.format("seq_aux_loss"),
    "small logits of the router": "--moe-z-loss-coeff 0.05",
}
# They change the numbers, also of one process; but not by how a step is cut, those of
# `OF_MICRO_BATCHES` as long as every micro-batch has one sample.
FEATURES = {
    "clipped": "--clip-grad 0.05",
    **OF_MICRO_BATCHES,
    "replay": "--use-routing-replay",
    "expert bias": "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01",
    "adapters": "--lora-rank 3 --lora-alpha 6",
}
PREDICTION = "--mtp-num-layers {} --enable-mtp-training"
ROWS = (
    "--micro-batch-size 2",
    "--micro-batch-size 2 --qkv-format bshd",
    BUDGET.replace("64", "30"),
    f"{BUDGET} --no-balance-data",
    SAME_NUMBERS["budget of log-probs"],
)
ROWS_OF_ONE = ("--micro-batch-size 1", "--micro-batch-size 1 --qkv-format bshd")
MODULES = ("core_attn", "layernorm", "mlp")
MODULES_OF_EXPERTS = (*MODULES, "moe", "shared_experts")
RECOMPUTE = (
    "",
    f"{FULL} --recompute-method uniform --recompute-num-layers 1",
    f"{FULL} --recompute-method uniform --recompute-num-layers 2",
    f"{FULL} --recompute-method block --recompute-num-layers 1",
    f"{FULL} --recompute-method block --recompute-num-layers 3",
)
OF_TENSOR_PARALLEL = (*RECOMPUTE, f"{RECOMPUTE[1]} --distribute-saved-activations")
OPTIMIZER = (
    "",
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --overlap-grad-reduce",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--overlap-grad-reduce",
)
HEAD = ("", "--log-probs-chunk-size 8", "--log-probs-chunk-size -1")
LAYOUT = "--pipeline-model-parallel-layout"
# by number of stages, of four layers
STAGES = {
    2: (
        "",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1",
        f"{LAYOUT} E|tt|t|tL",
        f"{LAYOUT} Et|t|t|tL",
        f"{LAYOUT} Ettt|tL",
    ),
    4: ("", f"{LAYOUT} E|tt|t|tL", f"{LAYOUT} Et|tt|t|L", "--decoder-first-pipeline-num-layers 1"),
    8: (f"{LAYOUT} E|t|t|t|t|||L",),
}
OTHERS = ("", "--ref-offload", "--attention-backend local")


@dataclass(frozen=True)
class Draw:
    """A random run."""

    family: str  # of tests/dist/test_families.py's CASES
    features: str  # flags that change the numbers
    predicting: bool  # with layers of multi-token prediction
    ranks: int
    layouts: tuple[str, ...]  # flags of each
    release: str = "this"  # or "other"

    @property
    def flags(self) -> str:
        """Without those of a layout."""
        depths = PREDICTION.format(PREDICTING[self.family][1]) if self.predicting else ""
        return f"{self.features} {depths}"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def layouts(draw: st.DrawFn, ranks: int, experts: bool, one_sample: bool, release: str) -> str:
    """Flags of a layout of this many processes and of what it may be combined with; legal or not."""
    words = []
    tp = draw(st.sampled_from(divisors(ranks)))
    pp = draw(st.sampled_from(divisors(ranks // tp)))
    cp = draw(st.sampled_from(divisors(ranks // tp // pp)))
    if tp > 1:
        words.append(f"--tensor-model-parallel-size {tp}")
        if experts or draw(st.booleans()):
            words.append("--sequence-parallel")
    if cp > 1:
        words.append(f"--context-parallel-size {cp}")
    if pp > 1:
        words += [f"--pipeline-model-parallel-size {pp}", draw(st.sampled_from(STAGES[pp]))]
    if experts:
        etp = draw(st.sampled_from(divisors(tp)))
        ep = draw(st.sampled_from(divisors(ranks // pp // etp)))
        words += [f"--expert-model-parallel-size {ep}"] * (ep > 1)
        words += [f"--expert-tensor-parallel-size {etp}"] * (ep > 1 and etp != tp)
        words += ["--moe-token-dispatcher-type allgather"] * (pp == 1 and draw(st.booleans()))
        words += ["--moe-router-dtype fp64"] * draw(st.booleans())
    words.append(draw(st.sampled_from(ROWS_OF_ONE if one_sample else ROWS)))
    if draw(st.booleans()):
        modules = st.sampled_from(MODULES_OF_EXPERTS if experts else MODULES)
        chosen = draw(st.lists(modules, min_size=1, max_size=3, unique=True))
        words.append(f"{SELECTIVE} {' '.join(chosen)}")
    else:
        shared = tp > 1 and "--sequence-parallel" not in words
        words.append(draw(st.sampled_from(OF_TENSOR_PARALLEL if shared else RECOMPUTE)))
    words += [draw(st.sampled_from(axis)) for axis in (OPTIMIZER, HEAD, OTHERS)]
    if release == "other":
        words.append(draw(st.sampled_from(["", "--model-base gpt", "--model-base hybrid"])))
    return " ".join(filter(None, words))


@st.composite
def draws(draw: st.DrawFn, with_experts: frozenset[str], releases: tuple[str, ...]) -> Draw:
    """Random runs. with_experts: the families that have them."""
    family = draw(st.sampled_from(sorted(CASES)))
    experts = family in with_experts
    release = draw(st.sampled_from(releases))
    features = [LOSSES[draw(st.sampled_from(sorted(LOSSES)))]]
    legal = FEATURES if experts else {k: FEATURES[k] for k in ("clipped", "adapters")}
    # most runs have none or one of them, since any two may be refused together
    chosen = draw(st.lists(st.sampled_from(sorted(legal)), max_size=2, unique=True))
    features += [legal[name] for name in chosen]
    features += ["--clip-grad 0"] * ("clipped" not in chosen)
    predicting = family in PREDICTING and draw(st.booleans())
    one_sample = not OF_MICRO_BATCHES.keys().isdisjoint(chosen)
    ranks = draw(st.sampled_from([2, 2, 4, 4, 4, 8]))
    several = st.lists(
        layouts(ranks, experts, one_sample, release), min_size=1, max_size=4, unique=True
    )
    return Draw(family, " ".join(features), predicting, ranks, tuple(draw(several)), release)

"""What the parity matrix runs: models, losses, layouts, rows, precisions, and the cells that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from scripts.parity_table import make_model

SEQUENCES = "--loss-reduction sequence_mean"
LOSSES = {
    "ppo": "--policy-loss-type ppo",
    "sapo": "--policy-loss-type sapo",
    "gspo": f"--policy-loss-type gspo --eps-clip 0.05 {SEQUENCES}",
    "gmpo": f"--policy-loss-type gmpo {SEQUENCES}",
    "cispo": "--policy-loss-type cispo",
}
ROWS = {
    "packed": "--micro-batch-size 2",
    "padded": "--micro-batch-size 2 --qkv-format bshd",
    "budgets": "--use-dynamic-batch-size --max-tokens-per-gpu 30",
}
RECOMPUTE = {"": "", "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"}
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SP, VP2, EP2 = "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank 2", "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Layout:
    """flags: added to the run's. ranks: processes. model: "dense", or "experts"."""

    ranks: int
    flags: str
    model: str = "dense"


LAYOUTS = {
    "1": Layout(1, ""),
    "TP2": Layout(2, TP2),
    "TP2 SP": Layout(2, f"{TP2} {SP}"),
    "PP2": Layout(2, PP2),
    "PP2 VP2": Layout(2, f"{PP2} {VP2}"),
    "DP2": Layout(2, ""),
    "DP2 distributed optimizer": Layout(2, SHARDED),
    "DP2 overlap": Layout(2, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "CP2": Layout(2, CP2),
    "CP4": Layout(4, "--context-parallel-size 4"),
    "TP2 CP2": Layout(4, f"{TP2} {CP2}"),
    "TP2 SP CP2": Layout(4, f"{TP2} {SP} {CP2}"),
    "TP2 PP2": Layout(4, f"{TP2} {PP2}"),
    "PP2 CP2": Layout(4, f"{PP2} {CP2}"),
    "DP2 CP2": Layout(4, f"{CP2} {SHARDED}"),
    "TP2 PP2 DP2": Layout(8, f"{TP2} {SP} {PP2} {SHARDED}"),
    "experts 1": Layout(1, "", "experts"),
    "experts EP2": Layout(2, EP2, "experts"),
    "experts ETP2": Layout(2, f"{TP2} {SP}", "experts"),
    "experts TP2 EP2": Layout(2, f"{TP2} {SP} {EP2} --expert-tensor-parallel-size 1", "experts"),
    "experts CP2 EP2": Layout(2, f"{EP2} {CP2}", "experts"),
    "experts EP2 ETP2": Layout(4, f"{TP2} {SP} {EP2}", "experts"),
    "experts PP2 EP2": Layout(4, f"{PP2} {EP2} {SHARDED}", "experts"),
}


@dataclass(frozen=True)
class Precision:
    """flags: added to the run's. limit: of a cell's figure. base: the precision of the one process that a cell is compared with.
    sharded: whether the distributed optimizer takes parameters of this precision."""

    flags: str
    limit: float
    base: str
    sharded: bool = True


# In float32 and float64 the limit is of relative differences. In bfloat16 it is of their ratio to those of one process in bfloat16: a layout
# may be off from float32 by what rounding does anyway, and that twice, since its roundings are others.
# megatron-core clips, and shards, gradients in float32 only.
PRECISIONS = {
    "float32": Precision("", 1e-5, "float32"),
    "float64": Precision("--clip-grad 0", 1e-12, "float64", sharded=False),
    "bfloat16": Precision("--bf16", 2.0, "float32"),
}


@dataclass(frozen=True)
class Cell:
    layout: str
    loss: str
    rows: str
    recompute: str = ""
    precision: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.layout} | {self.line} | {self.loss}"

    @property
    def line(self) -> str:
        return " ".join(word for word in (self.rows, self.recompute, self.precision) if word not in ("", "float32"))

    @property
    def flags(self) -> str:
        words = (
            LOSSES[self.loss],
            ROWS[self.rows],
            RECOMPUTE[self.recompute],
            LAYOUTS[self.layout].flags,
            PRECISIONS[self.precision].flags,
        )
        return " ".join(words)


def matrix(
    layouts: Sequence[str], losses: Sequence[str], rows: Sequence[str], recompute: Sequence[str], precisions: Sequence[str] = ("float32",)
) -> list[Cell]:
    """All combinations in float32. The others are there for what is new in them, the arithmetic: only with the first kind of rows and of
    recompute, and float64 not with a distributed optimizer."""
    cells = []
    for precision in precisions:
        lines = product(rows, recompute) if precision == "float32" else [(rows[0], recompute[0])]
        chosen = [layout for layout in layouts if PRECISIONS[precision].sharded or SHARDED not in LAYOUTS[layout].flags]
        cells += [Cell(layout, loss, *line, precision) for layout, line, loss in product(chosen, list(lines), losses)]
    return cells


def make_moe_model(folder: Path) -> None:
    """A tiny Qwen3-MoE. Its routers are no sharper than a trained one's: with logits of size 5 the softmax saturates, and float32's
    rounding comes out of the gradients 200 times larger."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {"dense": lambda folder: make_model(folder, seed=3), "experts": make_moe_model}

"""Settings beyond the parity matrix on one and two pretend GPUs, against one CPU process: precision
of the optimizer's state, offloading, recomputation, experts, families of models, adapters, a critic.
Each also offloads its network and takes it back, gives its place to another model, and resumes from
a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.models import MODELS
from benchmarks.parity.ranks import run_ranks
from scripts.make_tiny_model import make_tiny_model
from tests.dist.test_families import VARIANTS

SP = "--tensor-model-parallel-size 2 --sequence-parallel"
TP2, PP2, CP2, EP2 = (
    f"--{name}-parallel-size 2"
    for name in ("tensor-model", "pipeline-model", "context", "expert-model")
)
D = "--use-distributed-optimizer"
PRECISE = f"--bf16 {D} --use-precision-aware-optimizer"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
DEEPSEEK, NEXT, GEMMA, GPT_OSS, DSA = (
    f"{name}ForCausalLM" for name in ("DeepseekV3", "Qwen3Next", "Gemma3", "GptOss", "GlmMoeDsa")
)


@dataclass(frozen=True)
class Setting:
    """A run that the pretend GPUs and the CPU both make."""

    model: str  # of benchmarks/parity/models.py, an architecture, or a variant of one
    flags: str  # of the run
    layout: str = ""  # flags that only the pretend GPUs get

    @property
    def precision(self) -> str:
        if "--bf16" in self.flags or "fp16" in self.flags:
            return "bfloat16"
        return "float32" if "optimizer" in self.flags or "lora" in self.flags else "float64"


ONE = {
    "bf16": Setting("dense", f"--bf16 {D}"),
    "fp16": Setting("dense", f"--allow-untested fp16:true {D}"),
    "entropy": Setting("dense", f"--bf16 {D} --entropy-coef 0.02"),
    "selective recomputation": Setting("dense", f"--bf16 {D} {SELECTIVE} layernorm core_attn"),
    "moments in bf16": Setting(
        "dense",
        f"{PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95 --main-grads-dtype bf16",
    ),
    "optimizer on the host": Setting("dense", f"{PRECISE} --optimizer-cpu-offload"),
    "optimizer on the host, overlapped": Setting(
        "dense", f"{PRECISE} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    ),
    "reference on the host": Setting("dense", f"--bf16 {D} --ref-offload"),
    "critic": Setting("dense", f"--bf16 {D} --advantage-estimator ppo"),
    "adapters": Setting("dense", "--lora-rank 4"),
    "adapters everywhere": Setting(
        "dense",
        "--bf16 --lora-rank 4 --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head",
    ),
    "adapters of experts": Setting("experts", "--bf16 --lora-rank 4"),
    "experts in bf16": Setting("experts", f"--bf16 {D}"),
    "auxiliary losses": Setting(
        "experts",
        "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-router-load-balancing-type seq_aux_loss",
    ),
    "global auxiliary loss": Setting(
        "experts", "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type global_aux_loss"
    ),
    "replayed routed_experts": Setting("experts", "--use-routing-replay"),
    "allgather of tokens": Setting("experts", "--moe-token-dispatcher-type allgather"),
    "capacity": Setting(
        "experts", "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"
    ),
    "latent attention": Setting(DEEPSEEK, ""),
    "gpt-oss": Setting(GPT_OSS, ""),
    "gpt-oss in bf16": Setting(GPT_OSS, f"--bf16 {D}"),
    "delta nets": Setting(NEXT, ""),
    "delta nets in bf16": Setting(NEXT, f"--bf16 {D}"),
    "Gemma": Setting(GEMMA, ""),
    "sparse attention": Setting(DSA, ""),
    "prediction": Setting(NEXT, "--mtp-num-layers 1"),
}
TWO = {
    "TP2 bf16": Setting("dense", f"--bf16 {D}", f"{SP}"),
    "PP2 bf16": Setting("dense", f"--bf16 {D}", PP2),
    "PP2 VP2 overlapped": Setting("dense", f"--bf16 {D}", f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --overlap-p2p-communication"),
    "DP2 moments in bf16": Setting("dense", f"{PRECISE} --exp-avg-dtype bf16"),
    "DP2 optimizer on the host": Setting("dense", f"{PRECISE} --optimizer-cpu-offload"),
    "fp16 critic PP2": Setting("dense", f"--allow-untested fp16:true --advantage-estimator ppo {D}", PP2),
    "critic PP2": Setting("dense", f"--bf16 {D} --advantage-estimator ppo", PP2),
    "adapters TP2": Setting("dense", "--lora-rank 4", SP),
    "EP2 allgather": Setting("experts", "--moe-token-dispatcher-type allgather", EP2),
    "latent attention TP2": Setting(DEEPSEEK, "", SP),
    "latent attention CP2": Setting(DEEPSEEK, "", CP2),
    "delta nets TP2": Setting(NEXT, "", SP),
    "delta nets CP2": Setting(NEXT, "", CP2),
    "gpt-oss EP2": Setting(GPT_OSS, "", EP2),
    "gpt-oss CP2": Setting(GPT_OSS, "", CP2),
    "sparse attention CP2": Setting(DSA, "", CP2),
    "Gemma PP2": Setting(GEMMA, "", f"{PP2} --decoder-last-pipeline-num-layers 1"),
}  # fmt: skip
# relative; in bfloat16 rounding in another order, so only the size of what is wrong
LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05}


@dataclass(frozen=True)
class Numbers:
    """Runs, and their differences from those of one CPU process."""

    folder: Path  # of the models and the numbers of one CPU process

    def model(self, name: str) -> str:
        folder = self.folder / name.replace(" ", "-")
        if not folder.exists():
            like, changes = VARIANTS.get(name, (name, {}))
            (MODELS.get(name) or (lambda path: make_tiny_model(like, path, **changes)))(folder)
        return str(folder)

    def cells(self, chosen: dict[str, Setting], layout: bool) -> dict[str, tuple[str, str, str]]:
        found = {}
        for name, each in chosen.items():
            words = f"--micro-batch-size 2 {each.flags} {each.layout if layout else ''}"
            words += " --clip-grad 0" if each.precision == "float64" else ""
            found[name] = (self.model(each.model), words, each.precision)
        return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_settings_give_the_numbers_of_one_cpu_process(
    ranks: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    chosen = ONE if ranks == 1 else TWO
    numbers = Numbers(tmp_path)
    worker, arguments = "tests.pretend_gpu.worker", {"base": str(tmp_path), "folder": str(tmp_path)}
    cells = {"cells": numbers.cells(chosen, layout=False)}
    run_ranks(f"{worker}:base_runs", 1, tmp_path / "cpu", {**arguments, **cells}, 300)
    cells = {"cells": numbers.cells(chosen, layout=True)}
    results: list[dict[str, Any]] = run_ranks(
        f"{worker}:run_cells",
        ranks,
        tmp_path / "gpu",
        {**arguments, **cells},
        500,
        environment=environment,
    )
    printed = (tmp_path / "gpu" / "output.txt").read_text()
    assert "RNG state changed" not in printed, "drawn on the host, so equally on all ranks"
    for found in results:
        assert found.keys() == chosen.keys()
        for name, apart in found.items():
            limit = LIMITS[chosen[name].precision]
            assert all(v if isinstance(v, bool) else v < limit for v in apart.values()), (
                name,
                apart,
            )

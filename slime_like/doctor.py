"""python -m slime_like.doctor: what this environment has, what it lacks, and what that is for. Status 1 when every run lacks something.

Packages are asked for their versions, not imported: that would take seconds, and some fail without a GPU. Only torch is, for CUDA."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Thing:
    """module: what Python imports, or "" for a program. package: of its version, or the program's name."""

    module: str
    package: str
    use: str
    required: bool = False


THINGS = (
    Thing("torch", "torch", "everything", required=True),
    Thing("megatron.core", "megatron-core", "the trainer", required=True),
    Thing(
        "transformers",
        "transformers",
        "models, tokenizers, the local rollout engine",
        required=True,
    ),
    Thing("safetensors", "safetensors", "checkpoints", required=True),
    Thing("numpy", "numpy", "balancing, checkpoints", required=True),
    Thing("yaml", "pyyaml", "run files (--config)", required=True),
    Thing("rich", "rich", "the display of a run", required=True),
    Thing("psutil", "psutil", "memory, worker processes", required=True),
    Thing(
        "tensorboard",
        "tensorboard",
        "TensorBoard files; --no-tensorboard does without",
        required=True,
    ),
    Thing(
        "transformer_engine",
        "transformer-engine",
        "fused layers on GPUs, context parallelism there",
    ),
    Thing("apex", "apex", "NVIDIA's fused optimizers and --gradient-accumulation-fusion"),
    Thing("flash_attn", "flash-attn", "attention kernels of Transformer Engine"),
    Thing("sglang", "sglang", "rollout engines that this environment starts"),
    Thing("sglang_router", "sglang-router", "one address for several engines"),
    Thing("httpx", "httpx", "engines and rewards over HTTP"),
    Thing("reasoning_gym", "reasoning-gym", "tasks that are made on the fly"),
    Thing("math_verify", "math-verify", "--rm-type math"),
    Thing("pyarrow", "pyarrow", "prompts in Parquet"),
    Thing("matplotlib", "matplotlib", "the plot of a run"),
    Thing("fastapi", "fastapi", "the server"),
    Thing("uvicorn", "uvicorn", "the server"),
    Thing("", "sbatch", "scripts/slurm"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """have: a version or a place; None where it is missing."""

    thing: Thing
    have: str | None

    def __str__(self) -> str:
        mark = "has  " if self.have is not None else "LACKS" if self.thing.required else "lacks"
        return f"{mark}  {self.thing.package:<20} {self.have or '-':<24} {self.thing.use}"


def look(thing: Thing) -> Finding:
    if not thing.module:
        return Finding(thing, shutil.which(thing.package))
    try:
        there = importlib.util.find_spec(thing.module) is not None
    except ImportError:  # of a parent package
        there = False
    if not there:
        return Finding(thing, None)
    try:
        return Finding(thing, metadata.version(thing.package))
    except metadata.PackageNotFoundError:
        return Finding(thing, "version unknown")


def devices() -> str:
    """What a rank would run on."""
    import torch

    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}, and finds no GPU"
            if torch.version.cuda
            else "this torch is a CPU build"
        )
        return f"lacks  CUDA: {built}; runs use the CPU and gloo"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"has    CUDA {torch.version.cuda}: {names}"


def report(
    things: Iterable[Thing] = THINGS, device: Callable[[], str] = devices
) -> tuple[list[str], int]:
    """(lines, exit status)."""
    findings = [look(thing) for thing in things]
    lacking = [f.thing.package for f in findings if f.have is None and f.thing.required]
    lines = [f"Python {sys.version.split()[0]}", *(str(finding) for finding in findings)]
    lines.append(f"every run needs: {', '.join(lacking)}" if lacking else device())
    return lines, int(bool(lacking))


def main() -> int:
    lines, status = report()
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())

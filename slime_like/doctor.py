"""python -m slime_like.doctor: what this environment has, what it lacks, and what that is for.
Status 1 when every run lacks something.

Packages are asked for their versions, not imported: that would take seconds, and some fail without
a GPU. Only torch is, for CUDA."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Dependency:
    """module: what Python imports, or "" for a program. package: of its version, or the program's
    name."""

    module: str
    package: str
    use: str
    required: bool = False


THINGS = (
    Dependency("torch", "torch", "everything", required=True),
    Dependency("megatron.core", "megatron-core", "the trainer", required=True),
    Dependency(
        "transformers",
        "transformers",
        "models, tokenizers, the local rollout engine",
        required=True,
    ),
    Dependency("safetensors", "safetensors", "checkpoints", required=True),
    Dependency("numpy", "numpy", "balancing, checkpoints", required=True),
    Dependency("yaml", "pyyaml", "run files (--config)", required=True),
    Dependency("rich", "rich", "the display of a run", required=True),
    Dependency("psutil", "psutil", "memory, worker processes", required=True),
    Dependency(
        "tensorboard",
        "tensorboard",
        "TensorBoard files; --no-tensorboard does without",
        required=True,
    ),
    Dependency(
        "transformer_engine",
        "transformer-engine",
        "fused layers on GPUs, context parallelism there",
    ),
    Dependency("apex", "apex", "NVIDIA's fused optimizers and --gradient-accumulation-fusion"),
    Dependency("flash_attn", "flash-attn", "attention kernels of Transformer Engine"),
    Dependency("sglang", "sglang", "rollout engines that this environment starts"),
    Dependency("sglang_router", "sglang-router", "one address for several engines"),
    Dependency("httpx", "httpx", "engines and rewards over HTTP"),
    Dependency("reasoning_gym", "reasoning-gym", "tasks that are made on the fly"),
    Dependency("math_verify", "math-verify", "--rm-type math"),
    Dependency("pyarrow", "pyarrow", "prompts in Parquet"),
    Dependency("matplotlib", "matplotlib", "the plot of a run"),
    Dependency("fastapi", "fastapi", "the server"),
    Dependency("uvicorn", "uvicorn", "the server"),
    Dependency("", "sbatch", "scripts/slurm"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """have: a version or a place; None where it is missing."""

    thing: Dependency
    have: str | None

    def __str__(self) -> str:
        mark = "has  " if self.have is not None else "LACKS" if self.thing.required else "lacks"
        return f"{mark}  {self.thing.package:<20} {self.have or '-':<24} {self.thing.use}"


def look(thing: Dependency) -> Status:
    if not thing.module:
        return Status(thing, shutil.which(thing.package))
    try:
        there = importlib.util.find_spec(thing.module) is not None
    except ImportError:  # of a parent package
        there = False
    if not there:
        return Status(thing, None)
    try:
        return Status(thing, metadata.version(thing.package))
    except metadata.PackageNotFoundError:
        return Status(thing, "version unknown")


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


def sandbox() -> list[str]:
    """What confines graders of model text and programs here (`slime_like.rewards.confinement`)."""
    from slime_like.rewards import confinement

    missing = confinement.missing()
    there = [name for name in confinement.LAYERS if name not in missing]
    lines = [f"has    sandbox: {', '.join(there)}"] if there else []
    lines += [f"lacks  sandbox: {words}" for words in confinement.unenforced()]
    refused = confinement.refusal()
    return [*lines, f"LACKS  --rm-type code and task: {refused}"] if refused else lines


def report(
    things: Iterable[Dependency] = THINGS, device: Callable[[], str] = devices
) -> tuple[list[str], int]:
    """(lines, exit status)."""
    findings = [look(thing) for thing in things]
    lacking = [f.thing.package for f in findings if f.have is None and f.thing.required]
    lines = [f"Python {sys.version.split()[0]}", *(str(finding) for finding in findings)]
    lines += sandbox()
    lines.append(f"every run needs: {', '.join(lacking)}" if lacking else device())
    return lines, int(bool(lacking))


def main() -> int:
    lines, status = report()
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())

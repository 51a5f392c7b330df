"""slime-like doctor: list what this environment has, what is missing, and what needs it.

Exit status 1 if a required package is missing or the self-test fails. --json is for bug reports.
Package versions are read from their metadata; only torch is imported, to query CUDA. Importing the
others takes seconds, and some fail without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata

from megatron_patches.patch import (
    has_compiler,
    has_engine_without_extension,
    has_transformer_engine,
)
from slime_like.extras import pip_install


@dataclass(frozen=True, slots=True)
class Dependency:
    """A package or program that runs may need."""

    module: str  # name to import, "" for a program
    package: str  # distribution name, or the program's name
    use: str
    required: bool = False
    advice: str | None = None  # how to get it, where pip install of its name would be wrong

    @property
    def remedy(self) -> str:
        """How to get it: a pip command, or whom to ask."""
        if self.advice is not None:
            return self.advice
        if not self.module:
            return "ask the cluster's administrator"
        if self.required:
            return pip_install()
        extra = next((name for name, packages in EXTRAS.items() if self.package in packages), None)
        return pip_install(extra) if extra else f"pip install {self.package}"


# extras of pyproject.toml
EXTRAS = {
    "tasks": ("reasoning-gym", "math-verify", "pyarrow", "matplotlib"),
    "vision": ("pillow",),
    "agents": ("gymnasium", "websockets"),
    "sglang": ("httpx", "sglang-router"),
    "server": ("fastapi", "uvicorn"),
    "gpu": ("transformer-engine",),
}
# constraints-gpu.txt: versions that fit each other where SGLang or Transformer Engine is installed
TOGETHER = {
    "flash-linear-attention": "0.6.0",
    "flashinfer-python": "0.7.2",
    "megatron-core": "0.16.1",
    "sglang": "0.5.23",
    "sglang-router": "0.3.2",
    "torch": "2.14.1",
    "transformer-engine": "2.20.2",
    "transformers": "5.19.0",
}
PORTS = {29500: "torchrun's rendezvous", 8000: "the server of the Tinker API", 30000: "SGLang"}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one self-test."""

    name: str
    good: bool
    words: str  # its duration, or the error

    def __str__(self) -> str:
        return f"{'good ' if self.good else 'FAILS'}  {self.name:<20} {self.words}"


DEPENDENCIES = (
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
    Dependency("pydantic", "pydantic", "checks of files and of servers' responses", required=True),
    Dependency("typing_extensions", "typing_extensions", "types of these checks", required=True),
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
    Dependency(
        "apex",
        "apex",
        "NVIDIA's fused optimizers and --gradient-accumulation-fusion",
        advice="build it from github.com/NVIDIA/apex (the index has another project of this name)",
    ),
    Dependency("flash_attn", "flash-attn", "attention kernels of Transformer Engine"),
    Dependency(
        "sglang",
        "sglang",
        "rollout engines that this environment starts",
        advice="in an environment of its own, as it needs other versions (--sglang-python)",
    ),
    Dependency(
        "vllm",
        "vllm",
        "vLLM servers that this environment starts",
        advice="in an environment of its own, as it needs other versions (--vllm-python)",
    ),
    Dependency("PIL", "pillow", "images (--multimodal-keys)"),
    Dependency("sglang_router", "sglang-router", "one address for several engines"),
    Dependency("httpx", "httpx", "engines and rewards over HTTP"),
    Dependency("reasoning_gym", "reasoning-gym", "generated tasks"),
    Dependency("gymnasium", "gymnasium", "--agent-environment gymnasium:<id>"),
    Dependency("math_verify", "math-verify", "--rm-type math"),
    Dependency("pyarrow", "pyarrow", "prompts in Parquet"),
    Dependency("matplotlib", "matplotlib", "the plot of a run"),
    Dependency("fastapi", "fastapi", "the server"),
    Dependency("uvicorn", "uvicorn", "the server"),
    Dependency("", "sbatch", "scripts/slurm"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """What is here of a dependency."""

    dependency: Dependency
    have: str | None  # the version or path; None if it is missing

    def __str__(self) -> str:
        use = self.dependency.use
        if self.have is not None:
            mark = "has  "
        else:
            mark = "LACKS" if self.dependency.required else "lacks"
            use += f"; {self.dependency.remedy}"
        return f"{mark}  {self.dependency.package:<20} {self.have or '-':<24} {use}"


def find(dependency: Dependency) -> Status:
    if not dependency.module:
        return Status(dependency, shutil.which(dependency.package))
    try:
        is_installed = importlib.util.find_spec(dependency.module) is not None
    except ImportError:  # raised when a parent package is missing
        is_installed = False
    if not is_installed:
        return Status(dependency, None)
    try:
        return Status(dependency, metadata.version(dependency.package))
    except metadata.PackageNotFoundError:
        return Status(dependency, "version unknown")


def lacking(findings: Iterable[Status]) -> list[str]:
    """Names of required packages that are missing."""
    return [f.dependency.package for f in findings if f.have is None and f.dependency.required]


def devices() -> str:
    """One line about the device that a rank would use."""
    import torch

    if not torch.cuda.is_available():
        reason = "this torch is a CPU build"
        if torch.version.cuda:
            reason = f"torch is built for CUDA {torch.version.cuda}, and finds no GPU"
        return f"lacks  CUDA: {reason}; runs use the CPU and gloo"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"has    CUDA {torch.version.cuda}: {names}"


def together(version: Callable[[str], str] = metadata.version) -> list[str]:
    """A line for each package whose version is not that of constraints-gpu.txt, in an environment
    that has SGLang or Transformer Engine."""
    have = {}
    for package in TOGETHER:
        with contextlib.suppress(metadata.PackageNotFoundError):
            have[package] = version(package).partition("+")[0]
    if have.keys().isdisjoint(("sglang", "transformer-engine")):
        return []
    return [
        f"other  {package:<20} {have[package]:<24} constraints-gpu.txt has {wanted}"
        for package, wanted in TOGETHER.items()
        if have.get(package, wanted) != wanted
    ]


def compiler() -> list[str]:
    """A line if a GPU's fused functions cannot be compiled."""
    import torch

    if not torch.cuda.is_available() or has_compiler():
        return []
    return ["lacks  C compiler (gcc or clang): megatron-core's fused functions run as they are"]


def transformer_engine() -> list[str]:
    """A line if Transformer Engine is installed and cannot be imported, as with an extension built
    for another torch. In a process of its own, since it takes seconds."""
    if has_engine_without_extension():
        return [
            "LACKS  Transformer Engine's extension for torch: pip install "
            "'transformer-engine[pytorch]', or remove transformer-engine"
        ]
    if not has_transformer_engine():
        return []
    command = [sys.executable, "-P", "-c", "import transformer_engine.pytorch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return [f"LACKS  a Transformer Engine that fits this torch: {reason}"]


def sandbox() -> list[str]:
    """Lines about the sandbox for graders of model output (`slime_like.rewards.confinement`)."""
    from slime_like.rewards import confinement

    missing = confinement.missing()
    layers = [name for name in confinement.LAYERS if name not in missing]
    lines = [f"has    sandbox: {', '.join(layers)}"] if layers else []
    lines += [f"lacks  sandbox: {layer}" for layer in confinement.unenforced()]
    if reason := confinement.refusal():
        lines.append(f"LACKS  --rm-type code and task: {reason}")
    return lines


def links() -> list[str]:
    """Network interfaces that are up, with their speed and first address; InfiniBand devices."""
    import psutil

    addresses = psutil.net_if_addrs()
    states = psutil.net_if_stats()
    lines = []
    for name, state in sorted(states.items()):
        first = [a.address for a in addresses.get(name, []) if a.family == socket.AF_INET][:1]
        if state.isup and first:
            speed = f"{state.speed} Mbit/s" if state.speed else "speed unknown"
            lines.append(f"link   {name:<20} {first[0]:<24} {speed}")
    folder = "/sys/class/infiniband"
    devices = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    lines.append(f"link   {'InfiniBand':<20} {', '.join(devices) or '-'}")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        if name in os.environ:
            lines.append(f"link   {name:<20} {os.environ[name]}")
    return lines


def ports() -> list[str]:
    """Lines about the default ports: free or in use on this host."""
    lines = []
    for port, use in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                state = "free"
            except OSError as error:
                state = f"unavailable ({error.strerror}); choose another one"
        lines.append(f"port   {port:<20} {state:<24} {use}")
    return lines


def report(
    dependencies: Iterable[Dependency] = DEPENDENCIES, device: Callable[[], str] = devices
) -> tuple[list[str], int]:
    """Check all dependencies. Returns (lines to print, exit status)."""
    findings = [find(dependency) for dependency in dependencies]
    missing = lacking(findings)
    lines = [f"Python {sys.version.split()[0]}", *(str(finding) for finding in findings)]
    lines += sandbox()
    if missing:
        lines.append(f"every run needs: {', '.join(missing)}")
    else:
        lines += [device(), *compiler(), *transformer_engine(), *together()]
    return lines, int(bool(missing))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--self-test",
        action="store_true",
        help="also try collectives of two processes and one training step of a tiny model; 8 s of "
        "processor time",
    )
    result.add_argument("--json", action="store_true", help="print JSON, for a report of a bug")
    return result


def main() -> int:
    chosen = parser().parse_args()
    checks: list[Check] = []
    # before report(), which initialises CUDA, because it forks
    if chosen.self_test and not lacking(map(find, DEPENDENCIES)):
        checks = importlib.import_module("slime_like.cli.self_test").self_test()
    lines, status = report()
    lines += [*links(), *ports()]
    status = status or int(not all(check.good for check in checks))
    if chosen.json:
        import slime_like

        result = {
            "slime_like": slime_like.__version__,
            "platform": platform.platform(),
            "python": sys.version,
            "packages": {s.dependency.package: s.have for s in map(find, DEPENDENCIES)},
            "lines": lines,
            "self_test": [asdict(check) for check in checks],
            "status": status,
        }
        print(json.dumps(result, indent=1))
    else:
        print("\n".join([*lines, *map(str, checks)]))
    return status


if __name__ == "__main__":
    sys.exit(main())

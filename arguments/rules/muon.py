"""Rules about --optimizer muon, which megatron-core implements with NVIDIA's package
emerging_optimizers."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from arguments.megatron_configs import SIZED_FIELDS
from arguments.rules.base import Rule, Settings, problem
from megatron_patches.patch import megatron_version, release
from slime_like.config import Problem

PACKAGE = "emerging_optimizers"
OLD = "emerging-optimizers @ git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0"
STEPS_OF_QUINTIC = 5  # sets of coefficients; version 0.1 of the package needs a multiple of it


def _is_muon(s: Settings) -> bool:
    return s.core.get("optimizer") == "muon"


def check_muon_package(s: Settings) -> list[Problem]:
    """The required package version is installed. Not checked for a planned job, since another
    machine may have it."""
    if not _is_muon(s) or s.machine.planned or (reason := _package_problem()) is None:
        return []
    remedy = (
        f"pip install triton '{OLD}'"
        if _is_old()
        else "pip install emerging-optimizers (Python 3.12 or later)"
    )
    return problem("optimizer", "muon", f"requires {PACKAGE} {reason}: {remedy}; or use adam")


def _is_old() -> bool:
    """Whether this megatron-core requires version 0.1 of the package."""
    return release() < (0, 17)


def _package_problem() -> str | None:
    """What is wrong with the installed package; None if nothing is."""
    required = f"{'0.1' if _is_old() else '0.2 or later'} for megatron-core {megatron_version()}"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"({required}), which is not installed"
    version = metadata.version(PACKAGE)
    if (version.split(".")[:2] == ["0", "1"]) != _is_old():
        return f"({required}); {version} is installed"
    if _is_old() and importlib.util.find_spec("triton") is None:
        return "and triton, which is not installed"
    return None


def check_muon_split_qkv(s: Settings) -> list[Problem]:
    """megatron-core splits the QKV projection of all layers alike, by the sizes in its config, and
    before 0.18 ignores the rows of the gate of gated attention."""
    if not _is_muon(s) or not s.core.get("muon_split_qkv", True):
        return []
    if SIZED_FIELDS & s.core.keys():
        message = (
            "would split the QKV projection of all layers alike, and heads of this model differ by "
            "layer; add --muon-no-split-qkv"
        )
        return problem("muon_split_qkv", None, message)
    if not s.core.get("attention_output_gate") or release() >= (0, 18):
        return []
    message = "gated attention requires megatron-core 0.18 for it; add --muon-no-split-qkv"
    return problem("muon_split_qkv", None, message)


def check_muon_iterations(s: Settings) -> list[Problem]:
    if not _is_muon(s):
        return []
    steps = s.core.get("muon_num_ns_steps", STEPS_OF_QUINTIC)
    if not _is_old() or steps % STEPS_OF_QUINTIC == 0:
        return []
    return problem("muon_num_ns_steps", steps, f"must be a multiple of {STEPS_OF_QUINTIC}")


MUON_RULES: tuple[Rule, ...] = (
    check_muon_package,
    check_muon_split_qkv,
    check_muon_iterations,
)


def warn_muon_blockwise(s: Settings) -> str | None:
    size = s.parallel.tensor_model_parallel_size
    if not _is_muon(s) or s.core.get("muon_tp_mode") != "blockwise" or size == 1:
        return None
    return (
        f"--muon-tp-mode blockwise orthogonalises each of the {size} shards of a matrix by itself: "
        "results depend on --tensor-model-parallel-size; duplicated gives those of one process"
    )

"""Rules about --optimizer muon, which megatron-core implements with NVIDIA's package
emerging_optimizers."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from arguments.rules.base import Rule, Settings, problem
from megatron_patches.patch import megatron_version, release
from slime_like.config import Problem

PACKAGE = "emerging_optimizers"
OLD = "emerging-optimizers @ git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0"
STEPS_OF_QUINTIC = 5  # sets of coefficients; version 0.1 of the package needs a multiple of it


def _is_muon(s: Settings) -> bool:
    return s.core.get("optimizer") == "muon"


def muon_is_installed(s: Settings) -> list[Problem]:
    """The required package version is installed. Not checked for a planned job, since another
    machine may have it."""
    if not _is_muon(s) or s.machine.planned or (lacking := _lacking()) is None:
        return []
    remedy = (
        f"pip install triton '{OLD}'"
        if _is_old()
        else "pip install emerging-optimizers, which needs Python 3.12 or later"
    )
    message = f"needs the package {PACKAGE} {lacking}: {remedy}; or use adam"
    return problem("optimizer", "muon", message)


def _is_old() -> bool:
    """Whether this megatron-core requires version 0.1 of the package."""
    return release() < (0, 17)


def _lacking() -> str | None:
    """What is wrong with the installed package; None if nothing is."""
    needs = f"{'0.1' if _is_old() else '0.2 or later'} for megatron-core {megatron_version()}"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"({needs}), which is not installed"
    version = metadata.version(PACKAGE)
    if (version.split(".")[:2] == ["0", "1"]) != _is_old():
        return f"({needs}); {version} is installed"
    if _is_old() and importlib.util.find_spec("triton") is None:
        return "and triton, which it imports and which is not installed"
    return None


def muon_has_its_state_whole(s: Settings) -> list[Problem]:
    """Muon needs unsharded optimizer state, since it orthogonalises full matrices, and also needs
    parameters that are not matrices, for AdamW."""
    if not _is_muon(s):
        return []
    found = []
    if s.core.get("use_distributed_optimizer"):
        message = "does not go with --optimizer muon, which keeps its state unsharded; leave it out"
        found += problem("use_distributed_optimizer", None, message)
    if s.lora.lora_rank:
        message = (
            "does not go with --optimizer muon, which needs parameters that are no matrices too; "
            "adapters have none; use adam"
        )
        found += problem("lora_rank", s.lora.lora_rank, message)
    if s.core.get("decoupled_weight_decay") is False:
        message = "must be on with --optimizer muon"
        found += problem("decoupled_weight_decay", None, message)
    return found


def muon_can_split_the_projections(s: Settings) -> list[Problem]:
    """Before 0.18, megatron-core cannot split the QKV projection of gated attention: it ignores the
    rows of the gate."""
    gated = s.core.get("attention_output_gate") and s.core.get("muon_split_qkv", True)
    if not _is_muon(s) or not gated or release() >= (0, 18):
        return []
    message = (
        "is not possible with this network's gated attention before megatron-core 0.18; "
        "add --muon-no-split-qkv"
    )
    return problem("muon_split_qkv", None, message)


def muon_numbers(s: Settings) -> list[Problem]:
    if not _is_muon(s):
        return []
    core, found = s.core, []
    if not 0 <= core.get("muon_momentum", 0.95) < 1:
        found += problem("muon_momentum", core["muon_momentum"], "must be 0 <= x < 1")
    if core.get("muon_extra_scale_factor", 1.0) <= 0:
        value = core["muon_extra_scale_factor"]
        found += problem("muon_extra_scale_factor", value, "must be > 0")
    steps = core.get("muon_num_ns_steps", STEPS_OF_QUINTIC)
    whole = STEPS_OF_QUINTIC if _is_old() else 1
    if steps < 1 or steps % whole:
        legal = "must be >= 1" if whole == 1 else f"must be {whole} or a multiple of it"
        found += problem("muon_num_ns_steps", steps, legal)
    return found


MUON_RULES: tuple[Rule, ...] = (
    muon_is_installed,
    muon_has_its_state_whole,
    muon_can_split_the_projections,
    muon_numbers,
)


def blocks_of_the_layout(s: Settings) -> str | None:
    size = s.parallel.tensor_model_parallel_size
    if not _is_muon(s) or s.core.get("muon_tp_mode") != "blockwise" or size == 1:
        return None
    return (
        f"--muon-tp-mode blockwise orthogonalises each of the {size} shards of a matrix by itself: "
        "the numbers are those of this --tensor-model-parallel-size alone; duplicated gives those of "
        "one process"
    )

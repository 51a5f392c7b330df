"""The critic's parallel layout: its flags merged with the policy's, checked by the policy's
rules."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from arguments.megatron_configs import build_megatron_configs
from arguments.rules.algorithm import check_legacy_reduction, has_critic
from arguments.rules.base import Rule, Settings
from arguments.rules.declared import check_declared_rules
from arguments.rules.layout import (
    BATCH_RULES,
    PARALLEL_RULES,
    check_samples_per_rank,
)
from arguments.rules.moe import MOE_RULES
from arguments.rules.pipeline import COUNTED, ENDS, virtual_stages_of
from arguments.rules.pipeline import LAYOUT as STAGES
from arguments.run_config import CriticModel
from arguments.schema import CriticConfig, ParallelConfig
from slime_like.config import Problem, flag_name

PREFIX = "critic_"
# The fields of ParallelConfig that a critic may override.
_CRITIC_FIELDS = {f.name for f in dataclasses.fields(CriticConfig)}
LAYOUT = tuple(
    f.name for f in dataclasses.fields(ParallelConfig) if PREFIX + f.name in _CRITIC_FIELDS
)
INTERLEAVED = {"num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"}
_POLICY_FLAG = re.compile(f"--({'|'.join(flag_name(name)[2:] for name in LAYOUT)})(?![\\w-])")


def check_declared_layout(s: Settings) -> list[Problem]:
    """The declared rules of the layout."""
    return [p for p in check_declared_rules(s) if p.flag in map(flag_name, LAYOUT)]


# All rules that depend on a layout; problems independent of it are reported once, for the policy.
RULES: tuple[Rule, ...] = (
    check_declared_layout,
    *PARALLEL_RULES,
    *MOE_RULES,
    *BATCH_RULES,
    check_samples_per_rank,
    check_legacy_reduction,
)


def layout_flags(critic: CriticConfig) -> dict[str, Any]:
    """Values of the critic's layout flags, by field name of ParallelConfig."""
    values = {name: getattr(critic, PREFIX + name) for name in LAYOUT}
    return {name: value for name, value in values.items() if value is not None}


def critic_parallel(critic: CriticConfig, policy: ParallelConfig) -> ParallelConfig:
    """The policy's layout, overridden by the critic's flags. Settings that belong to a differing
    size are not inherited: the interleaved schedule if the pipeline size differs, expert tensor
    parallelism and sequence parallelism if the tensor-parallel size differs."""
    flags = layout_flags(critic)
    pipeline = flags.get("pipeline_model_parallel_size", policy.pipeline_model_parallel_size)
    interleaved = {}
    if INTERLEAVED & flags.keys() or pipeline != policy.pipeline_model_parallel_size:
        interleaved = {name: flags.get(name) for name in INTERLEAVED}
        if flags.get("num_virtual_stages_per_pipeline_rank") == 1:
            interleaved["num_virtual_stages_per_pipeline_rank"] = None
    sizes = dataclasses.replace(policy, **(flags | interleaved))
    if sizes.tensor_model_parallel_size != policy.tensor_model_parallel_size:
        sizes = dataclasses.replace(
            sizes, expert_tensor_parallel_size=flags.get("expert_tensor_parallel_size")
        )
    if sizes.tensor_model_parallel_size == 1 and "sequence_parallel" not in flags:
        sizes = dataclasses.replace(sizes, sequence_parallel=False)
    return sizes


def check_critic_layout(s: Settings) -> list[Problem]:
    """Apply the layout rules to the critic, and report problems under its flags. Problems that the
    policy's layout has too are only reported for the policy."""
    if not has_critic(s) or not layout_flags(s.critic):
        return []
    view = _as_policy(s)
    problems = []
    for rule in RULES:
        of_policy = rule(s)
        problems += [_under_critic_flag(p, s) for p in rule(view) if p not in of_policy]
    return problems


def _as_policy(s: Settings) -> Settings:
    """The settings as if the critic's layout were the policy's."""
    parallel = critic_parallel(s.critic, s.parallel)
    dropped = {"cp_comm_type"} if parallel.context_parallel_size == 1 else set[str]()
    if parallel.pipeline_model_parallel_size != s.parallel.pipeline_model_parallel_size:
        dropped |= {STAGES, *ENDS, *COUNTED}  # the shares of the policy's stages
    core = {name: value for name, value in s.core.items() if name not in dropped}
    layout = {name for name in LAYOUT if PREFIX + name in s.given}
    return dataclasses.replace(
        s, parallel=parallel, core=core, given=(s.given - set(LAYOUT)) | layout
    )


def _under_critic_flag(problem: Problem, s: Settings) -> Problem:
    """Rephrase a problem of the critic's layout in terms of the critic's flags."""
    renamed = Problem(_rename(problem.flag), problem.value, _rename(problem.message))
    if renamed.flag != problem.flag:
        return renamed
    flags = " ".join(
        flag_name(PREFIX + name) + ("" if value is True else f" {value}")
        for name, value in layout_flags(s.critic).items()
    )
    message = f"in the critic's layout ({flags}), {renamed.message}"
    return dataclasses.replace(renamed, message=message)


def _rename(text: str) -> str:
    return _POLICY_FLAG.sub(r"--critic-\1", text)


def build_critic(s: Settings) -> tuple[CriticModel | None, list[Problem]]:
    """Build the critic's layout and model config; returns megatron-core's objections as problems.
    Call after the rules have passed."""
    view = _as_policy(s)
    stages = virtual_stages_of(view.parallel, view.core)
    built, problems = build_megatron_configs(
        view.core, model=s.model, parallel=view.parallel, virtual_stages=stages, machine=s.machine
    )
    if built is None:
        return None, [_under_critic_flag(p, s) for p in problems]
    return CriticModel(
        dataclasses.replace(view.parallel, num_virtual_stages_per_pipeline_rank=stages), built
    ), []

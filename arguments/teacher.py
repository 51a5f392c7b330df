"""Build the config of the Megatron teacher of on-policy distillation from its folder."""

from __future__ import annotations

import dataclasses

from arguments.hf.model import HfModel, read_hf_model
from arguments.hf.vision import read_vision
from arguments.megatron_configs import build_megatron_configs
from arguments.rules.base import Settings
from arguments.run_config import TeacherModel
from arguments.schema import GPTModelConfig
from slime_like.checkpoints.folders import is_checkpoint_root
from slime_like.config import Problem


def build_teacher(
    s: Settings, checkpoint: HfModel | None, stages: int | None
) -> tuple[TeacherModel | None, list[Problem]]:
    """Build the teacher's config: its own shape, all other settings as for the policy. Returns
    megatron-core's objections as problems. A checkpoint folder has the policy's shape."""
    folder = s.distillation.opd_teacher_load
    if folder is None:
        return None, []
    if is_checkpoint_root(folder):
        core = dict(s.core)
        gpt = s.gpt
    else:
        core, gpt = _shape_of_teacher(s, checkpoint, folder)
    built, problems = build_megatron_configs(
        core, model=s.model, parallel=s.parallel, virtual_stages=stages, machine=s.machine
    )
    if built is None:
        return None, [
            Problem("--opd-teacher-load", folder, f"{problem.flag}: {problem.message}")
            for problem in problems
        ]
    return TeacherModel(gpt=gpt, transformer=built.transformer), []


def _shape_of_teacher(
    s: Settings, checkpoint: HfModel | None, folder: str
) -> tuple[dict[str, object], GPTModelConfig]:
    """TransformerConfig fields and GPTModelConfig of a teacher in Hugging Face format."""
    shape = read_hf_model(folder)
    policy = {} if checkpoint is None else checkpoint.transformer
    core = {name: value for name, value in s.core.items() if name not in policy} | shape.transformer
    vision = None if s.gpt.vision is None else read_vision(folder, shape, flag="--opd-teacher-load")
    changes = {**shape.gpt, "custom_model_provider_path": None, "vision": vision}
    return core, dataclasses.replace(s.gpt, **changes)

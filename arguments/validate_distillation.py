"""Rules about on-policy distillation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from arguments.hf_model import HfModel, read_hf_model
from arguments.validate import Rule, Settings, problem
from arguments.validate_parallel import virtual_stages_of
from slime_like.config import ConfigError, Problem, flag_name

SETTINGS = ("opd_type", "opd_kl_coef", "opd_teacher_load")


def distillation_is_complete(s: Settings) -> list[Problem]:
    opd = s.distillation
    if not opd.use_opd:
        idle = [name for name in SETTINGS if name in s.given]
        return [p for name in idle for p in problem(name, getattr(opd, name), "has no effect without --use-opd; add the switch")]
    if s.algorithm.loss_type == "sft_loss":
        return problem("use_opd", None, "grades what the policy samples, and --loss-type sft_loss samples nothing; leave it out")
    if opd.opd_type is None:
        return problem("opd_type", None, "is missing; --use-opd needs to know who computes the teacher's log-probs: megatron")
    if opd.opd_type == "megatron" and opd.opd_teacher_load is None:
        return problem("opd_teacher_load", None, "is missing; --opd-type megatron needs the folder of the teacher (Hugging Face)")
    return []


def teacher_is_there(s: Settings) -> list[Problem]:
    folder = s.distillation.opd_teacher_load
    if folder is None or not s.distillation.use_opd:
        return []
    if not (Path(folder) / "config.json").is_file():
        return problem("opd_teacher_load", folder, "no config.json in this folder; give a Hugging Face model")
    try:
        teacher = read_hf_model(folder)
    except ConfigError as error:
        return [dataclasses.replace(found, flag=flag_name("opd_teacher_load")) for found in error.problems]
    return teacher_fits_the_layout(s, teacher)


def teacher_fits_the_layout(s: Settings, teacher: HfModel) -> list[Problem]:
    """The teacher is spread over the same ranks as the policy, which may not divide it."""
    found = []
    folder, parallel = s.distillation.opd_teacher_load, s.parallel
    heads, groups = teacher.transformer["num_attention_heads"], teacher.transformer.get("num_query_groups")
    for name, size in (("attention heads", heads), ("key-value heads", groups)):
        if size is not None and size % parallel.tensor_model_parallel_size:
            message = f"has {size} {name}, which --tensor-model-parallel-size {parallel.tensor_model_parallel_size} does not divide"
            found += problem("opd_teacher_load", folder, message)
    layers = teacher.transformer["num_layers"]
    stages = parallel.pipeline_model_parallel_size * (virtual_stages_of(parallel, s.core.get("num_layers")) or 1)
    if layers % stages:
        message = f"has {layers} layers, which the policy's {stages} pipeline stages do not divide"
        found += problem("opd_teacher_load", folder, message)
    if s.gpt.vocab_size is not None and teacher.gpt["vocab_size"] < s.gpt.vocab_size:
        message = (
            f"has {teacher.gpt['vocab_size']} tokens, and the policy can sample {s.gpt.vocab_size}; give a teacher of the same vocabulary"
        )
        found += problem("opd_teacher_load", folder, message)
    return found


DISTILLATION_RULES: tuple[Rule, ...] = (distillation_is_complete, teacher_is_there)


def nothing_to_learn(s: Settings) -> str | None:
    if s.reward.rm_type == "zero" and s.generates and not s.distillation.use_opd:
        return "--rm-type zero without --use-opd: every reward is 0, so the policy loss has nothing to learn from"
    return None

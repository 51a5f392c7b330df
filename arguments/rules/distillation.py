"""Rules about on-policy distillation."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

from arguments.hf.model import HfModel, read_hf_model
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.parallel import virtual_stages_of
from arguments.schema import DistillationConfig
from slime_like.config import ConfigError, Problem, flag_name

_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.\-]+)(:\d{1,5})?(/[\w\-./]*)?")
# slime asks the teacher in a reward function
SLIME_REWARD = "slime.rollout.on_policy_distillation."


def distillation_is_complete(s: Settings) -> list[Problem]:
    opd = s.distillation
    if not opd.use_opd:
        return []
    if s.algorithm.loss_type == "sft_loss":
        return problem(
            "use_opd",
            None,
            "grades what the policy samples, and --loss-type sft_loss samples nothing; leave it out",
        )
    if opd.opd_type is None:
        return problem(
            "opd_type",
            None,
            "is missing; --use-opd needs to know who computes the teacher's log-probs: megatron or sglang",
        )
    if opd.opd_type == "megatron" and opd.opd_teacher_load is None:
        return problem(
            "opd_teacher_load",
            None,
            "is missing; --opd-type megatron needs the folder of the teacher (Hugging Face)",
        )
    return []


def teacher_is_of_its_type(s: Settings) -> list[Problem]:
    """Settings of the other type, and a server's address."""
    opd = s.distillation
    if not opd.use_opd or opd.opd_type is None:
        return []
    if opd.opd_type == "megatron":
        return []
    if opd.opd_teacher_load is not None:
        return problem(
            "opd_teacher_load",
            opd.opd_teacher_load,
            "is for --opd-type megatron; the servers of --opd-teacher-url have their teacher",
        )
    if importlib.util.find_spec("httpx") is None:
        return problem(
            "opd_type", "sglang", "needs httpx; install it with: pip install 'slime_like[sglang]'"
        )
    urls = teacher_urls(s)
    if not urls:
        return problem(
            "opd_teacher_url",
            None,
            "is missing; --opd-type sglang needs the teacher's server, as in http://10.0.0.7:30000",
        )
    flag = "opd_teacher_url" if opd.opd_teacher_url else "rm_url"
    return [
        p
        for url in urls
        if _URL.fullmatch(url) is None
        for p in problem(flag, url, "must be http://host:port")
    ]


def served_teacher_fits(s: Settings) -> list[Problem]:
    """What SGLang tells about given tokens is at temperature 1, over the whole vocabulary."""
    if not s.distillation.served:
        return []
    found = []
    if s.rollout.rollout_temperature != 1:
        message = "with --opd-type sglang must be 1: SGLang tells log-probs of given tokens at no other; or take --opd-type megatron"
        found += problem("rollout_temperature", s.rollout.rollout_temperature, message)
    if s.rollout.renormalize_sampled_log_probs:
        found += problem(
            "renormalize_sampled_log_probs",
            None,
            "does not go with --opd-type sglang, whose log-probs are over the whole vocabulary",
        )
    if s.model.hf_checkpoint is None:
        found += problem(
            "hf_checkpoint",
            None,
            "is missing: its tokenizer is compared with that of --opd-teacher-url",
        )
    return found


def slime_reward_of_distillation(s: Settings) -> list[Problem]:
    path = s.reward.custom_rm_path
    if path is None or not path.startswith(SLIME_REWARD):
        return []
    return problem(
        "custom_rm_path",
        path,
        "is built in: give --opd-type sglang, --opd-teacher-url, and --rm-type zero in place of this function",
    )


def teacher_urls(s: Settings) -> list[str]:
    """--rm-url has the teacher's address where it is not a reward's."""
    own, of_reward = s.distillation.opd_teacher_url, s.reward.rm_url
    return own or ([of_reward] if of_reward is not None and s.reward.rm_type != "remote_rm" else [])


def server_url(address: str) -> str:
    """Without the path of the call, which slime's users give."""
    return address.rstrip("/").removesuffix("/generate")


def completed_distillation(s: Settings) -> DistillationConfig:
    return (
        dataclasses.replace(s.distillation, opd_teacher_url=teacher_urls(s))
        if s.distillation.served
        else s.distillation
    )


def teacher_is_there(s: Settings) -> list[Problem]:
    folder = s.distillation.opd_teacher_load
    if folder is None or not s.distillation.use_opd:
        return []
    if not (Path(folder) / "config.json").is_file():
        return problem(
            "opd_teacher_load", folder, "no config.json in this folder; give a Hugging Face model"
        )
    try:
        teacher = read_hf_model(folder)
    except ConfigError as error:
        return [
            dataclasses.replace(found, flag=flag_name("opd_teacher_load"))
            for found in error.problems
        ]
    return teacher_fits_the_layout(s, teacher)


def teacher_fits_the_layout(s: Settings, teacher: HfModel) -> list[Problem]:
    """The teacher is spread over the same ranks as the policy, which may not divide it."""
    found = []
    folder, parallel = s.distillation.opd_teacher_load, s.parallel
    heads, groups = (
        teacher.transformer["num_attention_heads"],
        teacher.transformer.get("num_query_groups"),
    )
    for name, size in (("attention heads", heads), ("key-value heads", groups)):
        if size is not None and size % parallel.tensor_model_parallel_size:
            message = f"has {size} {name}, which --tensor-model-parallel-size {parallel.tensor_model_parallel_size} does not divide"
            found += problem("opd_teacher_load", folder, message)
    layers = teacher.transformer["num_layers"]
    stages = parallel.pipeline_model_parallel_size * (
        virtual_stages_of(parallel, s.core.get("num_layers")) or 1
    )
    if layers % stages:
        message = f"has {layers} layers, which the policy's {stages} pipeline stages do not divide"
        found += problem("opd_teacher_load", folder, message)
    if s.gpt.vocab_size is not None and teacher.gpt["vocab_size"] < s.gpt.vocab_size:
        message = f"has {teacher.gpt['vocab_size']} tokens, and the policy can sample {s.gpt.vocab_size}; give a teacher of the same vocabulary"
        found += problem("opd_teacher_load", folder, message)
    return found


DISTILLATION_RULES: tuple[Rule, ...] = (
    distillation_is_complete, teacher_is_of_its_type, served_teacher_fits, slime_reward_of_distillation, teacher_is_there,
)  # fmt: skip


def nothing_to_learn(s: Settings) -> str | None:
    if s.reward.rm_type == "zero" and s.generates and not s.distillation.use_opd:
        return "--rm-type zero without --use-opd: every reward is 0, so the policy loss has nothing to learn from"
    return None

"""Rules about on-policy distillation and its teacher."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

from arguments.hf.hub import download_hint
from arguments.hf.model import HfModel, read_hf_model
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.files import NO_MODEL
from arguments.rules.pipeline import check_pipeline_split, virtual_stages_of
from arguments.schema import DistillationConfig
from slime_like.checkpoints.folders import has_model, is_checkpoint_root
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.extras import pip_install

_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.\-]+)(:\d{1,5})?(/[\w\-./]*)?")
# slime queries the teacher in a reward function
SLIME_REWARD = "slime.rollout.on_policy_distillation."
AT_RM_URL = ("remote_rm", "reward_model")  # rewards of the server at --rm-url


def check_teacher_servers(s: Settings) -> list[Problem]:
    """--opd-type sglang needs server addresses, and excludes settings of the other types."""
    opd = s.distillation
    if not opd.use_opd or opd.opd_type != "sglang":
        return []
    if importlib.util.find_spec("httpx") is None:
        return problem("opd_type", "sglang", f"requires httpx: {pip_install('sglang')}")
    urls = teacher_urls(s)
    if not urls:
        message = (
            "required with --opd-type sglang: the teacher's server, e.g. http://10.0.0.7:30000"
        )
        return problem("opd_teacher_url", None, message)
    flag = "opd_teacher_url" if opd.opd_teacher_url else "rm_url"
    problems = []
    for url in urls:
        if _URL.fullmatch(url) is None:
            problems += problem(flag, url, "must be http://host:port")
    return problems


def check_slime_opd_reward(s: Settings) -> list[Problem]:
    path = s.reward.custom_rm_path
    if path is None or not path.startswith(SLIME_REWARD):
        return []
    message = "is built in; use --opd-type sglang, --opd-teacher-url and --rm-type zero instead"
    return problem("custom_rm_path", path, message)


def teacher_urls(s: Settings) -> list[str]:
    """Addresses of the teacher: --opd-teacher-url, or --rm-url unless the reward uses it."""
    if s.distillation.opd_teacher_url:
        return s.distillation.opd_teacher_url
    if s.reward.rm_url is None or s.reward.rm_type in AT_RM_URL:
        return []
    return [s.reward.rm_url]


def server_url(address: str) -> str:
    """Remove the path /generate, which addresses in slime's scripts include."""
    return address.rstrip("/").removesuffix("/generate")


def completed_distillation(s: Settings) -> DistillationConfig:
    if not s.distillation.served:
        return s.distillation
    return dataclasses.replace(s.distillation, opd_teacher_url=teacher_urls(s))


def check_teacher_model(s: Settings) -> list[Problem]:
    folder = s.distillation.opd_teacher_load
    if folder is None or not s.distillation.use_opd:
        return []
    if is_checkpoint_root(folder):
        return []  # has the policy's shape, to which the rules of the policy apply
    if not has_model(folder):
        return problem("opd_teacher_load", folder, f"{NO_MODEL}{download_hint(folder)}")
    try:
        teacher = read_hf_model(folder)
    except ConfigError as error:
        flag = flag_name("opd_teacher_load")
        return [dataclasses.replace(each, flag=flag) for each in error.problems]
    return _check_teacher_layout(s, teacher)


def _check_teacher_layout(s: Settings, teacher: HfModel) -> list[Problem]:
    """The teacher uses the policy's parallel sizes, which must divide its heads and layers. What
    they do not divide in the policy either is reported there."""
    parallel = s.parallel
    network = teacher.transformer
    tensor = parallel.tensor_model_parallel_size
    messages = []
    for name, key in (
        ("attention heads", "num_attention_heads"),
        ("key-value heads", "num_query_groups"),
    ):
        size = network.get(key)
        if size is not None and size % tensor and not (s.core.get(key) or 0) % tensor:
            messages.append(
                f"has {size} {name}, not divisible by --tensor-model-parallel-size {tensor}"
            )
    layers = network["num_layers"]
    stages = parallel.pipeline_model_parallel_size * (virtual_stages_of(parallel, s.core) or 1)
    if layers % stages and not check_pipeline_split(s):
        messages.append(f"has {layers} layers, not divisible by the policy's {stages} stages")
    vocabulary = teacher.gpt["vocab_size"]
    if s.gpt.vocab_size is not None and vocabulary < s.gpt.vocab_size:
        messages.append(
            f"has {vocabulary} tokens, and the policy can sample {s.gpt.vocab_size}; "
            "use a teacher with the policy's vocabulary"
        )
    flag = flag_name("opd_teacher_load")
    folder = s.distillation.opd_teacher_load
    return [Problem(flag, folder, message) for message in messages]


def check_self_teacher_context(s: Settings) -> list[Problem]:
    """Self-distillation needs context that the policy does not see, and templates with a
    placeholder for it."""
    opd = s.distillation
    if not opd.teaches_itself:
        return []
    single = s.rollout.n_samples_per_prompt == 1
    key = s.data.opd_demonstration_key or opd.opd_feedback_key
    problems = []
    if key is None and (opd.opd_success_reward is None or single):
        message = (
            "self requires context that only the teacher sees: --opd-demonstration-key, "
            "--opd-feedback-key, or --opd-success-reward with --n-samples-per-prompt above 1"
        )
        problems += problem("opd_type", "self", message)
    for name in ("prompt", "demonstration", "feedback"):
        field = f"opd_{name}_template"
        if f"{{{name}}}" not in getattr(opd, field):
            problems += problem(field, getattr(opd, field), f"must contain {{{name}}}")
    return problems


def check_self_teacher(s: Settings) -> list[Problem]:
    opd = s.distillation
    problems = list[Problem]()
    if not opd.teaches_itself:
        return problems
    if s.lora.lora_rank and opd.opd_self_teacher == "ema":
        message = "not supported with --lora-rank; legal values: live, base"
        problems += problem("opd_self_teacher", "ema", message)
    return problems


DISTILLATION_RULES: tuple[Rule, ...] = (
    check_teacher_servers,
    check_slime_opd_reward,
    check_teacher_model,
    check_self_teacher_context,
    check_self_teacher,
)


def warn_zero_reward(s: Settings) -> str | None:
    if s.rewards_are_zero and s.generates and not s.distillation.use_opd:
        return "--rm-type zero without --use-opd: every reward is 0, there is nothing to learn from"
    return None

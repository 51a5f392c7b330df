"""Rules about data, rewards, evaluation sets, prompt sampling, and the teacher of on-policy
distillation."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

from arguments.eval_sets import EvalSet
from arguments.hf.model import HfModel, read_hf_model
from arguments.rules.base import TASK_PREFIX, Rule, Settings, problem
from arguments.rules.pipeline import virtual_stages_of
from arguments.rules.rows import file_of, first_keys
from arguments.schema import DistillationConfig
from slime_like.checkpoints.folders import is_checkpoint_root
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.rewards import task
from slime_like.rewards.custom import load_function
from slime_like.rewards.registry import require_confinement, rewards

# --- distillation --------------------------------------------------------------------------------


_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.\-]+)(:\d{1,5})?(/[\w\-./]*)?")
# slime queries the teacher in a reward function
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
    return []


def teacher_is_of_its_type(s: Settings) -> list[Problem]:
    """--opd-type sglang needs server addresses, and excludes settings of the other types."""
    opd = s.distillation
    if not opd.use_opd or opd.opd_type is None:
        return []
    if opd.opd_type in ("megatron", "self"):
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
    """Settings incompatible with a served teacher: SGLang scores given tokens at temperature 1 over
    the full vocabulary."""
    if not s.distillation.served:
        return []
    found = []
    if s.rollout.rollout_temperature != 1:
        message = "with --opd-type sglang must be 1: SGLang reports log-probs of given tokens at no other; or use --opd-type megatron"
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
    """Addresses of the teacher: --opd-teacher-url, or --rm-url unless the reward uses it."""
    own, of_reward = s.distillation.opd_teacher_url, s.reward.rm_url
    return own or ([of_reward] if of_reward is not None and s.reward.rm_type != "remote_rm" else [])


def server_url(address: str) -> str:
    """Remove the path /generate, which addresses in slime's scripts include."""
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
    if is_checkpoint_root(folder):
        return []  # has the policy's shape, to which the rules of the policy apply
    if not (Path(folder) / "config.json").is_file():
        words = "neither a Hugging Face model (config.json) nor a folder of checkpoints"
        return problem("opd_teacher_load", folder, words)
    try:
        teacher = read_hf_model(folder)
    except ConfigError as error:
        return [
            dataclasses.replace(found, flag=flag_name("opd_teacher_load"))
            for found in error.problems
        ]
    return teacher_fits_the_layout(s, teacher)


def teacher_fits_the_layout(s: Settings, teacher: HfModel) -> list[Problem]:
    """The teacher uses the policy's parallel sizes, which must divide its heads and layers."""
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
    stages = parallel.pipeline_model_parallel_size * (virtual_stages_of(parallel, s.core) or 1)
    if layers % stages:
        message = f"has {layers} layers, which the policy's {stages} pipeline stages do not divide"
        found += problem("opd_teacher_load", folder, message)
    if s.gpt.vocab_size is not None and teacher.gpt["vocab_size"] < s.gpt.vocab_size:
        message = f"has {teacher.gpt['vocab_size']} tokens, and the policy can sample {s.gpt.vocab_size}; give a teacher of the same vocabulary"
        found += problem("opd_teacher_load", folder, message)
    return found


def self_teacher_sees_more(s: Settings) -> list[Problem]:
    """Self-distillation needs context that the policy does not see, and templates with a
    placeholder for it."""
    opd = s.distillation
    if not opd.teaches_itself:
        return []
    alone = s.rollout.n_samples_per_prompt == 1
    given = s.data.opd_demonstration_key or opd.opd_feedback_key
    found = []
    if given is None and (opd.opd_success_reward is None or alone):
        message = (
            "self needs what the teacher sees and the policy does not: --opd-demonstration-key, --opd-feedback-key, or "
            "--opd-success-reward with --n-samples-per-prompt above 1"
        )
        found += problem("opd_type", "self", message)
    for name in ("prompt", "demonstration", "feedback"):
        field = f"opd_{name}_template"
        if f"{{{name}}}" not in getattr(opd, field):
            found += problem(field, getattr(opd, field), f"must have {{{name}}}")
    return found


def self_teacher_fits(s: Settings) -> list[Problem]:
    opd, found = s.distillation, list[Problem]()
    if not opd.teaches_itself:
        return found
    if s.scheduling.data_source_path is not None:
        found += problem(
            "data_source_path",
            s.scheduling.data_source_path,
            "does not go with --opd-type self, which makes its prompts of the rows of --prompt-data",
        )
    if s.lora.lora_rank and opd.opd_self_teacher == "ema":
        found += problem(
            "opd_self_teacher",
            "ema",
            "is not there for adapters; with --lora-rank give live or base",
        )
    return found


def top_tokens_are_tokens(s: Settings) -> list[Problem]:
    top, tokens = s.distillation.opd_topk, s.gpt.vocab_size
    if top is None or tokens is None or top <= tokens:
        return []
    return problem("opd_topk", top, f"must be at most the {tokens} tokens of the vocabulary")


DISTILLATION_RULES: tuple[Rule, ...] = (
    distillation_is_complete, teacher_is_of_its_type, served_teacher_fits, slime_reward_of_distillation, teacher_is_there,
    self_teacher_sees_more, self_teacher_fits, top_tokens_are_tokens,
)  # fmt: skip


def nothing_to_learn(s: Settings) -> str | None:
    if s.reward.rm_type == "zero" and s.generates and not s.distillation.use_opd:
        return "--rm-type zero without --use-opd: every reward is 0, so the policy loss has nothing to learn from"
    return None


# --- data ----------------------------------------------------------------------------------------


DATA_SUFFIXES = (".jsonl", ".parquet")


def prompts(s: Settings) -> list[Problem]:
    path = s.data.prompt_data
    if path is None:
        if s.debug.load_debug_rollout_data is not None or s.scheduling.data_source_path:
            return []
        return problem(
            "prompt_data", None, f"is missing: a .jsonl or .parquet file, or {TASK_PREFIX}<task>"
        )
    return missing_data("prompt_data", path)


def keys_of_rows(s: Settings) -> list[Problem]:
    """Keys that none of the first rows has: --input-key and --label-key, the keys of answer pairs,
    and those of evaluation sets."""
    data, found = s.data, []
    there = _keys_there(data.prompt_data or "", data.skip_bad_rows)
    names = ("input_key", "label_key")
    if s.algorithm.pair_loss is not None:
        names = ("chosen_key", "rejected_key")
    for name in names:
        key = getattr(data, name)
        if there and key is not None and key not in there:
            found += problem(
                name, key, f"is no key of {data.prompt_data}, which has {_names(there)}"
            )
    flag = "eval_prompt_data" if s.eval.eval_config is None else "eval_config"
    for each in s.eval_sets if s.evaluates else ():
        there = _keys_there(each.path, data.skip_bad_rows)
        for key in (each.input_key or data.input_key, each.label_key or data.label_key):
            if there and key is not None and key not in there:
                words = (
                    f"set {each.name}: {key!r} is no key of {each.path}, which has {_names(there)}"
                )
                found += problem(flag, None, words)
    return found


def _keys_there(spec: str, may_be_bad: int) -> set[str] | None:
    """Keys in the first rows of a file; None if another rule applies to it, or it is read later."""
    path = file_of(spec)
    known = path.suffix in DATA_SUFFIXES and path.is_file()
    return first_keys(path, may_be_bad) if known else None


def _names(keys: set[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys))


def missing_data(name: str, spec: str) -> list[Problem]:
    """A data source that does not exist. Its content is checked when it is opened."""
    if spec.startswith(TASK_PREFIX):
        library = rewards.get("task").missing_library()
        words = f"needs {library}" if library is not None else task.unknown(spec)
        return [] if words is None else problem(name, spec, words)
    path = file_of(spec)
    if path.is_file():
        return []
    return problem(
        name,
        spec,
        "is a folder; name a .jsonl or .parquet file in it" if path.is_dir() else "no such file",
    )


WITHOUT_LABEL = (
    "task",
    "zero",
    "code",
    "ifbench",
    "remote_rm",
)  # zero compares with nothing, the others with what is in the metadata


def reward_is_chosen(s: Settings) -> list[Problem]:
    reward = s.reward
    sources = [s.data.prompt_data or ""] if s.generates else []
    graded = (
        [each for each in s.eval_sets if each.rm_type is None and each.custom_rm_path is None]
        if s.evaluates
        else []
    )
    if reward.custom_rm_path is not None or all(
        source.startswith(TASK_PREFIX) for source in [*sources, *[each.path for each in graded]]
    ):
        return []
    if reward.rm_type is None:
        return problem(
            "rm_type",
            None,
            f"is missing: give --rm-type, --custom-rm-path, or a {TASK_PREFIX} source, which scores itself",
        )
    if (
        reward.rm_type not in WITHOUT_LABEL
        and s.data.label_key is None
        and (any(sources) or any(each.label_key is None for each in graded))
    ):
        return problem(
            "label_key",
            None,
            f"is missing: the field with the reference answer, for --rm-type {reward.rm_type}",
        )
    return []


def reward_is_usable(s: Settings) -> list[Problem]:
    name, path = s.reward.rm_type, s.reward.custom_rm_path
    if path is not None and path.startswith(
        SLIME_REWARD
    ):  # of distillation, which has a separate rule
        return []
    if name is not None and path is not None:
        return problem("rm_type", name, "excludes --custom-rm-path; give one of them")
    if name is not None and (library := rewards.get(name).missing_library()) is not None:
        return problem("rm_type", name, f"needs {library}")
    if name is not None and s.generates:
        try:
            require_confinement(name)
        except ValueError as error:
            return problem("rm_type", name, str(error))
    if path is not None and (s.generates or s.evaluates):
        try:
            load_function(path)
        except ValueError as error:
            return problem("custom_rm_path", None, str(error).removeprefix("--custom-rm-path "))
    return []


def evaluation(s: Settings) -> list[Problem]:
    words, interval, file = s.eval.eval_prompt_data, s.eval.eval_interval, s.eval.eval_config
    if words is not None and file is not None:
        return []  # exclude each other
    if words is None and file is None:
        return (
            []
            if interval is None
            else problem(
                "eval_interval", interval, "needs --eval-prompt-data name path, or --eval-config"
            )
        )
    name = "eval_prompt_data" if file is None else "eval_config"
    if interval is None:
        return problem(
            "eval_interval", None, f"is missing; {flag_name(name)} is used every this many rollouts"
        )
    if words is not None and len(words) % 2:
        return problem(
            "eval_prompt_data", " ".join(words), "must be pairs: name path [name path ...]"
        )
    if words is not None and len(set(words[::2])) < len(words) // 2:
        return problem("eval_prompt_data", " ".join(words), "names a set twice")
    found = [p for each in s.eval_sets for p in missing_data(name, each.path)]
    return found + [p for each in s.eval_sets for p in _own_reward(each, s.reward.rm_url)]


def _own_reward(each: EvalSet, rm_url: str | None) -> list[Problem]:
    """Problems of the reward that an evaluation set of --eval-config names."""
    if each.rm_type is not None and each.custom_rm_path is not None:
        return problem(
            "eval_config",
            None,
            f"set {each.name}: rm_type excludes custom_rm_path; give one of them",
        )
    if each.rm_type is not None and each.rm_type not in rewards.names():
        return problem(
            "eval_config",
            None,
            f"set {each.name}: rm_type is {each.rm_type!r}; legal values: {', '.join(rewards.names())}",
        )
    if (
        each.rm_type is not None
        and (library := rewards.get(each.rm_type).missing_library()) is not None
    ):
        return problem("eval_config", None, f"set {each.name}: {each.rm_type} needs {library}")
    if each.rm_type == "remote_rm" and rm_url is None:
        return problem("eval_config", None, f"set {each.name}: rm_type remote_rm needs --rm-url")
    if each.custom_rm_path is not None:
        try:
            load_function(each.custom_rm_path)
        except ValueError as error:
            return problem(
                "eval_config",
                None,
                f"set {each.name}: {str(error).replace('--custom-rm-path', 'custom_rm_path')}",
            )
    return []


def truncates(s: Settings) -> bool:
    return s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k != -1


DATA_RULES: tuple[Rule, ...] = (
    prompts,
    keys_of_rows,
    reward_is_chosen,
    reward_is_usable,
    evaluation,
)

"""Rules about data, rewards, evaluation sets, and what is sampled of the prompts."""

from __future__ import annotations

import re
from pathlib import Path

from arguments.eval_sets import EvalSet
from arguments.rules.base import TASK_PREFIX, Rule, Settings, problem
from arguments.rules.distillation import SLIME_REWARD
from arguments.rules.rows import first_keys
from slime_like.config import Problem, flag_name
from slime_like.rewards import task
from slime_like.rewards.custom import load_function
from slime_like.rewards.registry import require_confinement, rewards

DATA_SUFFIXES = (".jsonl", ".parquet")
_ROW_RANGE = re.compile(r"@\[[^\]]*\]$")


def prompts(s: Settings) -> list[Problem]:
    path = s.data.prompt_data
    if path is None:
        if s.debug.load_debug_rollout_data is not None:
            return []
        return problem(
            "prompt_data", None, f"is missing: a .jsonl or .parquet file, or {TASK_PREFIX}<task>"
        )
    return missing_data("prompt_data", path)


def keys_of_rows(s: Settings) -> list[Problem]:
    """--input-key and --label-key, or an evaluation set's own, that none of the first rows has."""
    data, found = s.data, []
    there = _keys_there(data.prompt_data or "", data.skip_bad_rows)
    for name, key in (("input_key", data.input_key), ("label_key", data.label_key)):
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
    """Of a file; None where it has a rule of its own, or is read later."""
    path = Path(_ROW_RANGE.sub("", spec))
    known = path.suffix in DATA_SUFFIXES and path.is_file()
    return first_keys(path, may_be_bad) if known else None


def _names(keys: set[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys))


def missing_data(name: str, spec: str) -> list[Problem]:
    """A data source that is not there. Its contents are checked when it is opened."""
    if spec.startswith(TASK_PREFIX):
        library = rewards.get("task").missing_library()
        words = f"needs {library}" if library is not None else task.unknown(spec)
        return [] if words is None else problem(name, spec, words)
    path = Path(_ROW_RANGE.sub("", spec))
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
        and (sources or any(each.label_key is None for each in graded))
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
    ):  # of distillation, which has a rule of its own
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
    """The reward that a set of --eval-config names."""
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


def renormalization_needs_truncation(s: Settings) -> list[Problem]:
    name = "renormalize_sampled_log_probs"
    if not s.rollout.renormalize_sampled_log_probs:
        return []
    if s.algorithm.loss_type == "sft_loss":
        return problem(
            name,
            None,
            "has no effect with --loss-type sft_loss, which samples nothing to train on; leave it out",
        )
    if not truncates(s):
        return problem(
            name,
            None,
            "has no effect: neither --rollout-top-p below 1 nor --rollout-top-k is given; leave it out",
        )
    return []


DATA_RULES: tuple[Rule, ...] = (
    prompts,
    keys_of_rows,
    renormalization_needs_truncation,
    reward_is_chosen,
    reward_is_usable,
    evaluation,
)

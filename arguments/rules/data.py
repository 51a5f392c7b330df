"""Rules about data, rewards and evaluation sets."""

from __future__ import annotations

from arguments.eval_sets import EvalSet
from arguments.hf.hub import download_hint
from arguments.rules.base import TASK_PREFIX, Rule, Settings, problem
from arguments.rules.distillation import SLIME_REWARD
from arguments.rules.rows import file_of, first_keys
from arguments.rules.scheduling import OWN_ROLLOUT
from slime_like.config import Problem
from slime_like.rewards import task
from slime_like.rewards.custom import load_function
from slime_like.rewards.registry import require_confinement, rewards

DATA_SUFFIXES = (".jsonl", ".parquet")


def check_prompt_data(s: Settings) -> list[Problem]:
    path = s.data.prompt_data
    if path is not None:
        return missing_data("prompt_data", path)
    if s.debug.load_debug_rollout_data is not None or s.scheduling.data_source_path:
        return []
    message = f"required: a .jsonl or .parquet file, or {TASK_PREFIX}<task>"
    return problem("prompt_data", None, message)


def check_row_keys(s: Settings) -> list[Problem]:
    """Keys that none of the first rows has: --input-key and --label-key, the keys of answer pairs,
    and those of evaluation sets."""
    data = s.data
    problems = []
    keys = _keys_of(data.prompt_data or "", data.skip_bad_rows)
    names = ("input_key", "label_key")
    if s.algorithm.pair_loss is not None:
        names = ("chosen_key", "rejected_key")
    for name in names:
        key = getattr(data, name)
        if keys and key is not None and not _is_among(key, keys):
            message = f"no such key in {data.prompt_data}; its keys: {_join(keys)}"
            problems += problem(name, key, message)
    reported = {p.value for p in problems}
    flag = "eval_prompt_data" if s.eval.eval_config is None else "eval_config"
    for each in s.eval_sets if s.evaluates else ():
        keys = _keys_of(each.path, data.skip_bad_rows)
        for own, shared in ((each.input_key, data.input_key), (each.label_key, data.label_key)):
            key = own or shared
            if own is None and shared in reported:
                continue
            if keys and key is not None and not _is_among(key, keys):
                message = f"set {each.name}: no key {key!r} in {each.path}; its keys: {_join(keys)}"
                problems += problem(flag, None, message)
    return problems


def check_images(s: Settings) -> list[Problem]:
    """--multimodal-keys: what rows may have, and who writes the placeholders."""
    keys = s.data.multimodal_keys
    if keys is None:
        return []
    kinds = sorted(keys.keys() - {"image"})
    if kinds or not keys.get("image"):
        what = f"{', '.join(map(repr, kinds))} is not offered; " if kinds else ""
        return problem("multimodal_keys", None, what + """must be like '{"image": "images"}'""")
    if s.model.hf_checkpoint is None:
        message = "requires --hf-checkpoint with an image processor"
        return [] if s.needs_hf_checkpoint else problem("multimodal_keys", None, message)
    renders = s.data.apply_chat_template or s.algorithm.pair_loss is not None
    if s.generates and not renders and not s.agents.given:
        message = "requires --apply-chat-template, since the template writes the placeholders"
        return problem("multimodal_keys", None, message)
    others = {
        "--opd-type self": s.distillation.teaches_itself,
        "--opd-teacher-url": s.distillation.served,
        "--data-source-path": s.scheduling.data_source_path is not None,
        "--rollout-function-path": s.scheduling.rollout_function_path not in (None, OWN_ROLLOUT),
    }
    if given := [flag for flag, holds in others.items() if holds]:
        return problem("multimodal_keys", None, f"cannot be combined with {given[0]}")
    return []


def _keys_of(spec: str, max_bad_rows: int) -> set[str] | None:
    """Keys in the first rows of a file; None if another rule applies to it, or it is read later."""
    path = file_of(spec)
    readable = path.suffix in DATA_SUFFIXES and path.is_file()
    return first_keys(path, max_bad_rows) if readable else None


def _is_among(key: str, keys: set[str]) -> bool:
    """Whether rows may have this key, which may be a path into objects."""
    return key in keys or key.partition(".")[0] in keys


def _join(keys: set[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys))


def missing_data(name: str, spec: str) -> list[Problem]:
    """A data source that does not exist. Its content is checked when it is opened."""
    if spec.startswith(TASK_PREFIX):
        library = rewards.get("task").missing_library()
        message = f"requires {library}" if library is not None else task.unknown(spec)
        return [] if message is None else problem(name, spec, message)
    path = file_of(spec)
    if path.is_file():
        return []
    if path.is_dir():
        return problem(name, spec, "is a folder; must be a .jsonl or .parquet file")
    return problem(name, spec, f"no such file{download_hint(spec, 'dataset')}")


# zero ignores the response; the others compare it with the row's metadata
WITHOUT_LABEL = ("task", "zero", "code", "ifbench", "remote_rm")


def check_reward(s: Settings) -> list[Problem]:
    reward = s.reward
    sources = [s.data.prompt_data or ""] if s.generates else []
    eval_sets = s.eval_sets if s.evaluates else ()
    graded = [each for each in eval_sets if each.rm_type is None and each.custom_rm_path is None]
    paths = [*sources, *(each.path for each in graded)]
    if reward.custom_rm_path is not None or all(path.startswith(TASK_PREFIX) for path in paths):
        return []
    if reward.rm_type is None:
        message = f"required, or --custom-rm-path, or a {TASK_PREFIX} source, which scores itself"
        return problem("rm_type", None, message)
    needs_label = any(sources) or any(each.label_key is None for each in graded)
    if reward.rm_type not in WITHOUT_LABEL and s.data.label_key is None and needs_label:
        message = f"required with --rm-type {reward.rm_type}: the field with the reference answer"
        return problem("label_key", None, message)
    return []


def check_reward_function(s: Settings) -> list[Problem]:
    name = s.reward.rm_type
    path = s.reward.custom_rm_path
    if path is not None and path.startswith(SLIME_REWARD):
        return []  # has its own rule
    if name is not None and (library := rewards.get(name).missing_library()) is not None:
        return problem("rm_type", name, f"requires {library}")
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


def check_evaluation(s: Settings) -> list[Problem]:
    pairs = s.eval.eval_prompt_data
    file = s.eval.eval_config
    if pairs is not None and file is not None:
        return []  # cannot be combined, which the declared rules report
    if s.eval.eval_interval is None:
        return []
    if pairs is not None and len(pairs) % 2:
        message = "must be pairs: name path [name path ...]"
        return problem("eval_prompt_data", " ".join(pairs), message)
    if pairs is not None and len(set(pairs[::2])) < len(pairs) // 2:
        return problem("eval_prompt_data", " ".join(pairs), "has two sets of the same name")
    name = "eval_prompt_data" if file is None else "eval_config"
    problems = []
    for each in s.eval_sets:
        problems += missing_data(name, each.path)
    for each in s.eval_sets:
        if (reason := _reward_problem(each, s.reward.rm_url)) is not None:
            problems += problem("eval_config", None, f"set {each.name}: {reason}")
    return problems


def _reward_problem(each: EvalSet, rm_url: str | None) -> str | None:
    """What is wrong with the reward that an evaluation set of --eval-config names, if anything."""
    if each.custom_rm_path is not None:
        try:
            load_function(each.custom_rm_path)
        except ValueError as error:
            return str(error).replace("--custom-rm-path", "custom_rm_path")
        return None  # it takes precedence over rm_type
    if each.rm_type is None:
        return None
    if each.rm_type not in rewards.names():
        return f"rm_type is {each.rm_type!r}; legal values: {', '.join(rewards.names())}"
    if (library := rewards.get(each.rm_type).missing_library()) is not None:
        return f"{each.rm_type} requires {library}"
    if each.rm_type == "remote_rm" and rm_url is None:
        return "rm_type remote_rm requires --rm-url"
    return None


def truncates(s: Settings) -> bool:
    """Whether top-k or top-p sampling is on."""
    return s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k != -1


DATA_RULES: tuple[Rule, ...] = (
    check_prompt_data,
    check_row_keys,
    check_images,
    check_reward,
    check_reward_function,
    check_evaluation,
)

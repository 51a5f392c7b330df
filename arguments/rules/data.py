"""Rules about data, rewards and evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arguments.eval_sets import EvalSet
from arguments.hf.hub import download_hint
from arguments.prompt_mix import MixSource, is_mix
from arguments.rules.base import TASK_PREFIX, Rule, Settings, field_of, problem
from arguments.rules.distillation import SLIME_REWARD
from arguments.rules.rows import file_of, first_keys
from arguments.rules.scheduling import OWN_ROLLOUT
from arguments.rules.served_rewards import missing_server
from arguments.schema import DataConfig
from slime_like.config import Problem
from slime_like.rewards import task
from slime_like.rewards.custom import load_function
from slime_like.rewards.registry import require_confinement, rewards

DATA_SUFFIXES = (".jsonl", ".parquet")


def check_prompt_data(s: Settings) -> list[Problem]:
    path = s.data.prompt_data
    if path is not None and is_mix(path):
        return [p for each in s.data_configs if each is not s.data for p in _missing_source(each)]
    if path is not None:
        return missing_data("prompt_data", path)
    if s.debug.load_debug_rollout_data is not None or s.scheduling.data_source_path:
        return []
    message = f"required: a .jsonl or .parquet file, or {TASK_PREFIX}<task>"
    return problem("prompt_data", None, message)


def _missing_source(data: DataConfig) -> list[Problem]:
    """A source of a mix that does not exist."""
    assert data.prompt_data is not None
    if is_mix(data.prompt_data):
        message = "is a mix, and the sources of a mix must be data files"
        return problem("prompt_data", data.prompt_data, message)
    return missing_data("prompt_data", data.prompt_data)


def check_prompt_mix(s: Settings) -> list[Problem]:
    """What the sources of a mix ask for, and what cannot be combined with a mix."""
    problems: list[Problem] = []
    if not s.prompt_sources:
        return problems
    mix = s.data.prompt_data
    others = {
        "--data-source-path": s.scheduling.data_source_path is not None,
        "--opd-type self": s.distillation.teaches_itself,
        "--num-epoch, since its sources end their epochs at different times; give --num-rollout "
        "and max_epochs": s.rollout.num_epoch is not None and s.rollout.num_rollout is None,
    }
    for flag in [flag for flag, holds in others.items() if holds]:
        problems += problem("prompt_data", mix, f"a mix cannot be combined with {flag}")
    for source in s.prompt_sources:
        if not source.name.strip():
            problems += problem("prompt_data", mix, "has a source without a name; name it")
        if message := _source_problem(source, s):
            problems += problem("prompt_data", mix, f"source {source.name}: {message}")
    return problems


def _source_problem(source: MixSource, s: Settings) -> str | None:
    """What is wrong with a source in this run, if anything."""
    longest = s.rollout.rollout_max_response_len
    if s.supervised:
        idle: dict[str, object] = {
            "after": source.after,
            "pass_rate": source.pass_rate,
            "max_response_len": source.max_response_len,
            "metadata_overrides": source.metadata_overrides,
        }
        if not s.evaluates:
            idle |= {"rm_type": source.rm_type, "custom_rm_path": source.custom_rm_path}
        if given := [key for key, value in idle.items() if value]:
            return f"{given[0]} has no effect with --loss-type sft_loss; remove it"
        if s.data.label_key is None and source.label_key is not None:
            return "label_key: set --label-key, which makes all sources rows with an answer"
        if s.data.label_key is None and source.path.startswith(TASK_PREFIX):
            return f"{source.path}: has no conversations; set --label-key, or use a file"
        return None
    if source.max_response_len is not None and source.max_response_len > longest:
        return (
            f"max_response_len is {source.max_response_len}, must not be above "
            f"--rollout-max-response-len {longest}"
        )
    if source.grades_itself and s.reward.group_rm:
        return "a reward of its own cannot be combined with --group-rm"
    if source.learns_from_rewards and s.scheduling.rollout_function_path not in (None, OWN_ROLLOUT):
        return (
            "after and pass_rate need the run's own rollouts; remove them or "
            "--rollout-function-path"
        )
    return _reward_problem(source, s)


def check_row_keys(s: Settings) -> list[Problem]:
    """Keys that none of the first rows has: --input-key and --label-key, the keys of answer pairs,
    and those of evaluation sets."""
    data = s.data
    problems = []
    names: tuple[str, ...] = ("input_key", "label_key")
    if s.algorithm.pair_loss is not None:
        names = ("chosen_key", "rejected_key")
    if s.algorithm.scores_mismatches:
        names = (*names, "desirable_key")
    for each in s.data_configs:
        keys = _keys_of(each.prompt_data or "", data.skip_bad_rows)
        for name in names:
            key = getattr(each, name)
            if keys and key is not None and not _is_among(key, keys):
                message = f"no such key in {each.prompt_data}; its keys: {_join(keys)}"
                problems += problem(name, key, message)
    reported = {p.value for p in problems}
    for held_out in s.eval_sets if s.evaluates else ():
        if held_out.set is not None:
            continue  # has its own columns
        keys = _keys_of(held_out.path, data.skip_bad_rows)
        own_and_shared = (
            (held_out.input_key, data.input_key),
            (held_out.label_key, data.label_key),
        )
        for own, shared in own_and_shared:
            key = own or shared
            if own is None and shared in reported:
                continue
            if keys and key is not None and not _is_among(key, keys):
                where = f"set {held_out.name}: no key {key!r} in {held_out.path}"
                message = f"{where}; its keys: {_join(keys)}"
                problems += problem(field_of(held_out, s), None, message)
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
        "--loss-type kto_loss": s.algorithm.scores_mismatches,
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


# zero ignores the response; others compare it with the row's metadata, or need no reference
WITHOUT_LABEL = ("task", "zero", "code", "ifbench", "remote_rm", "judge", "reward_model")


def check_reward(s: Settings) -> list[Problem]:
    reward = s.reward
    sources = [s.data] if s.generates else []
    if s.prompt_sources and s.generates:
        ungraded = [each for each in s.prompt_sources if not each.grades_itself]
        sources = [each.data_config(s.data) for each in ungraded]
    eval_sets = s.eval_sets if s.evaluates else ()
    graded = [each for each in eval_sets if each.rm_type is None and each.custom_rm_path is None]
    paths = [*(each.prompt_data or "" for each in sources), *(each.path for each in graded)]
    if reward.custom_rm_path is not None or all(path.startswith(TASK_PREFIX) for path in paths):
        return []
    if reward.rm_type is None:
        message = f"required, or --custom-rm-path, or a {TASK_PREFIX} source, which scores itself"
        return problem("rm_type", None, message)
    label_keys = [each.label_key for each in sources if each.prompt_data]
    label_keys += [each.label_key for each in graded]
    needs_label = any(key is None for key in label_keys)
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
    problems = []
    names = [each.name for each in s.eval_sets]
    for each in s.eval_sets:
        if not each.name.strip():
            message = "has a set without a name, which its metrics would lack; name it"
            problems += problem(field_of(each, s), None, message)
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"{name}: another evaluation set has its name; rename one of them"
        if any(source.name == name for source in s.prompt_sources):
            problems += problem("prompt_data", s.data.prompt_data, f"source {message}")
        else:
            problems += problem("eval_sets", " ".join(s.eval.eval_sets or ()), f"set {message}")
    for each in s.eval_sets:
        if each.set is None:
            problems += missing_data(field_of(each, s), each.path)
    for each in s.eval_sets:
        flag = field_of(each, s)
        reason = _reward_problem(each, s) if flag in ("eval_sets", "eval_config") else None
        if reason is not None:
            problems += problem(flag, None, f"set {each.name}: {reason}")
    return problems


def _reward_problem(each: EvalSet | MixSource, s: Settings) -> str | None:
    """What is wrong with the reward that an evaluation set of --eval-config, or a source of a mix,
    names, if anything."""
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
    missing = missing_server(each.rm_type, s)
    return None if missing is None else f"rm_type {each.rm_type} requires {missing}"


def check_stop(s: Settings) -> list[Problem]:
    """Strings and tokens that can end a response."""
    problems = [
        *_stop_problems("rollout_stop", s.rollout.rollout_stop, s),
        *_stop_problems("rollout_stop_token_ids", s.rollout.rollout_stop_token_ids, s),
    ]
    for each in s.eval_sets:
        values: list[str | int] = [*(each.stop or ()), *(each.stop_token_ids or ())]
        for found in _stop_problems(field_of(each, s), values, s):
            problems.append(replace(found, message=f"set {each.name}: {found.message}"))
    return problems


def _stop_problems(name: str, values: Sequence[str | int] | None, s: Settings) -> list[Problem]:
    """The first value that cannot end a response."""
    size = s.gpt.vocab_size
    for value in values or ():
        if value == "":
            return problem(name, value, "an empty string ends no response; remove it")
        if isinstance(value, int) and (value < 0 or (size is not None and value >= size)):
            legal = "at least 0" if size is None else f"from 0 to {size - 1}, a token of the model"
            return problem(name, value, f"must be {legal}")
    return []


def truncates(s: Settings) -> bool:
    """Whether top-k or top-p sampling is on."""
    return s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k != -1


DATA_RULES: tuple[Rule, ...] = (
    check_prompt_data,
    check_prompt_mix,
    check_row_keys,
    check_images,
    check_reward,
    check_reward_function,
    check_evaluation,
    check_stop,
)

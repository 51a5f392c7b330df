"""The evaluation sets of a run: pairs on the command line (--eval-prompt-data), standard sets by
name (--eval-sets), or a YAML file with settings for each set (--eval-config, in place of the
pairs).

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 4096}
        - {name: easy, path: easy.jsonl, n_samples_per_eval_prompt: 1, temperature: 0}
        - {name: maths, set: math-500, path: data/math-500}

As in slime, ``eval:`` may be omitted, and ``datasets`` may be a mapping by name. Settings that a
set omits are taken from `defaults`, then from the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from arguments.file_rows import OF_ONE_ROW, checked_row, named_rows
from arguments.rules.rows import without_range
from arguments.schema.data import EvalConfig
from arguments.schema.rollout import ALL_OR_SOME
from arguments.unique_keys import load_yaml
from slime_like.config import (
    AT_LEAST_ONE,
    GREEDY_OR_TEMPERATURE,
    UNIT_OPEN_LOW,
    Problem,
    arg,
)
from slime_like.standard_sets import located, standard_sets
from slime_like.template import parse_template

FLAG = "--eval-config"
SETS_FLAG = "--eval-sets"


@dataclass(frozen=True, slots=True)
class EvalSet:
    """An evaluation set. None: use the value of the run's flag."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    n_samples_per_eval_prompt: int = arg(1, "", legal=AT_LEAST_ONE)
    temperature: float | None = arg(None, "", legal=GREEDY_OR_TEMPERATURE)
    top_p: float | None = arg(None, "", legal=UNIT_OPEN_LOW)
    top_k: int | None = arg(None, "", legal=ALL_OR_SOME)
    max_response_len: int | None = arg(None, "", legal=AT_LEAST_ONE)
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    metadata_overrides: Mapping[str, object] = field(default_factory=dict)
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: Mapping[str, object] | None = None
    max_prompt_len: int | None = arg(None, "", legal=AT_LEAST_ONE)
    set: str | None = None  # a standard set; `path` is a copy of it, "" what this machine has
    prompt_template: str | None = None  # of a standard set's prompt, in place of its own

    @property
    def metadata(self) -> dict[str, object]:
        """Overrides for the metadata of every row."""
        return ({} if self.rm_type is None else {"rm_type": self.rm_type}) | dict(
            self.metadata_overrides
        )


_TEXTS = (
    "name",
    "path",
    "rm_type",
    "custom_rm_path",
    "input_key",
    "label_key",
    "metadata_key",
    "set",
    "prompt_template",
)
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str,)),
    **dict.fromkeys(
        ("n_samples_per_eval_prompt", "top_k", "max_response_len", "max_prompt_len"), (int,)
    ),
    **dict.fromkeys(("temperature", "top_p"), (int, float)),
    "stop": (list, str),
    "stop_token_ids": (list,),
    "metadata_overrides": (dict,),
    "apply_chat_template": (bool,),
    "apply_chat_template_kwargs": (dict,),
}
_OF_OTHER_SETS = ("input_key", "label_key", "metadata_key")
_SPELLINGS = {"prompt_key": "input_key", "n_samples_per_prompt": "n_samples_per_eval_prompt"}


def command_line_sets(config: EvalConfig) -> tuple[EvalSet, ...]:
    """The sets of --eval-prompt-data, with the values of the evaluation flags."""
    pairs = config.eval_prompt_data or []
    return tuple(
        EvalSet(name=name, path=path, **_from_flags(config))
        for name, path in zip(pairs[::2], pairs[1::2])
    )


def standard_eval_sets(config: EvalConfig) -> tuple[tuple[EvalSet, ...], list[Problem]]:
    """The sets of --eval-sets, and what is wrong with them."""
    found, problems = [], []
    for given in config.eval_sets or ():
        name, path = _named(given)
        flags = {k: v for k, v in _from_flags(config).items() if k not in _OF_OTHER_SETS}
        values = {"name": name, "path": path, "set": name, **flags}
        try:
            if given == f"{name}=":
                raise ValueError(f"{given!r} has no path behind its =")
            found.append(EvalSet(**_of_standard(values)))
        except ValueError as error:
            problems.append(Problem(SETS_FLAG, given, str(error)))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        problems.append(Problem(SETS_FLAG, " ".join(config.eval_sets or ()), "names a set twice"))
    return tuple(found), problems


def _named(given: str) -> tuple[str, str]:
    """Name and path of an item of --eval-sets; of a range without a path, aime-2025@[0:10], the
    range."""
    name, equals, path = given.partition("=")
    if equals:
        return name, path
    name, at, bounds = given.partition("@")
    return name, at + bounds


def _of_standard(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation set, with the reward of the standard set that it may name.
    Raises ValueError if there is no such set, it has no files here, or a setting has no effect."""
    name = values.get("set")
    if name is None:
        if values.get("prompt_template") is not None:
            raise ValueError("prompt_template has no effect without 'set'; remove it")
        return values
    standard = standard_sets.get(name)
    for key in _OF_OTHER_SETS:
        if values.get(key) is not None:
            raise ValueError(f"{key} has no effect with 'set: {name}'; remove it")
    if (template := values.get("prompt_template")) is not None:
        try:
            if not parse_template(template, standard.names)[1]:
                raise ValueError(f"uses none of the names {', '.join(standard.names)}")
        except ValueError as error:
            raise ValueError(f"prompt_template {error}") from error
    located(name, without_range(values["path"]) or None)
    if values.get("rm_type") is None and values.get("custom_rm_path") is None:
        values["rm_type"] = standard.reward
    return {**values, "set": standard_sets.canonical(name)}


def _from_flags(config: EvalConfig) -> dict[str, Any]:
    return {
        "input_key": config.eval_input_key,
        "label_key": config.eval_label_key,
        "n_samples_per_eval_prompt": config.n_samples_per_eval_prompt,
        "temperature": config.eval_temperature,
        "top_p": config.eval_top_p,
        "top_k": config.eval_top_k,
        "max_response_len": config.eval_max_response_len,
    }


def setting_of(eval_set: EvalSet, config: EvalConfig) -> str:
    """The setting that names an evaluation set."""
    standard = {_named(given)[0] for given in config.eval_sets or ()}
    if eval_set.set is not None and eval_set.name in standard:
        return "eval_sets"
    return "eval_prompt_data" if config.eval_config is None else "eval_config"


def eval_sets_of(config: EvalConfig) -> tuple[tuple[EvalSet, ...], list[Problem]]:
    """The evaluation sets of the run, those of --eval-sets last, and what is wrong with them."""
    standard, problems = standard_eval_sets(config)
    if config.eval_config is None:
        return (*command_line_sets(config), *standard), problems
    try:
        content = load_yaml(Path(config.eval_config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = f"cannot be read: {' '.join(str(error).split())}"
        return standard, [*problems, Problem(FLAG, config.eval_config, message)]
    try:
        return (*_sets(content, _from_flags(config)), *standard), problems
    except ValueError as error:
        return standard, [*problems, Problem(FLAG, config.eval_config, str(error))]


def _sets(content: object, flags: Mapping[str, object]) -> tuple[EvalSet, ...]:
    body = content.get("eval", content) if isinstance(content, dict) else content
    if not isinstance(body, dict) or not body.get("datasets"):
        raise ValueError("must have 'datasets': a list of sets, each with a name and a path")
    unknown = sorted(set(body) - {"defaults", "datasets"})
    if unknown:
        raise ValueError(f"has the unknown key {unknown[0]!r}; legal keys: defaults, datasets")
    defaults = _checked(body.get("defaults") or {}, "defaults", forbidden=(*OF_ONE_ROW, "set"))
    rows = named_rows(body["datasets"], "datasets", "set", _checked)
    sets = []
    for values in rows:
        shared = {**flags, **defaults}
        if "set" in values:
            shared = {key: value for key, value in shared.items() if key not in _OF_OTHER_SETS}
        try:
            sets.append(EvalSet(**_of_standard(shared | values)))
        except ValueError as error:
            raise ValueError(f"set {values['name']}: {error}") from error
    return tuple(sets)


def _checked(row: object, place: str, forbidden: tuple[str, ...] = ()) -> dict[str, Any]:
    values = checked_row(row, place, EvalSet, _KINDS, spellings=_SPELLINGS, forbidden=forbidden)
    if "set" in values:
        values = {"name": values["set"], "path": "", **values}
    return values

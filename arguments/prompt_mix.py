"""The sources of a prompt mix: a YAML file in place of a data file (--prompt-data sources.yaml).

    defaults: {rm_type: math, label_key: answer}
    sources:
      - {name: easy, path: easy.jsonl, weight: {0: 3, 200: 1}, max_epochs: 2}
      - {name: hard, path: hard.parquet, after: {easy: 0.7}, pass_rate: [0.05, 0.95]}
      - {name: chat, path: chat.jsonl, custom_rm_path: my/reward.py:score, eval_path: test.jsonl}

Settings that a source omits are taken from `defaults`, then from the flags. `data/prompt_mix.py`
draws from them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from arguments.eval_sets import EvalSet
from arguments.file_rows import OF_ONE_ROW, checked_row, named_rows
from arguments.schema.data import DataConfig, EvalConfig
from arguments.unique_keys import load_yaml
from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, Problem, arg, value_problem

FLAG = "--prompt-data"
MIX_SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # a part of metric names


@dataclass(frozen=True, slots=True)
class MixSource:
    """A source of a prompt mix. None: use the value of the run's flag."""

    name: str
    path: str
    # its share of the prompts relative to the other sources', from each rollout on
    weight: Mapping[int, float] = field(default_factory=lambda: {0: 1})
    # passes over its rows, after which it leaves the mix; None: no limit
    max_epochs: int | None = arg(None, "", legal=AT_LEAST_ONE)
    # begins when each of these sources has this pass rate, or has left the mix
    after: Mapping[str, float] = field(default_factory=dict)
    # groups over whose rewards the source's pass rate is the mean, the latest
    pass_window: int = arg(64, "", legal=AT_LEAST_ONE)
    pass_reward: float = 1.0  # a sample passes if its reward is at least this
    # a row whose group has a lower or a higher pass rate rests
    pass_rate: tuple[float, float] | None = None
    rest_epochs: int = arg(1, "", legal=AT_LEAST_ONE)
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    metadata_overrides: Mapping[str, object] = field(default_factory=dict)
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: Mapping[str, object] | None = None
    max_prompt_len: int | None = arg(None, "", legal=AT_LEAST_ONE)
    max_response_len: int | None = arg(None, "", legal=AT_LEAST_ONE)
    eval_path: str | None = None  # held-out rows, evaluated as the set of the source's name

    @property
    def metadata(self) -> dict[str, object]:
        """Overrides for the metadata of every row."""
        return ({} if self.rm_type is None else {"rm_type": self.rm_type}) | dict(
            self.metadata_overrides
        )

    @property
    def grades_itself(self) -> bool:
        """Whether the source has a reward of its own."""
        return self.rm_type is not None or self.custom_rm_path is not None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards decide which of its rows are drawn, or when."""
        return bool(self.after) or self.pass_rate is not None

    def weight_at(self, rollout: int) -> float:
        """Its weight in a rollout, counted from 0."""
        return self.weight[max(step for step in self.weight if step <= rollout)]

    def has_left(self, rollout: int) -> bool:
        """Whether its weight is 0 from a rollout on, counted from 0."""
        later = (weight for step, weight in self.weight.items() if step > rollout)
        return not self.weight_at(rollout) and not any(later)

    def data_config(self, data: DataConfig) -> DataConfig:
        """The run's data settings with this source's."""
        return with_overrides(dataclasses.replace(data, prompt_data=self.path), self)


def with_overrides(data: DataConfig, row: MixSource | EvalSet) -> DataConfig:
    """Data settings with those of a source or an evaluation set."""
    values = {
        "input_key": row.input_key,
        "label_key": row.label_key,
        "metadata_key": row.metadata_key,
        "apply_chat_template": row.apply_chat_template,
        "apply_chat_template_kwargs": row.apply_chat_template_kwargs,
        "rollout_max_prompt_len": row.max_prompt_len,
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(data, **given)


_TEXTS = (
    "name",
    "path",
    "eval_path",
    "rm_type",
    "custom_rm_path",
    "input_key",
    "label_key",
    "metadata_key",
)
_COUNTS = ("max_epochs", "pass_window", "rest_epochs", "max_prompt_len", "max_response_len")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str,)),
    **dict.fromkeys(_COUNTS, (int,)),
    "weight": (int, float, dict),
    "after": (dict,),
    "pass_rate": (list,),
    "pass_reward": (int, float),
    "metadata_overrides": (dict,),
    "apply_chat_template": (bool,),
    "apply_chat_template_kwargs": (dict,),
}
_SPELLINGS = {"prompt_key": "input_key"}


def is_mix(prompt_data: str | None) -> bool:
    """Whether --prompt-data names a file of sources."""
    return prompt_data is not None and Path(prompt_data).suffix in MIX_SUFFIXES


def prompt_sources_of(config: DataConfig) -> tuple[tuple[MixSource, ...], list[Problem]]:
    """The sources of the run's mix, and the problems of the file; none without a mix."""
    path = config.prompt_data
    if path is None or not is_mix(path):
        return (), []
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return (), [Problem(FLAG, path, f"cannot be read: {' '.join(str(error).split())}")]
    try:
        return _sources(content), []
    except ValueError as error:
        return (), [Problem(FLAG, path, str(error))]


def mix_eval_sets(sources: tuple[MixSource, ...], config: EvalConfig) -> tuple[EvalSet, ...]:
    """The evaluation sets of the sources with an `eval_path`, with the sources' settings."""
    sets = []
    for source in sources:
        if source.eval_path is not None:
            lengths = (source.max_response_len, config.eval_max_response_len)
            sets.append(
                EvalSet(
                    name=source.name,
                    path=source.eval_path,
                    rm_type=source.rm_type,
                    custom_rm_path=source.custom_rm_path,
                    input_key=source.input_key or config.eval_input_key,
                    label_key=source.label_key or config.eval_label_key,
                    metadata_key=source.metadata_key,
                    n_samples_per_eval_prompt=config.n_samples_per_eval_prompt,
                    temperature=config.eval_temperature,
                    top_p=config.eval_top_p,
                    top_k=config.eval_top_k,
                    max_response_len=next(filter(None, lengths), None),
                    metadata_overrides=source.metadata_overrides,
                    apply_chat_template=source.apply_chat_template,
                    apply_chat_template_kwargs=source.apply_chat_template_kwargs,
                    max_prompt_len=source.max_prompt_len,
                )
            )
    return tuple(sets)


def _sources(content: object) -> tuple[MixSource, ...]:
    if not isinstance(content, dict) or not content.get("sources"):
        raise ValueError("must have 'sources': a list of sources, each with a name and a path")
    unknown = sorted(map(str, content.keys() - {"defaults", "sources"}))
    if unknown:
        raise ValueError(f"has the unknown key {unknown[0]!r}; legal keys: defaults, sources")
    defaults = _checked(content.get("defaults") or {}, "defaults", forbidden=OF_ONE_ROW)
    rows = named_rows(content["sources"], "sources", "source", _checked)
    sources = tuple(MixSource(**{**defaults, **values}) for values in rows)
    for source in sources:
        if not _NAME.fullmatch(source.name):
            raise ValueError(
                f"source {source.name}: the name is part of metrics; it must begin with a letter "
                "or a digit and have only letters, digits, '_', '.' and '-'"
            )
        _check_after(source, sources)
    _check_always_one(sources)
    _check_no_circle(sources)
    return sources


def _checked(row: object, place: str, forbidden: tuple[str, ...] = ()) -> dict[str, Any]:
    values = checked_row(row, place, MixSource, _KINDS, spellings=_SPELLINGS, forbidden=forbidden)
    if "weight" in values:
        values["weight"] = _weights(values["weight"], place)
    if "pass_rate" in values:
        bounds = values["pass_rate"]
        numbers = [x for x in bounds if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(bounds) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= 1:
            raise ValueError(
                f"{place}: pass_rate is {list(bounds)}, must be two numbers, 0 <= low <= high <= 1"
            )
    return values


def _weights(value: object, place: str) -> Mapping[int, float]:
    """The weight from each rollout on. Raises ValueError for one that is no weight."""
    if not isinstance(value, dict):
        if not isinstance(value, int | float) or value_problem(value, None, None) or value <= 0:
            raise ValueError(f"{place}: weight is {value!r}, must be > 0")
        return {0: value}
    for step, weight in value.items():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(
                f"{place}: weight from {step!r}, must be from a rollout, counted from 0"
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or value_problem(weight, None, NON_NEGATIVE):
            raise ValueError(f"{place}: weight is {weight!r} from rollout {step}, must be >= 0")
    if not any(value.values()):
        raise ValueError(f"{place}: weight is 0 throughout; give it a weight > 0, or remove it")
    return dict(sorted({0: 0, **value}.items()))


def _check_after(source: MixSource, sources: tuple[MixSource, ...]) -> None:
    names = [each.name for each in sources if each.name != source.name]
    for name, rate in source.after.items():
        place = f"source {source.name}: after"
        if name not in names:
            raise ValueError(
                f"{place} names {name!r}; legal names: {', '.join(names) or 'none, it is alone'}"
            )
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not 0 < rate <= 1:
            raise ValueError(f"{place}: the pass rate of {name} is {rate!r}, must be 0 < x <= 1")


def _check_no_circle(sources: tuple[MixSource, ...]) -> None:
    """Raise ValueError if sources wait for each other."""
    waiting = {source.name: source for source in sources}
    while free := [s.name for s in waiting.values() if waiting.keys().isdisjoint(s.after)]:
        for name in free:
            del waiting[name]
    if waiting:
        name = next(iter(waiting))
        seen: list[str] = []
        while name not in seen:
            seen.append(name)
            name = next(other for other in waiting[name].after if other in waiting)
        circle = " after ".join([*seen[seen.index(name) :], name])
        raise ValueError(f"the sources wait for each other, and none begins: {circle}")


def _check_always_one(sources: tuple[MixSource, ...]) -> None:
    """Raise ValueError if in some rollout no source may be drawn from."""
    for rollout in sorted({step for source in sources for step in source.weight}):
        if not any(not s.after and s.weight_at(rollout) > 0 for s in sources):
            raise ValueError(
                f"no source can be drawn from in rollout {rollout}: one without 'after' must have "
                "a weight > 0 there"
            )

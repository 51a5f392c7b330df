"""Building blocks of the rules between settings.

A rule is a function that takes `Settings` and returns problems. All rules run, and all problems are
reported together. The other modules of this package have the rules, by topic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from arguments.config_groups import ConfigGroups
from arguments.eval_sets import EvalSet, setting_of
from arguments.megatron_configs import Machine
from arguments.schema import ParallelConfig
from slime_like.config import Problem, flag_name
from slime_like.import_utils import load_function
from slime_like.losses.registry import PolicyLoss

TASK_PREFIX = "reasoning_gym:"  # data source that generates rows, answers and scores


@dataclass(frozen=True)
class Settings(ConfigGroups):
    """The input of rules."""

    loss: PolicyLoss  # the policy loss with its settings applied
    core: Mapping[str, Any]  # megatron-core's fields, from flags and checkpoint
    given: frozenset[str]  # names of the fields that the user set
    machine: Machine

    @property
    def trains(self) -> bool:
        return not self.debug.debug_rollout_only

    @property
    def needs_hf_checkpoint(self) -> bool:
        """Whether the run cannot do without --hf-checkpoint, which one rule asks for."""
        return not self.debug.debug_train_only

    @property
    def supervised(self) -> bool:
        return self.algorithm.loss_type == "sft_loss"

    @property
    def generates(self) -> bool:
        """Whether the run generates responses: not in supervised fine-tuning or from recorded
        rollouts."""
        return (
            self.algorithm.loss_type == "policy_loss"
            and not self.debug.debug_train_only
            and self.debug.load_debug_rollout_data is None
        )

    @property
    def evaluates(self) -> bool:
        """Whether an engine answers --eval-prompt-data, however the run trains."""
        return self.eval.eval_interval is not None and not self.debug.debug_train_only

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def data_parallel_size(self) -> int | None:
        """Data-parallel size; None if the sizes do not divide the world size, which another rule
        reports."""
        size, remainder = divmod(self.world_size, self.parallel.model_parallel_size)
        return None if remainder else size


class LayoutSettings(Protocol):
    """Input of the rules about parallel sizes: settings of a run or of a checkpoint conversion."""

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def core(self) -> Mapping[str, Any]: ...

    @property
    def world_size(self) -> int: ...


Rule = Callable[[Settings], list[Problem]]
Warn = Callable[[Settings], str | None]


def problem(field: str, value: object, message: str) -> list[Problem]:
    """A list with one problem of a flag."""
    return [Problem(flag_name(field), None if value is True else value, message)]


def reject(settings: Mapping[str, object], message: str) -> list[Problem]:
    """The same problem for every setting (field name -> value) that is on."""
    problems = []
    for field, value in settings.items():
        if value:
            problems += problem(field, value, message)
    return problems


def field_of(eval_set: EvalSet, s: Settings) -> str:
    """The field that names an evaluation set."""
    if any(source.eval_path and source.name == eval_set.name for source in s.prompt_sources):
        return "prompt_data"
    return setting_of(eval_set, s.eval)


def import_function(field: str, path: str) -> tuple[Callable[..., object] | None, list[Problem]]:
    """The function that a flag names, or None and the problem if it cannot be imported."""
    flag = flag_name(field)
    try:
        return load_function(path, flag), []
    except ValueError as error:
        return None, problem(field, path, str(error).removeprefix(f"{flag} {path!r}: "))


def import_problem(field: str, path: str) -> list[Problem]:
    """A problem if the function that a flag names cannot be imported."""
    return import_function(field, path)[1]


def import_or_none(field: str, path: str) -> Callable[..., object] | None:
    """The function that a flag names; None if it cannot be imported, which another rule reports."""
    return import_function(field, path)[0]

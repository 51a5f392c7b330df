"""Basics of rules between settings. A rule is a small function that returns a list of problems; all
rules run, and all problems are reported together. The rules are in the other modules of this
package, by topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from arguments.config_groups import ConfigGroups
from arguments.megatron_configs import Machine
from arguments.schema import ParallelConfig
from slime_like.config import Problem, flag_name
from slime_like.losses.registry import PolicyLoss

TASK_PREFIX = "reasoning_gym:"  # data source that generates rows, answers and scores


@dataclass(frozen=True)
class Settings(ConfigGroups):
    """The input of rules. core: megatron-core's fields, from flags and checkpoint. loss: the policy
    loss with its settings applied. given: names of the fields that the user set."""

    loss: PolicyLoss
    core: Mapping[str, Any]
    given: frozenset[str]
    machine: Machine

    @property
    def trains(self) -> bool:
        return not self.debug.debug_rollout_only

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
        whole, rest = divmod(self.world_size, self.parallel.model_parallel_size)
        return None if rest else whole


class LayoutSettings(Protocol):
    """Input of the rules about parallel sizes: settings of a run or of a checkpoint conversion."""

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def core(self) -> Mapping[str, Any]: ...

    @property
    def world_size(self) -> int: ...


Rule = Callable[[Settings], list[Problem]]


def problem(field: str, value: object, message: str) -> list[Problem]:
    """A list with one problem of a flag."""
    return [Problem(flag_name(field), value, message)]

"""Rules about agents: reject settings that are incompatible with multi-sequence episodes."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from arguments.config_groups import ConfigGroups
from arguments.rules.base import (
    Rule,
    Settings,
    import_function,
    problem,
)
from slime_like.advantages.registry import (
    TurnEstimator,
    advantage_estimators,
    compares_tokens,
)
from slime_like.config import Problem, flag_name
from slime_like.engines.registry import engine_traits
from slime_like.environments.base import environment_maker
from slime_like.losses.registry import PolicyLoss, policy_losses
from slime_like.programs.environment import environment_without_keys
from slime_like.programs.preloaded import Preloaded, python_program

FUNCTION = "agent_function_path"
COMMAND = "agent_command"
WORKERS = "agent_worker_keys"
ENVIRONMENT = "agent_environment"
MIN_KEY_LENGTH = 16
# Sequence-level losses, which would depend on how an episode is split into sequences.
SEQUENCE_LOSSES = ("gmpo", "vespo")


def check_agent_settings(s: Settings) -> list[Problem]:
    """The agent can be loaded, and this run generates responses."""
    config = s.agents
    if not config.given:
        return []
    if not (s.generates or s.evaluates):
        names = (FUNCTION, COMMAND, ENVIRONMENT, WORKERS)
        name = next(n for n in names if getattr(config, n) is not None)
        return problem(name, None, "has no effect: this run samples no rollouts; remove it")
    problems = _check_agent_function(config.agent_function_path)
    if config.agent_environment is not None:
        try:
            environment_maker(config.agent_environment)
        except ValueError as error:
            message = str(error).removeprefix(f"{flag_name(ENVIRONMENT)} ")
            problems += problem(ENVIRONMENT, config.agent_environment, message)
    if (path := config.agent_worker_keys) is not None:
        try:
            worker_keys(path)
        except ValueError as error:
            message = str(error).removeprefix(f"{flag_name(WORKERS)} {path}: ")
            problems += problem(WORKERS, path, message)
        if not config.agent_port:
            message = "required with --agent-worker-keys, because workers connect to it"
            problems += problem("agent_port", None, message)
    if (config.agent_tool_format or "").startswith("sglang:") and find_spec("sglang") is None:
        message = "requires the package sglang in this Python; or use a format without sglang:"
        problems += problem("agent_tool_format", config.agent_tool_format, message)
    if config.agent_command is not None:
        problems += _check_agent_command(config.agent_command, config.agent_preload)
    return problems


def _check_agent_command(line: str, modules: Sequence[str] | None) -> list[Problem]:
    try:
        command = shlex.split(line)
    except ValueError as error:
        return problem(COMMAND, line, f"not a valid command line: {error}")
    if not command:
        return problem(COMMAND, line, "must name a program")
    if modules is None:
        return []
    try:
        preloaded = Preloaded(python_program(command), modules, environment_without_keys())
    except ValueError as error:
        return problem(COMMAND, line, f"with --agent-preload: {error}")
    try:
        preloaded.start()
    except RuntimeError as error:
        return problem("agent_preload", " ".join(modules), str(error))
    preloaded.close()
    return []


def _check_agent_function(path: str | None) -> list[Problem]:
    if path is None:
        return []
    function, problems = import_function(FUNCTION, path)
    if problems or inspect.iscoroutinefunction(function):
        return problems
    return problem(FUNCTION, path, "must be an async function")


def worker_keys(path: str) -> frozenset[str]:
    """Read keys from a file, one per line; empty lines and lines that start with # are skipped.

    Raises:
        ValueError: The file cannot be read, or has no key or one that is too short; names the flag.
    """
    flag = f"{flag_name(WORKERS)} {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: cannot be read: {error}") from None
    keys = frozenset(line.strip() for line in lines if line.strip() and line.strip()[0] != "#")
    if not keys or min(map(len, keys)) < MIN_KEY_LENGTH:
        raise ValueError(
            f"{flag}: must have a key of at least {MIN_KEY_LENGTH} characters in each line"
        )
    return keys


def check_turn_estimator(s: Settings) -> list[Problem]:
    """An estimator that credits turns needs agents, or recorded agent rollouts."""
    name = s.algorithm.advantage_estimator
    if not isinstance(advantage_estimators.get(name), TurnEstimator):
        return []
    if s.agents.given or not (s.generates and s.trains):
        return []
    message = "requires --agent-function-path, --agent-command or --agent-environment"
    return problem("advantage_estimator", name, message)


def check_agent_compatibility(s: Settings) -> list[Problem]:
    """Settings that agent episodes do not support."""
    if not s.agents.given:
        return []
    scheduling = s.scheduling
    partial = s.scheduling.partial_rollout
    in_rounds = s.scheduling.fully_async and not engine_traits(s.rollout.rollout_engine).has_servers
    unsupported = {
        "apply_chat_template": (
            s.data.apply_chat_template,
            ": the chat template is always applied to an agent's messages; remove it",
        ),
        "rollout_time_limit_s": (
            partial and scheduling.rollout_time_limit_s is not None,
            " and --partial-rollout: unfinished episodes wait for the next rollout",
        ),
        "agent_worker_keys": (
            (partial or in_rounds) and s.agents.agent_worker_keys is not None,
            f" and {'--partial-rollout' if partial else '--fully-async on this engine'}: the "
            "gateway is down while the run trains",
        ),
        "mask_offpolicy_in_partial_rollout": (
            scheduling.mask_offpolicy_in_partial_rollout,
            ": an episode is trained on as a whole",
        ),
        "buffer_filter_path": (
            partial and scheduling.buffer_filter_path is not None,
            " and --partial-rollout: discarded episodes would never end",
        ),
        "rollout_slice_len": (
            scheduling.rollout_slice_len is not None and not (partial or in_rounds),
            " without --partial-rollout: an episode has no slices",
        ),
        "opd_teacher_url": (s.distillation.served, "; use --opd-type megatron"),
        "opd_demonstration_key": (
            s.distillation.teaches_itself,
            " and --opd-type self: an episode has several prompts",
        ),
    } | _depends_on_split(s, s.loss)
    problems = []
    for name, (is_set, reason) in unsupported.items():
        if is_set:
            problems += problem(name, None, f"cannot be combined with agents{reason}")
    if s.generates and s.trains and not s.algorithm.use_dynamic_batch_size:
        message = "required with agents, whose episodes have any number of sequences"
        problems += problem("use_dynamic_batch_size", None, message)
    return problems


def _depends_on_split(s: ConfigGroups, loss: PolicyLoss) -> dict[str, tuple[bool, str]]:
    """Settings that depend on how an episode is split into sequences: field -> (whether the run
    uses it, reason)."""
    name = s.algorithm.advantage_estimator
    config = s.policy_loss
    off_policy = s.off_policy
    by_turn = getattr(config, "gspo_ratio_level", None) == "turn"
    remedy = "; add --gspo-ratio-level turn" if loss.name == "gspo" else ""
    split = "depends on how an episode is split into sequences"
    masks = ": it masks whole sequences"
    return {
        "advantage_estimator": (
            compares_tokens(advantage_estimators.get(name)),
            f": {name} needs a reward per sequence, and those of an episode share one",
        ),
        "policy_loss_type": (
            (loss.sequence_ratio and not by_turn) or loss.name in SEQUENCE_LOSSES,
            f": {loss.name} {split}{remedy}",
        ),
        "sapo_ratio_level": (
            getattr(config, "sapo_ratio_level", None) == "sequence",
            f": sequence {split}; use turn",
        ),
        "use_opsm": (s.algorithm.use_opsm, masks),
        "tis_ratio_type": (off_policy.tis_ratio_type == "sequence", f": sequence {split}"),
        "sequence_mask_metric": (off_policy.sequence_mask_metric is not None, masks),
        "rejection_metric": (str(off_policy.rejection_metric or "").startswith("seq"), masks),
        "outlier_token_is_threshold_low": (
            off_policy.outlier_token_is_threshold_low is not None,
            masks,
        ),
        "outlier_token_is_threshold_high": (
            off_policy.outlier_token_is_threshold_high is not None,
            masks,
        ),
        "opd_prefix_gamma": (s.distillation.opd_prefix_gamma > 0, f": it {split}"),
        "loss_reduction": (
            s.algorithm.loss_reduction == "token_mean_legacy",
            f": token_mean_legacy {split}",
        ),
    }


def check_branches(config: ConfigGroups) -> None:
    """Raise ValueError naming a flag that is incompatible with multi-sequence episodes. Call before
    training on a rollout that has such episodes."""
    loss = policy_losses.get(config.algorithm.policy_loss_type).with_config(config.policy_loss)
    for name, (is_set, reason) in _depends_on_split(config, loss).items():
        if is_set:
            raise ValueError(
                f"{flag_name(name)} cannot be combined with a generate function that returns "
                f"several samples per response{reason}"
            )


AGENT_RULES: tuple[Rule, ...] = (
    check_agent_settings,
    check_turn_estimator,
    check_agent_compatibility,
)

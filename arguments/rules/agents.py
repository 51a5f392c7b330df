"""Rules about agents: reject settings that are incompatible with multi-sequence episodes."""

from __future__ import annotations

import inspect
import shlex
from importlib.util import find_spec
from pathlib import Path

from arguments.config_groups import ConfigGroups
from arguments.rules.base import Rule, Settings, problem
from slime_like.advantages.registry import (
    TurnEstimator,
    advantage_estimators,
    compares_tokens,
)
from slime_like.config import Problem, flag_name
from slime_like.environments.base import environment_maker
from slime_like.import_utils import load_function
from slime_like.losses.registry import PolicyLoss, policy_losses

FUNCTION, COMMAND, WORKERS = "agent_function_path", "agent_command", "agent_worker_keys"
ENVIRONMENT = "agent_environment"
KEY_LENGTH = 16  # minimum length of a worker key
# Sequence-level losses, which would depend on how an episode is split into sequences.
_OF_SEQUENCES = ("gmpo", "vespo")


def agents_play(s: Settings) -> list[Problem]:
    """The agent can be loaded, and this run generates responses."""
    config, found = s.agents, []
    name = next(
        (n for n in (FUNCTION, COMMAND, ENVIRONMENT) if getattr(config, n) is not None), WORKERS
    )
    if not config.given:
        return []
    if not (s.generates or s.evaluates):
        return problem(name, None, "has no effect: this run samples no rollouts; leave it out")
    if config.agent_function_path is not None:
        flag = flag_name(FUNCTION)
        try:
            function = load_function(config.agent_function_path, flag)
        except ValueError as error:
            return problem(FUNCTION, None, str(error).removeprefix(flag + " "))
        if not inspect.iscoroutinefunction(function):
            found += problem(FUNCTION, config.agent_function_path, "must be an async function")
    if config.agent_environment is not None:
        try:
            environment_maker(config.agent_environment)
        except ValueError as error:
            reason = str(error).removeprefix(f"{flag_name(ENVIRONMENT)} ")
            found += problem(ENVIRONMENT, config.agent_environment, reason)
    if config.agent_worker_keys is not None:
        try:
            worker_keys(config.agent_worker_keys)
        except ValueError as error:
            reason = str(error).removeprefix(f"{flag_name(WORKERS)} {config.agent_worker_keys}: ")
            found += problem(WORKERS, config.agent_worker_keys, reason)
    if config.agent_worker_keys is not None and not config.agent_port:
        found += problem(
            "agent_port", None, "is needed with --agent-worker-keys: workers must know it; add it"
        )
    if (config.agent_tool_format or "").startswith("sglang:") and find_spec("sglang") is None:
        reason = "needs the package sglang in this Python; the formats without a prefix do not"
        found += problem("agent_tool_format", config.agent_tool_format, reason)
    if config.agent_command is not None:
        try:
            words = shlex.split(config.agent_command)
        except ValueError as error:
            return problem(COMMAND, config.agent_command, f"is no command line: {error}")
        if not words:
            found += problem(COMMAND, config.agent_command, "must name a program")
    return found


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
    found = frozenset(line.strip() for line in lines if line.strip() and line.strip()[0] != "#")
    if not found or min(map(len, found)) < KEY_LENGTH:
        raise ValueError(
            f"{flag}: must have a key of at least {KEY_LENGTH} characters in each line"
        )
    return found


def turns_need_agents(s: Settings) -> list[Problem]:
    """An estimator that credits turns needs agents, or recorded agent rollouts."""
    name = s.algorithm.advantage_estimator
    if not isinstance(advantage_estimators.get(name), TurnEstimator):
        return []
    if s.agents.given or not (s.generates and s.trains):
        return []
    words = "gives credit to the answers of agents; add --agent-function-path, --agent-command or --agent-environment"
    return problem("advantage_estimator", name, words)


def agents_exclude(s: Settings) -> list[Problem]:
    """Settings that agent episodes do not support."""
    if not s.agents.given:
        return []
    own = "; an agent makes its own messages, which the chat template is applied to: leave it out"
    refused = {
        "apply_chat_template": (s.data.apply_chat_template, own),
        "rollout_time_limit_s": (
            s.scheduling.partial_rollout and s.scheduling.rollout_time_limit_s is not None,
            " and --partial-rollout: an episode has its reward at its end, and waits for the next rollout until then",
        ),
        "agent_worker_keys": (
            s.scheduling.partial_rollout and s.agents.agent_worker_keys is not None,
            " and --partial-rollout: nobody answers workers elsewhere while the run trains",
        ),
        "mask_offpolicy_in_partial_rollout": (
            s.scheduling.mask_offpolicy_in_partial_rollout,
            " yet: an episode is trained on as a whole",
        ),
        "buffer_filter_path": (
            s.scheduling.partial_rollout and s.scheduling.buffer_filter_path is not None,
            " and --partial-rollout: what it discards would wait for ever",
        ),
        "rollout_slice_len": (
            s.scheduling.rollout_slice_len is not None and not s.scheduling.partial_rollout,
            " without --partial-rollout: an episode is played in one piece",
        ),
        "opd_teacher_url": (s.distillation.served, " yet; use a teacher on Megatron"),
        "opd_demonstration_key": (
            s.distillation.teaches_itself,
            " and --opd-type self: an episode has several prompts",
        ),
    } | _cut_matters(s, s.loss)
    found = [
        p
        for name, (given, words) in refused.items()
        if given
        for p in problem(name, None, f"does not go with agents{words}")
    ]
    if s.generates and s.trains and not s.algorithm.use_dynamic_batch_size:
        words = "is needed by agents: an episode has any number of sequences; add it, and --max-tokens-per-gpu"
        found += problem("use_dynamic_batch_size", None, words)
    return found


def _cut_matters(s: ConfigGroups, loss: PolicyLoss) -> dict[str, tuple[bool, str]]:
    """Settings that depend on how an episode is split into sequences: flag -> (whether the run uses
    it, reason)."""
    estimator = advantage_estimators.get(s.algorithm.advantage_estimator)
    by_turn = getattr(s.policy_loss, "gspo_ratio_level", None) == "turn"
    turns = "; add --gspo-ratio-level turn" if loss.name == "gspo" else ""
    whole = "; the sequences of an episode have one reward, and their tokens none"
    return {
        "advantage_estimator": (
            compares_tokens(estimator),
            f" yet with {s.algorithm.advantage_estimator}{whole}",
        ),
        "policy_loss_type": (
            (loss.sequence_ratio and not by_turn) or loss.name in _OF_SEQUENCES,
            f" with {loss.name}: its loss depends on how an episode is cut into sequences{turns}",
        ),
        "sapo_ratio_level": (
            getattr(s.policy_loss, "sapo_ratio_level", None) == "sequence",
            " with sequence, which depends on how an episode is cut into sequences; turn does not",
        ),
        "use_opsm": (s.algorithm.use_opsm, ", as it masks whole sequences"),
        "tis_ratio_type": (
            s.off_policy.tis_ratio_type == "sequence",
            " with sequence, which depends on how an episode is cut into sequences",
        ),
        "sequence_mask_metric": (
            s.off_policy.sequence_mask_metric is not None,
            ", as it masks whole sequences",
        ),
        "rejection_metric": (
            str(s.off_policy.rejection_metric or "").startswith("seq"),
            f" with {s.off_policy.rejection_metric}, which is of whole sequences",
        ),
        "outlier_token_is_threshold_low": (
            s.off_policy.outlier_token_is_threshold_low is not None,
            ", as it drops whole sequences",
        ),
        "outlier_token_is_threshold_high": (
            s.off_policy.outlier_token_is_threshold_high is not None,
            ", as it drops whole sequences",
        ),
        "opd_prefix_gamma": (
            s.distillation.opd_prefix_gamma > 0,
            ", as it weighs a token by what came before it in its sequence",
        ),
        "loss_reduction": (
            s.algorithm.loss_reduction == "token_mean_legacy",
            " with token_mean_legacy, which depends on how a step is cut",
        ),
    }


def check_branches(run: ConfigGroups) -> None:
    """Raise ValueError naming a flag that is incompatible with multi-sequence episodes. Call before
    training on a rollout that has such episodes."""
    loss = policy_losses.get(run.algorithm.policy_loss_type).with_config(run.policy_loss)
    for name, (given, words) in _cut_matters(run, loss).items():
        if given:
            raise ValueError(
                f"{flag_name(name)} does not go with a generate function that returns several "
                f"samples for one{words}"
            )


AGENT_RULES: tuple[Rule, ...] = (agents_play, turns_need_agents, agents_exclude)

"""Builds the agent runner of a run from its configuration."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.rules.agents import worker_keys
from arguments.run_config import RunConfig
from arguments.schema import AgentsConfig
from slime_like.advantages import TurnEstimator, advantage_estimators, follows_tokens
from slime_like.agents.answer_parsers import TRANSFORMERS, default_format
from slime_like.agents.command import not_apart, run_command
from slime_like.agents.environment import player
from slime_like.agents.outputs import EpisodeOutputs
from slime_like.agents.rollouts import (
    AGENT_COMMAND,
    AGENT_FUNCTION,
    AGENT_WORKERS,
    TOOL_FORMAT,
    AgentGenerate,
    Play,
)
from slime_like.agents.server import CONNECTIONS, Gateway
from slime_like.agents.sessions import WAITING, SessionLimits
from slime_like.agents.task import Task
from slime_like.agents.tasks import TaskQueue
from slime_like.agents.templates import ChatTemplate
from slime_like.engines.registry import engine_traits
from slime_like.environments.base import FLAG as ENVIRONMENT
from slime_like.environments.base import environment_maker
from slime_like.import_utils import absolute, load_function
from slime_like.logs import warn_rank_0
from slime_like.programs.environment import environment_without_keys
from slime_like.programs.preloaded import Preloaded, PythonProgram, python_program

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FUNCTION_PROGRAM = "slime_like.agents.function_program"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Agent:
    """The agent that a flag names."""

    name: str
    play: Play
    tasks: TaskQueue | None = None  # set for remote workers


def _make_agent(config: AgentsConfig, output_dir: Path) -> _Agent | None:
    if (path := config.agent_function_path) is not None:
        name = f"{AGENT_FUNCTION} {path}"
        if config.agent_function_isolation:
            return _Agent(name, _isolated_function(path, config, output_dir))
        return _Agent(name, load_function(path, AGENT_FUNCTION))
    if (line := config.agent_command) is not None:
        command = shlex.split(line)
        preloaded: Preloaded | None = None
        if (modules := config.agent_preload) is not None:
            preloaded = Preloaded(python_program(command), modules, environment_without_keys())
        return _Agent(f"{AGENT_COMMAND} {line!r}", _player(command, preloaded, config, output_dir))
    if (spec := config.agent_environment) is not None:
        return _Agent(f"{ENVIRONMENT} {spec}", player(environment_maker(spec)))
    if (file := config.agent_worker_keys) is not None:
        keys = worker_keys(file)
        tasks = TaskQueue(keys, config.agent_timeout_s, config.agent_heartbeat_s)
        return _Agent(f"{AGENT_WORKERS} {file}", tasks.play, tasks)
    return None


def _player(
    command: Sequence[str],
    preloaded: Preloaded | None,
    config: AgentsConfig,
    output_dir: Path,
    *,
    flag: str = AGENT_COMMAND,
) -> Play:
    """Runs a program for each episode. flag: names it in messages."""
    if config.agent_isolation and (problem := not_apart()) is not None:
        warn_rank_0(logger, f"{flag}: {problem}")
    outputs = EpisodeOutputs(output_dir)

    async def play(task: Task) -> float | None:
        return await run_command(
            command,
            task,
            apart=config.agent_isolation,
            outputs=outputs,
            preloaded=preloaded,
            returns_metadata=flag == AGENT_FUNCTION,
        )

    return play


def _isolated_function(path: str, config: AgentsConfig, output_dir: Path) -> Play:
    """Plays each episode of a function in a process of its own."""
    words = ("-m", FUNCTION_PROGRAM, absolute(path))
    # so that it finds the modules that this process finds
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = PythonProgram((sys.executable,), words, {})
    preloaded = Preloaded(program, [FUNCTION_PROGRAM], environment_without_keys() | paths)
    return _player(words, preloaded, config, output_dir, flag=AGENT_FUNCTION)


def agent_generate(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, rank: int, output_dir: Path
) -> AgentGenerate | None:
    """The agent runner of --agent-function-path, --agent-command, --agent-environment or
    --agent-worker-keys; None without these. Raises ValueError naming the flag.

    Args:
        output_dir: Of the run; gets what programs print.
    """
    agents = config.agents
    agent = _make_agent(agents, output_dir)
    if agent is None:
        return None
    end_ids = end_ids_of(config, tokenizer)
    ChatTemplate(tokenizer, end_ids)  # rejects tokenizers without a template early
    if agents.agent_tool_format == TRANSFORMERS and default_format(tokenizer) != TRANSFORMERS:
        raise ValueError(f"{TOOL_FORMAT} {TRANSFORMERS}: the tokenizer has no response_template")
    port = agents.agent_port + rank if agents.agent_port else 0
    estimator = advantage_estimators.get(config.algorithm.advantage_estimator)
    return AgentGenerate(
        agent.name,
        agent.play,
        Gateway(
            agents.agent_host,
            port,
            max_body=int(agents.agent_max_body_mb * 2**20),
            connections=CONNECTIONS + agents.agent_episodes * (agents.agent_concurrency + WAITING),
            tasks=agent.tasks,
        ),
        end_ids=end_ids,
        template_arguments=config.data.apply_chat_template_kwargs,
        tool_format=agents.agent_tool_format,
        limits=SessionLimits(
            agents.agent_max_turns,
            agents.agent_concurrency,
            positions=config.gpt.max_position_embeddings,
            tokens=agents.agent_max_answer_tokens,
            reward=config.reward.max_abs_reward,
        ),
        timeout_s=agents.agent_timeout_s,
        episodes=agents.agent_episodes,
        observations=config.algorithm.observation_loss_coef > 0,
        pauses=pauses(config),
        attempts=1 if agent.tasks is None else 1 + agents.agent_retries,
        own_timeout=agent.tasks is not None,
        by_turn=isinstance(estimator, TurnEstimator),
        by_token=follows_tokens(estimator),
    )


def pauses(config: RunConfig) -> bool:
    """Whether episodes pause for training; with --fully-async on servers they go on meanwhile."""
    scheduling = config.scheduling
    on_servers = engine_traits(config.rollout.rollout_engine).has_servers
    return scheduling.partial_rollout or (scheduling.fully_async and not on_servers)


def end_ids_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the checkpoint's, the tokenizer's and
    --rollout-stop-token-ids."""
    from transformers import AutoConfig

    from slime_like.engines.local.engine import end_token_ids

    folder = str(config.model.hf_checkpoint)
    trust = config.model.trust_remote_code
    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    return end_token_ids(folder, model_config, tokenizer) | frozenset(
        config.rollout.rollout_stop_token_ids or ()
    )

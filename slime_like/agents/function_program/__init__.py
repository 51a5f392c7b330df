"""An agent function as a program: ``python -m slime_like.agents.function_program path:function``
plays the episode in whose folder it is started (`--agent-function-isolation`).

`before_fork` imports the function in the process from which the programs of episodes are forked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

from slime_like.agents.command import METADATA, REWARD, TASK
from slime_like.agents.episode_samples import bad_reward
from slime_like.agents.remote_task import RemoteTask
from slime_like.agents.rollouts import AGENT_FUNCTION
from slime_like.import_utils import load_function


def before_fork() -> None:
    """Import the function. Raises ValueError."""
    load_function(sys.argv[1], AGENT_FUNCTION)


def main() -> None:
    """Play the episode: the reward goes into the file `reward`, the metadata into
    `metadata.json`."""
    play = load_function(sys.argv[1], AGENT_FUNCTION)
    task = RemoteTask(
        **json.loads(Path(TASK).read_text()),
        url=os.environ["ANTHROPIC_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    reward = asyncio.run(_play(play, task))
    if (problem := bad_reward(reward, float("inf"))) is not None:
        sys.exit(problem)
    Path(METADATA).write_text(json.dumps(task.metadata))
    if reward is not None:
        Path(REWARD).write_text(repr(float(reward)))


async def _play(play: object, task: RemoteTask) -> float | None:
    assert inspect.iscoroutinefunction(play), "checked on the command line"
    try:
        reward: float | None = await play(task)
    finally:
        await task.close()
    return reward

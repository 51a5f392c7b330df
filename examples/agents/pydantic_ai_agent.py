"""An agent of the package pydantic-ai (pip install 'pydantic-ai-slim[openai]'), trained as it is.

    python train.py ... --agent-function-path examples/agents/pydantic_ai_agent.py:play \
        --prompt-data "reasoning_gym:chain_sum?size=1000" --rm-type zero \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096

The package makes the messages, describes the tool, runs its calls and asks again, until the model
answers in text. All that it needs of the run is a client at the gateway.
"""

from __future__ import annotations

from arithmetic import INSTRUCTIONS, add, is_right
from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from slime_like.agents.task import Task

agent = Agent(instructions=INSTRUCTIONS, tools=[add], retries=2)


async def play(task: Task) -> float:
    """1 for the right number, else 0; also where the model never comes to an answer."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=task.openai()))
    try:
        result = await agent.run(task.prompt, model=model)
    except AgentRunError:  # calls that cannot be read, again and again; no room for an answer
        return 0.0
    return float(is_right(result.output, task.label))

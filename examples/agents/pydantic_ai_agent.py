"""An unmodified pydantic-ai agent (pip install 'pydantic-ai-slim[openai]').

    python train.py ... --agent-function-path examples/agents/pydantic_ai_agent.py:play \
        --prompt-data "reasoning_gym:chain_sum?size=1000" --rm-type zero \
        --use-dynamic-batch-size --max-tokens-per-gpu 4096

pydantic-ai builds the messages, describes the tool, runs its calls and queries the model again
until it answers in text. The only connection to the run is a client that points to the gateway.
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
    """1 for the right number, otherwise 0, including when the model gives no answer."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=task.openai()))
    try:
        result = await agent.run(task.prompt, model=model)
    except AgentRunError:  # calls that cannot be read, again and again; no room for an answer
        return 0.0
    return float(is_right(result.output, task.label))

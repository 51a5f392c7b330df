"""The vendors' packages and an agent package, unmodified, in a run of train.py with the local engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.samples.episodes import complete
from slime_like.types import Sample
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_agents import SIZES, prompts

# each sample of a prompt plays by another package; a reward says which
AGENT = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

async def by_openai(task):
    client, text = task.openai(), ""
    first = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": task.prompt}], max_tokens=6, logprobs=True
    )
    assert first.choices[0].logprobs.content[0].logprob < 0
    items = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": first.choices[0].message.content},
             {"role": "user", "content": "again"}]
    async with client.responses.stream(model="m", input=items, max_output_tokens=6) as events:
        async for event in events:
            text += event.delta if event.type == "response.output_text.delta" else ""
    return text

async def by_anthropic(task):
    client = task.anthropic()
    messages = [{"role": "user", "content": task.prompt}]
    first = await client.messages.create(model="m", messages=messages, max_tokens=6)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "again"}]
    async with client.messages.stream(model="m", messages=messages, max_tokens=6) as stream:
        return await stream.get_final_text()

async def by_pydantic_ai(task):
    provider = OpenAIProvider(openai_client=task.openai())
    agent = Agent(OpenAIChatModel("policy", provider=provider), model_settings={"max_tokens": 6})
    first = await agent.run(task.prompt)
    return (await agent.run("again", message_history=first.all_messages())).output

async def play(task):
    number = task.sample_id % 3
    text = await (by_openai, by_anthropic, by_pydantic_ai)[number](task)
    assert isinstance(text, str)
    return number + 0.1
"""


def check_histories(samples: Sequence[Sample]) -> None:
    """The second answer continues the first one. pydantic-ai asks again for an empty answer, and
    puts a joiner into what looks like a special token, which makes another history: a branch."""
    for sample in samples:
        numbers = sample.metadata["agent"]
        if sample.reward == 2.1:
            assert numbers["answers"] >= 2 and numbers["branches"] <= numbers["answers"]
        else:
            assert (numbers["answers"], numbers["branches"], numbers["foreign_messages"]) == (
                2,
                1,
                0,
            )


@pytest.mark.extended
def test_unmodified_packages_train_with_the_local_engine(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Two turns each: the second continues the first one's tokens, whichever package sends it back,
    and the trainer's log-probs are the sampler's."""
    for package in ("openai", "anthropic", "pydantic_ai"):
        pytest.importorskip(package, reason=f"pip install {package}")
    (tmp_path / "agent.py").write_text(AGENT)
    flags: dict[str, Any] = SIZES | dict(
        prompt_data=prompts(tmp_path), apply_chat_template=None, agent_function_path=f"{tmp_path}/agent.py:play", custom_rm_path=None,
        rm_type="zero", save_debug_rollout_data=tmp_path / "r",
    )  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log").ok()
    (row,) = rows_of(tmp_path / "out")
    assert row["agent/lost"] == 0 and row["train/grad_norm"] > 0
    assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-5
    samples = [s for g in load_rollout(str(tmp_path / "r"), 0) for s in complete(g.samples)]
    assert {s.reward for s in samples} == {0.1, 1.1, 2.1}
    check_histories(samples)

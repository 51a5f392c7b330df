"""The vendors' own packages, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

import pytest

from slime_like.agents.rollouts import Task
from slime_like.agents.sessions import SessionLimits
from tests.unit.agents.test_server import CALL, TOOLS, Engine, episodes, open_gateway, session_of


def trained(sample: Any) -> list[int]:
    response = sample.tokens[sample.prompt_length :].tolist()
    return [t for t, m in zip(response, sample.loss_mask.tolist(), strict=True) if m]


def test_the_openai_package() -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    engine = Engine("<think>\nhm\n</think>\n\nI ask." + CALL, "sunny", "streamed words", "item")

    async def play(task: Task) -> float:
        client = task.openai()
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        first = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, logprobs=True, seed=None
        )
        message = first.choices[0].message
        assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == ["Paris", "Rome"]  # fmt: skip
        assert first.choices[0].logprobs.content[0].logprob == -0.5
        messages.append(message)  # the package's own object, thoughts and all
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})
        second = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        messages += [second.choices[0].message, {"role": "user", "content": "more"}]
        text = ""
        stream = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == "streamed words"
        response = await client.responses.create(
            model="any", input="hello", instructions="be brief"
        )
        assert response.output_text == "item"
        with pytest.raises(openai.BadRequestError, match="top_logprobs = 5 is not offered"):
            await client.chat.completions.create(model="any", messages=messages, top_logprobs=5)
        assert [m.id async for m in client.models.list()] == ["policy"]
        await client.close()
        return 1.0

    (sample,) = episodes(play, engine, 1)
    assert sample.metadata.get("failure") is None
    (branch,) = sample.branches
    assert trained(sample) == [t for tokens in engine.written[:3] for t in tokens]
    assert trained(branch) == list(engine.written[3])
    assert sample.metadata["agent"]["foreign_messages"] == 0


FUNCTION: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}  # fmt: skip


def test_the_openai_package_reads_streamed_responses() -> None:
    """By `create(stream=True)` and by `stream`, which rebuilds the response from its events: thoughts,
    text and parallel calls; what it rebuilt, sent back, continues the answer's tokens."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    engine = Engine("<think>\nhm\n</think>\n\nI ask." + CALL, "sunny", "é" * 9)

    async def play(task: Task) -> float:
        client = task.openai()
        items: list[Any] = [{"role": "user", "content": task.prompt}]
        fixed: dict[str, Any] = dict(model="any", tools=[FUNCTION])
        kinds: list[str] = []
        numbers = []
        async with client.responses.stream(input=items, **fixed) as events:
            async for event in events:
                kinds.append(event.type.removeprefix("response."))
                numbers.append(event.sequence_number)
            first = await events.get_final_response()
        assert numbers == list(range(len(kinds)))
        assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
        assert [o.type for o in first.output] == ["reasoning", "message", "function_call", "function_call"]  # fmt: skip
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 4
        assert kinds.count("reasoning_text.delta") == kinds.count("output_text.delta") == 1
        assert kinds.count("function_call_arguments.done") == 2
        assert first.output_text == "I ask." and first.usage.output_tokens == len(engine.written[0])
        calls = [o for o in first.output if o.type == "function_call"]
        assert [json.loads(c.arguments)["city"] for c in calls] == ["Paris", "Rome"]
        items += [o.model_dump(exclude_none=True) for o in first.output]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
        text, last = "", None
        async for event in await client.responses.create(input=items, stream=True, **fixed):
            last = event
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == "sunny" and last.response.output_text == "sunny"
        async for event in await client.responses.create(
            input="hello", stream=True, model="any", max_output_tokens=3
        ):
            last = event
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError, match="background = true is not offered"):
            await client.responses.create(input="x", stream=True, background=True, model="any")
        await client.close()
        return 1.0

    (sample,) = episodes(play, engine, 1)
    assert sample.metadata.get("failure") is None
    assert trained(sample) == [t for tokens in engine.written[:2] for t in tokens]
    (branch,) = sample.branches
    assert trained(branch) == list(engine.written[2])
    assert sample.metadata["agent"]["foreign_messages"] == 0


def test_the_anthropic_package() -> None:
    pytest.importorskip("anthropic", reason="pip install anthropic")
    engine = Engine("<think>\nhm\n</think>\n\nI ask." + CALL, "sunny", "streamed words")

    async def play(task: Task) -> float:
        client = task.anthropic()
        tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
        fixed: dict[str, Any] = dict(model="any", max_tokens=300, tools=tools, system="be brief")
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        first = await client.messages.create(messages=messages, **fixed)
        assert first.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": "sun"}
            for b in first.content
            if b.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]  # fmt: skip
        second = await client.messages.create(messages=messages, **fixed)
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "more"}]  # fmt: skip
        async with client.messages.stream(messages=messages, **fixed) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert text == "streamed words"
        await client.close()
        return 1.0

    (sample,) = episodes(play, engine, 1)
    assert sample.metadata.get("failure") is None and not sample.branches
    assert trained(sample) == [t for tokens in engine.written for t in tokens]
    assert sample.metadata["agent"]["foreign_messages"] == 0


def test_the_openai_package_waits_and_asks_again() -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    engine = Engine("ABORT", "better")
    session = session_of(engine, SessionLimits(turns=1))

    async def work() -> None:
        async with open_gateway({"key": session}) as (_, gateway):
            client = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="key")
            body: Any = dict(model="any", messages=[{"role": "user", "content": "x"}])
            answer = await client.chat.completions.create(**body)
            assert answer.choices[0].message.content == "better"
            with pytest.raises(openai.RateLimitError):
                await client.with_options(max_retries=0).chat.completions.create(**body)
            other = client.with_options(api_key="no", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await other.chat.completions.create(**body)
            await client.close()

    asyncio.run(work())
    assert session.numbers()["engine_failures"] == 1


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client_reads_no_certificates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway speaks plain HTTP, and each episode has a client of its own."""
    pytest.importorskip(name, reason=f"pip install {name}")
    read: list[object] = []
    load = ssl.SSLContext.load_verify_locations
    monkeypatch.setattr(
        ssl.SSLContext,
        "load_verify_locations",
        lambda *args, **kwargs: (read.append(args), load(*args, **kwargs)),
    )
    task = Task(0, "p", None, {}, False, "http://127.0.0.1:1", "key")
    getattr(task, name)()
    asyncio.run(task.close())
    assert read == []

"""The gateway over HTTP: both vendors' forms, keys, limits, and what agents do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from slime_like.agents.command import MARK, run_command
from slime_like.agents.episode_samples import agent_metrics
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import Session, SessionLimits
from slime_like.agents.templates import ChatTemplate
from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.episode import Model
from slime_like.samples.groups import SampleGroup
from slime_like.types import Prompt, Sample, SampleStatus
from tests.agent_templates import FAMILIES, call_text, make_tokenizer

FAMILY = FAMILIES["qwen3"]
TOKENIZER = make_tokenizer(FAMILY)
END = TOKENIZER.eos_token_id
CALL = call_text(FAMILY, [("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})])


class Engine:
    """Answers from a list, or with the last words of the prompt; `slow` seconds each."""

    def __init__(self, *texts: str, slow: float = 0.0) -> None:
        self.texts, self.slow = list(texts), slow
        self.prompts: list[str] = []
        self.written: list[tuple[int, ...]] = []
        self.running = self.most = self.cancelled = 0

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.slow)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.prompts.append(TOKENIZER.decode(request.prompt_tokens))
        text = self.texts.pop(0) if self.texts else f"ok {request.seed % 1000}"
        if text == "ABORT":
            return GenerateOutput(0, (), (), "abort", (), failure="the engine died")
        tokens = tuple([*TOKENIZER(text, add_special_tokens=False)["input_ids"], END])
        tokens = tokens[: sampling.max_new_tokens]
        self.written.append(tokens)
        reason: Any = "stop" if tokens[-1] == END else "length"
        return GenerateOutput(0, tokens, (-0.5,) * len(tokens), reason, (1,) * len(tokens))


def model_of(engine: Engine) -> Model:
    sampling = SamplingParams(max_new_tokens=500)
    return Model(
        cast(GenerationClient, engine), TOKENIZER, sampling, lambda i, position: position + i
    )


def session_of(engine: Engine, limits: SessionLimits | None = None) -> Session:
    template = ChatTemplate(TOKENIZER, {END})
    return Session(1, model_of(engine), template, tool_format="hermes", limits=limits)


@contextlib.asynccontextmanager
async def open_gateway(
    sessions: Mapping[str, Session], max_body: int = 10_000
) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    gateway = Gateway("127.0.0.1", 0, max_body=max_body)
    async with contextlib.AsyncExitStack() as stack:
        for key, session in sessions.items():
            await stack.enter_async_context(gateway.episode(key, session))
        yield (
            await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=20)),
            gateway,
        )


def run(session: Session, talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def work() -> None:
        async with open_gateway({"key": session}) as (client, _):
            client.headers["authorization"] = "Bearer key"
            await talk(client)

    asyncio.run(work())


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_chat_completions_with_parallel_tools_keep_every_token() -> None:
    engine = Engine("<think>\nhm\n</think>\n\nI ask." + CALL, "sunny")
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        messages: list[Any] = [user("weather?")]
        path = "/v1/chat/completions"
        first = await post(client, path, messages=messages, tools=TOOLS, logprobs=True)
        (choice,) = first["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["message"]["content"] == "I ask."
        cities = [json.loads(c["function"]["arguments"])["city"] for c in choice["message"]["tool_calls"]]  # fmt: skip
        assert cities == ["Paris", "Rome"]
        assert len(choice["logprobs"]["content"]) == len(engine.written[0])
        assert first["usage"]["completion_tokens"] == len(engine.written[0])
        messages.append(choice["message"])
        for call in choice["message"]["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sun"})
        last = await post(client, path, messages=messages, tools=TOOLS)
        assert last["choices"][0]["message"]["content"] == "sunny"

    run(session, talk)
    (branch,) = session.tree.branches()
    trained = [t for t, m in zip(branch.tokens[branch.prompt_length :], branch.loss_mask) if m]
    assert trained == [t for tokens in engine.written for t in tokens]


def test_anthropic_messages_keep_every_token() -> None:
    engine = Engine("<think>\nhm\n</think>\n\nI ask." + CALL, "sunny", "again")
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        fixed: dict[str, Any] = dict(system="be brief", max_tokens=400, tools=tools)
        messages: list[Any] = [user("weather?")]
        first = await post(client, "/v1/messages", messages=messages, **fixed)
        assert [b["type"] for b in first["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first["stop_reason"], first["content"][2]["input"]) == ("tool_use", {"city": "Paris"})  # fmt: skip
        results = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": "sun", "is_error": i > 2}
            for i, b in enumerate(first["content"])
            if b["type"] == "tool_use"
        ]
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]  # fmt: skip
        count = await post(client, "/v1/messages/count_tokens", messages=messages, **fixed)
        second = await post(client, "/v1/messages", messages=messages, **fixed)
        assert second["usage"]["input_tokens"] == count["input_tokens"]
        messages += [{"role": "assistant", "content": second["content"]}, user("more")]
        body = dict(messages=messages, stream=True, **fixed)
        async with client.stream("POST", "/v1/messages", json=body) as stream:
            events = [line async for line in stream.aiter_lines() if line.startswith("event:")]
        assert events[0] == "event: message_start" and events[-1] == "event: message_stop"

    run(session, talk)
    assert len(session.tree.branches()) == 1 and session.numbers()["tool_errors"] == 1
    assert session.tree.counts["foreign_messages"] == 0


def test_responses_and_streams() -> None:
    engine = Engine(CALL, "sunny", "one two", "x")
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        tools = [{"type": "function", "name": "weather", "parameters": {}}]
        items: list[Any] = [user("weather?")]
        first = await post(client, "/v1/responses", input=items, tools=tools)
        assert [o["type"] for o in first["output"]] == ["function_call"] * 2
        items += first["output"]
        for call in first["output"]:
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sun"})  # fmt: skip
        second = await post(client, "/v1/responses", input=items, tools=tools)
        assert second["output"][0]["content"][0]["text"] == "sunny"
        refused = await post(client, "/v1/responses", 400, input="x", background=True)
        assert "background = true is not offered" in refused["error"]["message"]
        body = dict(messages=[user("a")], stream=True, stream_options={"include_usage": True})
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = [line[6:] async for line in stream.aiter_lines() if line]
        assert lines[-1] == "[DONE]" and "completion_tokens" in lines[-2]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-2]]
        assert "".join(d.get("content") or "" for d in deltas) == "one two"

    run(session, talk)
    assert [len(b.tokens) > 0 for b in session.tree.branches()] == [True, True]


def test_an_answer_that_is_cut_after_a_whole_call_is_reported_as_cut() -> None:
    first = call_text(FAMILY, [("weather", {"city": "Paris"})])
    limit = len(TOKENIZER(first, add_special_tokens=False)["input_ids"]) + 6
    session = session_of(Engine(CALL, CALL, CALL))

    async def talk(client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = dict(messages=[user("weather?")], max_tokens=limit)
        chat = await post(client, "/v1/chat/completions", tools=TOOLS, **body)
        (choice,) = chat["choices"]
        assert chat["usage"]["completion_tokens"] == limit
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "length"
        tools: list[Any] = [{"name": "weather", "input_schema": {"type": "object"}}]
        message = await post(client, "/v1/messages", tools=tools, **body)
        assert "tool_use" in [block["type"] for block in message["content"]]
        assert message["stop_reason"] == "max_tokens"
        tools = [{"type": "function", "name": "weather", "parameters": {}}]
        body = dict(input=[user("weather?")], max_output_tokens=limit, tools=tools)
        response = await post(client, "/v1/responses", **body)
        assert "function_call" in [item["type"] for item in response["output"]]
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}

    run(session, talk)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": [user("a")], "top_logprobs": 3}, "top_logprobs = 3 is not offered"),
        ({"messages": [user("a")], "tool_choice": 3}, 'legal: "auto", "none"'),
        ({"messages": [user("a")], "response_format": ["json"]}, "response_format"),
        ({"messages": [user("a")], "unheard_of": 1}, "unheard_of = 1 is not offered"),
        ({"messages": [user("a")], "n": 0}, "n is 0, must be a whole number from 1"),
        ({"messages": [user("a")], "stop": [""]}, "stop must be text"),
        ({"messages": [user("a" * 600)]}, "context_length_exceeded"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    session = session_of(Engine(), SessionLimits(positions=300))

    async def talk(client: httpx.AsyncClient) -> None:
        answer = await post(client, "/v1/chat/completions", 400, **body)
        assert words in answer["error"]["message"]

    run(session, talk)
    assert not session.tree.turns


def test_overridden_parameters_are_counted_and_n_stop_and_seed_taken() -> None:
    engine = Engine("say STOP it", "b", "c")
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        body = dict(messages=[user("q")], temperature=0.3, top_p=1.0, stop="STOP", seed=7)
        first = await post(client, "/v1/chat/completions", **body)
        assert first["choices"][0]["message"]["content"] == "say "
        both = await post(client, "/v1/chat/completions", messages=[user("q")], n=2)
        assert [c["message"]["content"] for c in both["choices"]] == ["b", "c"]

    run(session, talk)
    assert session.numbers()["overridden"] == 1 and len(session.tree.branches()) == 3


def test_keys_of_others_are_refused_and_the_path_may_hold_the_key() -> None:
    first, second = session_of(Engine()), session_of(Engine())

    async def work() -> None:
        async with open_gateway({"one": first, "two": second}) as (client, gateway):
            body = {"messages": [user("x")]}
            for headers in ({}, {"x-api-key": "three"}, {"authorization": "Bearer x"}):
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 401 and "of no episode" in answer.text
            await post(client, "/session/two/v1/chat/completions", **body)
            answer = await client.get("/v1/models", headers={"x-api-key": "one"})
            assert answer.json()["data"][0]["id"] == "policy"
            large = await client.post("/session/one/v1/responses", content=b"x" * 20_000)
            assert large.status_code == 413
            broken = await client.post("/session/one/v1/responses", content=b"[1")
            assert broken.status_code == 400 and "not JSON" in broken.text
            url = gateway.url
        async with httpx.AsyncClient() as outside:
            with pytest.raises(httpx.ConnectError):
                await outside.get(url + "/v1/models")
        assert (len(first.tree.turns), len(second.tree.turns)) == (0, 1)

    asyncio.run(work())


def test_a_flood_waits_its_turn_or_is_asked_to_come_again() -> None:
    engine = Engine(slow=0.02)
    session = session_of(engine, SessionLimits(turns=1000, concurrent=2, waiting=4))

    async def talk(client: httpx.AsyncClient) -> None:
        bodies = [{"messages": [user(str(i))]} for i in range(40)]
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for body in bodies)
        )
        codes = [a.status_code for a in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 6
        assert all("retry-after" in a.headers for a in answers if a.status_code == 429)
        engine.texts = ["ABORT"]
        assert "the engine died" in str(
            await post(client, "/v1/chat/completions", 503, **bodies[0])
        )

    run(session, talk)
    assert engine.most == 2
    numbers = session.numbers()
    assert numbers["refused"] > 0 and numbers["engine_failures"] == 1
    assert numbers["answers"] == len(session.tree.turns)


def test_a_client_that_leaves_stops_the_engine() -> None:
    engine = Engine(slow=30)
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={"messages": [user("x")]}, timeout=0.3)
        for _ in range(100):
            if engine.cancelled:
                break
            await asyncio.sleep(0.05)
        assert engine.cancelled == 1 and not session.tree.turns

    run(session, talk)


def episodes(
    play: Callable[[Task], Awaitable[Any]],
    engine: Engine,
    count: int = 4,
    timeout_s: float = 20,
    max_body: int = 10_000,
) -> list[Sample]:
    """Samples 0 to `count`, played at the same time."""
    agent = AgentGenerate(
        "--agent-function-path play",
        play,
        Gateway("127.0.0.1", 0, max_body=max_body),
        end_ids=frozenset({END}),
        limits=SessionLimits(turns=20),
        timeout_s=timeout_s,
        episodes=64,
    )
    prompt = Prompt(0, "q", tuple(TOKENIZER("q")["input_ids"]), label="a")
    samples = [Sample.empty(prompt, i) for i in range(count)]
    return agent.run(samples, model_of(engine), evaluation=False)


def test_what_agents_do_wrong_costs_their_own_samples() -> None:
    urls: dict[int, tuple[str, str]] = {}

    async def play(task: Task) -> Any:
        urls[task.sample_id] = task.url, task.api_key
        question = [user(task.prompt)]
        await task.chat(question)
        if task.sample_id == 1:
            raise RuntimeError("crash")
        if task.sample_id == 2:
            await asyncio.sleep(60)
        if task.sample_id == 3:
            return "much"
        if task.sample_id == 4:  # floods, replays, and opens what it can
            for _ in range(25):
                with contextlib.suppress(Exception):
                    await task.chat(question)
        if task.sample_id == 5:  # asks as another one
            headers = {"x-api-key": "0" * 32}
            async with httpx.AsyncClient(base_url=task.url, headers=headers) as client:
                tries = (client.post("/v1/messages", json={"i": i}) for i in range(20))
                codes = {a.status_code for a in await asyncio.gather(*tries)}
                assert codes <= {401, 503}
        return 0.5

    started = time.monotonic()
    samples = episodes(play, Engine(), 8, timeout_s=10)
    assert time.monotonic() - started < 50
    lost = [s.sample_id for s in samples if s.status == SampleStatus.ABORTED]
    assert lost == [1, 2, 3]
    reasons = [s.metadata["failure"] for s in samples[1:4]]
    for reason, words in zip(
        reasons, ("RuntimeError: crash", "--agent-timeout-s 10", "returned str")
    ):
        assert words in reason
    good = [s for s in samples if s.sample_id not in (1, 2, 3)]
    assert all(s.reward == 0.5 and s.active_tokens for s in good)
    assert [s.num_branches for s in good] == [0, 19, 0, 0, 0], "as many answers as it may have"
    metrics = agent_metrics([SampleGroup(0, tuple(samples))])
    assert metrics["agent/lost"] == 3 / 8 and metrics["agent/refused"] > 0
    assert samples[0].metadata["messages"][-1]["role"] == "assistant"


def test_an_agent_that_asks_nothing_is_lost() -> None:
    async def play(task: Task) -> None:
        return None

    (sample,) = episodes(play, Engine(), 1)
    assert sample.metadata["failure"] == "the agent asked for no answer"


PROGRAM = """
import json, os, subprocess, sys, urllib.request
task = json.load(open("task.json"))
body = {"messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
assert "RANK" not in os.environ
open("reward", "w").write("0.25")
"""
HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("working", flush=True)
time.sleep(600)
"""


def test_a_program_plays_and_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "good.py").write_text(PROGRAM)
    (tmp_path / "hangs.py").write_text(HANGS)
    keys = []

    async def play(task: Task) -> float | None:
        keys.append(task.api_key)
        name = ("good", "hangs", "absent")[task.sample_id]
        return await run_command([sys.executable, str(tmp_path / f"{name}.py")], task)

    good, hangs, absent = episodes(play, Engine(), 3, timeout_s=4)
    assert good.reward == 0.25 and good.active_tokens
    assert "longer than --agent-timeout-s 4" in hangs.metadata["failure"]
    assert "exit status 2" in absent.metadata["failure"]
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) in keys and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    assert not left

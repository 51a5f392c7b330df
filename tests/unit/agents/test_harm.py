"""What models write and agents do that must cost nobody else's time, and not the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from slime_like.agents.anthropic_api import messages_json, parse_messages_request
from slime_like.agents.command import environment, not_apart, read_reward, run_command
from slime_like.agents.messages import BadRequest
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import (
    Choice,
    EngineAborted,
    ParsedRequest,
    SessionEnded,
    SessionLimits,
)
from slime_like.agents.templates import ChatTemplate
from slime_like.agents.tool_calls import FORMATS, parse
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rewards import confinement
from slime_like.types import Prompt, Sample, SampleStatus
from tests.paths import ROOT
from tests.unit.agents.test_server import (
    END,
    TOKENIZER,
    Engine,
    episodes,
    model_of,
    post,
    run,
    session_of,
    user,
)

MARKS = (
    "<tool_call>", "</tool_call>", "<tool_call><function=a>", "</function>", "<arg_key>", "<parameter=a>", "<arg_key>a</arg_key><arg_value>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>", "<|tool_call_begin|>a<|tool_call_argument_begin|>",
    "to=functions.", "<|channel|>commentary to=functions.a", "[TOOL_CALLS]a[ARGS]{", "[TOOL_CALLS][", "<|START_ACTION|>", "<|tool_call|>",
    "<|tool_call|>[", "```tool_code\n", "{", "}", "]", " ", "\n", "a",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_of_a_model_takes_long_to_read(name: str) -> None:
    openings = {
        "qwen3_coder": "<tool_call><function=a>", "glm": "<tool_call>a", "deepseek": "<｜tool▁calls▁begin｜>",
        "kimi": "<|tool_calls_section_begin|>", "harmony": "to=functions.",
    }  # fmt: skip
    closings = ("", "</tool_call>")
    opening = openings.get(name, "<tool_call>")
    began = time.process_time()
    for mark in MARKS:
        for closing in closings:
            parse(opening + mark * 2000 + closing, name)
    assert time.process_time() - began < 10, (
        "48 texts, which squares of their length take minutes for"
    )


def test_calls_that_json_cannot_say_stay_text() -> None:
    for words in ("x={1, 2}", 'x=b"a"', "x=1j", "x=" + "-" * 100_000 + "1"):
        text = f"```tool_code\nf({words})\n```"
        parsed = parse(text, "python")
        assert (parsed.errors, parsed.content, parsed.calls) == (1, text, ()), words[:20]
    assert parse('```tool_code\nf(x={1: 2, "a": 3})\n```', "python").calls == (("f", {"x": {"1": 2, "a": 3}}),)  # fmt: skip


def test_text_arguments_stay_text_where_the_tool_says_so() -> None:
    properties = {"zip": {"type": "string"}, "n": {"type": "integer"}, "m": {"type": ["string", "null"]}}  # fmt: skip
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    given = {"zip": "01234", "n": "3", "m": "null", "other": "[1]"}
    wanted = {"zip": "01234", "n": 3, "m": None, "other": [1]}
    xml = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
    text = f"<tool_call>\n<function=f>\n{xml}</function>\n</tool_call>"
    assert parse(text, "qwen3_coder", tools=tools).calls == (("f", wanted),)
    given["zip"] = "12345"  # JSON too
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in given.items())  # fmt: skip
    (call,) = parse(f"<tool_call>f\n{pairs}</tool_call>", "glm", tools=tools).calls
    assert call == ("f", wanted | {"zip": "12345"})


def program_task(key: str = "k") -> Task:
    return Task(0, "p", None, {}, False, "http://127.0.0.1:1", key)


needs_namespaces = pytest.mark.skipif(not_apart() is not None, reason=str(not_apart()))


def stops_growing(file: Path, within_s: float) -> bool:
    """Whether nothing more is written to the file, at the latest after so many seconds."""
    end = time.monotonic() + within_s
    while True:
        size = file.stat().st_size
        time.sleep(0.5)
        if file.stat().st_size == size > 0:
            return True
        if time.monotonic() > end:
            return False


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_namespaces)])
def test_a_process_that_hides_does_not_hold_the_episode(tmp_path: Path, apart: bool) -> None:
    """And ends with it, with namespaces and without."""
    hidden = tmp_path / "beats"
    line = f"env -i setsid sh -c 'while :; do date >> {hidden}; sleep 0.05; done' & echo $! > {tmp_path}/pid; sleep 60"

    async def work() -> None:
        episode = asyncio.create_task(run_command(["sh", "-c", line], program_task(), apart=apart))
        async with asyncio.timeout(60):
            while not hidden.exists() or hidden.stat().st_size == 0:
                await asyncio.sleep(0.05)
        episode.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await episode

    try:
        asyncio.run(work())
        assert stops_growing(hidden, within_s=0.0)
    finally:
        if not apart:  # otherwise the number is one of its own namespace
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((tmp_path / "pid").read_text()), 9)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_namespaces)])
def test_programs_end_with_a_run_that_is_killed(tmp_path: Path, apart: bool) -> None:
    """With SIGKILL, so that the run can end nothing itself."""
    beats = tmp_path / "beats"
    line = f"while :; do date >> {beats}; sleep 0.05; done"
    program = (
        "import asyncio; from tests.unit.agents.test_harm import program_task, run_command; "
        f"asyncio.run(run_command(['sh', '-c', {line!r}], program_task(), apart={apart}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as run:
        try:
            end = time.monotonic() + 60
            while not beats.exists() and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            run.kill()
    assert stops_growing(beats, within_s=20.0)


def test_a_program_that_ends_its_process_group_ends_as_it_says() -> None:
    """As a shell script's `trap "kill 0" EXIT`."""
    with pytest.raises(RuntimeError, match=r"exit status 143: begun$"):
        asyncio.run(run_command(["sh", "-c", "echo begun; kill -TERM 0; sleep 60"], program_task()))


SPY = """
import os, pathlib, signal, sys, time
keys, signals, folders = set(), 0, []
mine = os.environ["OPENAI_API_KEY"]
end = time.monotonic() + 20
while len(keys) < 1 and time.monotonic() < end and not os.path.exists(sys.argv[1] + "/stop"):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = pathlib.Path("/proc", pid, "environ").read_bytes().decode("latin1")
        except OSError:
            continue
        keys |= {v.split("=", 1)[1] for v in text.split(chr(0)) if v.startswith("OPENAI_API_KEY=")} - {mine}
    time.sleep(0.05)
    if sys.argv[2] == "apart":
        break
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(pid) != os.getpid():
            os.kill(int(pid), 0)
            signals += int(pid) == int(sys.argv[3])
    except OSError:
        pass
folders = [f for f in pathlib.Path.cwd().parent.iterdir() if f != pathlib.Path.cwd() and f.is_dir()]
pathlib.Path(sys.argv[1], mine).write_text(f"{sorted(keys)} {signals} {len(folders)} {os.getuid()}")
"""


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_namespaces)])
def test_a_program_sees_nothing_of_the_others(tmp_path: Path, apart: bool) -> None:
    """Neither their keys in /proc, nor their folders; and it can signal none of them. Without the
    separation it does all of that."""
    (tmp_path / "spy.py").write_text(SPY)
    sleeper = "import time; time.sleep(60)"

    async def work() -> None:
        other = asyncio.create_task(
            run_command([sys.executable, "-c", sleeper], program_task("of another"), apart=apart)
        )
        await asyncio.sleep(1.0)
        how = "apart" if apart else "together"
        words = [sys.executable, str(tmp_path / "spy.py"), str(tmp_path), how, str(os.getpid())]
        await run_command(words, program_task("mine"), apart=apart)
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other

    asyncio.run(work())
    found = (tmp_path / "mine").read_text()
    assert found == (f"[] 0 0 {os.getuid()}" if apart else f"['of another'] 1 1 {os.getuid()}")


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_namespaces)])
def test_how_a_program_ends(apart: bool) -> None:
    def run(*command: str) -> float | None:
        return asyncio.run(run_command(command, program_task(), apart=apart))

    assert run("sh", "-c", "echo 0.5 > reward") == 0.5
    assert run("sh", "-c", "cat task.json > copy; ls / > /dev/null; test -s copy") is None
    with pytest.raises(RuntimeError, match=r"exit status 3: no$"):
        run("sh", "-c", "echo no; exit 3")
    with pytest.raises(RuntimeError, match=r"exit status (143|-15)"):
        run("sh", "-c", "kill -TERM $$")
    with pytest.raises(RuntimeError, match=r"cannot be started: .*No such file"):
        run("no_such_program_anywhere")


def test_what_a_host_cannot_enforce_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_missing", {"namespaces": "left out"})
    assert "one can read the keys and files of the others, and kill them" in str(not_apart())
    assert asyncio.run(run_command(["sh", "-c", "echo 1 > reward"], program_task())) == 1.0


def test_the_end_of_a_long_output_is_reported() -> None:
    line = "import sys; print('x' * 10**6, 'the end', flush=True); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"exit status 3: x{1000,}.* the end$"):
        asyncio.run(run_command([sys.executable, "-c", line], program_task()))


def test_a_reward_is_a_regular_file(tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    assert read_reward(reward) is None
    os.mkfifo(reward)
    with pytest.raises(RuntimeError, match="no regular file"):
        read_reward(reward)
    reward.unlink()
    (tmp_path / "other").write_text("1")
    reward.symlink_to(tmp_path / "other")
    with pytest.raises(RuntimeError, match="cannot be read"):
        read_reward(reward)


def test_agents_that_exit_cancel_or_never_end_lose_their_own_sample() -> None:
    async def play(task: Task) -> float:
        await task.chat([user(task.prompt)])
        if task.sample_id == 1:
            sys.exit(0)
        if task.sample_id == 2:
            own = asyncio.ensure_future(asyncio.sleep(9))
            own.cancel()
            await own
        while task.sample_id == 3:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_like.agents.task.CANCEL_S", 0.2)
        samples = episodes(play, Engine(), 4, timeout_s=3)
    assert samples[0].reward == 1.0
    words = [str(s.metadata.get("failure")) for s in samples]
    assert "SystemExit" in words[1] and "CancelledError" in words[2]
    assert "longer than --agent-timeout-s" in words[3]


def test_a_session_keeps_its_limits_and_its_main_conversation() -> None:
    engine = Engine(slow=0.01)
    session = session_of(engine, SessionLimits(turns=3, concurrent=2, waiting=32))

    def ask(text: str) -> ParsedRequest:
        return ParsedRequest(({"role": "user", "content": text},))

    async def work() -> None:
        asks = (session.answer(ask(str(i))) for i in range(12))
        found = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(each, list) for each in found) == 3

    asyncio.run(work())
    engine = Engine("ABORT", "x")
    session = session_of(engine)

    async def again() -> None:
        with pytest.raises(EngineAborted):
            await session.answer(ask("a"))
        await session.answer(ask("a"))
        assert session._main is session.tree.turns[0], "the second try is the main conversation"
        session.aborted = True
        with pytest.raises(SessionEnded, match="no more"):
            await session.answer(ask("b"))

    asyncio.run(again())


def test_an_abort_ends_an_agent_that_asks_nothing_more() -> None:
    async def play(task: Task) -> None:
        assert task.session is not None
        task.session.aborted = True
        task.session.on_abort.set()
        await asyncio.sleep(60)

    began = time.monotonic()
    (sample,) = episodes(play, Engine(), 1, timeout_s=60)
    assert sample.status == SampleStatus.ABORTED and time.monotonic() - began < 50


def test_a_gateway_may_begin_again_while_it_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    gateway = Gateway("127.0.0.1", port, max_body=1000)

    async def second() -> None:
        while not gateway.url or gateway._starting is not None:
            await asyncio.sleep(0)
        async with gateway.episode("b", session_of(Engine())):
            assert gateway.url
            await asyncio.sleep(0.3)
            assert gateway.url

    async def first() -> None:
        async with gateway.episode("a", session_of(Engine())):
            await asyncio.sleep(0.1)

    async def work() -> None:
        await asyncio.gather(first(), second())

    asyncio.run(work())


def test_programs_get_no_secrets_and_ask_the_gateway_directly() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "s")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        patch.setenv("NO_PROXY", "here")
        found = environment(program_task())
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(found)
    assert (found["OPENAI_API_KEY"], found["NO_PROXY"]) == ("k", "here,127.0.0.1")


def test_answers_of_anthropics_form() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = messages_json(Choice(message, "tool_calls", 1, (1,), (0.0,), stop="X"), "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    body = {"max_tokens": 5, "messages": [user("a"), {"role": "assistant", "content": "b"}]}
    with pytest.raises(BadRequest, match="prefilled answers"):
        parse_messages_request(body, SamplingParams(max_new_tokens=5))


def test_a_template_that_knows_no_developer_is_given_a_system_message() -> None:
    template = ChatTemplate(TOKENIZER, {END})
    tokens = template.prompt([{"role": "developer", "content": "be brief"}], None)
    assert "system\nbe brief" in template.decode(tokens)


def test_the_gateways_own_errors_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A failure of the engine's that nobody foresaw is a 500 of that request, in the log and in the
    session's numbers; wrong options are refused before the engine is asked, and prompts are not
    counted without end."""

    class Broken(Engine):
        async def generate_one(
            self, request: GenerateRequest, sampling: SamplingParams
        ) -> GenerateOutput:
            raise KeyError("weights")

    engine = Broken()
    session = session_of(engine, SessionLimits(turns=1))

    async def talk(client: httpx.AsyncClient) -> None:
        path, asked = "/v1/chat/completions", {"messages": [user("a")]}
        await post(client, path, 400, **asked, stream=True, stream_options=3)
        answer = await post(client, path, 500, **asked)
        assert answer["error"]["message"] == "the gateway failed"
        for status in (*[200] * 8, 429):
            await post(client, "/v1/messages/count_tokens", status, **asked)

    run(session, talk)
    assert session.numbers()["internal_errors"] == 1 and session.numbers()["refused"] == 1
    assert "the gateway failed at a request of an agent" in caplog.text


def test_a_connection_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.agents.server.SILENT_S", 0.2)

    async def work() -> None:
        gateway = Gateway("127.0.0.1", 0, max_body=1000)
        async with gateway.listening():
            port = int(gateway.url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(work())


def test_a_client_that_leaves_within_its_request_is_no_error_of_the_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = session_of(Engine(), SessionLimits(turns=1))

    async def talk(client: httpx.AsyncClient) -> None:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: key\r\n"
        writer.write(f"{head}content-length: 900\r\n\r\n{{".encode())
        async with asyncio.timeout(20):
            while session._requests != 1:
                await asyncio.sleep(0.01)
            writer.close()
            while session._requests != 0:
                await asyncio.sleep(0.01)

    run(session, talk)
    assert session.numbers()["internal_errors"] == 0 and caplog.text == ""


def test_a_thousand_connections_of_one_agent_keep_nobody_out() -> None:
    """Silent ones, halves of headers, and halves of bodies with a right key: the others are answered,
    at the first try, though the gateway takes 64 connections at a time."""

    async def play(task: Task) -> float:
        port = int(task.url.rsplit(":", 1)[1])
        kept = []
        if task.sample_id == 0:
            head = f"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: {task.api_key}\r\n"
            begins = ("", "POST /v1/mess", head + "content-length: 900\r\n\r\n{")
            for i in range(1000):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begins[i % 3].encode())
                kept.append(writer)
        else:
            await asyncio.sleep(0.3)  # most of the flood is there
        async with httpx.AsyncClient(
            base_url=task.url, headers={"x-api-key": task.api_key}
        ) as client:
            for i in range(0 if task.sample_id == 0 else 3):
                await post(client, "/v1/chat/completions", messages=[user(str(i))])
                await asyncio.sleep(0.3)
        for writer in kept:
            writer.close()
        return 0.5

    agent = AgentGenerate(
        "test", play, Gateway("127.0.0.1", 0, max_body=10_000, connections=64), end_ids=frozenset({END}),
        limits=SessionLimits(turns=20), timeout_s=60, episodes=8,
    )  # fmt: skip
    samples = agent.run(
        [Sample.empty(Prompt(0, "q", (1,)), i) for i in range(8)],
        model_of(Engine()),
        evaluation=False,
    )
    assert "asked for no answer" in samples[0].metadata["failure"]
    assert [s.metadata.get("failure") for s in samples[1:]] == [None] * 7
    assert [s.reward for s in samples[1:]] == [0.5] * 7
    assert all(s.metadata["agent"]["answers"] == 3 for s in samples[1:])

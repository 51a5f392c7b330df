"""examples/agents/nemo_gym_agent.py against a stand-in of a resources server; tests/environments has
the package itself."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slime_like.import_utils import load_function
from slime_like.types import Sample, SampleStatus
from tests.agent_templates import FAMILIES, call_text
from tests.paths import ROOT
from tests.unit.agents.test_sdks import trained
from tests.unit.agents.test_server import Engine, episodes

AGENT = ROOT / "examples" / "agents" / "nemo_gym_agent.py"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
ROW = {
    "responses_create_params": {"input": "What is 1+1?", "tools": [TOOL], "parallel_tool_calls": False},
    "answer": "It is 2.",
}  # fmt: skip


class Resources(ThreadingHTTPServer):
    daemon_threads = True
    seen: list[tuple[str, dict[str, Any], str]]
    broken: str = ""  # path that answers with status 500


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Resources)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Cookie", "")
        server.seen.append((self.path, body, session))
        answer: dict[str, Any] = {}
        if self.path == "/verify":
            text = json.dumps(body["response"]["output"])
            answer = {**body, "reward": float(body["answer"] in text)}
        elif self.path == "/add":
            answer = {"sum": 40 + body["x"]}
        data = json.dumps(answer).encode()
        self.send_response(500 if self.path == server.broken else 200)
        self.send_header("Content-Length", str(len(data)))
        if self.path == "/seed_session":
            self.send_header("Set-Cookie", f"session={len(server.seen)}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def resources() -> Iterator[Resources]:
    with Resources(("127.0.0.1", 0), Handler) as running:
        running.seen = []
        thread = Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def played(resources: Resources, engine: Engine, max_steps: int | None = None) -> Sample:
    play = load_function(f"{AGENT}:play", "--agent-function-path")
    url = f"http://127.0.0.1:{resources.server_port}"

    async def of_the_row(task: Any) -> Any:
        task.metadata["nemo_gym"] = {"server": url, "max_steps": max_steps, "row": ROW}
        return await play(task)

    (sample,) = episodes(of_the_row, engine, 1, timeout_s=60)
    return sample


def call(name: str, **arguments: Any) -> str:
    return call_text(FAMILIES["qwen3"], [(name, arguments)])


def test_tools_verifier_and_session(resources: Resources) -> None:
    """Of one session; every token of the policy is trained on, and the verifier sees all outputs."""
    engine = Engine(call("add", x=1), "It is 2.")
    sample = played(resources, engine)
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0), sample.metadata
    assert [path for path, _, _ in resources.seen] == ["/seed_session", "/add", "/verify"]
    assert [session for _, _, session in resources.seen] == ["", "session=1", "session=1"]
    kinds = [each["type"] for each in resources.seen[-1][1]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    assert '"sum": 41' in engine.prompts[1]
    assert trained(sample) == [t for tokens in engine.written for t in tokens]


def test_a_policy_cannot_call_the_verifier(resources: Resources) -> None:
    engine = Engine(call("verify", reward=1), call("../verify", reward=1), "no idea")
    sample = played(resources, engine)
    assert sample.reward == 0.0
    assert [path for path, _, _ in resources.seen] == ["/seed_session", "/verify"]
    assert "there is no tool" in engine.prompts[1] and "there is no tool" in engine.prompts[2]


def test_the_number_of_steps_is_bounded(resources: Resources) -> None:
    engine = Engine(call("add", x=1), call("add", x=2), "It is 2.")
    assert played(resources, engine, max_steps=2).reward == 0.0
    assert len(engine.prompts) == 2


@pytest.mark.parametrize("path", ["/seed_session", "/verify"])
def test_a_server_that_fails_loses_the_episode(resources: Resources, path: str) -> None:
    resources.broken = path
    sample = played(resources, Engine("2"))
    assert sample.status == SampleStatus.ABORTED
    assert f"{path} answered 500" in sample.metadata["failure"]


def test_lines_are_json_rows(tmp_path: Path) -> None:
    """Characters that str.splitlines takes for ends of lines, blank lines, and a line that is none."""
    module = runpy.run_path(str(AGENT))
    file = tmp_path / "rows.jsonl"
    texts = ["a\u2028b\x85c", "second"]
    written = [
        json.dumps({"responses_create_params": {"input": text}}, ensure_ascii=False)
        for text in texts
    ]
    file.write_text("\n\n".join(written) + "\n\n", encoding="utf-8")
    assert [row["prompt"] for row in module["rows"](file, "http://h", None)] == texts
    for wrong in ("{", "[]", "{}", '{"responses_create_params": {"input": []}}'):
        file.write_text(f"{written[1]}\n\n{wrong}\n", encoding="utf-8")
        with pytest.raises(ValueError, match="line 3: no row of NeMo Gym"):
            list(module["rows"](file, "http://h", None))

"""Rewards of a server, against one on this machine that answers what each test says; and rewards of
whole groups."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from slime_like.rewards.grader import Grader
from slime_like.types import SampleStatus
from tests.unit.rewards.test_grader import make

Answer = Callable[
    [dict[str, Any], int], tuple[int, bytes]
]  # (request, how many came with this response) -> status, body


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of connections that wait: 5 are too few on a loaded machine
    answer: Answer
    requests: list[dict[str, Any]]
    headers_seen: list[Message]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append(body)
        server.headers_seen.append(self.headers)
        status, data = server.answer(body, sum(r == body for r in server.requests))
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client gave up
            self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.requests = []
        running.headers_seen = []
        thread = Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def grader(server: Server, **more: Any) -> Grader:
    url = f"http://127.0.0.1:{server.server_port}/reward"
    return Grader(
        **{
            "rm_type": "remote_rm",
            "rm_url": url,
            "rm_num_workers": 1,
            "rm_timeout_s": 200.0,
            **more,
        }
    )


def test_what_it_is_sent_and_what_comes_back(server: Server) -> None:
    server.answer = lambda body, n: (
        200,
        json.dumps({"score": len(body["response"]), "form": 1}).encode(),
    )
    with grader(server, reward_key="score") as g:
        graded = g.grade([make(i, "x" * i, label=i) for i in range(100)])
    assert [s.reward for s in graded] == list(range(100)), "more than a worker takes at once"
    assert {"prompt": "prompt 3", "response": "xxx", "label": 3} in server.requests and len(
        server.requests
    ) == 100
    assert graded[3].metadata["reward_details"] == {"form": 1.0}


def test_errors_by_their_class(server: Server) -> None:
    """busy and broken are tried again; forbidden is not; nonsense is no number."""
    answers = {
        "busy": (429, b""),
        "broken": (503, b""),
        "forbidden": (403, b""),
        "html": (200, b"<html>"),
        "null": (200, b"null"),
    }

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        return (
            answers[body["response"]] if n < 3 or body["response"] == "forbidden" else (200, b"0.5")
        )

    server.answer = answer
    with grader(server) as g:
        busy, broken, forbidden, html, null = g.grade(
            [make(i, name) for i, name in enumerate(answers)]
        )
    assert busy.reward == broken.reward == 0.5
    assert forbidden.status == html.status == SampleStatus.FAILED
    assert f"127.0.0.1:{server.server_port}/reward answered 403" in forbidden.metadata["failure"]
    assert "answered no JSON: <html>" in html.metadata["failure"]
    assert null.reward != null.reward, "null is no reward"
    tries = [sum(r["response"] == name for r in server.requests) for name in answers]
    assert tries == [3, 3, 1, 1, 1]


def test_a_server_that_stays_broken_or_hangs_costs_its_deadline(server: Server) -> None:
    graded = Event()

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        if body["response"] == "hangs":
            graded.wait(300)
        return 500, b""

    server.answer = answer
    with grader(server, rm_timeout_s=10.0) as g:
        broken, hangs = g.grade([make(0, "broken"), make(1, "hangs")])
    graded.set()
    assert "answered 500, " in broken.metadata["failure"] and "times" in broken.metadata["failure"]
    assert hangs.status == SampleStatus.FAILED
    assert re.search(
        r"--rm-timeout-s 10: .*127\.0\.0\.1:\d+/reward gave no whole answer in 10 s",
        hangs.metadata["failure"],
    )


def test_all_of_the_concurrency_is_used(server: Server) -> None:
    """Also where it is no multiple of the workers."""
    together = Barrier(5)

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        together.wait(150)
        return 200, b"0.5"

    server.answer = answer
    with grader(server, rm_num_workers=4, rm_concurrency=5) as g:
        graded = g.grade([make(i, "x" * i) for i in range(10)])
    assert [s.reward for s in graded] == [0.5] * 10


def test_nobody_is_there(server: Server) -> None:
    with grader(server, rm_url="http://127.0.0.1:9/x", rm_timeout_s=3.0) as g:
        (lost,) = g.grade([make(0, "x")])
    assert "could not be reached (ConnectError)" in lost.metadata["failure"]


def test_a_wrong_type_names_the_sample(server: Server) -> None:
    server.answer = lambda body, n: (200, b'"good"')
    with (
        grader(server) as g,
        pytest.raises(ValueError, match="sample 7: --rm-type returned str; return a number"),
    ):
        g.grade([make(7, "x")])


def group_grader(folder: Path, body: str, **more: Any) -> Grader:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(body))
    return Grader(custom_rm_path=f"{path}:score", group_rm=True, rm_num_workers=2, **more)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_groups(tmp_path: Path, kind: str) -> None:
    """The rank of each response within its group; a sample that failed before is seen and keeps its
    state."""
    body = f"""
        {kind} score(args, samples):
            order = sorted(samples, key=lambda s: len(s.response))
            return [order.index(s) for s in samples]
    """
    lost = make(5, "yyyy", status=SampleStatus.ABORTED)
    groups = [[make(0, "xxx"), make(1, "x"), make(2, "xx")], [make(4, "y"), lost, make(6, "yy")]]
    with group_grader(tmp_path, body) as g:
        first, second = g.grade_groups(groups)
        assert g.grade_groups([first]) == [first], "what is graded stays"
    assert [s.reward for s in first] == [2, 0, 1] and [s.reward for s in second] == [0, None, 1]
    assert second[1].status == SampleStatus.ABORTED


@pytest.mark.parametrize(
    ("body", "words"),
    [("return 1.0", "sample 0: .* returned float for a group of 2 samples"),
        ("return [1.0]", "returned 1 rewards for a group of 2"),
     ("return [1.0, 'x']", "sample 1: .* returned str")],
)  # fmt: skip
def test_a_function_of_groups_that_returns_something_else(
    tmp_path: Path, body: str, words: str
) -> None:
    with (
        group_grader(tmp_path, f"def score(args, samples):\n    {body}\n") as g,
        pytest.raises(ValueError, match=words),
    ):
        g.grade_groups([[make(0), make(1)]])


def test_a_function_of_groups_that_raises_loses_the_group(tmp_path: Path) -> None:
    with group_grader(
        tmp_path,
        "def score(args, samples):\n    assert samples[0].index == 0, 'no'\n    return [1, 2]\n",
    ) as g:
        good, bad = g.grade_groups([[make(0), make(1)], [make(2), make(3)]])
    assert [s.reward for s in good] == [1, 2] and {s.status for s in bad} == {SampleStatus.FAILED}

"""The report of a running run, served to a browser."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_like.report.page import live_data, page
from slime_like.report.read import read_run, state_of
from slime_like.report.rollouts import Samples
from slime_like.report.serve import ReportServer
from tests.unit.report.runs import write_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    write_run(tmp_path)

    def runs() -> list[Any]:
        return [read_run(tmp_path)]

    with ReportServer(
        0,
        lambda: page(runs(), Samples(), live=True),
        lambda timeline: live_data(runs(), timeline=timeline),
        lambda: state_of(tmp_path),
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(
    server: ReportServer, page: str, host: str = "localhost", *, tag: str = ""
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    path = page if page.startswith("/") else server.root + page
    connection.request("GET", path, headers={"Host": host, "If-None-Match": tag})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_browser_that_does_not_read_blocks_no_other(
    server: ReportServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.make_page = lambda: "x" * 50_000_000  # more than a socket takes
    with socket.create_connection(("127.0.0.1", server.server_port)) as stalled:
        stalled.sendall(f"GET {server.root} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        stalled.recv(1)  # the answer has begun
        assert get(server, "runs.json")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_running_run_is_followed(server: ReportServer, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, text = get(server, "")
    assert status == 200 and "connect-src 'self'" in text
    first = json.loads(get(server, "runs.json")[1])["runs"][0]
    assert first["steps"] == [1, 2] and not {"config", "timeline"} & first.keys()
    assert "timeline" in json.loads(get(server, "runs.json?timeline")[1])["runs"][0]
    tag = f'"{state_of(tmp_path)}"'
    assert get(server, "runs.json", tag=tag) == (304, "")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, "a": 1.0}\n{"step": 4, "ti')
    status, text = get(server, "runs.json", tag=tag)
    assert status == 200 and json.loads(text)["runs"][0]["steps"] == [1, 2, 3]
    assert get(server, "../run.json")[0] == 404
    assert get(server, "runs.json", host="evil.example:80")[0] == 403


@pytest.mark.parametrize("path", ["/", "/runs.json", "//runs.json", "/x/runs.json", "/ü"])
def test_the_page_has_an_address_that_nobody_guesses(server: ReportServer, path: str) -> None:
    status, text = get(server, urllib.parse.quote(path))
    assert status == 404 and "steps" not in text
    assert len(server.root) > 20

"""Memory that servers open by handle, with a server in a process of its own. Host memory that torch
shares by name stands for a GPU's: torch counts who has it open in both."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime_like.sglang import tensor_bucket
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.transports.tensor import NodeOrder
from slime_like.weights.buckets import Bucket, in_buckets

BUCKETS = 6
# Reads each bucket when the next arrives or the update has ended, after it answered: as late as a
# server may.
SERVER = """
import base64, io, json, pickle, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import torch, torch.multiprocessing as mp
mp.set_sharing_strategy("file_system")
unread, sums = [], []

def read():
    while unread:
        content = pickle.loads(base64.b64decode(unread.pop()))
        sums.append(float(content["flattened_tensor"].view(torch.float32).double().sum()))

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"success": True}
        try:
            read()
            unread.extend(body["serialized_named_tensors"])
            if body["flush_cache"]:
                read()
                print(json.dumps(sums), flush=True)
        except Exception as error:
            print(json.dumps(repr(error)), flush=True)
            answer = {"success": False, "message": repr(error)}
        data = json.dumps(answer).encode()
        self.send_response(200 if answer["success"] else 400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *words): pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Watched:
    """Buckets, and how many of them were alive at a time."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def buckets(self) -> Iterator[Bucket]:
        weights = ((f"w{i}", torch.full((1024,), float(i + 1))) for i in range(BUCKETS))
        for bucket in in_buckets(weights, 4096):
            self.alive.append(weakref.ref(bucket.flat))
            self.most = max(self.most, self.now())
            yield bucket
            del bucket

    def now(self) -> int:
        return sum(each() is not None for each in self.alive)


@pytest.fixture
def shared_by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Host memory goes as a handle."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    monkeypatch.setattr(tensor_bucket, "goes_as_handle", lambda flat: True)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def send(server: subprocess.Popen[str], watched: Watched) -> dict[str, str]:
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    order = NodeOrder({0: {}}, 1, as_handles=True, connect_s=5.0, timeout_s=20.0, api=SglangApi())
    return order.send(watched, {url: 1})  # type: ignore[arg-type]


def test_a_server_may_read_a_bucket_until_it_answers_the_next(
    server: subprocess.Popen[str], shared_by_name: None
) -> None:
    watched = Watched()
    assert send(server, watched) == {}
    assert server.stdout is not None
    expected = [1024.0 * (i + 1) for i in range(BUCKETS)]
    assert server.stdout.readline() == f"{expected}\n"
    assert watched.most == 2, "the one before stays, and memory is bounded"
    assert watched.now() == 0, "freed at the end"

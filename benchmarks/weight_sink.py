"""A server that takes weights and keeps none: SGLang's endpoints of an update, over gloo.

    python -m benchmarks.weight_sink BYTES_PER_S    # prints its port

A bucket takes at least its bytes over BYTES_PER_S, the simulated speed of the server's link. For
benchmarks of what an update costs beside the server's own work.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(minutes=10)
_groups: dict[str, Any] = {}
_state = {"weight_version": "default"}


def join(body: Any) -> None:
    """A process group as torch names its stores in a process of SGLang."""
    name = body["group_name"]
    address, port = body["master_address"], body["master_port"]
    store: Any = dist.TCPStore(address, port, is_master=False, timeout=LIMIT)
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    group = dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], LIMIT)
    _groups[name] = group


def receive(body: Any) -> None:
    sizes = [
        torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
    ]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    begun = time.monotonic()
    _groups[body["group_name"]].broadcast(flat, 0).wait()
    time.sleep(max(0.0, begun + flat.nbytes / float(sys.argv[1]) - time.monotonic()))
    _state["weight_version"] = body.get("weight_version", _state["weight_version"])


CALLS = {"/init_weights_update_group": join, "/update_weights_from_distributed": receive}
IGNORED = (
    "/begin_weight_update",
    "/end_weight_update",
    "/pause_generation",
    "/continue_generation",
    "/destroy_weights_update_group",
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"/model_info": _state, "/server_info": {"tp_size": 1}}.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path in CALLS:
            CALLS[self.path](body)
        elif self.path not in IGNORED:
            self.send_error(404)
            return
        self.answer({"success": True})

    def answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()

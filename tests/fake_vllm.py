"""A small server with vLLM's interface and our worker extension's calls, for tests of the engine:
`FakeServer` with other words."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime_like.engines.sglang.engine import SglangEngine
from slime_like.vllm.api import VllmApi
from slime_like.vllm.launch import EXTENSION, LOG_PROBS
from slime_like.weights.buckets import views
from slime_like.weights.export_plan import TensorPlan
from tests.fake_sglang import Answer, FakeServer, Handler, death, engine_of

GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"


def of_method(name: str) -> str:
    """Where a call of the worker extension is seen, refused and counted."""
    return f"/collective_rpc {name}"


class FakeVllm(FakeServer):
    def __init__(self, model: str, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__(model, port, host)
        self.settings: dict[str, Any] = {
            "parallel_config": {"tensor_parallel_size": 1, "worker_extension_cls": EXTENSION},
            "model_config": {
                "logprobs_mode": LOG_PROBS,
                "dtype": "torch.float32",
                "max_model_len": 64,
            },
        }
        self.dies_at = ""  # a call of the worker extension that ends the server
        self.paused = False
        self.forgotten = 0  # calls of /reset_prefix_cache

    def answers(self) -> dict[str, Any]:
        return {
            "/health": {},
            "/weight_info": {"weight_version": self.version},
            "/server_info?config_format=json": {"vllm_config": self.settings},
        }

    def get(self, handler: Handler) -> None:
        if handler.path == GENERATE and GENERATE not in self.refused:
            handler.reply(405, b'{"detail": "Method Not Allowed"}')
        else:
            super().get(handler)

    def answer(self, handler: Handler, body: Any) -> None:
        path = handler.path.partition("?")[0]
        if path == GENERATE:
            is_probe = "-probe-" in body["request_id"]
            faults = self.probe_faults if is_probe else self.faults
            fault = faults.pop(0) if faults else None
            answer = self._generated(body, is_probe=is_probe)
            if fault is None:
                handler.reply(200, json.dumps(answer).encode())
            else:
                fault(handler, answer)
        elif path == "/collective_rpc":
            self._call(handler, body["method"].removeprefix("slime_like_"), body.get("kwargs", {}))
        elif path == "/abort_requests":
            for rid in body["request_ids"]:
                self._slow.setdefault(rid.removeprefix(PREFIX), threading.Event()).set()
            handler.reply(200, b'{"status": "aborted"}')
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            handler.reply(200, b'{"status": "done"}')
        elif path == "/reset_prefix_cache":
            self.forgotten += 1
            handler.reply(200, b'{"success": true}')
        elif path == "/update_weight_version":
            self.version = body["new_version"]
            handler.reply(200, b'{"success": true}')
        else:
            handler.reply(404, b"no such call", "text/plain")

    def _call(self, handler: Handler, method: str, words: Any) -> None:
        self.seen.append((of_method(method), words))
        if method == self.dies_at:
            death(handler, {})
            return
        if of_method(method) in self.refused:
            code, text = self.refused[of_method(method)]
            handler.reply(code, json.dumps({"error": {"message": text}}).encode())
            return
        if method == "begin":
            self._in_session = True
            self._taken = {}
        elif method == "load_bytes":
            flat = torch.frombuffer(bytearray(base64.b64decode(words["data"])), dtype=torch.uint8)
            self._taken |= views(flat, plans(words))
        elif method == "join":
            self.join(
                {
                    "group_name": words["name"],
                    "world_size": words["world"],
                    "master_address": words["address"],
                    "master_port": words["port"],
                    "rank_offset": words["first_rank"],
                }
            )
        elif method == "receive":
            flat = torch.empty(sum(plan.nbytes for plan in plans(words)), dtype=torch.uint8)
            with self._scheduler:
                group: Any = self._groups[words["group"]]
                group.broadcast(flat, 0).wait()
            self._taken |= views(flat, plans(words))
        elif method == "leave":
            self._groups.pop(words["name"], None)
        elif method == "load_folder":
            for path in sorted(Path(words["folder"]).glob("*.safetensors")):
                self._taken |= load_file(path)
            self._load()
        elif method == "end":
            self._in_session = False
            self._load()
        handler.reply(200, b'{"results": [null]}')

    def _load(self) -> None:
        self.spoil(self._taken)
        with self._lock:
            self.engine.update_weights(iter(self._taken.items()), 0)
        self._taken = {}

    def _generated(self, body: Any, *, is_probe: bool) -> Answer:
        """As vLLM answers."""
        words = body["sampling_params"]
        rid = body["request_id"]
        as_sglang = {
            "rid": rid,
            "input_ids": body["token_ids"],
            "sampling_params": words
            | {"max_new_tokens": words["max_tokens"], "sampling_seed": words["seed"]},
        }
        answer = self.generate(as_sglang)
        if not is_probe:
            answer = self._paced(as_sglang, answer)
        meta = answer["meta_info"]
        content = [
            {"token_id": token, "logprob": log_prob, "rank": 1}
            for log_prob, token, _ in meta.get("output_token_logprobs", ())
        ]
        choice = {
            "index": 0,
            "finish_reason": meta["finish_reason"]["type"],
            "token_ids": answer["output_ids"],
            "weight_versions": meta.get("weight_versions") or None,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": len(body["token_ids"])}
        return {"request_id": PREFIX + rid, "choices": [choice], "usage": usage}


def plans(words: Any) -> list[TensorPlan]:
    return [
        TensorPlan(name, tuple(shape), getattr(torch, dtype))
        for name, dtype, shape in zip(words["names"], words["dtypes"], words["shapes"], strict=True)
    ]


@contextlib.contextmanager
def vllm_servers(model: str, count: int) -> Iterator[list[FakeVllm]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeVllm(model)) for _ in range(count)]


@contextlib.contextmanager
def vllm_engine_of(model: str, servers: list[FakeVllm], **settings: Any) -> Iterator[SglangEngine]:
    """An engine that asks these servers; see `engine_of`."""
    with engine_of(model, list(servers), api=VllmApi(), **settings) as engine:
        yield engine

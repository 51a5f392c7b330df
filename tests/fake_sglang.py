"""A small server with SGLang's interface, for tests of the engine. A local engine generates the
responses, so log-probs and weights are real; the test determines what fails.

    with FakeServer(model_folder) as server:
        server.faults = [status(500), None]  # the first /generate fails, all later ones succeed

As a program it takes a model folder and a port: python -m tests.fake_sglang FOLDER PORT.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer

from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.images.encoded import EncodedImage
from slime_like.images.processor import ImageProcessor
from slime_like.servers.http import Deadlines, Retries
from slime_like.servers.indexer_topk import IndexerFormat
from slime_like.servers.requests import RequestSettings
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.servers.router import Router
from slime_like.servers.server_api import ServerApi
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.settings import AdapterSettings, UpdateSettings
from slime_like.weight_sync.updater import WeightUpdater
from slime_like.weights.buckets import views
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.quantized import QuantizedWeight
from slime_like.weights.safetensors_reader import stored_format

# what tests ask servers for
SAMPLING = SamplingParams(max_new_tokens=8)
REQUESTS = [GenerateRequest(10 + i, (3 + i, 5, 7), seed=100 + i) for i in range(3)]
ATTEMPTS = 3  # of a request
Answer = dict[str, Any]
Fault = Callable[["Handler", Answer], None]  # writes what comes back in place of the answer


def status(code: int, text: str = "no") -> Fault:
    return lambda handler, answer: handler.reply(code, text.encode(), "text/plain")


def text(body: str, content_type: str = "text/html") -> Fault:
    return lambda handler, answer: handler.reply(200, body.encode(), content_type)


def changed(change: Callable[[Answer], None]) -> Fault:
    """The answer, spoiled."""

    def fault(handler: Handler, answer: Answer) -> None:
        change(answer)
        handler.reply(200, json.dumps(answer).encode())

    return fault


def silence(seconds: float) -> Fault:
    return lambda handler, answer: handler.server.fake.ended.wait(seconds)


def drip(handler: Handler, answer: Answer) -> None:
    """One byte, again and again."""
    body = json.dumps(answer).encode()
    handler.start(200, len(body), "application/json")
    for byte in body:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        if handler.server.fake.ended.wait(0.05):
            return


def death_in_the_middle(handler: Handler, answer: Answer) -> None:
    body = json.dumps(answer).encode()
    handler.start(200, len(body), "application/json")
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def death(handler: Handler, answer: Answer) -> None:
    """Of the server: from now on connections are refused."""
    handler.close_connection = True
    threading.Thread(target=handler.server.fake.stop, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None: ...

    def reply(self, code: int, body: bytes, content_type: str = "application/json") -> None:
        self.start(code, len(body), content_type)
        self.wfile.write(body)

    def start(self, code: int, length: int, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.fake.get(self)

    def do_DELETE(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.fake.delete(self)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or "{}")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.fake.post(self, body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection in the middle is no error of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FakeServer:
    """A server with the HTTP API of SGLang, and a local engine behind it."""

    def __init__(self, model: str, port: int = 0, host: str = "127.0.0.1") -> None:
        self.model = model
        self.images: ImageProcessor | None = None  # of a model that takes images
        if (Path(model) / "preprocessor_config.json").is_file():
            from tests.vision import processor_of

            self.images = processor_of(Path(model), AutoTokenizer.from_pretrained(model))
        self.engine = LocalEngine(model, None, images=self.images)
        # of the next /generate calls of rollouts, one each; None: a right answer
        self.faults: list[Fault | None] = []
        # of requests that ask whether the weights are right
        self.probe_faults: list[Fault | None] = []
        self.seen: list[tuple[str, Any]] = []  # (path, body) of every POST, in order
        self.refused: dict[str, tuple[int, str]] = {}  # path -> status and text
        self.garbage: dict[str, bytes] = {}  # path -> what comes back with status 200
        self.hung = False  # no call is answered, not even probes
        # the answer of /server_info
        self.info: dict[str, Any] = {
            "tp_size": 1,
            "pp_size": 1,
            "enable_deterministic_inference": True,
        }
        # applied to weights that are loaded
        self.spoil: Callable[[dict[str, Any]], None] = lambda weights: None
        # by its body, seconds that each token of a rollout's /generate call takes; an abort then
        # gives what there is, one token at least
        self.pace_s: Callable[[Any], float] = lambda body: 0.0
        self.workers: list[str] = []  # addresses that it names as a router would
        self._slow: dict[str, threading.Event] = {}  # set by an abort
        self.tokenizer: Any = None  # of texts; without one they are refused
        self.version = "default"
        self._coded: Mapping[str, QuantizedWeight] = {}
        if "quantization_config" in (Path(model) / "config.json").read_text():
            self._coded = stored_format(model)
        self._taken: dict[str, torch.Tensor] = {}
        self.adapters: dict[str, LocalEngine] = {}  # by name, each with its merged weights
        self._in_session = False
        self._groups: dict[str, dist.ProcessGroupGloo] = {}
        self._scheduler = threading.Lock()
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._http = Server((host, port), Handler)
        self._http.fake = self
        self.address = f"{host}:{self._http.server_address[1]}"
        self.url = f"http://{self.address}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on connections are refused; those that are open are cut when their handlers end."""
        if not self.ended.is_set():
            self.ended.set()
            self._http.shutdown()
            self._http.server_close()

    def count(self, path: str) -> int:
        return sum(seen == path for seen, _ in self.seen)

    def answers(self) -> dict[str, Any]:
        """Of GET requests, by path."""
        return {
            "/health": {},
            "/health_generate": {},
            "/model_info": {"weight_version": self.version},
            "/server_info": self.info,
            "/workers": {
                "workers": [{"url": url, "id": str(i)} for i, url in enumerate(self.workers)]
            },
        }

    def get(self, handler: Handler) -> None:
        if self._gone(handler):
            return
        answers = self.answers()
        if handler.path in self.garbage:
            handler.reply(200, self.garbage[handler.path])
        elif handler.path in self.refused:
            code, words = self.refused[handler.path]
            handler.reply(code, words.encode(), "text/plain")
        elif handler.path in answers:
            handler.reply(200, json.dumps(answers[handler.path]).encode())
        else:
            handler.reply(404, b"no such call", "text/plain")

    def post(self, handler: Handler, body: Any) -> None:
        self.seen.append((handler.path, body))
        if self._gone(handler):
            return
        if handler.path in self.garbage:
            handler.reply(200, self.garbage[handler.path])
        elif handler.path in self.refused:
            code, words = self.refused[handler.path]
            handler.reply(code, json.dumps({"success": False, "message": words}).encode())
        else:
            self.answer(handler, body)

    def answer(self, handler: Handler, body: Any) -> None:
        if handler.path == "/generate":
            is_probe = "-probe-" in body["rid"]  # of the weights, or of a teacher, by the run
            faults = self.probe_faults if is_probe else self.faults
            fault = faults.pop(0) if faults else None
            if refusal := self._refusal(body):
                handler.reply(400, json.dumps({"error": {"message": refusal}}).encode())
                return
            answer = (
                self.generate(body)
                if body["sampling_params"]["max_new_tokens"]
                else self.score(body)
            )
            if not is_probe:
                answer = self._paced(body, answer)
            if fault is None:
                handler.reply(200, json.dumps(answer).encode())
            else:
                fault(handler, answer)
        elif handler.path == "/update_weights_from_disk":
            weights = {
                name: tensor
                for path in sorted(Path(body["model_path"]).glob("*.safetensors"))
                for name, tensor in load_file(path).items()
            }
            self.spoil(weights)
            with self._lock:
                self.engine.update_weights(self._plain(weights), int(body["weight_version"]))
                self.version = body["weight_version"]
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/init_weights_update_group":
            self.join(body)
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/destroy_weights_update_group":
            self._groups.pop(body["group_name"])
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/update_weights_from_distributed":
            if not self._in_session:
                handler.reply(400, b'{"success": false, "message": "no weight update is open"}')
                return
            self.receive(body)
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/update_weights_from_tensor":
            self.take(body)
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/load_lora_adapter_from_tensors":
            self.load_adapter(handler, body["lora_name"], body["config_dict"], _tensors(body))
        elif handler.path == "/load_lora_adapter":
            folder = Path(body["lora_path"])
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            self.load_adapter(handler, body["lora_name"], config, tensors)
        elif handler.path == "/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None) is not None
            words = "" if known else f"LoRA with name {body['lora_name']} does not exist"
            answer = {"success": known, "error_message": words}
            handler.reply(200 if known else 400, json.dumps(answer).encode())
        elif handler.path == "/update_weight_version":
            self.version = body["new_version"]
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path == "/workers":
            self.workers.append(body["url"])
            handler.reply(202, b"{}")
        elif handler.path == "/abort_request":
            self._slow.setdefault(body["rid"], threading.Event()).set()
            handler.reply(200, b'{"success": true, "message": ""}')
        elif handler.path in (
            "/pause_generation",
            "/continue_generation",
            "/begin_weight_update",
            "/end_weight_update",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            if handler.path.endswith("_weight_update"):
                self._in_session = handler.path == "/begin_weight_update"
            handler.reply(200, b'{"success": true, "message": ""}')
        else:
            handler.reply(404, b"no such call", "text/plain")

    def delete(self, handler: Handler) -> None:
        """A worker of a router, by its number."""
        del self.workers[int(handler.path.rsplit("/", 1)[1])]
        handler.reply(202, b"{}")

    def load_adapter(
        self, handler: Handler, name: str, config: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Beside the base model. As SGLang with strict loading, refuses names that it does not
        know."""
        weights = dict(weights_of(self.model))
        left = dict(tensors)
        for target in {key.rpartition(".lora_")[0] for key in tensors}:
            a, b = (left.pop(f"{target}.lora_{half}.weight") for half in "AB")
            weight = f"{target.removeprefix('base_model.model.')}.weight"
            if weight not in weights:
                left[target] = a
                continue
            scale = config["lora_alpha"] / config["r"]
            weights[weight] = weights[weight] + scale * (b.float() @ a.float())
        problem = f"{name} is already loaded" if name in self.adapters else None
        if left:
            problem = f"unknown: {sorted(left)}"
        if problem is not None:
            answer = {"success": False, "error_message": problem}
            handler.reply(400, json.dumps(answer).encode())
            return
        engine = LocalEngine(self.model, None)
        engine.update_weights(iter(weights.items()), 1)
        self.adapters[name] = engine
        handler.reply(200, b'{"success": true, "error_message": ""}')

    def take(self, body: Any) -> None:
        """A bucket of weights; all of them are loaded with the last one."""
        self._taken |= _tensors(body)
        if "weight_version" in body:
            self.spoil(self._taken)
            with self._lock:
                self.engine.update_weights(self._plain(self._taken), int(body["weight_version"]))
                self.version, self._taken = body["weight_version"], {}

    def _plain(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What a quantised model's weights, which come as its folder stores them, stand for."""
        stored = {plan.name for coded in self._coded.values() for plan in coded.stored}
        yield from ((name, tensor) for name, tensor in weights.items() if name not in stored)
        for name, coded in self._coded.items():
            if not {plan.name for plan in coded.stored}.isdisjoint(weights):
                yield name, coded.decode(lambda n, a, b: weights[n][a:b], 0, coded.shape[0])

    def join(self, body: Any) -> None:
        """A process group, as torch makes the one of SGLang's side out of the same words; without
        its table of names, which servers of one process would share. NCCL is that of
        tests/pretend_gpu: gloo whose members tell each other their devices."""
        name, world = body["group_name"], body["world_size"]
        limit = timedelta(seconds=30)
        address, port = body["master_address"], body["master_port"]
        store = dist.TCPStore(address, port, world, is_master=False, timeout=limit)
        is_nccl = body.get("backend") == "nccl"  # vLLM is not told
        for prefix in (name, f"{name}/", "cuda/" if is_nccl else "cpu/"):
            store = dist.PrefixStore(prefix, store)
        if is_nccl:
            store.set(f"device of {body['rank_offset']}", "of the server")
        self._groups[name] = dist.ProcessGroupGloo(store, body["rank_offset"], world, limit)

    def receive(self, body: Any) -> None:
        """A bucket that the first rank of a group broadcasts. As in SGLang's scheduler, nothing
        else is received meanwhile."""
        assert body["load_format"] == "flattened_bucket"
        tensors = [
            TensorPlan(name, tuple(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            )
        ]
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        with self._scheduler:
            group: Any = self._groups[body["group_name"]]
            group.broadcast(flat, 0).wait()
        self._taken |= views(flat, tensors)
        if "weight_version" in body:
            self.spoil(self._taken)
            with self._lock:
                self.engine.update_weights(self._plain(self._taken), int(body["weight_version"]))
                self.version, self._taken = body["weight_version"], {}

    def generate(self, body: Any) -> Answer:
        """As SGLang answers."""
        words = body["sampling_params"]
        sampling = SamplingParams(
            words["temperature"], words.get("top_p", 1.0), words.get("top_k", -1), words["max_new_tokens"], (),
            tuple(words.get("stop_token_ids", ())), ignore_end_tokens=words.get("ignore_eos", False),
            report_routed_experts=body.get("return_routed_experts", False),
            report_indexer_topk=body.get("return_indexer_topk", False),
            report_sampling_mask=body.get("return_sampling_mask", False),
        )  # fmt: skip
        images = tuple(
            EncodedImage(base64.b64decode(url.partition(",")[2]))
            for url in body.get("image_data") or ()
        )
        ids = body["input_ids"]
        if images:  # one placeholder each, which the server repeats
            assert self.images is not None
            ids = self.images.expand(ids, self.images.token_counts(images))
        request = GenerateRequest(0, tuple(ids), words.get("sampling_seed", 0), images)
        engine = self.engine
        if "lora_path" in body:
            engine = self.adapters[body["lora_path"]]
        with self._lock:
            if not engine._weights_complete:
                return {
                    "text": "",
                    "output_ids": [],
                    "meta_info": {
                        "finish_reason": {
                            "type": "abort",
                            "status_code": 503,
                            "message": "no weights",
                        }
                    },
                }
            output = engine.generate([request], sampling)[0]
            scores = (
                self.engine.prompt_log_probs([request.prompt_tokens])[0]
                if body.get("logprob_start_len") == 0
                else None
            )
        count = len(output.tokens)
        routed_experts = (
            {}
            if output.routed_experts is None
            else {
                "routed_experts": base64.b64encode(
                    output.routed_experts[:-1].int().numpy().tobytes()
                ).decode()
            }
        )
        keys = {}
        if output.indexer_topk is not None:
            numbers = reported_keys(output.indexer_topk, len(ids) + count, engine.model.config)
            keys = {"indexer_topk": base64.b64encode(numbers.tobytes()).decode()}
        masks = {}
        full = output.log_probs
        if output.sampling_mask is not None:
            masks = {
                "output_token_sampling_mask": [kept.tolist() for kept in output.sampling_mask],
                "output_token_sampling_logprobs": list(output.log_probs),
            }
            rows = self.engine.log_prob_rows(
                [*request.prompt_tokens, *output.tokens], len(ids), words["temperature"]
            )
            full = tuple(float(row[t]) for row, t in zip(rows, output.tokens, strict=True))
        reported = {"prompt_token_ids": list(ids)} if body.get("return_prompt_token_ids") else {}
        return reported | {
            "text": "",
            "output_ids": list(output.tokens),
            "meta_info": {
                **routed_experts,
                **keys,
                **masks,
                "id": body["rid"],
                "finish_reason": {"type": output.finish_reason},
                "prompt_tokens": len(ids),
                "completion_tokens": count,
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": count}],
                "output_token_logprobs": [
                    [p, t, None] for p, t in zip(full, output.tokens, strict=True)
                ],
                "input_token_logprobs": []
                if scores is None
                else [
                    [p, t, None] for p, t in zip((None, *scores), body["input_ids"], strict=True)
                ],
            },
        }

    def _paced(self, body: Any, answer: Answer) -> Answer:
        """After its time; what was there of it when it was aborted."""
        pace, tokens = self.pace_s(body), answer["output_ids"]
        if not pace or not tokens:
            return answer
        start = time.monotonic()
        if not self._slow.setdefault(body["rid"], threading.Event()).wait(pace * len(tokens)):
            return answer
        count = min(len(tokens), max(1, int((time.monotonic() - start) / pace)))
        meta = answer["meta_info"] | {
            "finish_reason": {"type": "abort", "message": "Abort by user"},
            "completion_tokens": count,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "output_token_logprobs": answer["meta_info"]["output_token_logprobs"][:count],
        }
        return {"text": "", "output_ids": tokens[:count], "meta_info": meta}

    def score(self, body: Any) -> Answer:
        """As SGLang answers about given tokens: the last token of its vocabulary is named 0."""
        tokens, start = (
            tuple(body.get("input_ids") or self.tokenizer(body["text"])["input_ids"]),
            body["logprob_start_len"],
        )
        engine = self.adapters[body["lora_path"]] if "lora_path" in body else self.engine
        with self._lock:
            scores = [None, *engine.prompt_log_probs([tokens])[0]]
        scores[start] = None
        named = [0 if token == self.engine._vocab_size - 1 else token for token in tokens]
        entries = [
            [score, token, None] for score, token in zip(scores[start:], named[start:], strict=True)
        ]
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": entries},
        }

    def _refusal(self, body: Any) -> str | None:
        if body.get("lora_path") not in (None, *self.adapters):
            return f"adapter that has never been loaded: {body['lora_path']}"
        if any(token >= self.engine._vocab_size for token in body.get("token_ids_logprob", ())):
            return f"out-of-vocabulary token id; valid range is [0, {self.engine._vocab_size})."
        return "no tokenizer" if "text" in body and self.tokenizer is None else None

    def _gone(self, handler: Handler) -> bool:
        """Whether it was stopped, perhaps while it hung; then a connection that was open is cut
        without an answer."""
        while self.hung and not self.ended.wait(0.02):
            pass
        handler.close_connection = handler.close_connection or self.ended.is_set()
        return self.ended.is_set()


def reported_keys(record: torch.Tensor, length: int, config: Any) -> Any:
    """As SGLang has them, [tokens - 1, decoder layers, index_topk] int32: those of layers that take
    another's choice too, and in rows of queries without a choice what was in the buffer before."""
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    slots = [sum(kind == "full" for kind in kinds[: layer + 1]) - 1 for layer in range(len(kinds))]
    topk = record.size(2)
    numbers = torch.full((length - 1, len(kinds), topk), 7777, dtype=torch.int32)
    numbers[topk:] = record[:-1, slots]
    return numbers.numpy()


def _tensors(body: Any) -> dict[str, torch.Tensor]:
    """Of a bucket."""
    (bucket,) = (
        pickle.loads(base64.b64decode(words)) for words in body["serialized_named_tensors"]
    )
    return {
        entry.name: bucket["flattened_tensor"][entry.start_idx : entry.end_idx]
        .view(entry.dtype)
        .reshape(entry.shape)
        for entry in bucket["metadata"]
    }


@contextlib.contextmanager
def fake_servers(model: str, count: int) -> Iterator[list[FakeServer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeServer(model)) for _ in range(count)]


@contextlib.contextmanager
def engine_of(
    model: str,
    servers: list[FakeServer],
    *,
    transport: str = "disk",
    synced: bool = True,
    update_timeout_s: float = 5.0,
    total_s: float = 10.0,
    probe_timeout_s: float = 5.0,
    router: Router | None = None,
    buffer_bytes: int = 2**20,
    colocated: bool = False,
    routed_experts: RoutesFormat | None = None,
    indexer_topk: IndexerFormat | None = None,
    joined_by_router: bool = False,
    keep_copy: bool = True,
    delta: Mapping[str, Any] | None = None,
    check_updates: bool = False,
    left_out: Sequence[str] = (),
    api: ServerApi | None = None,
    adapter: AdapterSettings | None = None,
) -> Iterator[SglangEngine]:
    """An engine that asks `servers`;

    Args:
        api: Theirs, if it is not SGLang's.
        adapter: They get adapters.
        synced: They have the model's weights, as version 1.
        delta: They get changes of weights; settings of these.
    """
    health = HealthSettings(interval_s=0.05, timeout_s=probe_timeout_s, start_s=10, failed_probes=2)
    pool = ServerPool(
        [s.url for s in servers],
        [],
        router,
        health,
        1.0,
        api=api or SglangApi(),
        joined_by_router=joined_by_router,
    )
    pool.start()
    updater = WeightUpdater(
        pool,
        UpdateSettings(
            transport,
            buffer_bytes,
            timeout_s=update_timeout_s,
            keep_copy=keep_copy,
            delta=delta is not None,
            adapter=adapter,
            **(delta or {}),
        ),
        model,
        torch.device("cpu"),
    )
    requests = RequestSettings(
        Deadlines(5.0, total_s, total_s), Retries(ATTEMPTS, 0.01, 0.02), 64, servers[0].images
    )
    engine = SglangEngine(
        pool,
        updater,
        requests,
        model,
        check_updates=check_updates,
        left_out=left_out,
        colocated=colocated,
        routed_experts=routed_experts,
        indexer_topk=indexer_topk,
        takes_adapter=adapter is not None,
    )
    try:
        if synced:
            engine.update_weights(weights_of(model), 1)
            assert engine.weight_version == 1
        yield engine
    finally:
        engine.close()


def make_served_model(folder: Path, seed: int) -> str:
    """A tiny model without a tokenizer; its folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, initializer_range=0.3, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def weights_of(model: str) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(load_file(Path(model) / "model.safetensors").items())


def main() -> None:
    with FakeServer(sys.argv[1], int(sys.argv[2])):
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()

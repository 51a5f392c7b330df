"""Overhead of the Tinker API, and fairness between clients: a server on this machine against direct
calls of the same model host.

    python benchmarks/bench_server.py [--json server.json] [--seconds 5]

Latency: forward_backward of one token (nearly empty: what is left is the API), of a small batch and
of a larger one, by the server's host of models in this process, over HTTP, and through the SDK
where it is installed; calls take turns, medians count. Shares: clients with an adapter each, who
all ask for one pass after another; and then again while one of them keeps many requests waiting.
The model is small, so that what the API costs can be seen at all: read the ratios of one run, and
the milliseconds that the API adds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.tinker.factory import make_model_host

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402
from slime_like.cli.tiny_model import save_model  # noqa: E402
from slime_like.servers.processes import free_ports  # noqa: E402

PROTOBUF = {"Accept": "application/x-protobuf", "Content-Type": "application/x-protobuf"}
BATCHES = {
    "one token": (1, 1),
    "16 x 64": (16, 64),
    "64 x 256": (64, 256),
}  # datums, tokens of each
FLOOD = 32  # pending requests of a flooding client


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30, help="calls of each way and batch")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of shares")
    parser.add_argument("--json", type=Path, help="write the results here")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="slime_like_bench_") as folder:
        model = Path(folder) / "model"
        save_model(model, hidden_size=chosen.hidden_size, num_layers=chosen.num_layers)
        with running_server(model, Path(folder)) as url:
            api_pid = json.loads(
                (Path(folder) / "server" / "link.json").read_text(encoding="utf-8")
            )["pid"]
            latency = measure_latency(model, url, chosen.repeats, api_pid)
            shares = {
                name: measure_shares(model, url, chosen.clients, chosen.seconds, flood=flood)
                for name, flood in (
                    ("one request at a time", 0),
                    (f"one keeps {FLOOD} waiting", FLOOD),
                )
            }
    print_latency(latency)
    print_shares(shares)
    write_json(chosen.json, {"latency": latency, "shares": shares})
    return 0


@contextlib.contextmanager
def running_server(model: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start a server and wait until it responds; yields its address."""
    import httpx

    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "slime_like.tinker",
        "--hf-checkpoint",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--server-dir", str(folder / "server"), "--max-models", "32", *flags]
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}/api/v1/"
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}healthz", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text(encoding="utf-8"))
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


# --- clients --------------------------------------------------------------------------------------


def message_of(count: int, length: int, seed: int = 0) -> Any:
    """A forward_backward request of `count` datums of `length` tokens, without model and sequence
    number."""
    from slime_like.tinker import proto

    rng = np.random.default_rng(seed)
    request = proto.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(count):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = (
            rng.integers(5, 90, length).astype("<i4").tobytes()
        )
        targets = datum.loss_fn_inputs["target_tokens"]
        weights = datum.loss_fn_inputs["weights"]
        targets.dtype = proto.DTYPE_INT64
        targets.dense = rng.integers(5, 90, length).astype("<i8").tobytes()
        weights.dtype = proto.DTYPE_FLOAT32
        weights.dense = rng.normal(size=length).astype("<f4").tobytes()
    return request


class HttpClient:
    """A client with a separate model, without the SDK."""

    def __init__(self, model: Path, url: str, *, rank: int) -> None:
        import httpx

        self.http = httpx.Client(base_url=url, headers={"X-API-Key": "tml-benchmark"}, timeout=120)
        self.session = self.post("create_session", {})["session_id"]
        lora = {"rank": rank, "seed": 1, "train_unembed": False}
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": str(model),
            "lora_config": lora,
        }
        self.model = str(self.result(self.post("create_model", body)["request_id"])["model_id"])
        self.seq = 0

    def post(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def result(self, request: str) -> Any:
        """Wait for a result: JSON or protobuf bytes. Raises RuntimeError if the request failed."""
        while True:
            answer = self.http.post(
                "retrieve_future",
                json={"request_id": request},
                headers={"Accept": PROTOBUF["Accept"]},
            )
            answer.raise_for_status()
            if answer.headers["content-type"] == PROTOBUF["Accept"]:
                return answer.content
            told = answer.json()
            if "error" in told:
                raise RuntimeError(told["error"])
            if told.get("type") != "try_again":
                return told

    def send(self, message: Any) -> str:
        """Send a pass; returns its request id."""
        self.seq += 1
        message.model_id = self.model
        message.seq_id = self.seq
        answer = self.http.post(
            "forward_backward", content=message.SerializeToString(), headers=PROTOBUF
        )
        answer.raise_for_status()
        return str(answer.json()["request_id"])

    def step(self) -> Any:
        self.seq += 1
        return self.result(
            self.post(
                "optim_step", {"model_id": self.model, "seq_id": self.seq, "adam_params": {}}
            )["request_id"]
        )

    def close(self) -> None:
        self.post(f"sessions/{self.session}/finish", {})
        self.http.close()


# --- latency --------------------------------------------------------------------------------------


def measure_latency(
    model: Path, url: str, repeats: int, api_pid: int
) -> dict[str, dict[str, float]]:
    """Per batch: median milliseconds of each way, their ratio to the direct call, and the CPU
    milliseconds of the API process per HTTP call, which other load on the machine affects least."""
    found: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(direct_host(model))
        client = HttpClient(model, url, rank=8)
        stack.callback(client.close)
        sdk = (
            stack.enter_context(sdk_client(model, url))
            if importlib.util.find_spec("tinker")
            else None
        )
        for name, (count, length) in BATCHES.items():
            message = message_of(count, length)
            ways: dict[str, Callable[[], Any]] = {
                "direct": direct_call(host, message),
                "http": partial(http_call, client, message),
            }
            if sdk is not None:
                ways["sdk"] = sdk_call(sdk, message)
            milliseconds = medians(ways, repeats)
            client.step()
            host.execute({"op": "optim_step", "model": "m", "adam": ADAM})
            ratios = {
                f"{way} / direct": ms / milliseconds["direct"]
                for way, ms in milliseconds.items()
                if way != "direct"
            }
            found[name] = {
                **milliseconds,
                **ratios,
                "api core": core_ms(api_pid, ways["http"], repeats),
            }
    return found


ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def medians(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds; ways are run in turn, so that other load affects all equally."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 2):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            if number >= 2:
                taken[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in taken.items()}


def core_ms(pid: int, call: Callable[[], Any], repeats: int) -> float:
    """CPU milliseconds of a process per call, over `repeats` calls."""
    import psutil

    def spent() -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = spent()
    for _ in range(repeats):
        call()
    return 1000 * (spent() - before) / repeats


@contextlib.contextmanager
def direct_host(model: Path) -> Iterator[Any]:
    """The server's model host in this process, with an adapter named m."""
    import megatron_patches
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    from arguments.parse import SERVER, parse_args
    from slime_like.megatron.init import process_groups

    config = parse_args(["--hf-checkpoint", str(model)], 1, SERVER)
    with process_groups(config.parallel, virtual_stages=None, seed=config.model.seed) as layout:
        host = make_model_host(config, layout)
        lora = {"rank": 8, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False}
        host.execute({"op": "create", "model": "m", "role": "policy", "policy": None, "lora": lora})
        yield host


def direct_call(host: Any, message: Any) -> Callable[[], Any]:
    command = command_of(message)
    return lambda: host.execute({"op": "forward_backward", "model": "m", **command})


def http_call(client: HttpClient, message: Any) -> Any:
    return client.result(client.send(message))


def command_of(message: Any) -> dict[str, Any]:
    """The command that workers get for a request, without the model."""
    from slime_like.tinker.data import DataLimits, check_forward_backward

    message.model_id = "m"
    message.seq_id = 1
    return check_forward_backward(
        message, role="policy", limits=DataLimits(10_000, 10_000, 10**9)
    ).command()


@contextlib.contextmanager
def sdk_client(model: Path, url: str) -> Iterator[Any]:
    import tinker

    service = tinker.ServiceClient(base_url=url.removesuffix("/api/v1/"), api_key="tml-benchmark")
    yield service.create_lora_training_client(
        str(model), rank=8, seed=1, train_unembed=False
    ).result()
    service.close("success").result(timeout=10)


def sdk_call(training: Any, message: Any) -> Callable[[], Any]:
    from tinker import types

    data = []
    for datum in message.data:
        tokens = np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").tolist()
        arrays = {
            "target_tokens": np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, "<i8"),
            "weights": np.frombuffer(datum.loss_fn_inputs["weights"].dense, "<f4"),
        }
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens),
                loss_fn_inputs=arrays,  # type: ignore[arg-type]
            )
        )
    return lambda: training.forward_backward(data, "cross_entropy").result()


# --- shares ---------------------------------------------------------------------------------------


@dataclass
class Served:
    """Passes of one client."""

    # seconds from sending each pass to its result
    waits_s: list[float] = field(default_factory=list)


def measure_shares(
    model: Path, url: str, clients: int, seconds: float, *, flood: int
) -> dict[str, Any]:
    """Run `clients` threads for `seconds`, each with a separate adapter and one pending request.
    flood: number of pending requests of the first client; 0: one, like the others."""
    asking = [HttpClient(model, url, rank=8) for _ in range(clients)]
    served = [Served() for _ in asking]
    start = threading.Barrier(clients)
    errors = []

    def ask(number: int) -> None:
        try:
            start.wait(60)
            window = flood if flood and number == 0 else 1
            keep_asking(asking[number], served[number], window, time.perf_counter() + seconds)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [
        threading.Thread(target=ask, args=(number,), daemon=True) for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    if errors:
        raise errors[0]
    for client in asking:
        client.close()
    return summary(served, flood=flood)


def keep_asking(client: HttpClient, served: Served, window: int, until: float) -> None:
    message = message_of(2, 16)
    waiting: list[tuple[float, str]] = []
    while time.perf_counter() < until or waiting:
        while time.perf_counter() < until and len(waiting) < window:
            waiting.append((time.perf_counter(), client.send(message)))
        if not waiting:
            return
        sent, request = waiting.pop(0)
        client.result(request)
        if time.perf_counter() < until:
            served.waits_s.append(time.perf_counter() - sent)


def summary(served: Sequence[Served], *, flood: int) -> dict[str, Any]:
    calls = [len(one.waits_s) for one in served]
    polite = served[1:] if flood else served
    waits = sorted(wait for one in polite for wait in one.waits_s)
    return {
        "calls": calls,
        "calls, max / min": max(calls) / max(1, min(calls)),
        "wait, median ms": 1000 * statistics.median(waits),
        "wait, 95th percentile ms": 1000 * waits[int(0.95 * (len(waits) - 1))],
        "wait, longest ms": 1000 * waits[-1],
    }


# --- tables ---------------------------------------------------------------------------------------


def print_latency(found: dict[str, dict[str, float]]) -> None:
    ways = [name for name in ("direct", "http", "sdk") if name in next(iter(found.values()))]
    print(
        "| forward_backward | "
        + " | ".join(f"{way}, ms" for way in ways)
        + " | "
        + " | ".join(f"{w} / direct" for w in ways[1:])
        + " | API process, core ms |"
    )
    print("|---" * (2 * len(ways) + 1) + "|")
    for name, row in found.items():
        cells = [f"{row[way]:.2f}" for way in ways] + [
            f"{row[f'{way} / direct']:.2f}" for way in ways[1:]
        ]
        cells.append(f"{row['api core']:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_shares(found: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(found.values())))
    print("\n| clients | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    for name, row in found.items():
        cells = [
            ", ".join(map(str, value)) if isinstance(value, list) else f"{value:.2f}"
            for value in row.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())

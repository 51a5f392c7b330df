"""What an update of a LoRA policy costs and loses: merged into bfloat16 weights, and as an adapter.

    python benchmarks/bench_adapters.py --sglang-python scripts/sglang_cpu/python [--json out.json]

A Qwen3 with weights as large as a trained model's (standard deviation 0.02) trains adapters in
bfloat16 with Adam, on policy gradients of random tokens. For each learning rate: the share of the
weights that an update changes in the engine, and the error of what the engine sees of it (see
slime_like/megatron/lora/rounding.py). With --sglang-python, the same model is served twice, with
whole weights and with adapters, and updates are timed from the trainer's tensors to the last
server's answer. Without it, only bytes are counted.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron_patches  # noqa: E402

megatron_patches.apply()

import torch  # noqa: E402

from arguments.parse import parse_args  # noqa: E402
from benchmarks.bench_common import write_json  # noqa: E402
from benchmarks.bench_delta import make_model  # noqa: E402
from slime_like.cli.tiny_model import make_tokenizer  # noqa: E402
from slime_like.engines.sglang.engine import SglangEngine  # noqa: E402
from slime_like.engines.sglang.factory import AdapterNeeds, SglangProgram  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.init import process_groups  # noqa: E402
from slime_like.megatron.lora import LoraNetwork  # noqa: E402
from slime_like.megatron.lora.gather import factor_stream  # noqa: E402
from slime_like.megatron.lora.rounding import MergeRounding  # noqa: E402
from slime_like.servers.launches import Slot  # noqa: E402
from slime_like.servers.processes import LOOPBACK, Launch, ServerProcess, free_ports  # noqa: E402
from slime_like.servers.requests import RequestSettings  # noqa: E402
from slime_like.servers.server_pool import HealthSettings, ServerPool  # noqa: E402
from slime_like.sglang.api import SglangApi  # noqa: E402
from slime_like.types import TrainBatch, TrainSample  # noqa: E402
from slime_like.weight_sync.settings import AdapterSettings, UpdateSettings  # noqa: E402
from slime_like.weight_sync.updater import WeightUpdater  # noqa: E402

VOCAB = 8192  # of bench_delta.py's model
SEQUENCES = 8
LENGTH = 64
MODULES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
TRANSPORTS = ("tensor", "disk")
START_S = 900.0  # a loaded machine with two cores


@contextmanager
def lora_backend(model: Path, rank: int, lr: float) -> Iterator[MegatronBackend]:
    rollout = model.parent / "rollout_0.pt"
    rollout.touch()
    words = (
        f"--hf-checkpoint {model} --debug-train-only --load-debug-rollout-data "
        f"{model.parent}/rollout_{{rollout_id}}.pt --num-rollout 1 "
        f"--rollout-batch-size {SEQUENCES} --n-samples-per-prompt 1 "
        f"--micro-batch-size {SEQUENCES} --bf16 --lora-rank {rank} "
        f"--lr {lr} --no-tensorboard --no-progress --no-plot"
    )
    config = parse_args(words.split(), 1)
    with process_groups(config.parallel, virtual_stages=None, seed=1) as layout:
        yield MegatronBackend(config, layout, total_steps=1000)


def policy_of(backend: MegatronBackend) -> LoraNetwork:
    assert isinstance(backend.policy, LoraNetwork)
    return backend.policy


def train(backend: MegatronBackend, seed: int) -> None:
    """One step on sequences of random tokens, each with an advantage of its own."""
    g = torch.Generator().manual_seed(seed)
    response = LENGTH - 1
    samples = [
        TrainSample(
            tokens=torch.randint(VOCAB, (LENGTH,), generator=g),
            response_length=response,
            loss_mask=torch.ones(response, dtype=torch.bool),
            loss_weights=torch.full((response,), 1 / (SEQUENCES * response)),
            advantages=torch.randn(1, generator=g).expand(response),
            old_log_probs=torch.full((response,), -math.log(VOCAB)),
        )
        for _ in range(SEQUENCES)
    ]
    backend.optim_step(backend.forward_backward(TrainBatch(tuple(samples))))


def rounding(model: Path, words: argparse.Namespace, lr: float) -> dict[str, float]:
    with lora_backend(model, words.rank, lr) as backend:
        measured = []
        compare = MergeRounding(policy_of(backend))
        for step in range(words.warmup + words.updates):
            train(backend, step)
            measured.append(compare.measure())
    kept = measured[words.warmup :]
    changed = statistics.mean(m["lora/merged_changed_frac"] for m in kept)
    error = statistics.mean(m["lora/merged_update_error"] for m in kept)
    whole = measured[-1]["lora/merged_adapter_error"]
    print(
        f"lr {lr:g}: an update changes {changed:.2%} of the bfloat16 weights that it should; what "
        f"the engine sees differs from it by {error:.0%} of its norm; after {len(measured)} of "
        f"them the engine's weights differ from the trainer's by {whole:.0%} of the adapter"
    )
    return {"lr": lr, "changed_frac": changed, "update_error": error, "adapter_error": whole}


@contextmanager
def server(model: Path, words: argparse.Namespace, *, adapter: bool) -> Iterator[str]:
    """Its address."""
    (port,) = free_ports(1)
    needs = AdapterNeeds(words.rank, MODULES) if adapter else None
    program = SglangProgram(words.sglang_python, str(model), "bfloat16", False, adapter=needs)
    slot = Slot(LOOPBACK, port, gpus=1, first_gpu=0)
    log = model.parent / f"server-{port}.log"
    process = ServerProcess(Launch(program.command(slot), log, program.environment(slot)))
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.end()


@contextmanager
def engine_of(
    model: Path, words: argparse.Namespace, url: str, transport: str, *, adapter: bool
) -> Iterator[SglangEngine]:
    pool = ServerPool([url], [], None, HealthSettings(start_s=START_S), 5.0, api=SglangApi())
    try:
        pool.start()
        sent = AdapterSettings(words.rank, 32.0) if adapter else None
        updater = WeightUpdater(
            pool, UpdateSettings(transport, adapter=sent), str(model), torch.device("cpu")
        )
        engine = SglangEngine(
            pool,
            updater,
            RequestSettings(),
            str(model),
            check_updates=False,
            takes_adapter=adapter,
        )
        yield engine
        engine.close()
    finally:
        pool.close()


def timed(model: Path, words: argparse.Namespace, way: str) -> Iterator[dict[str, object]]:
    """Median seconds of an update after the first one, in which connections are made, for each
    transport."""
    adapter = way == "adapter"
    with (
        lora_backend(model, words.rank, 1e-5) as backend,
        server(model, words, adapter=adapter) as url,
    ):
        for transport in TRANSPORTS:
            seconds = []
            with engine_of(model, words, url, transport, adapter=adapter) as engine:
                for version in range(1, words.updates + 2):
                    train(backend, version)
                    start = time.perf_counter()
                    backend.sync_weights(engine, version)
                    seconds.append(time.perf_counter() - start)
                mib = engine.take_metrics()["engine/weight_update_gb"] * 1e9 / 2**20
            median = statistics.median(seconds[1:])
            print(f"{way}, {transport}: {mib:.2f} MiB, {median:.3f} s")
            yield {"way": way, "transport": transport, "mib": mib, "seconds": median}


def sizes(model: Path, words: argparse.Namespace) -> dict[str, float]:
    with lora_backend(model, words.rank, 1e-5) as backend:
        merged = sum(weight.nbytes for _, weight in backend.export_weights())
        adapter = sum(factor.nbytes for _, factor in factor_stream(policy_of(backend)))
    print(
        f"an update has {merged / 2**20:.1f} MiB merged, and {adapter / 2**20:.2f} MiB as an "
        f"adapter of rank {words.rank}: 1/{merged / adapter:.0f}"
    )
    return {"merged_mib": merged / 2**20, "adapter_mib": adapter / 2**20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 3e-5, 1e-4])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5, help="optimizer steps before")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sglang-python", help="an interpreter with SGLang, to time updates")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="bench_adapters_") as folder:
        model = Path(folder) / "model"
        network = make_model(words.hidden, words.layers).to(torch.bfloat16)
        network.save_pretrained(model)  # type: ignore[operator]
        make_tokenizer().save_pretrained(model)  # servers start with a request of text
        rows.append(dict(sizes(model, words)))
        rows += [dict(rounding(model, words, lr)) for lr in words.lr]
        if words.sglang_python is not None:
            for way in ("merged", "adapter"):
                rows += timed(model, words, way)
    write_json(words.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

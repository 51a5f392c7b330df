"""Cost of syncing the weights of an MoE model: collectives, bytes, seconds and memory of every way
to export weights, against a plain broadcast of the same bytes between the same processes, and
against one parameter at a time, in one run.

    python benchmarks/bench_weights.py --layout 2 2 1 4 1 --ranks 8 [--json weights.json]

"everywhere" is what engines in the trainer's processes get, "rank zero" what one sender to servers
has, "own" what each of several senders has, "disk" the files that they write. One parameter at a
time is the same code with buckets of one byte. Ways take turns; seconds are the fastest of
--repeats, of the slowest rank. Peak: of live tensors beside the model, on the rank that has most;
gloo's threads may have their last message a moment longer. The exit status is 1 where a way to
engines takes more than --limit times as long as the plain broadcast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_patches

megatron_patches.apply()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from arguments.hf.model import HfModel, read_hf_model  # noqa: E402
from arguments.schema import GPTModelConfig  # noqa: E402
from benchmarks.bench_common import machine, write_json  # noqa: E402
from benchmarks.parity.ranks import run_ranks  # noqa: E402
from benchmarks.parity.steps import parallel  # noqa: E402
from slime_like.megatron.model.gpt import build_chunks  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.preflight.live_bytes import LiveBytes, group_key  # noqa: E402
from slime_like.weights.gather import WeightStream  # noqa: E402
from slime_like.weights.hf_export import HfExport  # noqa: E402
from slime_like.weights.hf_save import save_hf  # noqa: E402

RAW = "plain broadcast"
TO_ENGINES = ("everywhere", "rank zero", "own")
ONE_BY_ONE = "everywhere, one parameter at a time"
GROUPS = ("tp_group", "pp_group", "etp_group")
DTYPE = torch.bfloat16


def make_config(folder: Path, *, experts: int, layers: int, hidden: int) -> None:
    """Write config.json of a Qwen3-MoE with experts half as wide as the model."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


def build(folder: str, layout: ParallelLayout) -> tuple[list[Any], HfModel, GPTModelConfig]:
    """This rank's chunks, with random weights."""
    hf = read_hf_model(folder)
    gpt = GPTModelConfig(**hf.gpt)
    config = TransformerConfig(
        **{**hf.transformer, "activation_func": F.silu},
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vp_size if layout.vp_size > 1 else None,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        moe_token_dispatcher_type="alltoall",
        transformer_impl="local",
        pipeline_dtype=DTYPE,
        params_dtype=DTYPE,
    )
    chunks = [chunk.to(DTYPE).eval() for chunk in build_chunks(config, gpt, "local", layout)]
    return chunks, hf, gpt


def measure(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Measure on every rank. Returns by way: "seconds" of each repeat, "calls" (each collective
    counted once over its ranks) and "peak"; and "bytes" of all weights."""
    with parallel(*arguments["layout"]) as layout:
        chunks, hf, gpt = build(arguments["folder"], layout)
        live = LiveBytes()
        weights = [w for chunk in chunks for w in (*chunk.parameters(), *chunk.buffers())]

        size = arguments["bucket_bytes"]
        exports = {  # built once, as in a network
            bucket_bytes: HfExport(chunks, hf=hf, gpt=gpt, layout=layout, bucket_bytes=bucket_bytes)
            for bucket_bytes in (size, 1)
        }

        def stream(bucket_bytes: int) -> WeightStream:
            return exports[bucket_bytes].stream()

        plan = stream(size).plan
        total = sum(planned.nbytes for planned in plan)
        ways: dict[str, Callable[[], None]] = {
            RAW: lambda: broadcast(total, size),
            "everywhere": lambda: take(stream(size)),
            "rank zero": lambda: take(stream(size).to_rank_zero()),
            "own": lambda: take(stream(size).own()),
            "disk": lambda: save_hf(
                arguments["output"], stream(size), arguments["folder"], 8 * size
            ),
            ONE_BY_ONE: lambda: take(stream(1)),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments["repeats"]):
            for way, run in ways.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
        found = {}
        for way, run in ways.items():
            live = LiveBytes(groups_of(layout))
            live.ignore(weights)
            with live:
                run()
            found[way] = {
                "seconds": min(seconds[way]),
                "calls": collectives(live, layout),
                "peak": live.peak,
            }
    return {"bytes": total, "messages": len(plan), "ways": found}


def take(stream: Any) -> None:
    for bucket in stream.buckets():
        del bucket


def broadcast(total: int, size: int) -> None:
    """Broadcast `total` bytes from rank 0, in buckets of `size` bytes."""
    for start in range(0, total, size):
        dist.broadcast(torch.empty(min(size, total - start), dtype=torch.uint8), src=0)


def groups_of(layout: ParallelLayout) -> dict[int, str]:
    named = {group_key(getattr(layout, name)): name for name in GROUPS}
    return {**named, group_key(dist.group.WORLD): "world"}  # type: ignore[arg-type]


def collectives(live: LiveBytes, layout: ParallelLayout, *, other: int = 0) -> float:
    """This rank's share of the collectives counted, so that the sum over ranks counts each once.
    other: size of the group that is not of the layout."""

    def ranks(name: str, group: str) -> int:
        if name in ("send", "recv"):
            return 2
        return other if group == "other" else dist.get_world_size(group_named(layout, group))

    return sum(traffic.calls / ranks(*key) for key, traffic in live.traffic.items())


def group_named(layout: ParallelLayout, name: str) -> Any:
    return dist.group.WORLD if name == "world" else getattr(layout, name)


def table(ranks: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Results by way, over all ranks; a send and its receive count as one collective."""
    first = ranks[0]
    raw = max(rank["ways"][RAW]["seconds"] for rank in ranks)
    rows = {}
    for way in first["ways"]:
        seconds = max(rank["ways"][way]["seconds"] for rank in ranks)
        rows[way] = {
            "collectives": round(sum(rank["ways"][way]["calls"] for rank in ranks)),
            "seconds": seconds,
            "times plain": seconds / raw,
            "peak MiB": max(rank["ways"][way]["peak"] for rank in ranks) / 2**20,
        }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--layout",
        type=int,
        nargs=5,
        default=[2, 2, 1, 4, 1],
        help="tensor-, pipeline-, virtual pipeline-, expert- and expert-tensor-parallel size",
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.3, help="times a plain broadcast")
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_weights_"))
    try:
        make_config(
            folder / "model", experts=given.experts, layers=given.layers, hidden=given.hidden
        )
        arguments = {
            "folder": str(folder / "model"), "output": str(folder / "out"), "layout": given.layout,
            "repeats": given.repeats,
            "bucket_bytes": int(given.bucket_mib * 2**20),
        }  # fmt: skip
        ranks = run_ranks(
            "benchmarks.bench_weights:measure", given.ranks, folder / "run", arguments,
            given.timeout_s
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = table(ranks)
    size = ranks[0]["bytes"]
    messages = ranks[0]["messages"]
    print(f"{size / 2**20:.1f} MiB in {messages} messages of {given.bucket_mib:g} MiB; {machine()}")
    print(f"{'':36} {'collectives':>11} {'seconds':>8} {'x plain':>8} {'peak MiB':>9}")
    for way, row in rows.items():
        print(
            f"{way:36} {row['collectives']:11d} {row['seconds']:8.3f} {row['times plain']:8.2f} "
            f"{row['peak MiB']:9.2f}"
        )
    write_json(given.json, {"bytes": size, "messages": messages, "ways": rows})
    return int(any(rows[way]["times plain"] > given.limit for way in TO_ENGINES))


if __name__ == "__main__":
    sys.exit(main())

"""Seconds, GB/s and peak memory of both conversions on this machine, against a plain copy of the
same bytes and against transformers' own load and save, in one run; and the same for a model with
ten times the layers, whose peaks should be no higher.

    python benchmarks/bench_convert.py --layers 8 80 --folder outputs/bench_convert [--json
    convert.json]

Every measurement is a separate process, forked from one that has imported everything; the model's
files are in the page cache. Seconds are those of the whole program but for its imports; whatever is
written is synced. Peak: the most memory that the process had beyond what it started with, pages of
mapped files included. Exit status 1 when a conversion's peak grows with the model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import megatron_patches

megatron_patches.apply()

import transformers  # noqa: E402

import slime_like.conversion.verify  # noqa: E402, F401  for the processes that are forked
from benchmarks.bench_common import machine, write_json  # noqa: E402
from scripts import convert_hf_to_megatron, convert_megatron_to_hf  # noqa: E402
from slime_like.checkpoints.files import sync_path  # noqa: E402
from slime_like.trainer.launch import quiet_dependencies  # noqa: E402
from slime_like.weights.export_plan import TensorPlan  # noqa: E402
from slime_like.weights.safetensors_reader import weight_files  # noqa: E402
from slime_like.weights.safetensors_writer import plan_shards, write_index, write_shard  # noqa: E402

SHARD_BYTES = 400 * 10**6
MIB = 2**20
COPY = "plain copy of the files"
ALLOWED_GROWTH_MIB = 64.0  # for the metadata of ten times as many tensors


def make_model(folder: Path, layers: int, hidden: int) -> int:
    """Write a Llama with random bfloat16 weights, one tensor at a time. Returns its size in
    bytes."""
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), dtype="bfloat16", tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    shards = plan_shards(
        (TensorPlan(name, tuple(t.shape), torch.bfloat16) for name, t in shapes.items()),
        SHARD_BYTES,
    )

    def random_tensors(planned: tuple[TensorPlan, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in planned:
            yield tensor.name, torch.randn(tensor.shape).mul_(0.02).to(torch.bfloat16)

    for shard in shards:
        write_shard(folder, shard, random_tensors(shard.tensors), "", lambda size: None)
    write_index(folder, shards)
    return sum(shard.nbytes for shard in shards)


def in_a_process(action: Callable[[], Any]) -> dict[str, float]:
    """Run `action` in a forked process; returns {"s", "peak_mib"}. If it fails, raises RuntimeError
    with its output."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                Path("/proc/self/clear_refs").write_text("5")  # reset the peak
                before = resident_kib("VmRSS")
                started = time.perf_counter()
                status = action()
                found: dict[str, Any] = {
                    "s": time.perf_counter() - started,
                    "peak_mib": (resident_kib("VmHWM") - before) / 1024,
                }
                if status:
                    found = {"error": out.getvalue()}
        except BaseException as error:
            found = {"error": f"{out.getvalue()}{error!r}"}
        os.write(theirs, json.dumps(found).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def resident_kib(name: str) -> int:
    """Resident memory of this process. name: VmRSS (current) or VmHWM (peak)."""
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().split("\n")
        if line.startswith(name)
    )


def copy_synced(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in weight_files(source):
        shutil.copyfile(path, target / path.name)
    sync_all(target)


def sync_all(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        sync_path(path)


def load_with_transformers(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


def save_with_transformers(source: Path, target: Path) -> None:
    load_with_transformers(source).save_pretrained(target, max_shard_size=SHARD_BYTES)
    sync_all(target)


def script(module: Any, *words: object) -> Callable[[], int]:
    def call() -> int:
        sys.argv = [module.__name__, *map(str, words), "--no-progress"]
        return int(module.main())

    return call


def measure(folder: Path, layers: int, hidden: int, repeat: int) -> dict[str, dict[str, float]]:
    """By operation: seconds of the fastest of `repeat` runs, GB/s, and the highest peak in MiB."""
    model, copy, saved, root, out = (
        folder / name for name in ("model", "copy", "saved", "megatron", "hf")
    )
    size = make_model(model, layers, hidden)
    to_megatron = script(
        convert_hf_to_megatron, "--hf-checkpoint", model, "--save", root, "--workers", 2
    )
    files = ("--load", root, "--hf-checkpoint", model, "--output", out)
    words = (*files, "--max-shard-size", f"{SHARD_BYTES}B", "--workers", 2)
    jobs: list[tuple[str, Callable[[], Any]]] = [
        (COPY, lambda: copy_synced(model, copy)),
        ("transformers, load", lambda: load_with_transformers(model) and None),
        ("transformers, load and save", lambda: save_with_transformers(model, saved)),
        ("to Megatron", to_megatron),
        ("to Hugging Face, checkpoint verified", script(convert_megatron_to_hf, *words)),
        ("to Hugging Face", script(convert_megatron_to_hf, *words, "--no-verify-checkpoint")),
    ]
    results: dict[str, dict[str, float]] = {}
    for _ in range(repeat):
        for path in (copy, saved, root, out):
            shutil.rmtree(path, ignore_errors=True)
        for name, job in jobs:
            found = in_a_process(job)
            best = results.get(name, {"s": float("inf"), "peak_mib": 0.0})
            results[name] = {
                "s": min(found["s"], best["s"]),
                "peak_mib": max(found["peak_mib"], best["peak_mib"]),
            }
    for result in results.values():
        result |= {
            "gb": size / 1e9,
            "gb_per_s": size / 1e9 / result["s"],
            "copies": result["s"] / results[COPY]["s"],
        }
    shutil.rmtree(folder)
    return results


def grown(small: dict[str, dict[str, float]], large: dict[str, dict[str, float]]) -> list[str]:
    """Conversions with a higher peak for the larger model."""
    ours = [name for name in small if name.startswith("to ")]
    return [
        name
        for name in ours
        if large[name]["peak_mib"] > small[name]["peak_mib"] + ALLOWED_GROWTH_MIB
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[8, 80],
        help="a model of each of these numbers of layers",
    )
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=2, help="the fastest of this many is shown")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/bench_convert"), help="is removed at the end"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    quiet_dependencies()
    transformers.utils.logging.disable_progress_bar()
    results = [
        measure(chosen.folder / str(layers), layers, chosen.hidden_size, chosen.repeat)
        for layers in chosen.layers
    ]
    for result in results:
        print(
            f"| model of {result[COPY]['gb']:.2f} GB | s | GB/s | times the plain copy | peak, MiB "
            "|\n|---|---|---|---|---|"
        )
        for name, row in result.items():
            print(
                f"| {name} | {row['s']:.2f} | {row['gb_per_s']:.2f} | {row['copies']:.1f} | "
                f"{row['peak_mib']:.0f} |"
            )
        print()
    print(machine())
    write_json(chosen.json, results)
    if worse := grown(results[0], results[-1]):
        print(f"memory grows with the model: {', '.join(worse)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

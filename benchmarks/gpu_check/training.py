"""Checks of training: against the CPU, the speed of models from config, what moves out of the
device's memory, and the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_training_step import GROUP_SIZE, make_model, make_samples, our_step
from benchmarks.bench_training_step import Sizes as StepSizes
from benchmarks.gpu_check.common import GIB, Figures, Sizes, device, has_gpu, peak_bytes, seconds
from slime_like.preflight.flops import TERA, forward_flops, peak_tflops, step_flops

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(__file__).with_name("run.py")
SMALL = StepSizes(128, 2, 512, 32, 24, 96, 8, 512, 5)
TINY = StepSizes(32, 1, 64, 8, 8, 24, 4, 128, 2)
COMMON = (
    "--swiglu --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels "
    "128 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 "
    "--position-embedding-type rope --disable-bias-linear --vocab-size 151936 --num-layers 28"
)
MODELS = {  # sizes of Qwen's config.json files
    "0.6B": f"{COMMON} --hidden-size 1024 --ffn-hidden-size 3072",
    "1.7B": f"{COMMON} --hidden-size 2048 --ffn-hidden-size 6144",
}
REHEARSED = (
    "--swiglu --num-attention-heads 2 --kv-channels 8 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --vocab-size 64 --num-layers 1 "
    "--hidden-size 16 --ffn-hidden-size 32"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@contextmanager
def trainer(words: str, of: StepSizes, folder: str) -> Iterator[tuple[Any, Any]]:
    """(settings, layout) of one process with the given flags of train.py."""
    import megatron_patches
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    from arguments.parse import parse_args
    from slime_like.megatron.init import process_groups

    common = (
        f"--debug-train-only --load-debug-rollout-data {folder}/rollout_{{rollout_id}} "
        "--num-rollout 1 --lr 1e-4 --clip-grad 1.0 "
        f"--rollout-batch-size {of.sequences // GROUP_SIZE} --n-samples-per-prompt {GROUP_SIZE} "
        "--loss-reduction token_mean "
        f"--use-dynamic-batch-size --max-tokens-per-gpu {of.budget}"
    )
    config = parse_args(f"{common} {words}".split(), 1)
    with process_groups(config.parallel, virtual_stages=config.virtual_stages, seed=1) as layout:
        yield config, layout


def losses_and_norms(precision: str, sizes: Sizes) -> dict[str, list[float]]:
    """Losses and gradient norms of a few updates of a small model on the same samples."""
    of = TINY if sizes.rehearse else SMALL
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), of, "dense")
        flags = f"--hf-checkpoint {folder} {'--bf16' if precision == 'bf16' else ''}"
        with trainer(flags, of, folder) as (config, layout):
            step = our_step(Path(folder), of, config, layout)
            found = [step() for _ in range(sizes.steps)]
    return {"loss": [loss for loss, _ in found], "grad_norm": [norm for _, norm in found]}


def _on_cpu(precision: str, sizes: Sizes) -> dict[str, list[float]]:
    """`losses_and_norms` in a process that sees no GPU; in this process if there is none."""
    if not has_gpu():
        return losses_and_norms(precision, sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [
                *(sys.executable, str(RUN), "--losses-to", str(path), "--precision", precision),
                *(["--rehearse"] if sizes.rehearse else []),
            ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=True,
            timeout=180,
        )
        found: dict[str, list[float]] = json.loads(path.read_text())
        return found


def _parity(precision: str, sizes: Sizes) -> Figures:
    here = losses_and_norms(precision, sizes)
    cpu = _on_cpu(precision, sizes)
    norms = zip(here["grad_norm"], cpu["grad_norm"], strict=True)
    losses = zip(here["loss"], cpu["loss"], strict=True)
    return {
        "loss_first": here["loss"][0],
        "loss_change": here["loss"][-1] - here["loss"][0],
        "loss_difference": max(abs(a - b) for a, b in losses),
        "norm_difference": max(abs(a - b) / b for a, b in norms),
    }


def float32(sizes: Sizes) -> Figures:
    """Losses and gradient norms of a few updates in float32, against the CPU."""
    return _parity("float32", sizes)


def bf16(sizes: Sizes) -> Figures:
    """Like `float32`, in bf16."""
    return _parity("bf16", sizes)


def _speed(model: str, tokens: int, sizes: Sizes) -> Figures:
    """Training speed of a model. tokens: per packed row; 90% of the sequences have an eighth of it,
    10% most of it."""
    flags = REHEARSED if sizes.rehearse else MODELS[model]
    of = StepSizes(0, 0, 151936, 32, tokens // 8, tokens * 7 // 8, 0, tokens, 1)
    if sizes.rehearse:
        of = TINY
    elif tokens > 8192:
        flags += f" {RECOMPUTE}"
    with (
        tempfile.TemporaryDirectory() as folder,
        trainer(f"{flags} --bf16", of, folder) as (config, layout),
    ):
        step = our_step(Path(folder), of, config, layout)
        samples = make_samples(of)[0]
        lengths = [sample.total_length for sample in samples]
        taken = seconds(step, repeats=sizes.model_steps, warm_up=1)
        flops = step_flops(
            forward_flops(config.megatron.transformer, config.gpt),
            lengths,
            sum(sample.response_length for sample in samples),
        )
        found: Figures = {
            "tokens_of_a_step": sum(lengths),
            "step_s": taken,
            "tokens_per_s": sum(lengths) / taken,
            "tflops": flops / taken / TERA,
            "peak_gib": held / GIB if (held := peak_bytes(step)) is not None else None,
            "recompute": RECOMPUTE in flags,
        }
        peak = peak_tflops(torch.cuda.get_device_name()) if has_gpu() else None
        return {**found, "mfu": flops / taken / TERA / peak} if peak else found


def small_8k(sizes: Sizes) -> Figures:
    """Training of a Qwen3-0.6B from config in bf16, rows of 8k tokens."""
    return _speed("0.6B", 8192, sizes)


def small_32k(sizes: Sizes) -> Figures:
    """The same, rows of 32k tokens, layers recomputed."""
    return _speed("0.6B", 32768, sizes)


def large_8k(sizes: Sizes) -> Figures:
    """Training of a Qwen3-1.7B from config in bf16, rows of 8k tokens."""
    return _speed("1.7B", 8192, sizes)


def large_32k(sizes: Sizes) -> Figures:
    """The same, rows of 32k tokens, layers recomputed."""
    return _speed("1.7B", 32768, sizes)


def offload(sizes: Sizes) -> Figures:
    """Offload a trained network to host memory and restore it: bytes freed, and bitwise equality
    afterwards."""
    from slime_like.megatron.backend import MegatronBackend
    from slime_like.megatron.offload import OffloadedNetwork, storages_of

    flags = REHEARSED if sizes.rehearse else MODELS["0.6B"]
    with (
        tempfile.TemporaryDirectory() as folder,
        trainer(f"{flags} --bf16", TINY, folder) as (config, layout),
    ):
        network = MegatronBackend(config, layout, total_steps=1).trained
        before = [tensor.detach().cpu().clone() for tensor in network.tensors()]
        held = sum(storage.nbytes() for storage in storages_of(network))
        allocated = torch.cuda.memory_allocated() if has_gpu() else held
        outside = OffloadedNetwork(network)
        left = sum(storage.nbytes() for storage in storages_of(network))
        freed = allocated - torch.cuda.memory_allocated() if has_gpu() else held - left
        outside.restore()
        same = all(torch.equal(a, b.cpu()) for a, b in zip(before, network.tensors(), strict=True))
    return {"gib": held / GIB, "freed_share": freed / held, "same_bits": same}


def handoff(sizes: Sizes) -> Figures:
    """Open a weight bucket, as sent by --update-weight-transport, in another process; on a GPU a
    CUDA IPC handle, as the probe at the start of a run does."""
    from slime_like.weight_sync.transports.handles import why_no_handles

    reason = why_no_handles(sys.executable, torch.device(device()))
    if reason:
        raise RuntimeError(reason)
    return {"transport": "cuda_ipc" if has_gpu() else "tensor", "right": True}


def demo(sizes: Sizes) -> Figures:
    """`make demo` on one process: the score on held-out words."""
    from slime_like.metrics.logger import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        less = {"SFT_STEPS": "2", "ROLLOUTS": "1"} if sizes.rehearse else {}
        settings = {"LAYOUT": "one", "PYTHON": sys.executable, "OUTPUT": folder, **less}
        ran = subprocess.run(
            ["bash", "scripts/demo.sh"],
            cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        path = Path(folder) / "rl" / "metrics.jsonl"
        if not path.is_file():
            raise RuntimeError(f"{ran.stdout[-500:]}\n{ran.stderr[-1500:]}")
        scores = [
            row["eval/heldout/mean"] for row in read_metrics(path) if "eval/heldout/mean" in row
        ]
    return {"score_first": scores[0], "score_last": scores[-1]}


def write_losses(path: Path, precision: str, sizes: Sizes) -> None:
    """Entry point of the process that `_on_cpu` starts."""
    path.write_text(json.dumps(losses_and_norms(precision, sizes)))

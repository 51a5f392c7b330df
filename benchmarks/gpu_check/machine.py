"""Checks of the machine: its facts, process groups of one, and a snapshot of memory."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bench_common import machine
from benchmarks.gpu_check.common import GIB, Figures, Sizes, device, has_gpu


def facts(_: Sizes) -> Figures:
    """Description of the machine that the figures were measured on."""
    packages = ("transformer_engine", "flash_attn", "apex", "liger_kernel", "triton")
    found: Figures = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "packages": [name for name in packages if importlib.util.find_spec(name)],
        "host": f"{machine()['cores']} cores, {machine()['processor']}",
    }
    if not has_gpu():
        return {**found, "device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def world(_: Sizes) -> Figures:
    """Collectives in a world of one process over the backends of a run return their input."""
    backend = "cpu:gloo,cuda:nccl" if has_gpu() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        right = True
        for place in {"cpu", device()}:
            sent = torch.arange(1024.0, device=place)
            summed = sent.clone()
            gathered = [torch.empty_like(sent)]
            dist.all_reduce(summed)
            dist.all_gather(gathered, sent)
            dist.broadcast(summed, src=0)
            right &= torch.equal(summed, sent) and torch.equal(gathered[0], sent)
    finally:
        dist.destroy_process_group()
    return {"backend": backend, "right": right}


def snapshot(_: Sizes) -> Figures:
    """--record-memory-history writes its file."""
    from arguments.schema import ProfilingConfig
    from slime_like.trainer.profiling import Profiler

    with tempfile.TemporaryDirectory() as folder:
        settings = ProfilingConfig(record_memory_history=True, memory_snapshot_num_steps=1)
        profiler = Profiler(settings, Path(folder), 0)
        with profiler.rollout(0):
            torch.ones(1024, device=device())
        profiler.close()
        files = list(Path(folder).iterdir())
        return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}

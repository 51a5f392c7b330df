"""A Hugging Face model -> a checkpoint that `train.py --load`, `--ref-load` and `--critic-load` read, in any layout.

    python scripts/convert_hf_to_megatron.py --hf-checkpoint Qwen3-0.6B --save checkpoints/qwen3
    torchrun --nproc-per-node 4 scripts/convert_hf_to_megatron.py --hf-checkpoint Qwen3-0.6B --save checkpoints/qwen3 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

The checkpoint has step 0 and weights only: a run with `--load` starts at its first rollout. `train.py` reads Hugging Face models itself, so
this is for models that are loaded often, or by many ranks. Several processes write their own part each; the layout need not be the run's.
Each process holds a few parameters at a time. An interrupted conversion goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.convert_common import DTYPES, UsageError, exit_status, on_the_cpu, progress, rank_and_world

if TYPE_CHECKING:
    from arguments.groups import ParallelConfig


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True, help="folder of the Hugging Face model (safetensors)")
    parser.add_argument("--save", required=True, help="folder for the checkpoint; it must hold none yet")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the one in config.json, else fp32")
    parser.add_argument(
        "--network", choices=("policy", "critic"), default="policy", help="critic: a model with a score head, for --critic-load"
    )
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument(
        "--workers", type=int, default=min(4, os.cpu_count() or 1), help="threads of each process; each holds one parameter"
    )
    parser.add_argument("--no-progress", action="store_true")
    return parser


def convert(chosen: argparse.Namespace) -> int:
    on_the_cpu()
    import torch

    import megatron_patches
    from arguments.groups import ParallelConfig
    from arguments.hf_model import read_hf_model
    from slime_like.launcher import quiet_dependencies

    quiet_dependencies()
    rank, world = rank_and_world()
    value_head = chosen.network == "critic"
    hf = read_hf_model(chosen.hf_checkpoint, value_head=value_head)
    parallel = ParallelConfig(
        tensor_model_parallel_size=chosen.tensor_model_parallel_size,
        pipeline_model_parallel_size=chosen.pipeline_model_parallel_size,
        expert_model_parallel_size=chosen.expert_model_parallel_size,
        expert_tensor_parallel_size=chosen.expert_tensor_parallel_size,
        # megatron-core wants it for experts; weights do not depend on it
        sequence_parallel=chosen.tensor_model_parallel_size > 1 and bool(hf.transformer.get("num_moe_experts")),
        distributed_backend="gloo",
    )
    check_layout(parallel, hf.transformer, world, chosen.workers)
    dtype = getattr(torch, DTYPES[chosen.dtype] if chosen.dtype else hf.dtype or "float32")
    megatron_patches.apply()
    from slime_like.convert.blueprint import make_blueprint
    from slime_like.convert.to_megatron import convert_to_megatron
    from slime_like.megatron_backend.init import process_groups

    started = time.perf_counter()
    with process_groups(parallel, virtual_stages=None, seed=1) as layout:
        blueprint = make_blueprint(hf, parallel, layout, dtype, value_head=value_head)
        total = sum(p.numel() * p.element_size() for p in blueprint.parameters.values())
        title = "to Megatron" if world == 1 else f"to Megatron, rank 0 of {world}"
        with progress(title, total, show=rank == 0 and not chosen.no_progress) as bar:
            done = convert_to_megatron(
                blueprint, chosen.hf_checkpoint, chosen.save, network=chosen.network, workers=chosen.workers, advance=bar
            )
        if rank == 0:
            seconds = time.perf_counter() - started
            kept = f", {done.kept} of {done.files} files kept from an interrupted conversion" if done.kept else ""
            print(f"{done.folder}: {done.bytes / 1e9:.3f} GB in {seconds:.1f} s ({layout.describe()}, weights only, step 0){kept}")
            flag = "--critic-load" if value_head else "--load or --ref-load"
            print(f"to use it: train.py --hf-checkpoint {chosen.hf_checkpoint} {flag} {chosen.save}")
    return 0


def check_layout(parallel: ParallelConfig, network: dict[str, Any], world: int, workers: int) -> None:
    """Raises UsageError for the first size that does not fit."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    sizes = {name: 1 if getattr(parallel, name) is None else getattr(parallel, name) for name in names}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"--{name.replace('_', '-')} {size}: must be >= 1")
    if workers < 1:
        raise UsageError(f"--workers {workers}: must be >= 1")
    tensor, pipeline = sizes["tensor_model_parallel_size"], sizes["pipeline_model_parallel_size"]
    if world % (tensor * pipeline):
        raise UsageError(
            f"--tensor-model-parallel-size {tensor} times --pipeline-model-parallel-size {pipeline} does not divide the {world} process(es); "
            "start a multiple of it with torchrun --nproc-per-node"
        )
    experts = network.get("num_moe_experts") or 1
    expert = sizes["expert_model_parallel_size"]
    if experts % expert:
        raise UsageError(f"--expert-model-parallel-size {expert}: does not divide the {experts} expert(s); choose a divisor")
    grid = expert * (parallel.expert_tensor_parallel_size or tensor) * pipeline
    if world % grid:
        words = f"the experts' layout takes {grid} ranks, which does not divide the {world} process(es); start a multiple of it"
        raise UsageError(f"--expert-model-parallel-size {expert}: {words}")
    for name, flag, size in (
        ("num_attention_heads", "tensor", tensor),
        ("ffn_hidden_size", "tensor", tensor),
        ("num_layers", "pipeline", pipeline),
    ):
        whole = network[name]
        if whole % size:
            raise UsageError(f"--{flag}-model-parallel-size {size}: does not divide {name} {whole}; choose a divisor of it")


def main() -> int:
    chosen = parser().parse_args()
    return exit_status(lambda: convert(chosen))


if __name__ == "__main__":
    raise SystemExit(main())

"""Convert a Hugging Face model to a checkpoint for `train.py --load`, `--ref-load` and
`--critic-load`, which read it in any layout.

    slime-like convert hf-to-megatron --hf-checkpoint Qwen3-0.6B --save checkpoints/qwen3
    torchrun --nproc-per-node 4 --no-python slime-like convert hf-to-megatron \\
        --hf-checkpoint Qwen3-0.6B --save checkpoints/qwen3 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

The checkpoint has step 0 and weights only: a run with `--load` starts at its first rollout.
`train.py` also reads Hugging Face models directly, so this is for models that are loaded often, or
by many ranks. Each process writes its own part and holds a few parameters at a time; the layout may
differ from the run's. To continue an interrupted conversion, repeat the same command.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.surroundings import require_surroundings
from slime_like.cli.convert_common import (
    DTYPES,
    VERIFY,
    WORKERS,
    check_workers,
    exit_status,
    on_the_cpu,
    progress,
    progress_title,
    rank_and_world,
    verify,
    warn_of_tokenizer,
)

if TYPE_CHECKING:
    import torch

    from arguments.hf.model import HfModel
    from arguments.schema import ParallelConfig
    from slime_like.conversion.to_megatron import Converted


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hf-checkpoint", required=True, help="folder of the Hugging Face model (safetensors)"
    )
    parser.add_argument(
        "--save", required=True, help="folder for the checkpoint; must have none yet"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights; default: as in config.json, or fp32"
    )
    parser.add_argument(
        "--network",
        choices=("policy", "critic"),
        default="policy",
        help="critic: a model with a score head, for --critic-load",
    )
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--workers", **WORKERS)
    parser.add_argument("--verify", **VERIFY)
    parser.add_argument("--no-progress", action="store_true")
    return parser


def layout_of(args: argparse.Namespace, hf: HfModel, world: int) -> ParallelConfig:
    """The layout of the conversion. Raises ConfigError if sizes do not divide the network or the
    number of processes."""
    from arguments.rules.network import ShardedNetwork, layout_problems
    from slime_like.config import ConfigError, SettingsError
    from slime_like.conversion.meta_model import conversion_layout

    try:
        parallel = conversion_layout(
            hf,
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size,
        )
    except SettingsError as error:
        raise ConfigError(error.problems) from error  # it names flags
    if problems := layout_problems(ShardedNetwork(parallel, hf.transformer, world)):
        raise ConfigError(problems)
    return parallel


def convert(args: argparse.Namespace) -> int:
    on_the_cpu()
    require_surroundings()
    import torch

    import megatron_patches
    from arguments.hf.model import read_hf_model
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    from slime_like.conversion.meta_model import build_meta_model

    rank, world = rank_and_world()
    value_head = args.network == "critic"
    hf = read_hf_model(args.hf_checkpoint, value_head=value_head)
    parallel = layout_of(args, hf, world)
    check_workers(args.workers)
    warn_of_tokenizer(hf, args.hf_checkpoint)
    dtype = getattr(torch, DTYPES[args.dtype] if args.dtype else hf.dtype or "float32")
    from slime_like.conversion.to_megatron import convert_to_megatron
    from slime_like.megatron.init import model_parallel_groups, world_of_processes

    started = time.perf_counter()
    show = rank == 0 and not args.no_progress
    with world_of_processes(parallel):
        with model_parallel_groups(parallel, virtual_stages=None, seed=1) as layout:
            meta_model = build_meta_model(hf, parallel, layout, dtype, value_head=value_head)
            total = sum(p.numel() * p.element_size() for p in meta_model.parameters.values())
            with progress(progress_title("to Megatron", world), total, show=show) as bar:
                converted = convert_to_megatron(
                    meta_model,
                    args.hf_checkpoint,
                    args.save,
                    network=args.network,
                    workers=args.workers,
                    advance=bar,
                )
        if rank == 0:
            print(describe(converted, layout.describe(), time.perf_counter() - started))
        lines = []
        if args.verify:
            lines = verify_checkpoint(args, hf, converted.folder, converted.bytes, dtype)
        if rank == 0:
            flag = "--critic-load" if value_head else "--load or --ref-load"
            usage = f"train.py --hf-checkpoint {args.hf_checkpoint} {flag} {args.save}"
            print("\n".join([*lines, f"to use it: {usage}"]))
    return 0


def describe(converted: Converted, layout: str, seconds: float) -> str:
    """Message about what was written."""
    text = (
        f"{converted.folder}: {converted.bytes / 1e9:.3f} GB in {seconds:.1f} s "
        f"({layout}, weights only, step 0)"
    )
    if converted.kept:
        kept = f"{converted.kept} of {converted.files} files"
        text += f", {kept} kept from an interrupted conversion"
    return text


def verify_checkpoint(
    args: argparse.Namespace, hf: HfModel, folder: Path, size: int, dtype: torch.dtype
) -> list[str]:
    """Run the checks of --verify; returns messages about those that passed. size: bytes of the
    checkpoint `folder`. Raises ValueError."""
    from slime_like.conversion.meta_model import build_meta_model, conversion_layout
    from slime_like.conversion.to_hf import NetworkSource
    from slime_like.megatron.init import model_parallel_groups

    rank, world = rank_and_world()
    parallel = conversion_layout(hf)
    with model_parallel_groups(parallel, virtual_stages=None, seed=1) as layout:
        meta_model = build_meta_model(
            hf, parallel, layout, dtype, value_head=args.network == "critic"
        )
        source = NetworkSource(meta_model, folder / args.network, args.hf_checkpoint, None)
        return verify(
            args.verify,
            source,
            args.hf_checkpoint,
            share=-(-size // world),
            show=rank == 0 and not args.no_progress,
        )


def main() -> int:
    args = parser().parse_args()
    return exit_status(lambda: convert(args))


if __name__ == "__main__":
    raise SystemExit(main())

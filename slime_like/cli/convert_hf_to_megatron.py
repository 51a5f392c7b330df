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
from typing import TYPE_CHECKING

from slime_like.cli.convert import (
    conversion_parser,
    describe,
    logger,
    progress,
    start,
    torch_dtype,
    verify,
    warn_of_tokenizer,
)
from slime_like.cli.exit_status import exit_status, rank_and_world

if TYPE_CHECKING:
    from arguments.hf.model import HfModel
    from arguments.schema import ParallelConfig


def parser() -> argparse.ArgumentParser:
    result = conversion_parser(
        __doc__,
        model="folder of the Hugging Face model (safetensors)",
        dtype="as in config.json, or fp32",
        critic="a model with a score head, for --critic-load",
    )
    result.add_argument(
        "--save", required=True, help="folder for the checkpoint; must have none yet"
    )
    result.add_argument(
        "--vision-tower",
        action="store_true",
        help="also the vision tower, for runs with --multimodal-keys",
    )
    result.add_argument("--tensor-model-parallel-size", type=int, default=1)
    result.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    result.add_argument("--expert-model-parallel-size", type=int, default=1)
    result.add_argument("--expert-tensor-parallel-size", type=int)
    return result


def layout_of(args: argparse.Namespace, hf: HfModel, world: int) -> ParallelConfig:
    """The layout of the conversion. Raises ConfigError if sizes do not divide the network or the
    number of processes."""
    from arguments.rules.network import ShardedNetwork, layout_problems
    from slime_like.config import ConfigError, SettingsError
    from slime_like.conversion.network import conversion_layout

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
    start(args)
    from arguments.hf.model import read_hf_model

    critic = args.network == "critic"
    hf = read_hf_model(args.hf_checkpoint, value_head=critic)
    world = rank_and_world()[1]
    parallel = layout_of(args, hf, world)
    warn_of_tokenizer(hf, args.hf_checkpoint)
    from arguments.hf.vision import read_vision
    from slime_like.conversion.network import MetaNetwork, conversion_layout
    from slime_like.conversion.to_hf import NetworkSource
    from slime_like.conversion.to_megatron import convert_to_megatron
    from slime_like.megatron.init import model_parallel_groups, world_of_processes

    dtype = torch_dtype(args.dtype or hf.dtype or "fp32")
    vision = None
    if args.vision_tower:
        vision = read_vision(args.hf_checkpoint, hf, trained=not critic)
    started = time.perf_counter()
    with world_of_processes(parallel):
        with model_parallel_groups(parallel, virtual_stages=None, seed=1) as layout:
            network = MetaNetwork(hf, parallel, layout, dtype, value_head=critic, vision=vision)
            with progress(args, "to Megatron", network.nbytes * world) as advance:
                converted = convert_to_megatron(
                    network, args.hf_checkpoint, args.save, workers=args.workers, advance=advance
                )
        details = f" ({layout.describe()}, weights only, step 0)"
        logger.info(describe(converted, time.perf_counter() - started, details))
        if args.verify:
            alone = conversion_layout(hf)
            with model_parallel_groups(alone, virtual_stages=None, seed=1) as layout:
                network = MetaNetwork(hf, alone, layout, value_head=critic, vision=vision)
                folder = converted.folder / args.network
                source = NetworkSource(network, folder, args.hf_checkpoint)
                verify(args, source, args.hf_checkpoint, converted.bytes)
    flag = "--critic-load" if critic else "--load or --ref-load"
    usage = f"train.py --hf-checkpoint {args.hf_checkpoint} {flag} {args.save}"
    logger.info(f"to use it: {usage}")
    return 0


def main() -> int:
    args = parser().parse_args()
    return exit_status(lambda: convert(args))


if __name__ == "__main__":
    raise SystemExit(main())

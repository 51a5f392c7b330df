"""Convert a checkpoint of `train.py --save`, in any layout, to a Hugging Face folder.

    slime-like convert megatron-to-hf --load outputs/ck --hf-checkpoint Qwen3-0.6B \\
        --output outputs/hf
    torchrun --nproc-per-node 4 --no-python slime-like convert megatron-to-hf \\
        --load outputs/ck --hf-checkpoint Qwen3-0.6B --output outputs/hf

Several processes write the files in parallel, whatever the layout of the checkpoint. Each process
holds one parameter at a time. The output folder appears when it is complete. To continue an
interrupted conversion, repeat the same command: complete files are kept, by their SHA-256.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
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
from slime_like.cli.exit_status import UsageError, exit_status
from slime_like.logs import warn_rank_0

if TYPE_CHECKING:
    from slime_like.checkpoints.state import TrainerState
    from slime_like.conversion.network import MetaNetwork


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parser() -> argparse.ArgumentParser:
    result = conversion_parser(
        __doc__,
        model="the model that the run started from, for config.json and tokenizer",
        dtype="as in the checkpoint",
        critic="saved as a token classification model",
    )
    result.add_argument("--load", required=True, help="folder of checkpoints (--save of a run)")
    result.add_argument("--ckpt-step", type=int, help="step to convert; default: the newest")
    result.add_argument(
        "--output",
        required=True,
        help="folder for the Hugging Face model; an existing one is replaced at the end",
    )
    result.add_argument(
        "--quantized",
        action="store_true",
        help="quantise like --hf-checkpoint; default: the output is not quantised",
    )
    result.add_argument(
        "--max-shard-size", default="5GB", help="maximum file size, such as 5GB, 500MB or 2GiB"
    )
    result.add_argument(
        "--no-verify-checkpoint",
        action="store_true",
        help="do not verify the checkpoint's manifest first",
    )
    return result


def convert(args: argparse.Namespace) -> int:
    size = shard_bytes(args.max_shard_size)
    if args.quantized and args.verify:
        raise UsageError(
            "--verify excludes --quantized: quantised weights differ from the checkpoint's"
        )
    start(args)
    from arguments.hf.model import read_hf_model
    from arguments.hf.vision import read_vision
    from slime_like.checkpoints.folders import checkpoint_folder
    from slime_like.conversion.network import MetaNetwork, conversion_layout
    from slime_like.conversion.to_hf import NetworkSource, convert_to_hf, has_value_head
    from slime_like.megatron.checkpoint.load import open_checkpoint
    from slime_like.megatron.init import process_groups
    from slime_like.weights.safetensors_reader import stored_format

    critic = args.network == "critic"
    folder = checkpoint_folder(args.load, step_of(args))
    # rm_loss trains the policy with one
    value_head = critic or has_value_head(folder / args.network)
    hf = read_hf_model(args.hf_checkpoint, value_head=value_head)
    quantized = stored_format(args.hf_checkpoint) if args.quantized else None
    if args.quantized and not quantized:
        raise UsageError(
            f"--quantized: --hf-checkpoint {args.hf_checkpoint} is not quantised; give the "
            "quantised folder, or remove the flag"
        )
    warn_of_tokenizer(hf, args.hf_checkpoint)
    started = time.perf_counter()
    parallel = conversion_layout(hf)
    with process_groups(parallel, virtual_stages=None, seed=1) as layout:
        state = open_checkpoint(folder, verify=not args.no_verify_checkpoint)
        check_network(args.network, folder, state)
        mtp_layers = None if value_head else state["model"].get("mtp_num_layers")
        vision = None
        if state["model"].get("vision_tower"):
            vision = read_vision(args.hf_checkpoint, hf, trained=not critic)
        network = MetaNetwork(
            hf, parallel, layout, value_head=value_head, mtp_layers=mtp_layers, vision=vision
        )
        check_template(args.hf_checkpoint, folder, state, network)
        source = NetworkSource(
            network,
            folder / args.network,
            args.hf_checkpoint,
            torch_dtype(args.dtype) if args.dtype else None,
            quantized,
        )
        with progress(args, "to Hugging Face", source.nbytes) as advance:
            converted = convert_to_hf(
                source,
                args.hf_checkpoint,
                args.output,
                checkpoint=folder,
                max_shard_bytes=size,
                # a reward model's, as --save-hf writes it: its bias is 0
                value_task="ForTokenClassification" if critic else "ForSequenceClassification",
                workers=args.workers,
                advance=advance,
            )
        logger.info(describe(converted, time.perf_counter() - started))
        verify(args, source, args.output, source.nbytes)
    return 0


def check_network(name: str, folder: Path, state: TrainerState) -> None:
    """Raise UsageError if the checkpoint has no network of this name."""
    if name not in state["networks"]:
        networks = ", ".join(state["networks"]) or "no network"
        raise UsageError(f"--network {name}: checkpoint {folder} has {networks}; name one of these")


def check_template(template: str, folder: Path, state: TrainerState, network: MetaNetwork) -> None:
    """Raise UsageError naming the settings that differ from the template's."""
    from slime_like.checkpoints.manifest import identity_differences

    shape = network.shape
    if network.value_head:
        del shape["untied_embeddings"]  # it has no output layer
    if different := identity_differences(state.get("model", {}), shape, "template"):
        raise UsageError(
            f"--hf-checkpoint {template}: is not the model of checkpoint {folder}: "
            f"{', '.join(different)}; give the folder that the run started from"
        )


def step_of(args: argparse.Namespace) -> int:
    """The step to convert. Raises UsageError if there is none."""
    from slime_like.checkpoints.folders import complete_steps, newest_step

    if args.ckpt_step is not None:
        if args.ckpt_step not in (steps := complete_steps(args.load)):
            available = ", ".join(map(str, steps)) or "none"
            raise UsageError(
                f"--ckpt-step {args.ckpt_step}: not in {args.load}; complete steps: {available}"
            )
        return int(args.ckpt_step)
    try:
        step, warning = newest_step(args.load)
    except ValueError as error:
        raise UsageError(str(error)) from error
    warn_rank_0(logger, warning)
    return step


def shard_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    size = 0
    if match and match[2] in UNITS:
        size = int(float(match[1]) * UNITS[match[2]])
    if size < 1:
        raise UsageError(f"--max-shard-size {text}: must be a size such as 5GB, 500MB or 2GiB")
    return size


def main() -> int:
    args = parser().parse_args()
    return exit_status(lambda: convert(args))


if __name__ == "__main__":
    raise SystemExit(main())

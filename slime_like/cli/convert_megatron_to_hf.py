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
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.surroundings import require_surroundings
from slime_like.cli.convert_common import (
    DTYPES,
    VERIFY,
    WORKERS,
    UsageError,
    check_workers,
    exit_status,
    on_the_cpu,
    progress,
    progress_title,
    rank_and_world,
    verify,
    warn_of_tokenizer,
)
from slime_like.logs import set_up_logging, warn_rank_0

if TYPE_CHECKING:
    from slime_like.checkpoints.state import TrainerState
    from slime_like.conversion.meta_model import MetaModel
    from slime_like.conversion.to_hf import Exported, NetworkSource


logger = logging.getLogger("slime_like.convert")  # child of the package's logger

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", required=True, help="folder of checkpoints (--save of a run)")
    parser.add_argument("--ckpt-step", type=int, help="step to convert; default: the newest")
    parser.add_argument(
        "--hf-checkpoint",
        required=True,
        help="the model that the run started from, for config.json and tokenizer",
    )
    parser.add_argument(
        "--output",
        required=True,
        help="folder for the Hugging Face model; an existing one is replaced at the end",
    )
    parser.add_argument(
        "--network",
        choices=("policy", "critic"),
        default="policy",
        help="critic: saved as a token classification model",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights; default: as in the checkpoint"
    )
    parser.add_argument(
        "--quantized",
        action="store_true",
        help="quantise like --hf-checkpoint; default: the output is not quantised",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="maximum file size, such as 5GB, 500MB or 2GiB"
    )
    parser.add_argument("--workers", **WORKERS)
    parser.add_argument("--verify", **VERIFY)
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_true",
        help="do not verify the checkpoint's manifest first",
    )
    parser.add_argument("--no-progress", action="store_true")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Validate the flags. Raises UsageError."""
    if args.quantized and args.verify:
        raise UsageError(
            "--verify excludes --quantized: quantised weights differ from the checkpoint's"
        )
    check_workers(args.workers)


def convert(args: argparse.Namespace) -> int:
    on_the_cpu()
    require_surroundings()
    import torch

    import megatron_patches
    from arguments.hf.model import read_hf_model
    from slime_like.checkpoints.folders import checkpoint_folder
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    rank, world = rank_and_world()
    set_up_logging(rank)
    size = shard_bytes(args.max_shard_size)
    value_head = args.network == "critic"
    check_flags(args)
    hf = read_hf_model(args.hf_checkpoint, value_head=value_head)
    folder = checkpoint_folder(args.load, step_of(args))
    warn_of_tokenizer(hf, args.hf_checkpoint)
    megatron_patches.apply()
    from slime_like.conversion.meta_model import build_meta_model, conversion_layout
    from slime_like.conversion.to_hf import convert_to_hf
    from slime_like.megatron.checkpoint.load import open_checkpoint
    from slime_like.megatron.init import process_groups

    started = time.perf_counter()
    parallel = conversion_layout(hf)
    with process_groups(parallel, virtual_stages=None, seed=1) as layout:
        state = open_checkpoint(folder, verify=not args.no_verify_checkpoint)
        check_network(args.network, folder, state)
        mtp_layers = None if value_head else state["model"].get("mtp_num_layers")
        meta_model = build_meta_model(
            hf, parallel, layout, torch.float32, value_head=value_head, mtp_layers=mtp_layers
        )
        check_template(args.hf_checkpoint, folder, state, meta_model)
        source = source_of(args, meta_model, folder)
        total = sum(planned.nbytes for _, planned in source.tensors.values())
        show = rank == 0 and not args.no_progress
        share = -(-total // world)
        with progress(progress_title("to Hugging Face", world), share, show=show) as bar:
            exported = convert_to_hf(
                source,
                args.hf_checkpoint,
                args.output,
                checkpoint=folder,
                max_shard_bytes=size,
                workers=args.workers,
                advance=bar,
            )
        seconds = time.perf_counter() - started
        logger.info(f"{args.output}: {describe(exported)}, {seconds:.1f} s")
        for line in verify(args.verify, source, args.output, share=share, show=show):
            logger.info(line)
    return 0


def describe(exported: Exported) -> str:
    """Message about what was written."""
    text = f"{exported.bytes / 1e9:.3f} GB in {exported.files} file(s)"
    if exported.kept:
        text += f", {exported.kept} of them kept from an interrupted conversion"
    return text


def source_of(args: argparse.Namespace, meta_model: MetaModel, folder: Path) -> NetworkSource:
    """The network of a checkpoint, in the requested dtype or quantisation."""
    import torch

    from slime_like.conversion.to_hf import NetworkSource
    from slime_like.weights.safetensors_reader import stored_format

    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype else None
    quantized = stored_format(args.hf_checkpoint) if args.quantized else None
    return NetworkSource(meta_model, folder / args.network, args.hf_checkpoint, dtype, quantized)


def check_network(name: str, folder: Path, state: TrainerState) -> None:
    """Raise UsageError if the checkpoint has no network of this name."""
    if name not in state["networks"]:
        networks = ", ".join(state["networks"]) or "no network"
        raise UsageError(f"--network {name}: checkpoint {folder} has {networks}; name one of these")


def check_template(template: str, folder: Path, state: TrainerState, meta_model: object) -> None:
    """Raise UsageError naming the settings that differ from the template's."""
    from slime_like.conversion.to_hf import model_differences

    different = model_differences(state.get("model", {}), meta_model)  # type: ignore[arg-type]
    if different:
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

"""Make a quantised copy of a Hugging Face folder in bf16, for servers: a run with --load of the
bf16 weights, and with the copy as --hf-checkpoint, is sampled from in its format.

    slime-like quantize --hf-checkpoint Qwen3-8B --output Qwen3-8B-fp8
    slime-like quantize --hf-checkpoint gpt-oss-20b-bf16 --output gpt-oss-20b-mxfp4 --method mxfp4

The linear layers of attention, MLPs and experts are quantised, and embeddings, output layer, norms,
routers, small projections and vision towers are not, as in published folders. The folder appears
when it is complete. To continue an interrupted command, repeat it: complete files are kept, by
their SHA-256.
"""

from __future__ import annotations

import argparse
import os
import time

from slime_like.cli.convert import describe, logger, progress, start
from slime_like.cli.convert_megatron_to_hf import shard_bytes
from slime_like.cli.exit_status import UsageError, exit_status, rank_and_world

METHODS = ("fp8", "mxfp4", "int4", "int8")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--hf-checkpoint", required=True, help="the folder in bf16 or float32")
    result.add_argument("--output", required=True, help="folder to write; must not exist")
    result.add_argument(
        "--method",
        choices=METHODS,
        default="fp8",
        help="fp8: e4m3 in blocks (DeepSeek, Qwen3-FP8); mxfp4: the experts of gpt-oss; int4, "
        "int8: compressed-tensors pack-quantized, symmetric",
    )
    result.add_argument(
        "--scale-format",
        choices=("float", "ue8m0"),
        help="of --method fp8: float, or powers of two (DeepSeek-V3.1); default: float",
    )
    result.add_argument(
        "--block-size",
        type=int,
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        help="of --method fp8: values per scale; default: 128 128",
    )
    result.add_argument(
        "--group-size",
        type=int,
        help="of --method int4 and int8: values of a row per scale; default: 32",
    )
    result.add_argument(
        "--modules-to-not-convert",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="further modules to keep, by name or a part of it between dots, such as o_proj",
    )
    result.add_argument(
        "--max-shard-size", default="5GB", help="maximum file size, such as 5GB, 500MB or 2GiB"
    )
    result.add_argument(
        "--workers",
        type=int,
        default=min(4, os.cpu_count() or 1),
        help="threads; each writes a file and holds one weight",
    )
    result.add_argument("--no-progress", action="store_true")
    return result


def quantize(args: argparse.Namespace) -> int:
    size = shard_bytes(args.max_shard_size)
    check_flags(args)
    start(args)
    from arguments.hf.model import read_hf_model
    from slime_like.conversion.quantize import Method, QuantizedCopy, check_output, quantize_folder

    read_hf_model(args.hf_checkpoint)  # refuses what is not supported
    check_output(args.output)
    started = time.perf_counter()
    method = Method(
        args.method,
        scales=args.scale_format or "float",
        block=tuple(args.block_size or (128, 128)),
        group=args.group_size or 32,
        excluded=tuple(args.modules_to_not_convert),
    )
    copy = QuantizedCopy(args.hf_checkpoint, method)
    with progress(args, "quantising", copy.nbytes) as advance:
        written = quantize_folder(
            copy,
            args.hf_checkpoint,
            args.output,
            max_shard_bytes=size,
            workers=args.workers,
            advance=advance,
        )
    details = f", {len(copy.quantized)} weights in {args.method}"
    logger.info(describe(written, time.perf_counter() - started, details))
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags of another method, sizes below 1, and several processes."""
    of_fp8 = {"--scale-format": args.scale_format, "--block-size": args.block_size}
    for flag, value in of_fp8.items():
        if value is not None and args.method != "fp8":
            raise UsageError(f"{flag}: is of --method fp8, not of {args.method}; remove it")
    if args.group_size is not None and args.method not in ("int4", "int8"):
        raise UsageError(
            f"--group-size: is of --method int4 and int8, not of {args.method}; remove it"
        )
    if args.modules_to_not_convert and args.method == "mxfp4":
        raise UsageError("--modules-to-not-convert: mxfp4 is of all experts; remove it")
    if args.block_size is not None and min(args.block_size) < 1:
        raise UsageError(f"--block-size {args.block_size[0]} {args.block_size[1]}: must be >= 1")
    if args.group_size is not None and args.group_size < 1:
        raise UsageError(f"--group-size {args.group_size}: must be >= 1")
    if rank_and_world()[1] > 1:
        raise UsageError("quantize is one process; start it without torchrun, see --workers")


def main() -> int:
    args = parser().parse_args()
    return exit_status(lambda: quantize(args))


if __name__ == "__main__":
    raise SystemExit(main())

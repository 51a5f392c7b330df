"""slime-like convert DIRECTION ...: what both directions share, which is flags, start, verification
and progress bar."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.surroundings import require_surroundings
from slime_like.cli.__main__ import Command, dispatch
from slime_like.cli.exit_status import UsageError, on_the_cpu, rank_and_world
from slime_like.logs import set_up_logging

if TYPE_CHECKING:
    import torch

    from arguments.hf.model import HfModel
    from slime_like.conversion.network import Advance, Converted
    from slime_like.conversion.to_hf import NetworkSource

DIRECTIONS = {
    "hf-to-megatron": Command(
        "slime_like.cli.convert_hf_to_megatron",
        "a Hugging Face folder to a checkpoint for --load, --ref-load and --critic-load",
    ),
    "megatron-to-hf": Command(
        "slime_like.cli.convert_megatron_to_hf", "a checkpoint of a run to a Hugging Face folder"
    ),
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

logger = logging.getLogger("slime_like.convert")  # child of the package's logger


def conversion_parser(
    description: str | None, *, model: str, dtype: str, critic: str
) -> argparse.ArgumentParser:
    """A parser with the flags of both directions, and the help of those that differ."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--hf-checkpoint", required=True, help=model)
    result.add_argument("--dtype", choices=DTYPES, help=f"of the weights; default: {dtype}")
    networks = ("policy", "critic")
    result.add_argument("--network", choices=networks, default="policy", help=f"critic: {critic}")
    result.add_argument(
        "--workers",
        type=int,
        default=min(4, os.cpu_count() or 1),
        help="threads per process; each writes a file and holds one parameter",
    )
    result.add_argument(
        "--verify",
        choices=("checksums", "logits"),
        nargs="+",
        default=[],
        help="compare both formats afterwards. checksums: every parameter, bit by bit; logits: of "
        "transformers' model and of megatron-core's on fixed tokens, in float32, where rank 0 "
        "needs memory for the full model",
    )
    result.add_argument("--no-progress", action="store_true")
    return result


def start(args: argparse.Namespace) -> None:
    """Prepare this process for a conversion. Raises UsageError."""
    on_the_cpu()
    require_surroundings()
    import megatron_patches
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    megatron_patches.apply()
    set_up_logging(rank_and_world()[0])
    if args.workers < 1:
        raise UsageError(f"--workers {args.workers}: must be >= 1")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that --dtype or a config.json names."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES.get(name, name))
    return dtype


def warn_of_tokenizer(hf: HfModel, folder: str) -> None:
    """Warn on rank 0 if training could not use the folder's tokenizer, which conversion does not
    need. Tokenizers with custom code are not checked."""
    from slime_like.data.tokenizer import load_tokenizer

    if rank_and_world()[0] != 0 or next(Path(folder).glob("*.py"), None) is not None:
        return
    try:
        load_tokenizer(folder, vocab_size=hf.gpt.get("vocab_size"), trust_remote_code=False)
    except ValueError as error:
        print(
            f"warning: {error}; the weights are converted without it", file=sys.stderr, flush=True
        )


def verify(args: argparse.Namespace, source: NetworkSource, folder: str, size: int) -> None:
    """Run the checks of --verify, and report those that passed. Collective. Raises ValueError.

    Args:
        folder: The Hugging Face model.
        size: Bytes of the model.
    """
    from slime_like.conversion.verify import TOKENS, compare_bits, compare_logits

    if "checksums" in args.verify:
        with progress(args, "comparing", size) as advance:
            number = compare_bits(source, folder, advance)
        logger.info(
            f"verified: all {number} parameters of {source.stored.folder} and {folder} have the "
            "same bits"
        )
    if "logits" in args.verify:
        difference = compare_logits(source, folder)
        logger.info(
            f"verified: logits of {TOKENS} tokens in both formats differ by at most "
            f"{difference:.2g} standard deviations"
        )


def describe(converted: Converted, seconds: float, details: str = "") -> str:
    """Message about what was written."""
    text = (
        f"{converted.folder}: {converted.bytes / 1e9:.3f} GB in {converted.files} file(s), "
        f"{seconds:.1f} s{details}"
    )
    if converted.kept:
        text += f", {converted.kept} of them kept from an interrupted conversion"
    return text


@contextmanager
def progress(args: argparse.Namespace, title: str, total: int) -> Iterator[Advance]:
    """Rank 0's progress bar on stderr, unless --no-progress. Yields a function to call with the
    bytes of each step, from any thread.

    Args:
        total: Bytes of all ranks.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    rank, world = rank_and_world()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    disable = rank != 0 or args.no_progress
    with Progress(*columns, console=Console(stderr=True), disable=disable) as bar:
        title = title if world == 1 else f"{title}, rank 0 of {world}"
        task = bar.add_task(title, total=-(-total // world))
        yield lambda size: bar.advance(task, size)


def main() -> int:
    return dispatch("slime-like convert", DIRECTIONS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""Write the files of a Hugging Face folder side by side, so that an interrupted conversion is
continued.

Everything is written next to the output folder and renamed when complete; complete files are reused
by the next attempt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from slime_like.checkpoints.files import MARKER, complete_file, sync_path
from slime_like.checkpoints.replacement import folder_to_replace, replace_folder
from slime_like.conversion.network import Advance
from slime_like.distributed.collectives import from_rank_zero, together
from slime_like.megatron.checkpoint.save import MIB, check_space
from slime_like.weights.safetensors_writer import ShardPlan, write_shard

PARTIAL = ".partial"


def write_shards(
    folder: Path,
    shards: Sequence[ShardPlan],
    origin: str,
    stream: Callable[[ShardPlan], Iterator[tuple[str, Tensor]]],
    complete: Callable[[Path], None],
    *,
    workers: int,
    advance: Advance,
) -> int:
    """Write the files, distributed over processes and threads, and complete and rename the folder.
    Collective; returns how many files were kept from an earlier attempt. Raises ValueError or
    OSError on every rank.

    Args:
        origin: Fingerprint of everything but the files that determines the bytes of the output.
        stream: Yields a file's tensors in order.
        complete: Adds what else the output has to the folder of all files, next to the output.
            Called by rank 0.
        advance: Called with the bytes of each step, from any thread.
    """
    folder = folder_to_replace(folder)
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    identity = hashlib.sha256((origin + _plan_text(shards)).encode()).hexdigest()
    kept = from_rank_zero(lambda: _prepare(partial, shards, identity))
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1

    def write(shard: ShardPlan) -> None:
        if shard.file_name in kept:
            advance(shard.nbytes)
        else:
            write_shard(partial, shard, stream(shard), identity, advance)

    def write_mine() -> None:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(write, shards[rank::world]))

    def finish() -> None:
        complete(partial)
        # last: without them, an attempt after an error would write every file again
        for shard in shards:
            (partial / (shard.file_name + MARKER)).unlink()
        sync_path(partial)
        replace_folder(partial, folder)

    together(write_mine)
    from_rank_zero(finish)
    return len(kept)


def _plan_text(shards: Sequence[ShardPlan]) -> str:
    """The files with their tensors."""
    plan = []
    for shard in shards:
        tensors = [(t.name, t.shape, str(t.dtype)) for t in shard.tensors]
        plan.append((shard.file_name, tensors))
    return json.dumps(plan)


def _prepare(partial: Path, shards: Sequence[ShardPlan], identity: str) -> set[str]:
    """Prepare the working folder: keep only complete files of the same conversion, and return
    their names."""
    partial.mkdir(parents=True, exist_ok=True)
    names = [shard.file_name for shard in shards]
    kept = {name for name in names if complete_file(partial / name, identity) is not None}
    for path in partial.iterdir():
        if path.name.removesuffix(MARKER) not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    needed = sum(shard.nbytes for shard in shards if shard.file_name not in kept)
    check_space(partial, needed + MIB, "name a folder on another disk", what="--output:")
    return kept

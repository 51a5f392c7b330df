"""What tests do to a run from the inside: functions that a rank calls before it starts (see TrainServer.train(hook=...)).

Each gets the rank and the words of the hook."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from time import sleep
from typing import Any

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def before_each_call(action: Callable[[], None]) -> None:
    """Run `action` before every write, sync, rename, removal and new folder of a checkpoint."""
    from slime_like.checkpoints import files

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            action()
            return real(*args, **keywords)

        return call

    for name in CALLS:
        setattr(os, name, guarded(getattr(os, name)))
    files.HashedFile.write = guarded(files.HashedFile.write)  # type: ignore[method-assign]


def in_save(number: int, action: Callable[[], None]) -> None:
    """Arm `action` when the run begins to write its `number`th checkpoint."""
    from slime_like.megatron_backend.checkpoint.save import CheckpointSaver

    save, seen = CheckpointSaver.save, [0]

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        seen[0] += 1
        armed[0] = seen[0] == number
        return save(self, *args, **keywords)

    armed = [False]
    CheckpointSaver.save = counted  # type: ignore[method-assign]
    before_each_call(lambda: action() if armed[0] else None)


def kill_in_second_save(rank: int, point: str) -> None:
    left = [int(point)]
    lock = threading.Lock()

    def count() -> None:
        with lock:  # writers are threads
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        in_save(2, count)


def kill_after(rank: int, seconds: str) -> None:
    """Counted from the first save on."""
    from slime_like.megatron_backend.checkpoint.save import CheckpointSaver

    save, started = CheckpointSaver.save, []

    def first(self: Any, *args: Any, **keywords: Any) -> Any:
        if not started:
            started.append(threading.Timer(float(seconds), lambda: os.kill(os.getpid(), signal.SIGKILL)))
            started[0].start()
        return save(self, *args, **keywords)

    CheckpointSaver.save = first  # type: ignore[method-assign]


def signal_in_step(rank: int, name: str, step: str, on_rank: str) -> None:
    """SIGTERM or SIGKILL in that optimizer step (from 1), on one rank."""
    from slime_like.megatron_backend.backend import MegatronBackend

    accumulate, seen = MegatronBackend.accumulate, [0]

    def counted(self: Any, *args: Any) -> Any:
        seen[0] += 1
        if seen[0] == int(step) and rank == int(on_rank):
            os.kill(os.getpid(), signal.Signals[name])
        return accumulate(self, *args)

    MegatronBackend.accumulate = counted  # type: ignore[method-assign]


def disk_full_in_save(rank: int, number: str, on_rank: str) -> None:
    """Writing fails, on rank 0 from the fourth write on, as on a disk that fills up."""
    writes = [0]
    from slime_like.checkpoints import files

    def fail() -> None:
        writes[0] += 1
        if writes[0] > (3 if rank == 0 else 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank != int(on_rank):
        return
    kept = {name: getattr(os, name) for name in CALLS}
    in_save(int(number), fail)
    for name, call in kept.items():
        setattr(os, name, call)
    assert files.HashedFile.write.__name__ == "call"


def little_disk(rank: int, free: str) -> None:
    usage = shutil.disk_usage

    def shrunk(path: Any) -> Any:
        return usage(path)._replace(free=int(free))

    shutil.disk_usage = shrunk


def flip_a_moment_after_load(rank: int) -> None:
    """One bit of one tensor of Adam's, behind the loader's back."""
    import torch

    from slime_like.megatron_backend.checkpoint import load

    inner = load._load_network

    def flipped(network: Any, folder: Any, **keywords: Any) -> None:
        inner(network, folder, **keywords)
        state = next(iter(network.optimizer.optimizer.state.values()))
        bits = state["exp_avg_sq"].view(torch.int32).view(-1)
        bits[3] ^= 1

    load._load_network = flipped


def kill_in_shard(rank: int, number: str) -> None:
    """A conversion dies when it begins to write the `number`th file, with half of it there."""
    from slime_like.convert import shards

    real, seen = shards.hashed_file, [0]

    def counted(path: Any) -> Any:
        seen[0] += 1
        if seen[0] == int(number):
            path.write_bytes(b"half")
            os._exit(9)
        return real(path)

    shards.hashed_file = counted


def exchange_gate_and_up(rank: int, layer: str) -> None:
    """A map that is wrong while the files are written, and right afterwards: the gate and the up projection of one expert change places."""
    from slime_like.convert import to_hf

    whole = to_hf.whole_tensors

    def exchanged(mapping: Any, shards: Any, sizes: Any) -> Any:
        made = whole(mapping, shards, sizes)
        names = [
            name for name in made if f"layers.{layer}." in name and "experts.0." in name and ("gate_proj" in name or "up_proj" in name)
        ]
        return made | dict(zip(names, [made[name] for name in reversed(names)], strict=True))

    to_hf.whole_tensors = exchanged


def in_phase(phase: str, time: int, action: Callable[[], None]) -> None:
    """When the run enters that phase for the `time`th time."""
    from slime_like.metrics.progress import Progress

    enter, seen = Progress.phase, [0]

    def counted(self: Any, name: str) -> Any:
        seen[0] += name == phase
        if name == phase and seen[0] == time:
            self._on_phase(name)
            sleep(2.0)  # the others hear of the phase
            action()
        return enter(self, name)

    Progress.phase = counted  # type: ignore[method-assign]


def stop_in_phase(rank: int, phase: str, time: str, on_rank: str) -> None:
    """The process is stopped, as by a debugger, and stays so."""
    if rank == int(on_rank):
        in_phase(phase, int(time), lambda: os.kill(os.getpid(), signal.SIGSTOP))


def kill_in_phase(rank: int, phase: str, time: str, on_rank: str) -> None:
    if rank == int(on_rank):
        in_phase(phase, int(time), lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleep_in_phase(rank: int, phase: str, seconds: str, on_rank: str) -> None:
    """A rank that is late, or stuck: its process runs, its main thread does not."""
    if rank == int(on_rank):
        in_phase(phase, 2, lambda: sleep(float(seconds)))

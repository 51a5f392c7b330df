"""Faults that tests inject into a run: functions that a rank calls before it starts (see
TrainServer.train(hook=...)). Each gets the rank and the words of the hook."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time, sleep
from typing import Any


class Payload:
    """Makes the folder `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def write_payload(path: Path, mark: Path) -> None:
    """Make `path` a pickle, torch's where the name is one of torch's files, that makes the folder
    `mark` when it is loaded."""
    if path.suffix in (".pt", ".distcp", ".bin"):
        import torch

        torch.save(Payload(mark), path)
    else:
        path.write_bytes(pickle.dumps(Payload(mark)))


CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


EVERY = 256  # of the thousands of writes of a save, where a test cannot be at each


def before_each_call(action: Callable[[str], None]) -> None:
    """Run `action` before every write, sync, rename, removal and new folder of a checkpoint, with
    the name of the call. Writes are called "open" (the first to a file), "write" (every 256th) and
    ""."""
    from slime_like.checkpoints import files

    def guarded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            action(name)
            return real(*args, **keywords)

        return call

    write, lock, written = files.HashedFile.write, threading.Lock(), [0]

    def guarded_write(self: Any, data: Any) -> int:
        with lock:  # writers are threads
            written[0] += 1
            name = "open" if self.tell() == 0 else "write" if written[0] % EVERY == 0 else ""
        action(name)
        return write(self, data)

    for name in CALLS:
        setattr(os, name, guarded(name, getattr(os, name)))
    files.HashedFile.write = guarded_write  # type: ignore[method-assign]


def in_save(number: int, action: Callable[[str], None]) -> None:
    """Arm `action` when the run begins to write its `number`th checkpoint, until that is published."""
    from slime_like.megatron.checkpoint.save import CheckpointSaver

    save, finish, seen = CheckpointSaver.save, CheckpointSaver.finish, [0]

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        seen[0] += 1
        armed[0] = seen[0] == number
        return save(self, *args, **keywords)

    def finished(self: Any) -> Any:
        report = finish(self)
        armed[0] = armed[0] and report is None
        return report

    armed = [False]
    CheckpointSaver.save = counted  # type: ignore[method-assign]
    CheckpointSaver.finish = finished  # type: ignore[method-assign]
    before_each_call(lambda name: action(name) if armed[0] else None)


def kill_in_second_save(rank: int, call: str, point: str) -> None:
    left = [int(point)]
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:  # writers are threads
            left[0] -= name == call
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        in_save(2, count)


def look_in_second_save(rank: int, root: str, report: str) -> None:
    """Before each call: what would a process find that started now, had this one been killed?
    SIGKILL leaves what was written before it. A line of
    `report` for each call: its name, the complete steps, the tracker's."""
    from slime_like.checkpoints.folders import complete_steps, newest_step

    def look(name: str) -> None:
        line = f"{name or 'write'} {complete_steps(root)} {newest_step(root)}\n"
        os.write(lines, line.encode())

    if rank == 0:
        lines = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        in_save(2, look)


def kill_after(rank: int, seconds: str) -> None:
    """Counted from the first save on."""
    from slime_like.megatron.checkpoint.save import CheckpointSaver

    save, started = CheckpointSaver.save, []

    def first(self: Any, *args: Any, **keywords: Any) -> Any:
        if not started:
            started.append(
                threading.Timer(float(seconds), lambda: os.kill(os.getpid(), signal.SIGKILL))
            )
            started[0].start()
        return save(self, *args, **keywords)

    CheckpointSaver.save = first  # type: ignore[method-assign]


def signal_in_step(rank: int, name: str, step: str, on_rank: str) -> None:
    """SIGTERM or SIGKILL in that optimizer step (from 1), on one rank."""
    from slime_like.megatron.backend import MegatronBackend

    forward_backward, seen = MegatronBackend.forward_backward, [0]

    def counted(self: Any, *args: Any) -> Any:
        seen[0] += 1
        if seen[0] == int(step) and rank == int(on_rank):
            os.kill(os.getpid(), signal.Signals[name])
        return forward_backward(self, *args)

    MegatronBackend.forward_backward = counted  # type: ignore[method-assign]


def lose_lock_in_step(rank: int, root: str, step: str) -> None:
    """The lock of --save disappears in that optimizer step (from 1)."""
    from slime_like.megatron.backend import MegatronBackend

    forward_backward, seen = MegatronBackend.forward_backward, [0]

    def counted(self: Any, *args: Any) -> Any:
        seen[0] += 1
        if seen[0] == int(step) and rank == 0:
            (Path(root) / "run.lock").unlink()
        return forward_backward(self, *args)

    MegatronBackend.forward_backward = counted  # type: ignore[method-assign]


def disk_full_in_save(rank: int, number: str, on_rank: str) -> None:
    """Writing fails, on rank 0 from the fourth write on, as on a disk that fills up."""
    writes = [0]
    from slime_like.checkpoints import files

    def fail(name: str) -> None:
        writes[0] += 1
        if writes[0] > (3 if rank == 0 else 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank != int(on_rank):
        return
    kept = {name: getattr(os, name) for name in CALLS}
    in_save(int(number), fail)
    for name, call in kept.items():
        setattr(os, name, call)
    assert files.HashedFile.write.__name__ == "guarded_write"


def little_disk(rank: int, free: str) -> None:
    usage = shutil.disk_usage

    def shrunk(path: Any) -> Any:
        return usage(path)._replace(free=int(free))

    shutil.disk_usage = shrunk


def flip_a_moment_after_load(rank: int) -> None:
    """One bit of one tensor of Adam's, behind the loader's back."""
    import torch

    from slime_like.megatron.checkpoint import load

    inner = load._load_network

    def flipped(network: Any, folder: Any, **keywords: Any) -> None:
        inner(network, folder, **keywords)
        state = next(iter(network.optimizer.optimizer.state.values()))
        bits = state["exp_avg_sq"].view(torch.int32).view(-1)
        bits[3] ^= 1

    load._load_network = flipped


def kill_in_shard(rank: int, number: str) -> None:
    """A conversion dies when it begins to write the `number`th file, with half of it there."""
    from slime_like.weights import safetensors_writer

    real, seen = safetensors_writer.hashed_file, [0]

    def counted(path: Any) -> Any:
        seen[0] += 1
        if seen[0] == int(number):
            path.write_bytes(b"half")
            os._exit(9)
        return real(path)

    safetensors_writer.hashed_file = counted


def exchange_gate_and_up(rank: int, layer: str) -> None:
    """A map that is wrong while the files are written, and right afterwards: the gate and the up
    projection of one expert change places."""
    from slime_like.weights.hf_export import HfExport

    full_tensors = HfExport.full_tensors

    def exchanged(self: HfExport, parameter: Any, read: Any) -> Any:
        made = full_tensors(self, parameter, read)
        names = [
            name
            for name in made
            if f"layers.{layer}." in name
            and "experts.0." in name
            and ("gate_proj" in name or "up_proj" in name)
        ]
        return made | dict(zip(names, [made[name] for name in reversed(names)], strict=True))

    HfExport.full_tensors = exchanged  # type: ignore[method-assign]


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


def kill_in_round(rank: int, number: str) -> None:
    """In that round (from 1) of generating on rank 0, before its responses are part of the pool."""
    from slime_like.rollout.collector import RoundGeneration

    wait, seen = RoundGeneration.wait, [0]

    def counted(self: Any) -> Any:
        ended = wait(self)
        seen[0] += 1
        if seen[0] == int(number) and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return ended

    RoundGeneration.wait = counted  # type: ignore[method-assign]


def sleep_in_phase(rank: int, phase: str, seconds: str, on_rank: str) -> None:
    """A rank that is late, or stuck: its process runs, its main thread does not."""
    if rank == int(on_rank):
        in_phase(phase, 2, lambda: sleep(float(seconds)))


def work_in_phase(rank: int, phase: str, seconds: str, on_rank: str) -> None:
    """One rank computes so much longer in each `phase`, as on a slow processor."""
    from slime_like.metrics.progress import Progress

    enter = Progress.phase

    @contextlib.contextmanager
    def slowed(self: Any, name: str) -> Iterator[Any]:
        with enter(self, name) as found:
            until = process_time() + float(seconds) * (name == phase)
            while process_time() < until:
                sum(range(1000))
            yield found

    if rank == int(on_rank):
        Progress.phase = slowed  # type: ignore[assignment]


def suspend_all_in_phase(rank: int, phase: str, time: str, seconds: str) -> None:
    """All ranks are stopped together, as `scontrol suspend` does, and continued after that time."""
    from slime_like.distributed.failure_report import job

    def suspend() -> None:
        addresses = [job().store.read(f"address/{other}") or "" for other in range(2)]
        pids = " ".join(address.split("process ")[1] for address in addresses)
        command = f"kill -STOP {pids}; sleep {seconds}; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", command], start_new_session=True)
        sleep(1.0)  # until it comes

    if rank == 0:
        in_phase(phase, int(time), suspend)


def work_in(rank: int, folder: str) -> None:
    """The run's names without a folder are in this one."""
    os.chdir(folder)


def count_deliveries(rank: int, out: str) -> None:
    """A line of `out`/threads for each delivery of samples: the thread that rank 0 has it in."""
    from slime_like.batching.delivery import SampleDelivery

    delivered = SampleDelivery._exchange

    def counted(self: Any, *args: Any) -> Any:
        if rank == 0:
            with open(Path(out, "threads"), "a", encoding="ascii") as file:
                file.write(f"{threading.current_thread().name}\n")
        return delivered(self, *args)

    SampleDelivery._exchange = counted  # type: ignore[method-assign]


def deliver_in_front(rank: int, out: str) -> None:
    """As `count_deliveries`; rollouts that are sampled ahead are delivered when they are trained on."""
    from slime_like.batching.builder import BatchBuilder

    count_deliveries(rank, out)
    BatchBuilder.deliver_early = lambda self, rollout_id, samples, group: None  # type: ignore[method-assign]


def slow_tokens(rank: int, seconds: str) -> None:
    """The local engine takes at least so long for a token."""
    from slime_like.engines.local.decoder import Decoder

    forward = Decoder._forward

    def slow(self: Decoder, *args: Any) -> Any:
        sleep(float(seconds))
        return forward(self, *args)

    Decoder._forward = slow  # type: ignore[method-assign]


def set_variable(rank: int, name: str, value: str) -> None:
    """An environment variable of the run."""
    os.environ[name] = value

"""Workers of test_server.py: the workers' loop with a model host that fails on some ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime_like.distributed import connections
from slime_like.distributed.connections import opening_groups
from slime_like.errors import RunError
from slime_like.tinker import codec, worker
from slime_like.tinker.errors import Refused
from slime_like.tinker.worker_backend import UNCHANGED, WEIGHTS


class Source:
    """Commands one after another, and what was answered."""

    def __init__(self, commands: list[dict[str, Any]]) -> None:
        self.commands, self.answers = commands, []  # type: tuple[list[dict[str, Any]], list[dict[str, Any]]]

    def next(self) -> bytes:
        return codec.encode(self.commands.pop(0))

    def respond(self, message: dict[str, Any]) -> None:
        self.answers.append(message)


class Host:
    """Adds up over the ranks, or raises on the ranks that a command names."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.stage, self.group = rank, UNCHANGED, group
        self.recovered: list[tuple[str, int]] = []
        self.models = {"m": None}

    def recover(self, model: str, stage: int) -> bool:
        self.recovered.append((model, stage))
        return stage == WEIGHTS

    def execute(self, command: dict[str, Any]) -> Any:
        self.stage = command.get("stages", [UNCHANGED] * 2)[self.rank]
        if self.rank in command.get("refused_on", ()):
            raise Refused("it is bad")
        if self.rank in command.get("fails_on", ()):
            raise RuntimeError("it broke")
        if self.rank in command.get("exhausts", ()):
            torch.empty(2**60, dtype=torch.uint8)
        total = torch.tensor([self.rank + 1])
        if "no_collective" not in command:
            dist.all_reduce(total, group=self.group)
        return {"total": int(total), "data": command.get("data")}


def errors_are_agreed(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """Without collectives in between: every rank hears of it, and all continue with the next command."""
    commands: list[dict[str, Any]] = [
        {"id": "1", "op": "sum", "data": b"\x00\xff" * 100_000},
        {"id": "2", "op": "sum", "refused_on": [0, 1]},
        {
            "id": "3",
            "op": "forward_backward",
            "model": "m",
            "fails_on": [1],
            "no_collective": True,
            "stages": [1, 0],
        },
        {
            "id": "3b",
            "op": "optim_step",
            "model": "m",
            "fails_on": [0, 1],
            "no_collective": True,
            "stages": [1, 2],
        },
        {
            "id": "3c",
            "op": "forward_backward",
            "model": "m",
            "exhausts": [0, 1],
            "no_collective": True,
        },
        {
            "id": "3d",
            "op": "load",
            "model": "m",
            "refused_on": [0, 1],
            "stages": [2, 0],
        },
        {"id": "3e", "op": "load", "model": "m", "refused_on": [0, 1]},
        {"id": "4", "op": "idle"},
        {"id": "5", "op": "sum"},
        {"id": "6", "op": "stop"},
    ]
    host, layout = Host(rank), SimpleNamespace(rank=rank, world_size=world_size)
    source = Source(commands) if rank == 0 else None
    worker.ModelWorker(host, layout).serve(source)  # type: ignore[arg-type]
    answers = (
        []
        if source is None
        else [
            {k: len(v) if k == "data" else v for k, v in _flat(a).items()} for a in source.answers
        ]
    )
    return {"answers": answers, "recovered": host.recovered}


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    value = answer.get("value")
    return {
        **{k: v for k, v in answer.items() if k != "value"},
        **({k: v or b"" for k, v in value.items()} if isinstance(value, dict) else {}),
    }


def a_rank_is_left_in_a_collective(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """Rank 1 fails before a collective that rank 0 is in, several times, and at last where the
    connections can't be closed."""
    worker.AGREE_S = 5.0
    with opening_groups():
        group = dist.new_group(list(range(world_size)))
    host = Host(rank, group)
    loop = worker.ModelWorker(host, SimpleNamespace(rank=rank, world_size=world_size))  # type: ignore[arg-type]
    good = {"id": "0", "op": "sum"}
    answers = []
    for command in (
        {"id": "1", "op": "forward_backward", "model": "m", "exhausts": [1]},
        {"id": "2", "op": "forward_backward", "model": "m", "fails_on": [0], "stages": [1, 0]},
        {"id": "3", "op": "optim_step", "model": "m", "exhausts": [1], "stages": [2, 2]},
    ):
        started = time.monotonic()
        answer = loop.execute(command)
        seconds = time.monotonic() - started
        answers.append(
            {**answer, "seconds": seconds, "after": loop.execute(good)["value"]["total"]}
        )
    connections._opened.clear()
    if rank == 0:
        time.sleep(8.0)  # as if in the collective
        return {"answers": answers, "recovered": host.recovered}
    try:
        loop.execute({"id": "4", "op": "forward_backward", "model": "m", "fails_on": [1]})
    except RunError as error:
        return {"answers": answers, "recovered": host.recovered, "error": str(error)}
    return {}

"""A node that is lost costs a restart: two agents of torchrun on this host stand for two nodes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.nodes import end_nodes, start_node
from tests.e2e.programs import Done, TrainServer, free_port

ROLLOUTS = 7
# train.py; on the node that is lost, in its first start, the agent is killed there. The other one,
# alone, waits in its third rollout until it hears that the node is back
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from tests.e2e import faults
where, mark = os.environ.get("LOST_IN", ""), Path(os.environ["MARK"])
if where and not mark.exists():
    def lose():
        mark.touch()
        os.system("rm -rf " + os.environ["MEMORY"])  # it is lost with its node
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    if where == "save":
        faults.in_save(2, lambda call: lose())
    else:
        faults.in_phase(where, 3, lose)
if mark.exists() and os.environ["WORLD_SIZE"] == "1":
    from slime_like.distributed.signals import StopConditions
    remember, told = StopConditions._remember, []
    def note(self, number, frame):
        told.append(number)
        remember(self, number, frame)
    def wait():
        while not told:
            time.sleep(0.1)
    StopConditions._remember = note
    faults.in_phase("generate", 3, wait)
sys.argv[0] = "train.py"
import train
sys.exit(train.main())
"""


@dataclass
class Nodes:
    """Agents by number; 0 has the store where they meet, and is not lost."""

    folder: Path
    argv: list[str]
    lost_in: str
    in_memory: bool
    port: int = field(default_factory=free_port)
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: int) -> None:
        memory = str(self.folder / f"memory-{node}")
        own = {"LOST_IN": self.lost_in if node == 1 else "", "MARK": str(self.folder / "lost")}
        flags = ["--checkpoint-replica-dir", memory] if self.in_memory else []
        self.agents[node] = start_node(
            node, self.port, self.folder / "program.py", [*self.argv, *flags], self.folder / f"node-{node}.log", MEMORY=memory, **own
        )  # fmt: skip

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("node-?.log")))

    def wait(self, holds: Callable[[], Any], what: str, limit_s: float = 240) -> float:
        """When it holds, on the clock of files."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"not {what}\n{self.log()[-6000:]}"
            time.sleep(0.1)
        return time.time()

    def end(self) -> None:
        end_nodes(self.agents.values())


@contextmanager
def nodes(folder: Path, argv: list[str], lost_in: str, in_memory: bool) -> Iterator[Nodes]:
    (folder / "program.py").write_text(PROGRAM)
    running = Nodes(folder, argv, lost_in, in_memory)
    try:
        running.start(0)
        running.start(1)
        yield running
    finally:
        running.end()


@pytest.mark.extended
def test_a_killed_run_continues_from_memory(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Two ranks of one node, killed in their third rollout; bit by bit as if they were not. A
    version with a file that changed is not taken."""
    kept = {"checkpoint_replicas": 1, "checkpoint_replica_dir": tmp_path / "memory"}

    def argv(name: str, **more: Any) -> list[str]:
        ck = tmp_path / name / "ck"
        return work.flags(tmp_path / name, num_rollout=4, save=ck, load=ck, **more)

    def run(name: str, log: str, hook: str = "", **more: Any) -> Done:
        return server.train(argv(name, **more), tmp_path / log, ranks=2, hook=hook)

    run("whole", "log1").ok()
    assert run("killed", "log2", "tests.e2e.faults:signal_in_step SIGKILL 5 1", **kept).status
    (copy,) = (tmp_path / "memory").glob("*/iter_*")
    assert copy.name == "iter_0000002" and not list((tmp_path / "killed/ck").glob("iter_*"))
    shutil.copytree(copy, copy.with_name("iter_0000009"))
    file = next(copy.with_name("iter_0000009").glob("policy/*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    again = run("killed", "log3", **kept).ok()
    assert "iter_0000002 restored from the memory of 1 node(s)" in again.out
    assert same_numbers(rows_of(tmp_path / "killed")) == same_numbers(rows_of(tmp_path / "whole"))
    assert not list((tmp_path / "memory").glob("*/iter_*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost_in", "in_memory"),
    [("generate", False), ("save", False), ("generate", True), ("save", True)],
)
def test_a_lost_node_costs_a_restart(
    server: TrainServer, work: Workspace, tmp_path: Path, lost_in: str, in_memory: bool
) -> None:
    """The other continues alone from the newest checkpoint; when the node returns both train again.
    All rollouts are those of one process that nothing interrupts. in_memory: checkpoints are on no
    disk, and the memory of the lost node is lost."""
    out, ck = tmp_path / "out", tmp_path / "ck"
    kept = {"checkpoint_replicas": 1} if in_memory else {"save_interval": 1}
    argv = work.flags(out, num_rollout=ROLLOUTS, save=ck, load=ck, **kept)
    with nodes(tmp_path, argv, lost_in, in_memory) as running:
        lost = running.wait((tmp_path / "lost").exists, "lost")
        alone = len(rows_of(out)) + 1
        went_on = running.wait(lambda: "resumed on 1 of 2 ranks" in running.log(), "resumed")
        trained = running.wait(lambda: f"rollout {alone}/" in running.log(), "trained alone")
        print(f"resumed after {went_on - lost:.1f} s, trained after {trained - lost:.1f} s")
        running.start(1)
        running.wait(lambda: "resumed on 2 ranks, 1 before" in running.log(), "back")
        statuses = [agent.wait(240) for agent in running.agents.values()]
    log = running.log()
    assert statuses == [0, 0], log[-6000:]
    assert "data parallel 2 -> 1; " in log and "data parallel 1 -> 2; " in log
    assert ("iter_0000002 restored from the memory of 1 node(s)" in log) is (
        in_memory and lost_in == "generate"
    )
    assert ("iter_0000001 restored from the memory of 1 node(s)" in log) is (
        in_memory and lost_in == "save"
    )
    assert not list(tmp_path.glob("memory-?/*/iter_*")), "a run that is done leaves nothing there"
    full_run = tmp_path / "whole"
    server.train(work.flags(full_run, num_rollout=ROLLOUTS), tmp_path / "log").ok()
    rows, expected = rows_of(out), rows_of(full_run)
    assert [row["step"] for row in rows] == list(range(1, ROLLOUTS + 1))
    for row, other in zip(rows, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr", "rollout/reward_mean"):
            assert row[name] == pytest.approx(other[name], rel=2e-4, abs=1e-7), (row["step"], name)

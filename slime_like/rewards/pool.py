"""Worker processes with a time limit per sample: killed with SIGKILL when they exceed it, and
replaced.

Plain subprocesses rather than multiprocessing: that would import the training program's main
module, and torch with it, into every worker. A worker is the leader of its own process group, dies
with this process (PR_SET_PDEATHSIG), and gets an emptied environment unless it runs the user's own
function. PR_SET_PDEATHSIG counts from the thread that started the worker: when that thread ends,
idle workers end too, and the next call replaces them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_like.errors import RunError
from slime_like.rewards import confinement
from slime_like.rewards import reaper as reaper
from slime_like.rewards.worker import Setup
from slime_like.rewards.worker_protocol import HEADER, Answer, GradingJob
from slime_like.text import clean, printable

START_LIMIT_S = 120.0  # imports of a user's module on a slow file system
# an asynchronous function's own deadline comes first; past this its event loop is blocked
GRACE_S = 1.0
MAX_OUTPUT = 2**16  # bytes of the rewards' output that is shown per round
# bytes of an answer: of confined code, and of other code (e.g. token rewards of a group)
_MAX_ANSWER = 2**20
_MAX_OWN_ANSWER = 2**28
_MAX_KILLED_STARTS = 4
_MOMENT_S = 1.0
_MEASURED_S = 0.1  # most jobs end before their CPU time is measured
_QUICK_S = 0.005  # jobs below this are sent ahead, so that the worker never waits for the next one
_AHEAD = 16
_END_S = 10.0  # seconds for a reaper to end the processes that a reward started
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from slime_like.rewards.worker "
    "import main; main()"
)
_KEPT_ENVIRONMENT = (
    "PATH", "PYTHONHOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", confinement.DISABLE,
)  # fmt: skip


class GradingWorker:
    """A worker process, its pipes and its jobs. slots: number of concurrent jobs; 0 until it is
    ready."""

    def __init__(self, setup: Setup) -> None:
        environment = dict(os.environ)
        if setup.args.custom_rm_path is None:
            kept = (*_KEPT_ENVIRONMENT, *setup.variables)
            environment = {k: v for k, v in os.environ.items() if k in kept}
            environment["OMP_NUM_THREADS"] = "1"
        self.process = subprocess.Popen(
            # -P: a json.py in the working folder takes the place of no library
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.has_reaper = setup.args.custom_rm_path is not None
        self.stdin = self.process.stdin.fileno()
        self.stdout = self.process.stdout.fileno()
        self.stderr = self.process.stderr.fileno()
        for file in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(file, False)
        self.slots = 0
        # sent in advance, oldest first; the deadline of each starts when it is its turn
        self.queued: deque[int] = deque()
        self.quick = False  # whether the last job took less than _QUICK_S
        self.started = time.monotonic()  # start of the last job
        # CPU seconds of this process soon after that; infinite: not measured yet
        self.cpu = math.inf
        # by job; -1 is the start
        self.deadlines: dict[int, float] = {-1: time.monotonic() + START_LIMIT_S}
        self.hung_up = False  # whether the worker closed its end of the pipe
        self.max_answer = _MAX_ANSWER if setup.confined else _MAX_OWN_ANSWER
        self.broken: str | None = None  # description of an invalid answer
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.send(setup)

    @property
    def ready(self) -> bool:
        return self.slots > 0

    def send(self, message: Setup | GradingJob) -> None:
        body = pickle.dumps(message)
        self.outgoing += HEADER.pack(len(body)) + body

    def flush(self) -> None:
        """Write as much as the pipe accepts now. A dead reader is detected by `receive`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            del self.outgoing[: os.write(self.stdin, self.outgoing[: 2**20])]

    def receive(self) -> list[Answer] | None:
        """Complete answers received so far; None if the process ended or sent invalid data
        (`broken`)."""
        try:
            data = os.read(self.stdout, 2**20)
        except BlockingIOError:
            return []
        if not data:
            self.hung_up = True
            return None
        self.incoming += data
        answers: list[Answer] = []
        while len(self.incoming) >= HEADER.size:
            (length,) = HEADER.unpack_from(self.incoming)
            if length > self.max_answer:
                self.broken = f"an answer of {length} bytes, more than {self.max_answer}"
                return None
            end = HEADER.size + length
            if len(self.incoming) < end:
                break
            try:
                answers.append(json.loads(self.incoming[HEADER.size : end]))
            except ValueError:
                self.broken = "an answer that is no JSON"
                return None
            del self.incoming[:end]
        return answers

    def cpu_seconds(self) -> float:
        """CPU time of the process so far; 0 where the system does not tell."""
        try:
            times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def printed(self) -> bytes:
        """Output of the reward since the last call, limited by a pipe's capacity."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.stderr, 2**16)
        return b""

    def kill(self) -> str:
        """Kill the process and all its descendants; returns how the process itself ended."""
        code = self._ended_by_reaper()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait() if code is None else code
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return self.broken or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def _ended_by_reaper(self) -> int | None:
        """Exit code of the worker behind a reaper; None without a reaper, or if the reaper does not
        end."""
        if not self.has_reaper:
            return None
        if self.hung_up:  # files are closed a moment before the reaper sees that the worker ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_MOMENT_S)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(reaper.END)
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None
        return reaper.SIGNALLED - code if code > reaper.SIGNALLED else code


class WorkerPool:
    """Grades jobs in at most `num_workers` processes, which start on demand, and at most
    `concurrency` jobs at a time. Not thread-safe."""

    def __init__(self, setup: Setup, num_workers: int, concurrency: int | None = None) -> None:
        self.setup = replace(setup, missing=confinement.missing()) if setup.confined else setup
        self.num_workers = num_workers
        self.concurrency = concurrency
        self._workers: list[GradingWorker] = []
        # Also at interpreter exit; a forked child must not kill its parent's workers.
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def run(self, jobs: Sequence[GradingJob]) -> list[Answer]:
        """Run jobs; returns one answer per job, in order: a worker's answer, ``{"timeout": True}``
        or ``{"died": how}``.

        Raises RuntimeError if a worker cannot start.
        """
        try:
            return _Round(self, jobs).run()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        _kill_all(self._workers, os.getpid())

    def staff(self, wanted: int) -> None:
        """Ensure `wanted` workers, up to the limit; workers that ended while idle are replaced."""
        for worker in [w for w in self._workers if not w.deadlines]:
            if worker.process.poll() is not None or worker.receive() is None:
                self.discard(worker)
        while len(self._workers) < min(wanted, self.num_workers):
            self._workers.append(GradingWorker(self.setup))

    def discard(self, worker: GradingWorker) -> str:
        self._workers.remove(worker)
        return worker.kill()

    @property
    def workers(self) -> list[GradingWorker]:
        return list(self._workers)


class _Round:
    """State of one `run`. Jobs of a worker that is killed while it has several are retried once,
    individually: of several jobs in a blocked event loop only the blocking one fails."""

    def __init__(self, pool: WorkerPool, jobs: Sequence[GradingJob]) -> None:
        self.pool = pool
        self.jobs = [replace(job, id=number) for number, job in enumerate(jobs)]
        self.waiting = deque(range(len(jobs)))
        self.alone: set[int] = set()
        self.answers: dict[int, Answer] = {}
        self.shown = 0  # bytes of output
        self.killed_starts = 0  # workers that ended before they were ready

    def run(self) -> list[Answer]:
        while len(self.answers) < len(self.jobs):
            held = sum(len(w.deadlines) + len(w.queued) for w in self.pool.workers if w.ready)
            self.pool.staff(len(self.waiting) + held)
            self._assign()
            self._exchange()
            self._expire()
        return [self.answers[number] for number in range(len(self.jobs))]

    def _assign(self) -> None:
        ready = [worker for worker in self.pool.workers if worker.ready]
        free = self.pool.concurrency or math.inf
        free -= sum(len(worker.deadlines) for worker in ready)
        for worker in ready:
            while self.waiting and free > 0 and len(worker.deadlines) < worker.slots:
                has_alone = not self.alone.isdisjoint(worker.deadlines)
                if worker.deadlines and (has_alone or self.waiting[0] in self.alone):
                    break
                number = self.waiting.popleft()
                self._start(worker, number)
                worker.send(self.jobs[number])
                free -= 1
            if worker.slots == 1 and worker.quick and not self.alone:
                share = len(self.waiting) // len(self.pool.workers)
                while len(worker.queued) < min(share, _AHEAD):
                    worker.queued.append(self.waiting.popleft())
                    worker.send(self.jobs[worker.queued[-1]])

    def _start(self, worker: GradingWorker, number: int) -> None:
        """Start a job's timer."""
        grace = GRACE_S if worker.slots > 1 else 0.0
        worker.started = time.monotonic()
        worker.cpu = math.inf
        worker.deadlines[number] = worker.started + self.pool.setup.args.rm_timeout_s + grace

    def _exchange(self) -> None:
        """Wait for the next answer or deadline, and transfer data in both directions."""
        workers = self.pool.workers
        nearest = min(deadline for w in workers for deadline in w.deadlines.values())
        unmeasured = [w.started + _MEASURED_S for w in workers if math.isinf(w.cpu)]
        nearest = min([nearest, *unmeasured])
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
                selector.register(worker.stderr, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            events = selector.select(max(0.0, nearest - time.monotonic()))
        for key, mask in events:
            if key.data not in self.pool.workers:
                continue  # ended while this batch of events was processed
            if mask & selectors.EVENT_WRITE:
                key.data.flush()
            elif key.fd == key.data.stderr:
                self._show(key.data.printed())
            else:
                self._receive(key.data)

    def _show(self, data: bytes) -> None:
        """Forward the rewards' output, up to a limit per round."""
        left = MAX_OUTPUT - self.shown
        self.shown += len(data)
        if left > 0 and data:
            sys.stderr.write(printable(data[:left].decode(errors="replace")))
            if self.shown > MAX_OUTPUT:
                sys.stderr.write(
                    f"\n[what the rewards of this rollout print is shown up to {MAX_OUTPUT} "
                    "bytes]\n"
                )

    def _receive(self, worker: GradingWorker) -> None:
        answers = worker.receive()
        if answers is None:
            self._lose(worker, None)
            return
        for answer in answers:
            if "ready" in answer:
                worker.slots = int(answer["ready"])
                del worker.deadlines[-1]
            elif "failed" in answer:
                raise RunError(f"a reward worker cannot start: {answer['failed']}")
            elif worker.deadlines.pop(answer["job"], None) is not None:
                self.answers[answer["job"]] = answer
                worker.quick = time.monotonic() - worker.started < _QUICK_S
                if answer.get("last"):
                    self._requeue(worker)
                    self.pool.discard(worker)
                    return
                if worker.queued:
                    self._start(worker, worker.queued.popleft())

    def _may_start_again(self, how: str) -> bool:
        """Whether a worker that ended before it was ready is replaced: it was killed, perhaps as
        the machine's memory ran out, and not for the first few times in a row."""
        self.killed_starts += 1
        return how.startswith("signal") and self.killed_starts < _MAX_KILLED_STARTS

    def _requeue(self, worker: GradingWorker) -> None:
        """Requeue jobs that were sent in advance to a worker that ended before starting them."""
        self.waiting.extendleft(reversed(worker.queued))
        worker.queued.clear()

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in self.pool.workers:
            if math.isinf(worker.cpu) and worker.started + _MEASURED_S <= now:
                worker.cpu = worker.cpu_seconds()
            if any(deadline <= now for deadline in worker.deadlines.values()):
                spent = worker.cpu_seconds() - worker.cpu
                self._lose(worker, {"timeout": True, "spent": spent})

    def _lose(self, worker: GradingWorker, answer: Answer | None) -> None:
        """Kill a worker. A single job gets `answer` (None: that it died); several are retried
        individually."""
        output = worker.printed()
        self._show(output)
        self._requeue(worker)
        how = self.pool.discard(worker)
        if not worker.ready and answer is None and self._may_start_again(how):
            return
        if not worker.ready:
            reason = f"not ready after {START_LIMIT_S:g} s" if answer else how
            last = clean(output[-1000:].decode(errors="replace")) or "nothing"
            raise RunError(
                f"a reward worker ended before it was ready ({reason}); its standard error: {last}"
            )
        held = list(worker.deadlines)
        if len(held) == 1:
            self.answers[held[0]] = answer or {"died": how}
            return
        self.alone.update(held)
        self.waiting.extend(held)


def _kill_all(workers: list[GradingWorker], owner: int) -> None:
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().kill()

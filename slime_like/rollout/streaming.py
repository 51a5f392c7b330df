"""Streaming generation on rank 0, request by request: for servers, which can abort surplus
requests, and for user rollout functions."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from slime_like.data.group_buffer import PendingGroup
from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rewards.grader import Grader
from slime_like.rollout.episode import LoopRunner, Model
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.episodes import complete
from slime_like.samples.groups import split
from slime_like.samples.index import awaits_reward
from slime_like.types import FINISHED, Sample, SampleStatus

ABORT_S = 15.0  # for aborted requests to end


@dataclass(frozen=True, slots=True)
class _ToGrade:
    samples: Sequence[Sample]
    grader: Grader
    answer: Future[list[Sample]]


class RewardExecutor:
    """Computes rewards in a thread, batching whatever is waiting. The thread lives as long as the
    process, because the reward processes that it starts end with it (`rewards/pool.py`)."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._lock = threading.Lock()
        self._waiting: list[_ToGrade] = []

    def submit(self, samples: Sequence[Sample], grader: Grader) -> Future[list[Sample]]:
        """Grade the samples; they must be one group for a group reward."""
        item = _ToGrade(samples, grader, Future())
        with self._lock:
            self._waiting.append(item)
        self._thread.submit(self._grade_waiting)
        return item.answer

    def _grade_waiting(self) -> None:
        with self._lock:
            grader = self._waiting[0].grader if self._waiting else None
            items = [item for item in self._waiting if item.grader is grader]
            self._waiting = [item for item in self._waiting if item.grader is not grader]
        # nobody waits for those that are cancelled, and from here on none can be
        items = [item for item in items if item.answer.set_running_or_notify_cancel()]
        if grader is None or not items:
            return
        try:
            if grader.args.group_rm:
                graded = grader.grade_groups([item.samples for item in items])
            else:
                samples = list(itertools.chain.from_iterable(item.samples for item in items))
                parts = split(grader.grade(samples), [len(item.samples) for item in items])
                graded = [list(part) for part in parts]
        except BaseException as error:
            for item in items:
                item.answer.set_exception(error)
            return
        for item, samples in zip(items, graded, strict=True):
            item.answer.set_result(samples)


_reward_executor = RewardExecutor()


class Responder:
    """Continues and grades single responses. Also a `GenerationClient` for user functions."""

    def __init__(
        self, rollouter: Rollouter, client: GenerationClient, sampling: SamplingParams
    ) -> None:
        """
        Args:
            rollouter: The run's.
            client: Receives requests: the engine or a proxy.
            sampling: Sampling parameters of training.
        """
        self.rollouter = rollouter
        self._client = client
        self.sampling = sampling
        self.purpose = "train"  # see `Rollouter.generate`
        self.grader = rollouter.grader  # or an evaluation set's
        self.stopped = False  # no new requests, because there are enough groups or time is up
        self.out_of_time: float | None = None  # the time limit, once it is over

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool = False
    ) -> Sample:
        """Generate a response to its end, or until it is aborted.

        Args:
            sample: One that has ended is graded, if it was not.
            sampling: Sampling parameters; max_new_tokens is for the complete response.
            evaluation: Passed to a custom generate function.

        Returns:
            The sample, graded unless the run has a group reward.
        """
        if not sample.ended:
            if self.stopped:
                return sample
            sample = await self._ended(sample, sampling, evaluation=evaluation)
        if awaits_reward(sample) and not self.grader.args.group_rm:
            (sample,) = await self.grade([sample])
        return sample

    async def _ended(self, sample: Sample, sampling: SamplingParams, *, evaluation: bool) -> Sample:
        """The sample with its response, or with the part before an abort."""
        sampling = self.rollouter.sampling_of(sample, sampling)
        custom = self.rollouter.custom_generate
        if custom is None:
            sample = await self.generate(sample, sampling)
        else:
            model = self.model(sampling)
            sample = await custom.respond(sample, model, evaluation=evaluation)
        if self.out_of_time is not None and sample.status not in FINISHED:
            sample = self._cut_short(sample)
        return await self.with_hook(sample, evaluation=evaluation)

    async def with_hook(self, sample: Sample, *, evaluation: bool) -> Sample:
        """The sample as --rollout-sample-hook-path changes it."""
        return await self.rollouter.with_hook(sample, evaluation=evaluation)

    async def respond_group(
        self, samples: Sequence[Sample], sampling: SamplingParams
    ) -> list[Sample]:
        """`respond` for all samples of a group, then the group reward if the run has one."""
        done = await asyncio.gather(*(self.respond(sample, sampling) for sample in samples))
        if self.grader.args.group_rm and all(sample.ended for sample in done):
            return await self.grade(done)
        return done

    async def generate(self, sample: Sample, sampling: SamplingParams) -> Sample:
        """Continue a sample; it is PARTIAL after an abort."""
        sampling = self.rollouter.sampling_of(sample, sampling)
        room = sampling.max_new_tokens - sample.response_length
        if room <= 0:
            return replace(sample, status=SampleStatus.TRUNCATED)
        seed = self.seed_of(sample.sample_id, sample.response_length)
        tokens = tuple(sample.tokens.tolist())
        request = GenerateRequest(sample.sample_id, tokens, seed, sample.images)
        output = await self.generate_one(request, replace(sampling, max_new_tokens=room))
        return self.rollouter.append_output(sample, output, sampling)

    async def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """Grade samples; as one group for a group reward."""
        return await asyncio.wrap_future(_reward_executor.submit(samples, self.grader))

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        """Abort requests (None: all, and accept no new ones); each returns its partial output."""
        self.stopped = self.stopped or sample_ids is None
        custom = self.rollouter.custom_generate
        if sample_ids is None and custom is not None:
            custom.stop()
        await self._client.abort(sample_ids)

    async def leave_loop(self) -> None:
        """Call before the event loop of the caller ends."""
        await self._client.leave_loop()

    def model(self, sampling: SamplingParams) -> Model:
        """The model handle for a custom generate function."""
        rollouter = self.rollouter
        return Model(self, rollouter.tokenizer, sampling, self.seed_of, rollouter.image_processor)

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Send a request to the engine; after `stopped` it is aborted at once."""
        if self.stopped:
            return GenerateOutput(request.sample_id, (), (), "abort", ())
        return await self._client.generate_one(request, sampling)

    def seed_of(self, sample_id: int, position: int) -> int:
        """The same seed as in synchronous rounds, so that responses are equal."""
        return self.rollouter.seed_of(self.purpose, sample_id, position)

    def _cut_short(self, sample: Sample) -> Sample:
        """Truncate a response at --rollout-time-limit-s, as if it had reached the length limit; an
        empty one is aborted."""
        if sample.response_length:
            return replace(sample, status=SampleStatus.TRUNCATED)
        failure = f"no token within --rollout-time-limit-s {self.out_of_time:g}"
        metadata = {"failure": failure, **sample.metadata}
        return replace(sample, status=SampleStatus.ABORTED, metadata=metadata)


class StreamGeneration:
    """A `Generation` on rank 0, a context manager. Its event loop runs within `wait` and `stop`."""

    def __init__(self, responder: Responder, time_limit_s: float | None) -> None:
        """
        Args:
            responder: Generates the responses.
            time_limit_s: Seconds after the last draw of prompts when unfinished responses are
                truncated; None: no limit.
        """
        self.late = 0
        self._responder = responder
        self._time_limit_s = math.inf if time_limit_s is None else time_limit_s
        self._deadline = math.inf
        self._pending: set[asyncio.Task[PendingGroup]] = set()
        custom = responder.rollouter.custom_generate
        self._runner: LoopRunner = asyncio.Runner() if custom is None else custom.runner()

    def __enter__(self) -> StreamGeneration:
        return self

    def __exit__(self, *error: object) -> None:
        with self._runner:
            self._runner.run(self._end())

    def start(self, groups: Sequence[PendingGroup]) -> None:
        self._responder.stopped = False
        self._responder.out_of_time = None
        self._deadline = time.monotonic() + self._time_limit_s
        loop = self._runner.get_loop()
        self._pending |= {loop.create_task(self._respond(group)) for group in groups}

    def wait(self) -> list[PendingGroup]:
        return self._runner.run(self._first_ended())

    def stop(self) -> list[PendingGroup]:
        return self._runner.run(self._abort()) if self._pending else []

    async def _respond(self, group: PendingGroup) -> PendingGroup:
        responder = self._responder
        samples = await responder.respond_group(complete(group.samples), responder.sampling)
        return group.with_samples(samples)

    async def _first_ended(self) -> list[PendingGroup]:
        left = max(0.0, self._deadline - time.monotonic())
        done, self._pending = await asyncio.wait(
            self._pending,
            timeout=None if left == math.inf else left,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:  # time is up: truncate unfinished responses
            self._responder.out_of_time = self._time_limit_s
            self._deadline = math.inf
            self.late += len(self._pending)
            await self._responder.abort()
        return sorted((task.result() for task in done), key=lambda group: group.group_id)

    async def _abort(self) -> list[PendingGroup]:
        await self._responder.abort()
        groups = await asyncio.gather(*self._pending)
        self._pending = set()
        return sorted(map(_resumable, groups), key=lambda group: group.group_id)

    async def _end(self) -> None:
        """Abort the requests left after an error."""
        if self._pending:
            await self._responder.abort()
            await asyncio.wait(self._pending, timeout=ABORT_S)
        await self._responder.leave_loop()


def _resumable(group: PendingGroup) -> PendingGroup:
    """Prepare an unfinished group for the buffer: aborted samples become resumable."""

    def resumable(sample: Sample) -> Sample:
        if sample.status != SampleStatus.ABORTED:
            return sample
        if not sample.response_length:
            return Sample.empty(group.prompt, sample.sample_id)
        return replace(sample, status=SampleStatus.PARTIAL)

    return group.with_samples(map(resumable, complete(group.samples)))

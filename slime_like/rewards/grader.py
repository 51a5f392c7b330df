"""Compute rewards with a hard time limit.

Any code that processes model output (built-in rewards, math-verify, task scorers, user functions)
may hang, exhaust memory or ignore signals, so it runs in worker processes that can be killed
(`pool.py`); all except user functions are sandboxed. Async user functions run concurrently, up to
64 samples in one worker's event loop.

What the model wrote has a score with a built-in reward, and never fails: an answer on which the
reward hangs, dies or raises is scored like an empty answer to the same row, which shows that
the row and the machine are not at fault.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from slime_like.function_args import NO_SETTINGS, FunctionArgs
from slime_like.lazy import torch
from slime_like.rewards.custom import RewardArgs
from slime_like.rewards.limit import require_within
from slime_like.rewards.pool import WorkerPool
from slime_like.rewards.registry import (
    Reward,
    require_confinement,
    require_library,
    reward_of,
    rewards,
)
from slime_like.rewards.worker import Setup
from slime_like.rewards.worker_protocol import ASYNC_SLOTS, Answer, GradingJob, Text
from slime_like.samples.index import awaits_reward
from slime_like.samples.slime_sample import SlimeSample
from slime_like.text import clean
from slime_like.types import (
    ANSWER_REWARDS,
    FINISHED,
    PROMPT_MESSAGES,
    REWARD_DETAILS,
    SAMPLE_ATTRIBUTES,
    Sample,
    SampleStatus,
)

_MOST_WORKERS = 4  # limit of the automatic choice
# texts in a worker's batch, for a bounded reward
_BATCH = 256
_BATCH_CHARACTERS = 2**20
_NO_METADATA: dict[str, object] = {}  # shared, so that pickle writes it once
_BUSY = 0.25  # share of the time limit that a worker computes if its text is to blame
UNFIT = "scored_as_empty"  # metadata key of the reason
_FIELDS = [field.name for field in dataclasses.fields(Sample)]
# a copy of a frozen sample's class with settable fields and the same memory layout
_MutableSample = dataclasses.make_dataclass("_MutableSample", _FIELDS, slots=True)
_field_values = operator.attrgetter(*_FIELDS)


class Grader:
    """Computes rewards of samples. The arguments are the fields of
    `arguments.schema.rollout.RewardConfig`: ``Grader(**asdict(config))``.

    Args:
        rm_type: The reward; None: samples of a reasoning_gym source are scored by their task, see
            `registry.reward_of`.
        rm_type_from_metadata: ``rm_type`` in a sample's metadata takes precedence.
        custom_rm_path: Replaces all of these.
        rm_num_workers: Number of processes, started with the first sample that needs one; 0: this
            process's share of the cores, at most 4.
        sum_token_rewards: Sum the rewards of tokens to one of the response.
        settings: Of the run, for custom functions.

    Attributes of the last call of `grade`:
        last_counts: graded, nonfinite and unfit (of those), raised, timeout, died (how samples
            failed) and skipped (failed or aborted before).
        last_failure, last_nonfinite: Message about the first failed sample, and about the first
            with a reward of NaN, infinity or None; None if there is none.
    """

    def __init__(
        self,
        *,
        rm_type: str | None = None,
        custom_rm_path: str | None = None,
        reward_key: str | None = None,
        rm_timeout_s: float = 10.0,
        rm_num_workers: int = 0,
        max_abs_reward: float = 1e6,
        group_rm: bool = False,
        rm_url: str | None = None,
        rm_concurrency: int | None = None,
        rm_cache_size: int = 0,
        rm_type_from_metadata: bool = False,
        sum_token_rewards: bool = False,
        settings: FunctionArgs = NO_SETTINGS,
    ) -> None:
        self._from_metadata = rm_type_from_metadata
        self._sum_tokens = sum_token_rewards
        self.args = RewardArgs(
            rm_type,
            custom_rm_path,
            reward_key,
            rm_timeout_s,
            max_abs_reward,
            group_rm,
            rm_url,
            rm_concurrency,
            rm_cache_size,
            settings,
        )
        self._max_reward = min(max_abs_reward, sys.float_info.max)  # infinity exceeds any limit
        self.last_counts: dict[str, int] = {}
        self.last_failure: str | None = None
        self.last_nonfinite: str | None = None
        self._num_workers = rm_num_workers or _default_workers()
        self._rewards: dict[str, Reward] = {}  # prepared ones: library and confinement were checked
        self._pool: WorkerPool | None = None
        self._served_pools: dict[str, WorkerPool] = {}

    def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """Grade samples; returns them in order.

        Rewards of NaN, infinity and None become NaN and are counted; they are excluded from group
        statistics. `ANSWER_REWARDS` in the metadata are added. If the function raises, dies or
        times out, the sample has status FAILED, reward None and the reason in
        ``metadata["failure"]``. Failed samples are returned unchanged.

        Raises:
            ValueError: Names a sample for which there is no reward function, or with a value that
                is not a number or beyond --max-abs-reward.
        """
        counts = self._reset_counts()
        self._check_given(samples)
        types: dict[str | None, list[int]] = {}
        for i, sample in enumerate(samples):
            if awaits_reward(sample):
                types.setdefault(self._type_of(sample), []).append(i)
        for name in types:
            if name is not None and name not in self._rewards:
                require_library(name)
                require_confinement(name)
                self._rewards[name] = rewards.get(name)
        answers = self._answers(samples, types)
        counts["skipped"] = len(samples) - len(answers)
        return [
            self._graded(sample, answers[i], counts) if i in answers else sample
            for i, sample in enumerate(samples)
        ]

    def grade_groups(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Like `grade`, for --group-rm: the custom function gets all samples of a group, including
        failed ones, and returns one reward per sample. Graded groups are returned unchanged."""
        counts = self._reset_counts()
        for group in groups:
            self._check_given(group)
        jobs = []
        for i, group in enumerate(groups):
            if any(map(awaits_reward, group)):
                jobs.append(GradingJob(i, rm_type=None, sample=list(map(_reward_sample, group))))
        answers = self._pool_for(set()).run(jobs) if jobs else []
        graded = [list(group) for group in groups]
        for job, answer in zip(jobs, answers, strict=True):
            i = job.id
            group = groups[job.id]
            if "wrong_type" in answer:
                raise ValueError(self._wrong_type(group[0], answer["wrong_type"]))
            rows = answer.get("group") or [answer] * len(group)
            graded[i] = [
                self._graded(s, row, counts) if s.status in FINISHED else s
                for s, row in zip(group, rows, strict=True)
            ]
            counts["skipped"] += sum(s.status not in FINISHED for s in group)
        return graded

    def _check_given(self, samples: Iterable[Sample]) -> None:
        """Raise ValueError for a reward beyond the limit that came with its sample: from an agent,
        or from a function that makes responses."""
        for sample in samples:
            require_within(sample.reward, self.args.max_abs_reward, f"sample {sample.sample_id}")

    def close(self) -> None:
        """Stop the workers; further grading starts new ones."""
        for pool in (self._pool, *self._served_pools.values()):
            if pool is not None:
                pool.close()
        self._pool = None
        self._served_pools.clear()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reset_counts(self) -> Counter[str]:
        counts = Counter(graded=0, nonfinite=0, unfit=0, raised=0, timeout=0, died=0, skipped=0)
        self.last_counts = counts
        self.last_failure = None
        self.last_nonfinite = None
        return counts

    def _type_of(self, sample: Sample) -> str | None:
        """Name of a sample's reward; None for the custom function."""
        if self.args.custom_rm_path is not None:
            return None
        default = self.args.rm_type
        if default in self._rewards and "rm_type" not in sample.metadata:
            return default
        try:
            return reward_of(default, sample.metadata, from_metadata=self._from_metadata)
        except ValueError as error:
            raise ValueError(f"sample {sample.sample_id}: {error}") from error

    def _answers(
        self, samples: Sequence[Sample], types: Mapping[str | None, list[int]]
    ) -> dict[int, Answer]:
        """Grade samples. types: sample indices by reward name; None is the custom function."""
        answers: dict[int, Answer] = {}
        local: dict[str, list[int]] = {}
        jobs: list[GradingJob] = []
        for name, indices in types.items():
            if name is None:
                jobs = [GradingJob(i, None, _reward_sample(samples[i])) for i in indices]
            elif self._rewards[name].connect is not None:
                answers.update(self._served_answers(name, samples, indices))
            elif self._rewards[name].inline:
                value = self._rewards[name].score("", None, {})
                answers.update((i, {"value": value}) for i in indices)
            else:
                local[name] = indices
        if jobs or local:
            answers |= self._local_answers(samples, local, jobs)
        return answers

    def _served_answers(
        self, name: str, samples: Sequence[Sample], indices: list[int]
    ) -> Iterable[tuple[int, Answer]]:
        """Answers of a server."""
        if name not in self._served_pools:
            reward = self._rewards[name]
            workers = 1 if reward.keeps_answers else self._num_workers
            key = reward.key_setting
            has_key = key is not None and key in self.args.settings
            variable = getattr(self.args, str(key)) if has_key else None
            setup = Setup(
                self.args,
                (name,),
                served=True,
                slots=self._slots(workers),
                variables=() if variable is None else (variable,),
            )
            self._served_pools[name] = WorkerPool(
                setup, self._most_workers(workers), self.args.rm_concurrency
            )
        jobs = [GradingJob(i, None, _reward_sample(samples[i])) for i in indices]
        return zip(indices, self._served_pools[name].run(jobs), strict=True)

    def _most_workers(self, workers: int) -> int:
        """Of so many, those that --rm-concurrency lets work at a time."""
        return min(workers, self.args.rm_concurrency or workers)

    def _slots(self, workers: int) -> int:
        """Most samples at a time in each of so many workers of a server or an asynchronous
        function."""
        if self.args.rm_concurrency is None:
            return ASYNC_SLOTS
        return math.ceil(self.args.rm_concurrency / self._most_workers(workers))

    def _local_answers(
        self, samples: Sequence[Sample], local: Mapping[str, list[int]], jobs: list[GradingJob]
    ) -> dict[int, Answer]:
        """Answers to `jobs`, and to the samples of each built-in reward. If a batch is lost, its
        samples are retried individually."""
        pool = self._pool_for(set(local))
        batches = [[job.id] for job in jobs]
        for name, indices in local.items():
            bounded = self._rewards[name].bounded
            for batch in _batches(samples, indices) if bounded else [[i] for i in indices]:
                batches.append(batch)
                jobs.append(GradingJob(0, name, texts=[_text(samples[i], bounded) for i in batch]))
        answers: dict[int, Answer] = {}
        lost: list[GradingJob] = []
        lost_ids: list[int] = []
        for batch, job, answer in zip(batches, jobs, pool.run(jobs)):
            if len(batch) == 1:
                answers[batch[0]] = answer
            elif "values" in answer:
                for i, value in zip(batch, answer["values"], strict=True):
                    answers[i] = {"value": value}
            elif "batch" in answer:
                answers.update(zip(batch, answer["batch"], strict=True))
            else:
                lost += [dataclasses.replace(job, texts=[text]) for text in job.texts]
                lost_ids += batch
        answers.update(zip(lost_ids, pool.run(lost) if lost else []))
        name_of = {i: name for name, indices in local.items() for i in indices}
        unfit = [i for i, name in name_of.items() if self._blames_the_text(name, answers[i])]
        empty = [
            GradingJob(0, name_of[i], texts=[_text(samples[i], bounded=False, empty=True)])
            for i in unfit
        ]
        for i, control in zip(unfit, pool.run(empty) if empty else []):
            score = control.get("value")
            if score is not None and math.isfinite(score):
                answers[i] = {"value": score, "unfit": self._describe(answers[i])}
        return answers

    def _blames_the_text(self, name: str, answer: Answer) -> bool:
        """Whether the model's text may be why the reward `name` gave no score."""
        if "refused" in answer:
            return True
        if rewards.source(name) is not None or "last" in answer:
            return False  # a user's own mistake; a sandbox that broke
        if "timeout" in answer:  # unless the machine had no time for it
            return name == "code" or answer["spent"] >= _BUSY * self.args.rm_timeout_s
        value = answer.get("value")
        return value is None or not math.isfinite(value)

    def _describe(self, answer: Answer) -> str:
        """Why a text has no score of its own."""
        failure = self._failure(answer)
        if failure is not None:
            return failure[1]
        return clean(f"the reward returned {answer.get('wrong_type', answer.get('value'))}")

    def _pool_for(self, names: set[str]) -> WorkerPool:
        """A pool whose workers have prepared these rewards; replaced when a new reward is
        needed."""
        if self._pool is not None:
            prepared = set(self._pool.setup.rm_types)
            if names <= prepared:
                return self._pool
            self._pool.close()
            names = names | prepared
        modules = {source for name in names if (source := rewards.source(name)) is not None}
        custom = self.args.custom_rm_path is not None
        workers = self._most_workers(self._num_workers) if custom else self._num_workers
        setup = Setup(
            self.args,
            tuple(sorted(names)),
            modules=tuple(sorted(modules)),
            slots=self._slots(self._num_workers),
        )
        self._pool = WorkerPool(setup, workers, self.args.rm_concurrency if custom else None)
        return self._pool

    def _graded(self, sample: Sample, answer: Answer, counts: Counter[str]) -> Sample:
        value = answer.get("value")
        added = sample.metadata.get(ANSWER_REWARDS, 0.0)
        if len(answer) == 1 and value is not None and abs(value) <= self._max_reward and not added:
            counts["graded"] += 1
            return _replace(sample, reward=value)
        failure = self._failure(answer)
        if failure is not None:
            kind, reason = failure
            counts[kind] += 1
            self.last_failure = self.last_failure or f"sample {sample.sample_id}: {reason}"
            return _replace(
                sample,
                status=SampleStatus.FAILED,
                reward=None,
                metadata={**sample.metadata, "failure": reason},
            )
        if "wrong_type" in answer:
            raise ValueError(self._wrong_type(sample, answer["wrong_type"]))
        tokens = answer.get("tokens")
        if tokens is not None and len(tokens) != sample.response_length:
            returned = f"{len(tokens)} numbers for a response of {sample.response_length} tokens"
            raise ValueError(self._wrong_type(sample, returned))
        if tokens is not None and self._sum_tokens:
            value = sum(tokens)
            tokens = None
        if added and tokens is not None:
            raise ValueError(
                f"sample {sample.sample_id}: the reward function returned token rewards, and the "
                "answers of its agent have rewards of their own; add --sum-token-rewards"
            )
        if value is not None:
            value += added
        counts["graded"] += 1
        if "unfit" in answer:
            counts["unfit"] += 1
            sample = _replace(sample, metadata={**sample.metadata, UNFIT: answer["unfit"]})
        if not all(map(math.isfinite, tokens or ())):
            value = math.nan
        if value is None or not math.isfinite(value):
            counts["nonfinite"] += 1
            reason = _describe_non_finite(value)
            self.last_nonfinite = self.last_nonfinite or f"sample {sample.sample_id}: {reason}"
            return _replace(
                sample,
                reward=math.nan,  # excluded from group statistics; the failure text keeps the value
                metadata={**sample.metadata, "failure": reason},
            )
        largest = max([value, *(tokens or ())], key=abs)
        require_within(largest, self.args.max_abs_reward, f"sample {sample.sample_id}")
        metadata = sample.metadata
        if "details" in answer:
            metadata = {**metadata, REWARD_DETAILS: answer["details"]}
        return _replace(
            sample,
            reward=float(value),
            token_rewards=None if tokens is None else torch.tensor(tokens, dtype=torch.float64),
            metadata=metadata,
        )

    def _failure(self, answer: Answer) -> tuple[str, str] | None:
        """How the sample failed (a key of `last_counts`), and the reason as text."""
        # the output of a forked scorer is untrusted
        said = clean(answer["raised"]) if "raised" in answer else None
        if "timeout" in answer:
            late = f"the reward took longer than --rm-timeout-s {self.args.rm_timeout_s:g}"
            return "timeout", late if said is None else f"{late}: {said}"
        if said is not None:
            return "raised", f"the reward raised {said}"
        if "refused" in answer:
            return "raised", f"the answer is not scored: {answer['refused']}"
        if "died" in answer:
            return "died", f"the reward process died ({answer['died']})"
        return None

    def _wrong_type(self, sample: Sample, returned: str) -> str:
        """Message about a value that is no reward. returned: describes it."""
        args = self.args
        returned = clean(returned)
        option = f"--custom-rm-path {args.custom_rm_path}" if args.custom_rm_path else "--rm-type"
        remedy = "return a number, one for each token of the response, or a dict with --reward-key"
        if returned.startswith("a dict"):
            remedy = "name the one to train on with --reward-key"
            if args.reward_key:
                remedy = f"--reward-key {args.reward_key} is not among them"
        return f"sample {sample.sample_id}: {option} returned {returned}; {remedy}"


def _default_workers() -> int:
    """This process's share of the available cores."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _replace(sample: Sample, **changes: object) -> Sample:
    """Like `dataclasses.replace`, but four times faster. With short texts it dominated the cost of
    grading, because a frozen dataclass sets each field through a function call."""
    new: Any = _MutableSample(*_field_values(sample))
    for name, value in changes.items():
        setattr(new, name, value)
    new.__class__ = Sample  # the same fields, frozen from here on
    return cast("Sample", new)


def _describe_non_finite(value: float | None) -> str:
    if value is None:
        return "the reward function returned None (a path through it without a return?)"
    return f"the reward is {value}"


def _batches(samples: Sequence[Sample], indices: Sequence[int]) -> list[list[int]]:
    """Consecutive samples, limited in number and characters."""
    batches: list[list[int]] = []
    room = 0
    for i in indices:
        size = len(samples[i].response)
        if not batches or len(batches[-1]) == _BATCH or size > room:
            batches.append([])
            room = _BATCH_CHARACTERS
        batches[-1].append(i)
        room -= size
    return batches


def _text(sample: Sample, bounded: bool, *, empty: bool = False) -> Text:
    """Input of a built-in reward; a bounded one does not need metadata. empty: of an empty answer
    to the same row."""
    response = "" if empty else sample.response
    return response, sample.label, _NO_METADATA if bounded else dict(sample.metadata)


def _reward_sample(sample: Sample) -> SlimeSample:
    """The sample that a custom function gets."""
    metadata = dict(sample.metadata)
    added = metadata.pop(SAMPLE_ATTRIBUTES, {})
    converted = SlimeSample(
        index=sample.sample_id,
        group_index=sample.group_id,
        prompt=metadata.pop(PROMPT_MESSAGES, sample.text),
        response=sample.response,
        label=sample.label,
        tokens=sample.tokens.tolist(),
        response_length=sample.response_length,
        loss_mask=sample.loss_mask.int().tolist(),
        status=SlimeSample.Status(str(sample.status)),
        metadata=metadata,
        images=sample.images,
    )
    vars(converted).update(added)
    return converted

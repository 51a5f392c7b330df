"""A teacher behind SGLang servers: log-probs of the tokens that the policy sampled, for on-policy
distillation.

Each rank queries the teacher for its samples when a rollout has been sampled; with --async-rollout
concurrently with training. The teacher is frozen, so a recorded rollout gets the same scores again.
A sample without scores is aborted: it is not trained on, and counted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import httpx
import torch
import torch.distributed as dist

from slime_like.checked_json import InvalidResponse
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.rollout.episode import mark_aborted
from slime_like.samples.exchange import refresh_index
from slime_like.samples.groups import SampleGroup, flatten, regroup
from slime_like.servers.http import (
    Deadlines,
    RequestFailed,
    Retries,
    async_client,
    post_once,
    with_retries,
)
from slime_like.sglang.protocol import (
    read_input_tokens,
    read_scores,
    scoring_body,
    scoring_body_of_text,
    vocabulary_body,
)
from slime_like.types import Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

PROBE_TOKENS = 96  # tokens, evenly spread over the vocabulary, to compare tokenizers
PROBE_TEXT = 'Straße 東京 αβγ: def f(x): return x**2  # 3.14159\n\t{"a": [1, 2]}'
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Settings of a served teacher."""

    urls: tuple[str, ...]  # servers, all with the same teacher
    timeout_s: float = 300.0  # of one response
    attempts: int = 4  # per request, over the servers in turn
    concurrency: int = 64  # requests in flight, over all servers and ranks


class ServedTeacher:
    """A teacher behind SGLang servers. Every method is collective. tokenizer: the policy's."""

    def __init__(self, settings: TeacherSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._last = max(tokenizer.get_vocab().values())
        self._deadlines = Deadlines(CONNECT_S, settings.timeout_s, settings.timeout_s)
        self._run = f"teacher-{os.getpid():x}-{time.time_ns():x}"
        self._numbers = itertools.count()

    def probe(self) -> None:
        """Check the servers. Raises RunError on every rank if one does not respond, lacks tokens of
        the policy's vocabulary, or tokenizes text differently."""
        from_rank_zero(lambda: asyncio.run(self._compare(self._tokenizer)))

    def grade(
        self, groups: Sequence[SampleGroup], group: dist.ProcessGroup | None = None
    ) -> tuple[list[SampleGroup], dict[str, float]]:
        """Add `teacher_log_probs`; a sample without them is ABORTED, with the reason in its
        metadata. Collective over `group`."""
        started = time.perf_counter()
        samples = flatten(groups)
        to_score = [
            (i, s)
            for i, s in enumerate(samples)
            if isinstance(s, Sample) and s.status != SampleStatus.ABORTED and s.response_length
        ]
        num_querying = sum(gather(bool(to_score), group))
        counts: Counter[str] = Counter()
        results = together(
            lambda: asyncio.run(self._score_all(to_score, counts, num_querying)), group
        )
        for (i, sample), result in zip(to_score, results, strict=True):
            samples[i] = with_scores(sample, result)
        num_dropped = 0
        total_counts = Counter[str]()
        local_dropped = sum(isinstance(result, str) for result in results)
        for rank_dropped, rank_counts in gather((local_dropped, counts), group):
            num_dropped += rank_dropped
            total_counts += rank_counts
        metrics = {
            "rollout/opd_dropped": float(num_dropped),
            "rollout/opd_teacher_s": time.perf_counter() - started,
        }
        for kind, count in sorted(total_counts.items()):
            metrics[f"rollout/opd_request_{kind}"] = float(count)
        return regroup(groups, refresh_index(samples, group)), metrics

    async def _score_all(
        self, samples: Sequence[tuple[int, Sample]], counts: Counter[str], num_querying: int
    ) -> list[tuple[float, ...] | str]:
        """Query the teacher for all samples.

        Args:
            samples: (index in the rollout, sample).
            num_querying: Number of ranks that query concurrently.
        """
        concurrency = max(1, self._settings.concurrency // max(1, num_querying))
        slots = asyncio.Semaphore(concurrency)
        async with async_client(concurrency) as client:

            async def score(index: int, sample: Sample) -> tuple[float, ...] | str:
                async with slots:
                    return await self._score(client, sample, index, counts)

            return await asyncio.gather(*(score(i, sample) for i, sample in samples))

    async def _score(
        self, client: httpx.AsyncClient, sample: Sample, index: int, counts: Counter[str]
    ) -> tuple[float, ...] | str:
        """Log-probs [R] of the response, or the reason for having none. index: selects the first
        server to try."""
        tokens = sample.tokens.tolist()
        rid = self._new_id(sample.sample_id)
        start = sample.prompt_length - 1
        # a server that lacks this token would return the log-prob of another one
        if max(tokens) > self._last:
            return f"the teacher: token {max(tokens)} exceeds the tokenizer's last, {self._last}"

        async def attempt(number: int) -> tuple[float, ...]:
            url = self._settings.urls[(index + number - 1) % len(self._settings.urls)]
            answer = await self._post(client, url, scoring_body(tokens, f"{rid}-{number}", start))
            return read_scores(answer, tokens, f"{rid}-{number}", start, self._last)

        try:
            scores: tuple[float, ...] = await with_retries(
                attempt, Retries(attempts=self._settings.attempts), counts
            )
        except RequestFailed as failure:
            return f"the teacher: {failure}"
        except InvalidResponse as failure:
            counts[failure.kind] += 1
            return f"the teacher: {failure}"
        return scores

    async def _compare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        texts = [PROBE_TEXT + "".join(tokenizer.all_special_tokens), spread_text(tokenizer)]
        async with async_client(1) as client:
            for url in self._settings.urls:
                try:
                    await self._compare_vocabulary(client, url)
                    for text in texts:
                        tokens = tuple(tokenizer(text)["input_ids"])
                        await self._compare_text(client, url, text, tokens)
                except (RequestFailed, InvalidResponse) as failure:
                    raise RunError(f"--opd-teacher-url: no answer: {failure}") from None

    async def _compare_vocabulary(self, client: httpx.AsyncClient, url: str) -> None:
        rid = self._new_id("probe")
        try:
            read_scores(await self._post(client, url, vocabulary_body(self._last, rid)), [0], rid)
        except RequestFailed as failure:
            if failure.kind != "status_400":
                raise
            raise RunError(
                f"--opd-teacher-url {url}: the teacher lacks the policy's token {self._last}; use "
                f"a teacher with the same vocabulary ({failure})"
            ) from None

    async def _compare_text(
        self, client: httpx.AsyncClient, url: str, text: str, local: tuple[int, ...]
    ) -> None:
        """Compare the server's tokens of `text` with those of the policy's tokenizer."""
        rid = self._new_id("probe")
        try:
            answer = await self._post(client, url, scoring_body_of_text(text, rid))
        except RequestFailed as failure:
            if failure.kind != "status_400":
                raise
            logger.warning(
                f"the teacher {url} does not tokenize text, so its tokenizer is not compared with "
                f"the policy's: {failure}"
            )
            return
        remote = read_input_tokens(answer, rid)
        different = [
            i for i, (a, b) in enumerate(zip(local, remote)) if a != b and (a, b) != (self._last, 0)
        ]
        if different or len(local) != len(remote):
            raise RunError(
                f"--opd-teacher-url {url}: the teacher has another tokenizer than the policy: a "
                f"probe of {len(local)} tokens has {len(remote)}, and they differ from index "
                f"{min([*different, len(local), len(remote)])} on; use a teacher with the same "
                "tokenizer"
            )

    async def _post(self, client: httpx.AsyncClient, url: str, body: dict[str, object]) -> bytes:
        return await post_once(client, f"{url}/generate", body, self._deadlines)

    def _new_id(self, what: object) -> str:
        return f"{self._run}-{what}-{next(self._numbers)}"


def with_scores(sample: Sample, result: tuple[float, ...] | str) -> Sample:
    """Add log-probs [R] of the teacher, or abort the sample with the reason for having none."""
    if isinstance(result, str):
        return mark_aborted(sample, result)
    return replace(sample, teacher_log_probs=torch.tensor(result, dtype=torch.float32))


def spread_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that consists of tokens spread over the vocabulary."""
    ids = sorted(tokenizer.get_vocab().values())
    return str(tokenizer.decode(ids[:: max(1, len(ids) // PROBE_TOKENS)], skip_special_tokens=True))

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

from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.errors import RunError
from slime_like.rollout.engines.checked_json import BadAnswer
from slime_like.rollout.engines.sglang.http import (
    Deadlines,
    RequestFailed,
    Retries,
    async_client,
    post_once,
    with_retries,
)
from slime_like.rollout.engines.sglang.protocol import (
    read_input_tokens,
    read_scores,
    scoring_body,
    scoring_body_of_text,
    vocabulary_body,
)
from slime_like.rollout.sample_plane import share_index_again
from slime_like.types import Sample, SampleGroup, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

PROBE_TOKENS = 96  # tokens, evenly spread over the vocabulary, to compare tokenizers
PROBE_TEXT = 'Straße 東京 αβγ: def f(x): return x**2  # 3.14159\n\t{"a": [1, 2]}'
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Settings of a served teacher. urls: servers, all with the same teacher. timeout_s: of one
    response. attempts: per request, over the servers in turn. concurrency: requests in flight, over
    all servers and ranks."""

    urls: tuple[str, ...]
    timeout_s: float = 300.0
    attempts: int = 4
    concurrency: int = 64


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
        everyone = [s for each in groups for s in each.samples]
        asked = [
            (place, s)
            for place, s in enumerate(everyone)
            if isinstance(s, Sample) and s.status != SampleStatus.ABORTED and s.response_length
        ]
        asking = sum(gather(bool(asked), group))
        counts: Counter[str] = Counter()
        answers = together(lambda: asyncio.run(self._ask_all(asked, counts, asking)), group)
        graded = {
            s.sample_id: with_answer(s, answer)
            for (_, s), answer in zip(asked, answers, strict=True)
        }
        dropped = sum(isinstance(answer, str) for answer in answers)
        everyones = gather((dropped, counts), group)
        metrics = {
            "rollout/opd_dropped": float(sum(of_rank[0] for of_rank in everyones)),
            "rollout/opd_teacher_s": time.perf_counter() - started,
        }
        total = sum((of_rank[1] for of_rank in everyones), Counter[str]())
        metrics |= {
            f"rollout/opd_request_{kind}": float(count) for kind, count in sorted(total.items())
        }
        shared = iter(
            share_index_again(
                [graded.get(s.sample_id, s) if isinstance(s, Sample) else s for s in everyone],
                group,
            )
        )
        return [
            SampleGroup(g.group_id, tuple(next(shared) for _ in g.samples)) for g in groups
        ], metrics

    async def _ask_all(
        self, samples: Sequence[tuple[int, Sample]], counts: Counter[str], asking: int
    ) -> list[tuple[float, ...] | str]:
        """Query the teacher for all samples. samples: (index in the rollout, sample). asking:
        number of ranks that query concurrently."""
        concurrency = max(1, self._settings.concurrency // max(1, asking))
        slots = asyncio.Semaphore(concurrency)
        async with async_client(concurrency) as client:

            async def one(place: int, sample: Sample) -> tuple[float, ...] | str:
                async with slots:
                    return await self._ask(client, sample, place, counts)

            return await asyncio.gather(*(one(place, sample) for place, sample in samples))

    async def _ask(
        self, client: httpx.AsyncClient, sample: Sample, place: int, counts: Counter[str]
    ) -> tuple[float, ...] | str:
        """Log-probs [R] of the response, or the reason for having none. place: selects the first
        server to try."""
        tokens, rid = sample.tokens.tolist(), self._new_id(sample.sample_id)
        start = sample.prompt_length - 1
        if (
            max(tokens) > self._last
        ):  # the server may not have this token and would return the log-prob of another one
            return f"the teacher: token {max(tokens)} is above {self._last}, the last one of the tokenizer"

        async def attempt(number: int) -> tuple[float, ...]:
            url = self._settings.urls[(place + number - 1) % len(self._settings.urls)]
            answer = await self._post(client, url, scoring_body(tokens, f"{rid}-{number}", start))
            return read_scores(answer, tokens, f"{rid}-{number}", start, self._last)

        try:
            scores: tuple[float, ...] = await with_retries(
                attempt, Retries(attempts=self._settings.attempts), counts
            )
        except RequestFailed as failure:
            return f"the teacher: {failure}"
        except BadAnswer as failure:
            counts["bad_answer"] += 1
            return f"the teacher: {failure}"
        return scores

    async def _compare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        texts = [PROBE_TEXT + "".join(tokenizer.all_special_tokens), spread_text(tokenizer)]
        async with async_client(1) as client:
            for url in self._settings.urls:
                try:
                    await self._compare_vocabulary(client, url)
                    for text in texts:
                        await self._compare_text(
                            client, url, text, tuple(tokenizer(text)["input_ids"])
                        )
                except (RequestFailed, BadAnswer) as failure:
                    raise RunError(
                        f"--opd-teacher-url: the teacher does not answer: {failure}"
                    ) from None

    async def _compare_vocabulary(self, client: httpx.AsyncClient, url: str) -> None:
        rid = self._new_id("probe")
        try:
            read_scores(await self._post(client, url, vocabulary_body(self._last, rid)), [0], rid)
        except RequestFailed as failure:
            if failure.kind != "status_400":
                raise
            words = f"the teacher does not know the policy's token {self._last}; give one of the same vocabulary ({failure})"
            raise RunError(f"--opd-teacher-url {url}: {words}") from None

    async def _compare_text(
        self, client: httpx.AsyncClient, url: str, text: str, own: tuple[int, ...]
    ) -> None:
        rid = self._new_id("probe")
        try:
            theirs = read_input_tokens(
                await self._post(client, url, scoring_body_of_text(text, rid)), rid
            )
        except RequestFailed as failure:
            if failure.kind != "status_400":
                raise
            logger.warning(
                f"the tokenizer of the teacher {url} could not be compared with the policy's: {failure}"
            )
            return
        different = [
            i for i, (a, b) in enumerate(zip(own, theirs)) if a != b and (a, b) != (self._last, 0)
        ]
        if different or len(own) != len(theirs):
            raise RunError(
                f"--opd-teacher-url {url}: the teacher has another tokenizer than the policy: it reads a probe of {len(own)} tokens as "
                f"{len(theirs)}, different from place {min([*different, len(own), len(theirs)])} on; token ids are compared as they are, so give a "
                "teacher of the same tokenizer"
            )

    async def _post(self, client: httpx.AsyncClient, url: str, body: dict[str, object]) -> object:
        return await post_once(client, f"{url}/generate", body, self._deadlines)

    def _new_id(self, what: object) -> str:
        return f"{self._run}-{what}-{next(self._numbers)}"


def with_answer(sample: Sample, answer: tuple[float, ...] | str) -> Sample:
    if isinstance(answer, str):
        return replace(
            sample, status=SampleStatus.ABORTED, metadata={**sample.metadata, "failure": answer}
        )
    return replace(sample, teacher_log_probs=torch.tensor(answer, dtype=torch.float32))


def spread_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that consists of tokens spread over the vocabulary."""
    ids = sorted(tokenizer.get_vocab().values())
    return str(tokenizer.decode(ids[:: max(1, len(ids) // PROBE_TOKENS)], skip_special_tokens=True))

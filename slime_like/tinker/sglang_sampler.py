"""Sampling from snapshots by SGLang servers, which hold one snapshot at a time and load another one
on request.

Commands are executed one after another, so weights never change during a request. Concurrent
requests wait in the dispatcher's queues, which batch those of the same snapshot. Snapshots are
folders of --server-dir, which must have the same path on the servers. With --lora-sync adapter the
servers keep the base model, and hold several snapshots at a time, which are adapters.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from slime_like.checked_json import InvalidResponse
from slime_like.distributed.collectives import from_rank_zero, on_rank_zero
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.servers.http import CONTROL_S, RequestFailed, async_client, post_once, with_retries
from slime_like.servers.requests import RequestSettings
from slime_like.servers.server_pool import ServerPool
from slime_like.servers.weight_spec import checkpoint_shapes
from slime_like.sglang.protocol import read_scores, scoring_body
from slime_like.tinker.base_model import NO_UNMERGED, NO_WHOLE
from slime_like.tinker.errors import Refused, ServersFailed
from slime_like.tinker.sampler import PromptSamples, SampleCommand, is_tied, plain_output, with_nan
from slime_like.tinker.sglang_adapters import ServedAdapters
from slime_like.tinker.sglang_snapshots import SnapshotTransport

NO_ENGINE = "no_engine"
ATTEMPTS = 3  # attempts to update the servers; every failed one costs a server
NO_SEED = (
    "seed requires deterministic SGLang servers: start them with "
    "--sglang-enable-deterministic-inference, or leave the seed out"
)
NO_ROWS = (
    "target_prompt_logprobs and prompt_alt_tokens_k are not supported with SGLang as sampler; "
    "leave them out, or serve with --rollout-engine local"
)
NO_MASK = (
    "record_stability_info with top_k or top_p is not supported by SGLang as sampler, which does "
    "not report the tokens that they leave; sample without them, or with --rollout-engine local"
)
NO_TOP_K = (
    "topk_prompt_logprobs and topk_sample_logprobs are not supported with --rollout-engine sglang: "
    "leave them out, or start the server with --rollout-engine local"
)
UNTIED = (
    "this snapshot has an untied output layer (train_unembed), which SGLang servers of a model "
    "with tied embeddings cannot load: use --rollout-engine local, or train_unembed=False"
)


class SglangSampler:
    """Counterpart of `SnapshotSampler` for SGLang servers, which rank 0 talks to. snapshots,
    adapters: the engine's transport, and what holds adapters; on rank 0 only."""

    def __init__(
        self,
        engine: SglangEngine,
        snapshots: SnapshotTransport | None,
        settings: RequestSettings,
        base: str,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """Collective. base: folder of the model that the servers were started with."""
        self._base = base
        self._adapters = adapters
        self._engine = engine
        self._snapshots = snapshots
        self._settings = settings
        self._folder = ""  # source of the servers' current weights
        self._version = 0
        self._tied = from_rank_zero(lambda: is_tied(base))
        self._numbers = itertools.count()
        self.deterministic = from_rank_zero(lambda: is_deterministic(engine.pool))

    def sample(self, folder: str, command: SampleCommand) -> list[PromptSamples]:
        """Samples of each prompt, on rank 0. On all ranks, raises Refused for top-k log-probs and
        for seeds without effect, ServersFailed if all samples would fail, RunError if one
        was aborted or is invalid."""
        if command.top_k_prompt or command.top_k_sample:
            raise Refused(NO_TOP_K)
        if command.scores_rows:
            raise Refused(NO_ROWS)
        if command.params.report_sampling_mask:
            raise Refused(NO_MASK)
        if command.seeded and not self.deterministic:
            raise Refused(NO_SEED)
        # the session may be of a server that was started with another --lora-sync
        if self._engine.takes_adapter and folder != self._base:
            raise Refused(f"this sampling session has a whole model: {NO_WHOLE}")
        if not self._engine.takes_adapter and any(command.adapters):
            raise Refused(f"this sampling session has an adapter {NO_UNMERGED}")
        try:
            self._load(folder)
        except RunError as error:
            raise ServersFailed(str(error)) from error
        return on_rank_zero(lambda: self._sample_with_adapters(command)) or []

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        self._engine.close()

    def _load(self, folder: str) -> None:
        """Make the servers load the folder's weights. Collective."""
        self._engine.check_health()
        if folder == self._folder and self._engine.weight_version == self._version:
            return
        if from_rank_zero(lambda: is_tied(folder)) != self._tied:
            raise Refused(UNTIED)
        self._folder = ""
        shapes: dict[str, Tensor] = {}  # on rank 0
        on_rank_zero(lambda: shapes.update(meta_weights(folder)))
        for _ in range(ATTEMPTS):
            self._version += 1
            if self._snapshots is not None:
                self._snapshots.folder = Path(folder)
            self._engine.update_weights(iter(shapes.items()), self._version)
            if self._engine.weight_version == self._version:
                self._folder = folder
                return
        raise RunError(
            f"the snapshot {folder} did not reach the SGLang servers in {ATTEMPTS} attempts"
        )

    def _sample_with_adapters(self, command: SampleCommand) -> list[PromptSamples]:
        """Make every server hold the command's adapters, then sample. A server that comes back
        meanwhile lacks them: then once more."""
        used = sorted(set(command.adapters) - {""})
        if not used:
            return self._sample(command)
        assert self._adapters is not None, "refused before"
        for attempt in range(1, ATTEMPTS + 1):
            names = {"": "", **self._adapters.hold(used)}
            try:
                return self._sample(
                    replace(command, adapters=[names[folder] for folder in command.adapters])
                )
            except RunError:
                self._adapters.forget()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _sample(self, command: SampleCommand) -> list[PromptSamples]:
        """command: with the names of adapters on the servers."""
        places = command.places
        outputs = self._engine.generate(command.requests(places), command.params)
        for output in outputs:
            if output.finish_reason == "abort":
                raise RunError(f"a sample was aborted: {output.failure}")
            versions = set(output.weight_versions)
            if versions != {self._version}:
                raise ServersFailed(
                    f"a sample has weight version {versions}, not {self._version}; does another "
                    "run use the server?"
                )
        scores: list[bytes] | None = None
        if command.prompt_log_probs:
            try:
                scored = asyncio.run(self._score_all(command))
            except (RequestFailed, InvalidResponse) as failure:
                if isinstance(failure, RequestFailed) and failure.kind == NO_ENGINE:
                    raise ServersFailed(str(failure)) from failure
                raise RunError(str(failure)) from failure
            scores = [with_nan(each) for each in scored]
        samples = {
            place: plain_output(output) for place, output in zip(places, outputs, strict=True)
        }
        return [
            {
                "sequences": [samples[i, j] for j in range(count)],
                "prompt_log_probs": None if scores is None else scores[i],
            }
            for i, count in enumerate(command.counts)
        ]

    async def _score_all(self, command: SampleCommand) -> list[tuple[float, ...]]:
        """For each prompt the log-probs of all tokens except the first, at temperature 1."""
        slots = asyncio.Semaphore(self._settings.concurrency)
        async with async_client(self._settings.concurrency) as client:

            async def one(index: int) -> tuple[float, ...]:
                async with slots:
                    prompt = command.prompts[index]
                    return await self._score(client, prompt, command.adapter(index))

            return list(await asyncio.gather(*map(one, range(len(command.prompts)))))

    async def _score(
        self, client: httpx.AsyncClient, prompt: tuple[int, ...], adapter: str
    ) -> tuple[float, ...]:
        first = next(self._numbers)

        async def attempt(number: int) -> tuple[float, ...]:
            assert self._engine.pool is not None
            ready = self._engine.pool.ready()
            if not ready:
                message = "no engine with the snapshot's weights is left"
                raise RequestFailed(NO_ENGINE, message, retryable=False)
            url = ready[(first + number) % len(ready)].url
            rid = f"prompt-{first}-{number}-{self._version}"
            body = scoring_body(prompt, rid)
            if adapter:
                body = self._engine.pool.api.with_adapter(body, adapter)
            deadlines = self._settings.deadlines
            response = await post_once(client, f"{url}/generate", body, deadlines)
            return read_scores(response, prompt, rid)

        scores: tuple[float, ...] = await with_retries(attempt, self._settings.retries, Counter())
        return scores


def is_deterministic(pool: ServerPool | None) -> bool:
    """Whether every server samples deterministically from the given seeds."""
    if pool is None:
        return False
    for worker in pool.alive():
        try:
            info: Any = pool.call(worker, "/server_info", timeout_s=CONTROL_S, method="GET")
        except RequestFailed:
            return False
        if info.get("enable_deterministic_inference") is not True:
            return False
    return True


def meta_weights(folder: str) -> dict[str, Tensor]:
    """Shapes of the weights in a Hugging Face folder, as tensors without data. Raises ValueError if
    there are none."""
    shapes = checkpoint_shapes(folder)
    if not shapes:
        raise ValueError(f"the snapshot {folder} is gone")
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

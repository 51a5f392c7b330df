"""Sampling from snapshots on the workers: local engines that hold snapshots, with requests
distributed over the ranks."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from arguments.hf.model import read_hf_model
from arguments.schema import ModelConfig
from slime_like.distributed.collectives import gather, together
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.rollout.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.engines.local.engine import LocalEngine
from slime_like.weights.safetensors_reader import WeightFiles
from slime_like.weights.untrained import untrained_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MISSING_LOG_PROB = -99999.0  # the SDK's value (tinker.types.topk_logprobs)


@dataclass(frozen=True, slots=True)
class SampleCommand:
    """A batch to sample. prompts: their tokens. wanted: (prompt index, sample index) of all
    samples."""

    params: SamplingParams
    prompts: list[tuple[int, ...]]
    wanted: list[tuple[int, int]]

    @classmethod
    def of(
        cls, sampling: Mapping[str, Any], prompts: Sequence[bytes], counts: Sequence[int]
    ) -> SampleCommand:
        """Build from plain values. prompts: little-endian int32. counts: number of samples per
        prompt."""
        params = SamplingParams(
            **{
                **sampling,
                "stop": tuple(sampling["stop"]),
                "stop_token_ids": tuple(sampling["stop_token_ids"]),
            }
        )
        tokens = [tuple(np.frombuffer(prompt, dtype="<i4").tolist()) for prompt in prompts]
        return cls(params, tokens, [(i, j) for i, count in enumerate(counts) for j in range(count)])

    def requests(
        self, places: Sequence[tuple[int, int]], seeds: Sequence[int]
    ) -> list[GenerateRequest]:
        """Requests for a subset of `wanted`, numbered in order. seeds: one per prompt."""
        return [
            GenerateRequest(n, self.prompts[i], seed_of(seeds[i], j))
            for n, (i, j) in enumerate(places)
        ]


class SnapshotSampler:
    """Samples from exported models with at most `max_engines` local engines per rank; the least
    recently used engine loads the next snapshot."""

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_engines: int,
        local_batch_size: int | None,
        dtype: torch.dtype,
    ) -> None:
        """model, tokenizer: of the base model. dtype: of the engines' weights. local_batch_size: of
        an engine."""
        self.model, self.layout, self.max_engines = model, layout, max_engines
        self._local_batch_size, self._dtype = local_batch_size, dtype
        self._engines: OrderedDict[str, LocalEngine] = OrderedDict()
        self._tokenizer = tokenizer
        self._updates = 0

    def sample(
        self,
        folder: str,
        sampling: Mapping[str, Any],
        prompts: list[bytes],
        counts: list[int],
        seeds: list[int],
        prompt_log_probs: bool,
        seeded: bool = False,
        top_k_prompt: int = 0,
        top_k_sample: int = 0,
    ) -> list[dict[str, Any]]:
        """Samples of each prompt, as plain values, on every rank. seeded: whether the client set
        the seeds; ignored here, where seeds always apply. top_k_prompt, top_k_sample: number of
        most likely tokens to return per position; 0 for none."""
        together(lambda: self._engine(folder))
        engine = self._engine(folder)
        asked = SampleCommand.of(sampling, prompts, counts)
        rank, world = self.layout.rank, self.layout.world_size
        mine = asked.wanted[rank::world]
        requests = asked.requests(mine, seeds)
        outputs = together(lambda: engine.generate(requests, asked.params) if requests else [])
        scored = list(range(rank, len(prompts), world)) if prompt_log_probs else []
        scores = together(lambda: engine.prompt_log_probs([asked.prompts[i] for i in scored]))
        samples = {where: plain(output) for where, output in zip(mine, outputs, strict=True)}
        if top_k_sample:
            together(lambda: add_top(engine, asked, samples, top_k_sample))
        own = range(rank, len(prompts), world) if top_k_prompt else []
        tops = together(
            lambda: {i: top_of(engine, asked.prompts[i], 0, top_k_prompt, 1.0) for i in own}
        )
        local = (samples, {i: with_nan(s) for i, s in zip(scored, scores)}, tops)
        sequences: dict[tuple[int, int], dict[str, object]] = {}
        prompt_scores: dict[int, bytes] = {}
        top_prompts: dict[int, dict[str, Any]] = {}
        for of_samples, of_prompts, of_tops in gather(local):
            sequences |= of_samples
            prompt_scores |= of_prompts
            top_prompts |= of_tops
        return [
            {
                "sequences": [sequences[i, j] for j in range(count)],
                "prompt_log_probs": prompt_scores.get(i),
                "top_prompt": top_prompts.get(i),
            }
            for i, count in enumerate(counts)
        ]

    def close(self) -> None:
        """Nothing to do: there are no external resources."""

    def _engine(self, folder: str) -> LocalEngine:
        engine = self._engines.pop(folder, None)
        if engine is None:
            engine = self._free_engine(tied=is_tied(folder))
            self._updates += 1
            engine.update_weights(weights_in(folder), self._updates)
        self._engines[folder] = engine
        return engine

    def _free_engine(self, *, tied: bool) -> LocalEngine:
        """A new engine, or the least recently used one, for new weights. tied: see `is_tied`."""
        if len(self._engines) >= self.max_engines:
            oldest = self._engines.popitem(last=False)[1]
            if oldest.tied == tied:
                return oldest
            oldest.close()
        model = self.model
        assert model.hf_checkpoint is not None
        return LocalEngine(
            model.hf_checkpoint,
            self._tokenizer,
            local_batch_size=self._local_batch_size,
            device=device_of_this_process(),
            dtype=self._dtype,
            trust_remote_code=model.trust_remote_code,
            tied=tied,
        )


def seed_of(seed: int, sample: int) -> int:
    """63-bit seed of the j-th sample of a request, a function of both numbers only."""
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest(), "big")
        >> 1
    )


def is_tied(folder: str) -> bool:
    """Whether output layer and embedding share a weight, which is not the case after training an
    adapter on the output layer. Raises ValueError if the folder is gone."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the snapshot {folder} is gone") from error
    return bool(config.get("tie_word_embeddings", False))


def weights_in(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a Hugging Face folder's network, dequantised. Raises ValueError if
    there is none."""
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"the snapshot {folder} is gone")
    untrained = untrained_prefixes(read_hf_model(folder))
    with WeightFiles(folder) as files:
        for name in sorted(files.names):
            if not name.startswith(untrained):
                yield name, files.read(name, 0, 0, files.shape(name)[0])


def plain(output: GenerateOutput) -> dict[str, Any]:
    if output.finish_reason == "abort":
        raise ValueError("the model gave a log-prob that is not finite: its weights are broken")
    return {
        "tokens": np.array(output.tokens, dtype="<i4").tobytes(),
        "log_probs": np.array(output.log_probs, dtype="<f4").tobytes(),
        "stopped": output.finish_reason == "stop",
    }


def with_nan(scores: tuple[float, ...]) -> bytes:
    """Prompt log-probs as float32 bytes, with NaN for the first token, which has none."""
    return np.array([float("nan"), *scores], dtype="<f4").tobytes()


def add_top(
    engine: LocalEngine,
    asked: SampleCommand,
    samples: Mapping[tuple[int, int], dict[str, Any]],
    k: int,
) -> None:
    """Add to each sample, by (prompt, sample) index, its most likely tokens at the sampling
    temperature."""
    for (i, _), sample in samples.items():
        prompt = asked.prompts[i]
        row = (*prompt, *np.frombuffer(sample["tokens"], dtype="<i4").tolist())
        sample["top"] = top_of(engine, row, len(prompt), k, asked.params.temperature)


def top_of(
    engine: LocalEngine, tokens: Sequence[int], first: int, k: int, temperature: float
) -> dict[str, object]:
    """The k most likely tokens at positions `first` to N - 1, as plain values. Position 0 has no
    log-probs and gets the SDK's values for missing: token 0, MISSING_LOG_PROB."""
    ids, scores = engine.top_log_probs(tokens, max(first, 1), k, temperature)
    if first == 0:
        ids = torch.nn.functional.pad(ids, (0, 0, 1, 0))
        scores = torch.nn.functional.pad(scores, (0, 0, 1, 0), value=MISSING_LOG_PROB)
    return {
        "tokens": ids.numpy().astype("<i4").tobytes(),
        "log_probs": scores.numpy().astype("<f4").tobytes(),
        "k": k,
        "length": len(ids),
    }

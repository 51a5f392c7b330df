"""Sampling from snapshots on the workers: every rank has local engines, and samples its share of
the requests."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arguments.hf.model import read_hf_model, ties_embeddings
from arguments.hf.peft_adapter import ADAPTER_WEIGHTS, PeftAdapter, read_adapter_config
from arguments.schema import ModelConfig
from slime_like.distributed.collectives import gather, together
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.images.encoded import EncodedImage
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.lora.peft import BASE_DIGEST
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.tinker.schemas import MISSING_LOG_PROB
from slime_like.weights.safetensors_reader import WeightFiles, weights_digest
from slime_like.weights.untrained import untrained_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.images.processor import ImageProcessor

ALT_TOKENS = -1  # in place of a sample's index, for the seed of alternative tokens


class TopTokens(TypedDict):
    """The k most likely tokens at `length` positions: [length, k], as int32 and float32 bytes."""

    tokens: bytes
    log_probs: bytes
    k: int
    length: int


class SamplingSets(TypedDict):
    """Tokens that top-k and top-p left to sample each token from, concatenated."""

    tokens: bytes  # int32
    counts: bytes  # int32, of each token's set


class SampledSequence(TypedDict):
    """A response."""

    tokens: bytes  # int32 and float32 bytes
    log_probs: bytes  # int32 and float32 bytes
    stopped: bool  # ended by a stop token or text
    top: NotRequired[TopTokens]
    sets: NotRequired[SamplingSets]


class AltTokens(TypedDict):
    """k draws at each of the P - 1 positions after the first, [P - 1, k]."""

    tokens: bytes  # int64
    log_probs: bytes  # float32
    k: int


class PromptSamples(TypedDict):
    """All samples of one prompt."""

    sequences: list[SampledSequence]
    prompt_log_probs: bytes | None  # float32 bytes, NaN for the first token
    top_prompt: NotRequired[TopTokens | None]
    # float32 bytes: log-probs of the requested cells, 0 where none was requested
    targets: NotRequired[bytes | None]
    alt: NotRequired[AltTokens | None]


Place = tuple[int, int]  # prompt index, sample index


@dataclass(frozen=True, slots=True)
class SampleCommand:
    """A batch to sample."""

    params: SamplingParams
    prompts: list[tuple[int, ...]]
    # counts, seeds: number of samples and seed of each prompt
    counts: list[int]
    seeds: list[int]
    prompt_log_probs: bool = False  # whether to score the prompts
    seeded: bool = False  # whether the client set the seeds
    # top_k_prompt, top_k_sample: number of most likely tokens to return per position; 0 for none
    top_k_prompt: int = 0
    top_k_sample: int = 0
    # of each prompt: cells to score (row and token, int64 bytes), and draws per position
    targets: Sequence[Mapping[str, bytes] | None] = ()
    alt_tokens: Sequence[int] = ()
    images: Sequence[Sequence[bytes]] = ()  # of each prompt, as files
    # of each prompt: PEFT folder of an adapter beside the weights, "" for none; () for none at all
    adapters: Sequence[str] = ()

    def adapter(self, index: int) -> str:
        """Of a prompt."""
        return self.adapters[index] if self.adapters else ""

    @property
    def scores_rows(self) -> bool:
        """Whether some prompt needs log-probs of other tokens than its own."""
        return any(self.targets) or any(self.alt_tokens)

    @classmethod
    def from_plain(
        cls, sampling: Mapping[str, Any], prompts: Sequence[bytes], **fields: Any
    ) -> SampleCommand:
        """Build from plain values. prompts: little-endian int32."""
        stop = tuple(sampling["stop"])
        stop_token_ids = tuple(sampling["stop_token_ids"])
        params = SamplingParams(**{**sampling, "stop": stop, "stop_token_ids": stop_token_ids})
        tokens = [tuple(np.frombuffer(prompt, dtype="<i4").tolist()) for prompt in prompts]
        return cls(params, tokens, **fields)

    @property
    def places(self) -> list[Place]:
        """Of all samples, by prompt."""
        return [(i, j) for i, count in enumerate(self.counts) for j in range(count)]

    def requests(self, places: Sequence[Place]) -> list[GenerateRequest]:
        """Requests for a subset of `places`, numbered in order."""
        images = [tuple(map(EncodedImage, files)) for files in self.images]
        return [
            GenerateRequest(
                n,
                self.prompts[i],
                seed_of(self.seeds[i], j),
                images[i] if images else (),
                adapter=self.adapter(i),
            )
            for n, (i, j) in enumerate(places)
        ]


class SnapshotSampler:
    """Samples from exported models with at most `max_engines` local engines per rank; the least
    recently used engine loads the next snapshot. The engine with the base model's weights holds
    exported adapters beside them, at most `max_adapters`, and samples from several at once; the
    least recently used adapter makes room for the next one."""

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_engines: int,
        max_adapters: int,
        local_batch_size: int | None,
        dtype: torch.dtype,
        images: ImageProcessor | None = None,
    ) -> None:
        """
        Args:
            model, tokenizer, images: Of the base model; images: None without a vision tower.
            local_batch_size: Of an engine.
            dtype: Of the engines' weights.
        """
        self.model = model
        self.layout = layout
        self.max_engines = max_engines
        self.max_adapters = max_adapters
        self._local_batch_size = local_batch_size
        self._dtype = dtype
        self._engines: OrderedDict[str, LocalEngine] = OrderedDict()
        self._tokenizer = tokenizer
        self._images = images
        self._updates = 0
        self._adapters: OrderedDict[str, None] = OrderedDict()  # of the base model's engine

    def sample(self, folder: str, command: SampleCommand) -> list[PromptSamples]:
        """Samples of each prompt, on every rank. Seeds always apply. folder: of the weights; those
        of the base model where the command has adapters."""
        engine = together(lambda: self._engine(folder))
        used = sorted(set(command.adapters) - {""})
        assert not used or folder == self.model.hf_checkpoint, "adapters are of the base model"
        together(lambda: self._hold_adapters(engine, used))
        rank = self.layout.rank
        world = self.layout.world_size
        local_places = command.places[rank::world]
        requests = command.requests(local_places)
        outputs = together(lambda: engine.generate(requests, command.params) if requests else [])
        local_prompts = {i: command.prompts[i] for i in range(rank, len(command.prompts), world)}
        to_score = local_prompts if command.prompt_log_probs else {}
        scores = together(
            lambda: engine.prompt_log_probs(
                list(to_score.values()), [command.adapter(i) for i in to_score]
            )
        )
        samples = together(
            lambda: {
                place: plain_output(output)
                for place, output in zip(local_places, outputs, strict=True)
            }
        )
        if command.top_k_sample:
            together(lambda: add_top_tokens(engine, command, samples))
        for_top = local_prompts if command.top_k_prompt else {}
        k = command.top_k_prompt
        tops = together(
            lambda: {
                i: top_tokens(engine, prompt, 0, k, 1.0, command.adapter(i))
                for i, prompt in for_top.items()
            }
        )
        rows = local_prompts if command.scores_rows else {}
        extras = together(lambda: {i: row_scores(engine, command, i) for i in rows})
        local = (samples, {i: with_nan(s) for i, s in zip(to_score, scores)}, tops, extras)
        sequences: dict[Place, SampledSequence] = {}
        prompt_scores: dict[int, bytes] = {}
        top_prompts: dict[int, TopTokens] = {}
        of_rows: dict[int, tuple[bytes | None, AltTokens | None]] = {}
        for rank_samples, rank_scores, rank_tops, rank_extras in gather(local):
            sequences |= rank_samples
            prompt_scores |= rank_scores
            top_prompts |= rank_tops
            of_rows |= rank_extras
        return [
            {
                "sequences": [sequences[i, j] for j in range(count)],
                "prompt_log_probs": prompt_scores.get(i),
                "top_prompt": top_prompts.get(i),
                "targets": of_rows.get(i, (None, None))[0],
                "alt": of_rows.get(i, (None, None))[1],
            }
            for i, count in enumerate(command.counts)
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
            for name in oldest.adapters:
                oldest.drop_adapter(name)
                del self._adapters[name]
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
            images=self._images,
        )

    def _hold_adapters(self, engine: LocalEngine, used: Sequence[str]) -> None:
        """Load adapters for a command, and drop others, the least recently used first."""
        for folder in used:
            if folder not in self._adapters:
                config, factors = read_adapter(folder, self._base_digest)
                engine.load_adapter(folder, factors.items(), config.alpha / config.rank)
            self._adapters[folder] = None
            self._adapters.move_to_end(folder)
        unused = [folder for folder in self._adapters if folder not in used]
        for folder in unused[: max(0, len(self._adapters) - self.max_adapters)]:
            engine.drop_adapter(folder)
            del self._adapters[folder]

    @cached_property
    def _base_digest(self) -> str:
        assert self.model.hf_checkpoint is not None
        return weights_digest(self.model.hf_checkpoint)


def read_adapter(folder: str, base_digest: str) -> tuple[PeftAdapter, dict[str, Tensor]]:
    """The settings and factors of an exported adapter. Raises ValueError if the folder is gone, or
    if the adapter is of another base model."""
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.exists():
        raise ValueError(f"the snapshot {folder} is gone")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            digest = (file.metadata() or {}).get(BASE_DIGEST)
            factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if digest != base_digest:
        raise ValueError(
            f"{folder} is an adapter of another base model than --hf-checkpoint; start the server "
            "with the model that it was trained on, or save it again"
        )
    return read_adapter_config(folder), factors


def seed_of(seed: int, sample: int) -> int:
    """63-bit seed of the j-th sample of a request, a function of both numbers only."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def is_tied(folder: str) -> bool:
    """Whether output layer and embedding share a weight, which is not the case after training an
    adapter on the output layer. Raises ValueError if the folder is gone."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"the snapshot {folder} is gone")
    return ties_embeddings(folder)


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


def plain_output(output: GenerateOutput) -> SampledSequence:
    """Convert to plain values. Raises ValueError for an aborted output."""
    if output.finish_reason == "abort":
        raise ValueError("the model's log-probs are not finite: its weights are corrupt")
    sequence: SampledSequence = {
        "tokens": np.array(output.tokens, dtype="<i4").tobytes(),
        "log_probs": np.array(output.log_probs, dtype="<f4").tobytes(),
        "stopped": output.finish_reason == "stop",
    }
    if output.sampling_mask:
        sets = [each.numpy().astype("<i4") for each in output.sampling_mask]
        counts = np.array([each.size for each in sets], dtype="<i4")
        sequence["sets"] = {"tokens": np.concatenate(sets).tobytes(), "counts": counts.tobytes()}
    return sequence


def with_nan(scores: tuple[float, ...]) -> bytes:
    """Prompt log-probs as float32 bytes, with NaN for the first token, which has none."""
    return np.array([float("nan"), *scores], dtype="<f4").tobytes()


def add_top_tokens(
    engine: LocalEngine, command: SampleCommand, samples: Mapping[Place, SampledSequence]
) -> None:
    """Add to each sample its most likely tokens at the sampling temperature."""
    k = command.top_k_sample
    temperature = command.params.temperature
    for (i, _), sample in samples.items():
        prompt = command.prompts[i]
        row = (*prompt, *np.frombuffer(sample["tokens"], dtype="<i4").tolist())
        adapter = command.adapter(i)
        sample["top"] = top_tokens(engine, row, len(prompt), k, temperature, adapter)


def row_scores(
    engine: LocalEngine, command: SampleCommand, index: int
) -> tuple[bytes | None, AltTokens | None]:
    """Log-probs of a prompt's target cells, and its draws of alternative tokens at the sampling
    temperature with their log-probs; both log-probs are at temperature 1."""
    cells = command.targets[index]
    k = command.alt_tokens[index]
    if cells is None and not k:
        return None, None
    rows = engine.log_prob_rows(command.prompts[index], 1, 1.0, command.adapter(index)).cpu()
    scores = None
    if cells is not None:
        row_of = torch.from_numpy(np.frombuffer(cells["rows"], dtype="<i8").copy())
        tokens = torch.from_numpy(np.frombuffer(cells["tokens"], dtype="<i8").copy())
        found = rows[row_of, tokens.clamp(min=0)]
        scores = torch.where(tokens >= 0, found, 0.0).numpy().astype("<f4").tobytes()
    if not k:
        return scores, None
    temperature = command.params.temperature
    if temperature == 0:
        draws = rows.argmax(-1, keepdim=True).expand(-1, k)
    else:
        generator = torch.Generator().manual_seed(seed_of(command.seeds[index], ALT_TOKENS))
        draws = torch.multinomial(
            (rows / temperature).softmax(-1), k, replacement=True, generator=generator
        )
    alt: AltTokens = {
        "tokens": draws.numpy().astype("<i8").tobytes(),
        "log_probs": rows.gather(1, draws).numpy().astype("<f4").tobytes(),
        "k": k,
    }
    return scores, alt


def top_tokens(
    engine: LocalEngine,
    tokens: Sequence[int],
    first: int,
    k: int,
    temperature: float,
    adapter: str = "",
) -> TopTokens:
    """The k most likely tokens at positions `first` to N - 1. Position 0 has no log-probs and gets
    the SDK's values for missing: token 0, MISSING_LOG_PROB."""
    ids, scores = engine.top_log_probs(tokens, max(first, 1), k, temperature, adapter)
    if first == 0:
        ids = torch.nn.functional.pad(ids, (0, 0, 1, 0))
        scores = torch.nn.functional.pad(scores, (0, 0, 1, 0), value=MISSING_LOG_PROB)
    return {
        "tokens": ids.numpy().astype("<i4").tobytes(),
        "log_probs": scores.numpy().astype("<f4").tobytes(),
        "k": k,
        "length": len(ids),
    }

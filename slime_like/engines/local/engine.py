"""The local engine: generation inside the training process with transformers' model and KV cache,
for CPUs, tests and small models.

It has no paged cache, continuous batching or tensor parallelism; use SGLang where these matter.

A response depends on its prompt, seed, weights and sampling parameters. The other requests in its
batch change logits by float32 rounding only (padding and batch size select other kernels), which
changes about one token in 10^7.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from arguments.hf.model import read_hf_model
from arguments.hf.settings_file import generation_end_ids
from slime_like.engines.base import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.engines.local.adapter import LocalAdapters
from slime_like.engines.local.batcher import Batcher
from slime_like.engines.local.decoder import Decoder
from slime_like.engines.local.weight_loader import WeightSlots
from slime_like.hf_class import class_for_images, class_for_text, uninitialised_weights
from slime_like.images.processor import ImageProcessor
from slime_like.weights.safetensors_reader import WeightFiles
from slime_like.weights.untrained import untrained_weights

# KV cache budget that sets the batch size without --rollout-local-batch-size: for a small model,
# larger batches cost little more time until the KV cache exceeds the processor caches.
CACHE_BYTES = 256 * 2**20
FEWEST = 64
MOST = 512
# transformers' classes that take padding in front of a prompt for tokens, by model type:
# DeepSeek-V4's compresses it
WITHOUT_PADDING = ("deepseek_v4",)


class LocalEngine(RolloutEngine):
    """In-process `RolloutEngine`. The architecture comes from the config in the folder
    `hf_checkpoint`, weights only from `update_weights`.

    Args:
        tokenizer: For its end-of-sequence id and stop strings; None if prompts and stops are token
            ids.
        local_batch_size: Responses decoded together; None: as many as fit into `CACHE_BYTES` of KV
            cache, from `FEWEST` to `MOST`.
        dtype: Of weights and KV cache; sampling uses float32 logits.
        tied: Overrides the config's tie_word_embeddings (adapters on the output layer untie it).
        images: The model's image processor; None: prompts have no images, and the model no tower.
        lora_scale: Updates are adapters with this alpha over rank, beside the weights in
            `hf_checkpoint`; None: updates are whole weights.
    """

    def __init__(
        self,
        hf_checkpoint: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        local_batch_size: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
        tied: bool | None = None,
        images: ImageProcessor | None = None,
        lora_scale: float | None = None,
    ) -> None:
        if local_batch_size is not None and local_batch_size < 1:
            raise ValueError(f"--rollout-local-batch-size is {local_batch_size}, must be >= 1")
        config = AutoConfig.from_pretrained(hf_checkpoint, trust_remote_code=trust_remote_code)
        if tied is not None:
            config.tie_word_embeddings = tied
        if hasattr(config, "quantization_config"):  # of the files; synced weights have none
            del config.quantization_config
        # no random initialisation: every weight is synced later
        model_class = class_for_text(config) if images is None else class_for_images(config)
        with uninitialised_weights(), torch.device(device):
            model = model_class.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        if images is None:
            remove_tower(model)
        model.tie_weights()
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self._model = model.eval().requires_grad_(False)
        self._slots = WeightSlots(self._model)
        self._pads = config.get_text_config().model_type not in WITHOUT_PADDING
        if images is not None or self._slots.has_tables:
            self._slots.keep(untrained_weights(read_hf_model(hf_checkpoint), hf_checkpoint))
        self._adapters = LocalAdapters(self._model)
        self._lora_scale = lora_scale
        if lora_scale is not None:
            self.takes_adapter = True
            self._slots.load(self._stored_weights(hf_checkpoint))
        self._weights_complete = False
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        self._local_batch_size = local_batch_size
        self._end_ids = end_token_ids(hf_checkpoint, config, tokenizer)
        self._decoder = Decoder(
            self._model,
            tokenizer,
            self._device,
            self._end_ids,
            lambda: self.weight_version,
            self._adapters,
            images=images,
        )
        self._images = images
        self._token_lock = threading.Lock()  # weights are only replaced between two tokens
        self._batcher = Batcher(
            self._decoder.decode, self._batch_size, self._token_lock, self._together
        )
        text_config = config.get_text_config()
        self._cache_bytes_per_token = cache_bytes_per_token(text_config, dtype)
        self._vocab_size: int = text_config.vocab_size
        self._max_positions: int | None = getattr(text_config, "max_position_embeddings", None)

    @property
    def model(self) -> torch.nn.Module:
        """transformers' model."""
        return self._model

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine`. Tied weights may be sent under any or all of their names. Values are
        cast to the engine's dtype."""
        with self._token_lock:
            self._weights_complete = False
            if self._lora_scale is None:
                self._slots.load(weights)
            else:
                self._adapters.load(weights, self._lora_scale)
            self._weights_complete = True
            self.weight_version = version

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that requests may name."""
        return self._adapters.names

    def load_adapter(self, name: str, factors: Iterable[tuple[str, Tensor]], scale: float) -> None:
        """Hold one more adapter beside the weights, or replace it. See `LocalAdapters.load`."""
        with self._token_lock:
            self._adapters.load(factors, scale, name)

    def drop_adapter(self, name: str) -> None:
        with self._token_lock:
            self._adapters.drop(name)

    def _stored_weights(self, folder: str) -> Iterator[tuple[str, Tensor]]:
        """Those of the base model. Files may have others, e.g. of layers that predict ahead."""
        known = self._slots.tensors
        with WeightFiles(folder) as files:
            for name in sorted(known.keys() & files.names):
                yield name, files.read(name, *(0, 0, files.shape(name)[0]))

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        with self._token_lock:  # another thread may replace weights
            self._check(requests, sampling)
        # Sort by length for less padding; equal prompts become adjacent and are prefilled once.
        order = sorted(
            range(len(requests)),
            key=lambda i: (len(requests[i].prompt_tokens), requests[i].prompt),
        )
        outputs: list[GenerateOutput | None] = [None] * len(requests)
        size = self._batch_size(requests, sampling)
        for chunk in self._chunks(order, requests, size):
            chunk.sort(key=lambda i: requests[i].adapter)
            tokens = self._decoder.decode([requests[i] for i in chunk], sampling, frozenset())
            while True:
                with self._token_lock:
                    done = next(tokens, None)
                if done is None:
                    break
                for j, output in done.items():
                    outputs[chunk[j]] = output
        return [output for output in outputs if output is not None]

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """See `RolloutEngine`. Decoded in a batch with other waiting requests; yields to the event
        loop after every token."""
        with self._token_lock:  # as in `generate`
            self._check([request], sampling)
        return await self._batcher.submit(request, sampling)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        self._batcher.abort(sample_ids)

    def pause(self) -> None:
        self._batcher.paused = True

    def resume(self) -> None:
        self._batcher.paused = False

    def close(self) -> None:
        """Free the weights; no generation afterwards."""
        self._weights_complete = False
        self._decoder.free()
        del self._model, self._slots, self._adapters

    def _chunks(
        self, order: Sequence[int], requests: Sequence[GenerateRequest], size: int
    ) -> Iterator[list[int]]:
        """Requests that are decoded together, at most `size` of them. order: sorted by length."""
        runs = [list(order)]
        if not self._pads:
            by_length = itertools.groupby(order, lambda i: len(requests[i].prompt_tokens))
            runs = [list(run) for _, run in by_length]
        for run in runs:
            for start in range(0, len(run), size):
                yield run[start : start + size]

    def _together(self, first: GenerateRequest, other: GenerateRequest) -> bool:
        """Whether two requests can be decoded in one batch."""
        return self._pads or len(first.prompt_tokens) == len(other.prompt_tokens)

    def _batch_size(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> int:
        if self._local_batch_size is not None:
            return self._local_batch_size
        longest = max((len(r.prompt_tokens) for r in requests), default=0)
        row = self._cache_bytes_per_token * (longest + sampling.max_new_tokens)
        return min(max(FEWEST, CACHE_BYTES // row), MOST)

    def _check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        if not self._weights_complete:
            raise RuntimeError("the local engine has no complete weights: update_weights failed")
        if sampling.report_routed_experts and not self._decoder.routed_experts.layers:
            raise ValueError("--use-rollout-routing-replay: the model has no MoE layers")
        if sampling.report_indexer_topk and not self._decoder.indexers.layers:
            raise ValueError("--use-rollout-indexer-replay: the model has no indexers")
        if sampling.stop and self._tokenizer is None:
            raise ValueError(f"stop strings {sampling.stop!r} require an engine with a tokenizer")
        for request in requests:
            prompt = request.prompt_tokens
            if not prompt:
                raise ValueError(f"sample {request.sample_id}: the prompt is empty")
            if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
                raise ValueError(
                    f"sample {request.sample_id}: a prompt token is outside the vocabulary "
                    f"[0, {self._vocab_size})"
                )
            if request.adapter and request.adapter not in self._adapters.names:
                raise ValueError(
                    f"sample {request.sample_id}: the engine has no adapter {request.adapter!r}"
                )
            self._check_images(request)
            longest = len(prompt) + sampling.max_new_tokens
            if self._max_positions is not None and longest > self._max_positions:
                raise ValueError(
                    f"sample {request.sample_id}: {len(prompt)} prompt tokens and "
                    f"{sampling.max_new_tokens} new ones exceed the model's {self._max_positions} "
                    "positions; lower --rollout-max-response-len or drop long prompts"
                )

    def _check_images(self, request: GenerateRequest) -> None:
        """Check that the prompt has the placeholders of its images, and no others."""
        where = f"sample {request.sample_id}"
        if self._images is None:
            if request.images:
                raise ValueError(f"{where} has images, which need --multimodal-keys")
            return
        placeholders = request.prompt_tokens.count(self._images.rule.image_token)
        expected = sum(self._images.token_counts(request.images))
        if placeholders != expected:
            raise ValueError(
                f"{where}: the prompt has {placeholders} placeholders of images, and its "
                f"{len(request.images)} images have {expected} features"
            )

    @torch.inference_mode()
    def prompt_log_probs(
        self, prompts: Sequence[tuple[int, ...]], adapters: Sequence[str] | None = None
    ) -> list[tuple[float, ...]]:
        """Log-probs of each prompt's tokens except the first, at temperature 1: n - 1 numbers for n
        tokens. adapters: of each prompt; None for none. Raises ValueError for tokens outside the
        vocabulary and prompts that are too long."""
        names = [""] * len(prompts) if adapters is None else adapters
        self._check(
            [
                GenerateRequest(i, prompt, 0, adapter=adapter)
                for i, (prompt, adapter) in enumerate(zip(prompts, names, strict=True))
            ],
            SamplingParams(max_new_tokens=1),
        )
        scores = []
        for prompt, adapter in zip(prompts, names):  # one by one, to bound memory: [L, V] logits
            logits = self._logits(prompt, adapter)[:-1].float()
            targets = torch.tensor(prompt[1:], dtype=torch.long, device=self._device)[:, None]
            log_probs = logits.gather(1, targets)[:, 0] - logits.logsumexp(-1)
            scores.append(tuple(log_probs.tolist()))
        return scores

    @torch.inference_mode()
    def top_log_probs(
        self, tokens: Sequence[int], first: int, k: int, temperature: float, adapter: str = ""
    ) -> tuple[Tensor, Tensor]:
        """The k most likely tokens at each position of a sequence, before top-k and top-p sampling.

        Args:
            tokens: A sequence of N tokens.
            first: First position, at least 1: token 0 has no log-prob.
            k: At most the vocabulary size.
            temperature: Divides the logits; 0 (greedy) counts as 1.
            adapter: Of the model; "" for none.

        Returns:
            Token ids (int64) and log-probs (float32), both [N - first, k], for positions `first` to
            N - 1, in descending order of probability.
        """
        rows = self.log_prob_rows(tokens, first, temperature, adapter)
        top = rows.topk(k, dim=-1)
        return top.indices.cpu(), top.values.cpu()

    @torch.inference_mode()
    def log_prob_rows(
        self, tokens: Sequence[int], first: int, temperature: float, adapter: str = ""
    ) -> Tensor:
        """Log-probs of all tokens, [N - first, V], on the device; arguments as `top_log_probs`."""
        logits = self._logits(tokens, adapter)[first - 1 : -1].float()
        return (logits / (temperature or 1.0)).log_softmax(-1)

    def _logits(self, tokens: Sequence[int], adapter: str) -> Tensor:
        """After each token of a sequence, [N, V]."""
        with self._adapters.of_rows([adapter]):
            logits: Tensor = self._model(
                input_ids=torch.tensor([list(tokens)], device=self._device)
            ).logits[0]
        return logits


# names of towers and their projectors in transformers' classes
TOWERS = (
    *("visual", "vision_tower", "vision_model", "multi_modal_projector", "mm_projector"),
    *("embed_vision", "audio_tower", "embed_audio"),
)


def cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """KV cache bytes per token over all layers. config: of the text model."""
    if getattr(config, "is_heterogeneous", False):  # heads of layers differ
        layers = (config.per_layer_config[n] for n in range(config.num_hidden_layers))
        return sum(
            2 * layer.num_key_value_heads * layer.head_dim * dtype.itemsize for layer in layers
        )
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA caches the latents of all heads
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return int(config.num_hidden_layers * width * dtype.itemsize)


def remove_tower(model: torch.nn.Module) -> None:
    """Drop what computes the features of images, whose weights are not synced: prompts have
    none."""
    for module in (model, getattr(model, "model", model)):
        for name in TOWERS:
            if hasattr(module, name):
                setattr(module, name, None)


def end_token_ids(
    hf_checkpoint: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Token ids that end a response: the union of generation_config.json, config.json and the
    tokenizer, as in SGLang. Raises ValueError if generation_config.json cannot be read."""
    sources = (
        generation_end_ids(hf_checkpoint),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id if tokenizer is not None else None,
    )
    ids: set[int] = set()
    for source in sources:
        if isinstance(source, list | tuple):
            ids.update(source)
        elif source is not None:
            ids.add(source)
    return frozenset(ids)

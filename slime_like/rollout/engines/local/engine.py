"""Generation in the training process, on transformers' model and KV cache: the engine for CPUs,
tests and small models.

The decode loop is our own because transformers' `generate` computes the prompt once per sample and
goes on computing finished rows; sharing the prompt among the samples of a group and dropping
finished rows is worth more than 1.5x on group sampling. There is no paged cache, no continuous
batching and no tensor parallelism: use SGLang where these matter.

A response depends on its prompt, its seed, the weights and the sampling parameters. Which other
requests are decoded beside it changes logits by float32 rounding only (padding and batch size pick
other kernels), which turns a token in about one of 10^7.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from slime_like.rollout.engines.base import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
)
from slime_like.rollout.engines.local.batcher import LocalServing
from slime_like.rollout.engines.local.routed_experts import RouteRecorder, whole_routes
from slime_like.rollout.engines.local.weight_loader import WeightSlots
from slime_like.rollout.sampling import draw_uniforms, sample_from_sets, sample_tokens


@dataclass(slots=True)
class _Row:
    """A response in the making."""

    tokens: list[int] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    token_sets: list[Tensor] = field(default_factory=list)  # only where they are reported
    routes: list[Tensor] = field(
        default_factory=list
    )  # likewise: of the prompt [P, layers, topk], then of one token after another
    finish_reason: FinishReason = "length"


class LocalEngine:
    """`RolloutEngine` in process. The network comes from the config in `hf_checkpoint` (a folder), its
    weights only from `update_weights`.

    tokenizer: needed for its end-of-sequence id and for stop strings; None where prompts and stops
    are token ids. tied: whether the output layer is the embedding, where it is not as the config
    says (adapters on the output layer untie them). local_batch_size: responses decoded together.
    dtype: of weights and KV cache; sampling is in float32 logits whatever it is.
    """

    def __init__(
        self,
        hf_checkpoint: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        local_batch_size: int = 64,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
        tied: bool | None = None,
    ) -> None:
        if local_batch_size < 1:
            raise ValueError(f"--rollout-local-batch-size is {local_batch_size}, must be >= 1")
        config = AutoConfig.from_pretrained(hf_checkpoint, trust_remote_code=trust_remote_code)
        if tied is not None:
            config.tie_word_embeddings = tied
        with (
            no_init_weights(),
            torch.device(device),
        ):  # no random numbers are drawn: every weight is received later
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        model.tie_weights()
        self.weight_version = -1
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.serves_all_ranks = False
        self._serving = LocalServing(self._decode, local_batch_size)
        self._model = model.eval().requires_grad_(False)
        self._slots = WeightSlots(self._model)
        self._routes = RouteRecorder(self._model)
        self._weights_complete = False
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        self._local_batch_size = local_batch_size
        self._end_ids = _end_token_ids(hf_checkpoint, config, tokenizer)
        text_config = config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self._max_positions: int | None = getattr(text_config, "max_position_embeddings", None)

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine`. Tied weights may come under any one, or all, of their names. Values
        are cast to the engine's dtype."""
        with self._serving.between_tokens():
            self._weights_complete = False
            self._slots.load(weights)
            self._weights_complete = True
            self.weight_version = version

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        with self._serving.between_tokens():  # weights may be replaced by another thread
            self._check(requests, sampling)
        # Prompts of like length share a chunk (less padding), equal prompts are neighbours
        # (computed once).
        order = sorted(
            range(len(requests)),
            key=lambda i: (len(requests[i].prompt_tokens), requests[i].prompt_tokens),
        )
        outputs: list[GenerateOutput | None] = [None] * len(requests)
        for start in range(0, len(order), self._local_batch_size):
            chunk = order[start : start + self._local_batch_size]
            tokens = self._decode([requests[i] for i in chunk], sampling, frozenset())
            while True:
                with self._serving.between_tokens():
                    done = next(tokens, None)
                if done is None:
                    break
                for j, output in done.items():
                    outputs[chunk[j]] = output
        return [output for output in outputs if output is not None]

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Decoded together with what else is waiting; the event loop gets its turn after every
        token."""
        self._check([request], sampling)
        return await self._serving.submit(request, sampling)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        self._serving.abort(sample_ids)

    async def leave_loop(self) -> None:
        """Nothing belongs to it."""

    def pause(self) -> None:
        self._serving.paused = True

    def resume(self) -> None:
        self._serving.paused = False

    def check_health(self) -> None:
        """It lives as long as this process."""

    def release_memory(self) -> None:
        """Its weights stay: they are small, or there is no GPU."""

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Free the weights; the engine generates no more."""
        self._weights_complete = False
        del self._model, self._slots, self._routes

    def _check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        if not self._weights_complete:
            raise RuntimeError(
                "the local engine has no complete weights: its first or latest update_weights did not succeed"
            )
        if sampling.report_routes and not self._routes.layers:
            raise ValueError(
                "the model has no experts whose routes could be told (--use-rollout-routing-replay)"
            )
        if sampling.stop and self._tokenizer is None:
            raise ValueError(
                f"stop strings {sampling.stop!r} need a tokenizer, and this engine was made without one"
            )
        for request in requests:
            prompt = request.prompt_tokens
            if not prompt:
                raise ValueError(f"sample {request.sample_id}: the prompt is empty")
            if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
                raise ValueError(
                    f"sample {request.sample_id}: a prompt token is outside the vocabulary [0, {self._vocab_size})"
                )
            if (
                self._max_positions is not None
                and len(prompt) + sampling.max_new_tokens > self._max_positions
            ):
                raise ValueError(
                    f"sample {request.sample_id}: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones exceed the model's "
                    f"{self._max_positions} positions; lower --rollout-max-response-len or drop long prompts"
                )

    @torch.inference_mode()
    def prompt_log_probs(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probs of each prompt's tokens after its first, at temperature 1; a prompt of n tokens
        has n - 1. Raises ValueError for tokens outside the vocabulary and prompts that are too
        long."""
        self._check(
            [GenerateRequest(i, prompt, 0) for i, prompt in enumerate(prompts)],
            SamplingParams(max_new_tokens=1),
        )
        scores = []
        for prompt in prompts:  # one by one: [L, V] logits of each
            logits = (
                self._model(input_ids=torch.tensor([prompt], device=self._device))
                .logits[0, :-1]
                .float()
            )
            labels = torch.tensor(prompt[1:], device=self._device)
            scores.append(
                tuple((logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(-1)).tolist())
            )
        return scores

    @torch.inference_mode()
    def top_log_probs(
        self, tokens: Sequence[int], first: int, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at the positions of a sequence, before top-k and top-p.

        Args:
            tokens: A sequence of N tokens.
            first: The first position that is wanted, at least 1: token 0 has no log-prob.
            k: How many, at most the vocabulary.
            temperature: Divides the logits; 0 (greedy) counts as 1.

        Returns:
            Token ids (int64) and log-probs (float32), both [N - first, k], of positions `first` to
            N - 1, the likeliest first.
        """
        ids = torch.tensor([list(tokens)], device=self._device)
        logits = self._model(input_ids=ids).logits[0, first - 1 : -1].float()
        top = (logits / (temperature or 1.0)).log_softmax(-1).topk(k, dim=-1)
        return top.indices.cpu(), top.values.cpu()

    @torch.inference_mode()
    def _decode(
        self,
        requests: Sequence[GenerateRequest],
        sampling: SamplingParams,
        aborted: Collection[int],
    ) -> Iterator[dict[int, GenerateOutput]]:
        """Decode B requests together; after every token the outputs of those that ended with it, by
        their index. aborted: sample ids, read after every token."""
        rows = [_Row() for _ in requests]
        own_ends = frozenset() if sampling.ignore_end_tokens else self._end_ids
        stop_ids = own_ends.union(sampling.stop_token_ids)
        uniforms = draw_uniforms([r.seed for r in requests], sampling.max_new_tokens).to(
            self._device
        )  # (B, N)
        log_probs = torch.full(uniforms.shape, float("nan"), device=self._device)  # (B, N)
        with self._routes.recording(sampling.report_routes):
            logits, cache, mask, positions = self._prefill(
                [r.prompt_tokens for r in requests], sampling.max_new_tokens
            )
        if sampling.report_routes:
            for i, routes in enumerate(
                self._routes.of_prompts([r.prompt_tokens for r in requests])
            ):
                rows[i].routes.append(routes)
        reports = sampling.report_token_sets and not sampling.greedy
        live = list(range(len(requests)))  # requests[live[j]] is row j of the running batch
        live_index = torch.arange(len(requests), device=self._device)
        prompt_width = mask.size(1) - sampling.max_new_tokens
        for step in range(sampling.max_new_tokens):
            if reports:
                tokens, log_probs[live_index, step], kept = sample_from_sets(
                    logits, uniforms[live_index, step], sampling
                )
                for row, members in zip(live, kept.cpu(), strict=True):
                    rows[row].token_sets.append(members.nonzero()[:, 0].int())
            else:
                tokens, log_probs[live_index, step] = sample_tokens(
                    logits, uniforms[live_index, step], sampling
                )
            for row, token in zip(live, tokens.tolist(), strict=True):
                rows[row].tokens.append(token)
                rows[row].weight_versions.append(self.weight_version)
            going_on = self._mark_stopped(rows, live, stop_ids, sampling.stop)
            if step + 1 == sampling.max_new_tokens:
                going_on = []
            for row in [live[j] for j in going_on if requests[live[j]].sample_id in aborted]:
                rows[row].finish_reason = "abort"
            going_on = [j for j in going_on if rows[live[j]].finish_reason != "abort"]
            ended = [live[j] for j in sorted(set(range(len(live))) - set(going_on))]
            yield {
                row: self._output(requests[row], rows[row], log_probs[row].cpu(), reports=reports)
                for row in ended
            }
            if not going_on:
                return
            if len(going_on) < len(live):
                keep = torch.tensor(going_on, device=self._device)
                cache.reorder_cache(keep)
                live, live_index = [live[j] for j in going_on], live_index[keep]
                tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
            positions = positions + 1
            with self._routes.recording(sampling.report_routes):
                logits = self._forward(
                    tokens[:, None], mask[:, : prompt_width + step + 1], positions, cache
                )
            if sampling.report_routes:
                for row, routes in zip(live, self._routes.last(len(live)), strict=True):
                    rows[row].routes.append(routes)

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int
    ) -> tuple[Tensor, DynamicCache, Tensor, Tensor]:
        """Compute each distinct prompt once, left-padded, then repeat it for its samples.

        Returns logits of the last prompt token [B, V], the cache, the mask [B, W + max_new_tokens]
        (response part all True; W is the longest prompt) and the position of the last prompt token
        [B, 1].
        """
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, distinct))
        ids = torch.zeros(len(distinct), width, dtype=torch.long)
        mask = torch.ones(len(distinct), width + max_new_tokens, dtype=torch.long)
        for prompt, i in distinct.items():
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, : width - len(prompt)] = 0
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids, mask[:, :width], positions, cache)
        owner = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        cache.reorder_cache(owner)
        return logits[owner], cache, mask[owner], positions[owner, -1:]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [B, V] after the last of ids [B, new]; extends the cache. mask covers cached and
        new tokens."""
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _mark_stopped(
        self,
        rows: Sequence[_Row],
        live: Sequence[int],
        stop_ids: frozenset[int],
        stop: Sequence[str],
    ) -> list[int]:
        """Set the finish reason of rows whose last token ended them; return the indices into `live`
        of the others."""
        stopped = [rows[row].tokens[-1] in stop_ids for row in live]
        if stop:
            assert self._tokenizer is not None
            # Every token of a byte-level or SentencePiece vocabulary is at least a byte of text, so
            # that a stop string which the last token completes lies within as many tokens as it has
            # bytes; a few more keep the cut from touching it.
            reach = max(len(s.encode()) for s in stop) + 4
            tails = self._tokenizer.batch_decode(
                [rows[row].tokens[-reach:] for row in live], skip_special_tokens=False
            )
            stopped = [
                done or any(s in tail for s in stop)
                for done, tail in zip(stopped, tails, strict=True)
            ]
        for row, done in zip(live, stopped, strict=True):
            if done:
                rows[row].finish_reason = "stop"
        return [j for j, done in enumerate(stopped) if not done]

    def _output(
        self, request: GenerateRequest, row: _Row, log_probs: Tensor, *, reports: bool
    ) -> GenerateOutput:
        """A response up to its first non-finite log-prob, which only broken weights can cause; such
        a response is aborted."""
        values = log_probs[: len(row.tokens)]
        finite = int(values.isfinite().cumprod(0).sum())
        broken = finite < len(row.tokens)
        return GenerateOutput(
            sample_id=request.sample_id,
            tokens=tuple(row.tokens[:finite]),
            log_probs=tuple(values[:finite].tolist()),
            finish_reason="abort" if broken else row.finish_reason,
            weight_versions=tuple(row.weight_versions[:finite]),
            token_sets=tuple(row.token_sets[:finite]) if reports else None,
            routes=whole_routes(row.routes, len(request.prompt_tokens) + finite)
            if row.routes
            else None,
            failure=f"the log-prob of response token {finite} is {float(values[finite])}"
            if broken
            else None,
        )


def _end_token_ids(
    hf_checkpoint: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Token ids that end a response: the union of generation_config.json, config.json and the
    tokenizer, as SGLang takes it."""
    try:
        generation = GenerationConfig.from_pretrained(hf_checkpoint)
    except OSError:  # no generation_config.json
        generation = GenerationConfig()
    sources = (
        generation.eos_token_id,
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id if tokenizer is not None else None,
    )
    ids: set[int] = set()
    for source in sources:
        ids.update(
            source if isinstance(source, list | tuple) else () if source is None else (source,)
        )
    return frozenset(ids)

"""The decode loop of the local engine.

It replaces transformers' `generate`, which prefills the prompt once per sample and keeps computing
finished rows; sharing the prefill within a group and dropping finished rows speeds up group
sampling by more than 1.5x. A sampling step is a pure function of logits and uniforms, so a response
depends on its seed only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_like.engines.base import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    PromptKey,
    SamplingParams,
)
from slime_like.engines.local.adapter import LocalAdapters
from slime_like.images.inputs import concatenate
from slime_like.images.processor import ImageProcessor
from slime_like.images.rows import AXES, image_rows
from slime_like.samples.indexer_topk import pad_indexer_topk
from slime_like.samples.routed_experts import pad_routed_experts


@dataclass(slots=True)
class _Row:
    """A response being decoded."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # float32
    weight_versions: list[int] = field(default_factory=list)
    sampling_mask: list[Tensor] = field(default_factory=list)  # only if requested
    # only if requested: of the prompt [P, layers, topk], then of each token
    routed_experts: list[Tensor] = field(default_factory=list)
    indexer_topk: list[Tensor] = field(default_factory=list)  # likewise, [n, indexers, K]
    finish_reason: FinishReason = "length"


class _Cache(DynamicCache):
    """Says at each token whether the rows have padding, which the host knows. transformers finds
    out by reading the mask from the device, except for caches that it may compile."""

    is_compileable = False


class Decoder:
    """Decodes batches on one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        end_ids: frozenset[int],
        version: Callable[[], int],
        adapters: LocalAdapters,
        *,
        images: ImageProcessor | None = None,
    ) -> None:
        """
        Args:
            model: Uses the KV cache of transformers.
            tokenizer: For stop strings.
            device: Device of the model.
            end_ids: Tokens that end a response.
            version: Returns the current weight version; called at every token.
            adapters: Of the model, for requests that name one.
            images: The model's image processor, if prompts may have images.
        """
        self.routed_experts = RouteRecorder(model)
        self.indexers = IndexerRecorder(model)
        self._model = model
        self._tokenizer = tokenizer
        self._device = device
        self._end_ids = end_ids
        self._version = version
        self._adapters = adapters
        self._images = images
        # a placeholder without an image is never sampled, since no model could read it again
        self._never = () if images is None else (images.rule.image_token,)

    def free(self) -> None:
        """Release the model; no decoding afterwards."""
        del self._model, self.routed_experts, self.indexers, self._adapters

    @torch.inference_mode()
    def decode(
        self,
        requests: Sequence[GenerateRequest],
        sampling: SamplingParams,
        aborted: Collection[int],
    ) -> Iterator[dict[int, GenerateOutput]]:
        """Decode B requests in one batch. Yields after every token: newly finished outputs by
        index. aborted: sample ids to abort, read after every token."""
        rows = [_Row() for _ in requests]
        prompts = [request.prompt for request in requests]
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_end_tokens:
            stop_ids |= self._end_ids
        uniforms = draw_uniforms([r.seed for r in requests], sampling.max_new_tokens)  # (B, N)
        uniforms = uniforms.to(self._device)
        with self._recording(sampling):
            logits, cache, mask, positions = self._prefill(requests, sampling.max_new_tokens)
        if sampling.report_routed_experts:
            for record, routed_experts in zip(
                rows, self.routed_experts.of_prompts(prompts), strict=True
            ):
                record.routed_experts.append(routed_experts)
        if sampling.report_indexer_topk:
            for record, keys in zip(rows, self.indexers.of_prompts(prompts), strict=True):
                record.indexer_topk.append(keys)
        live = list(range(len(requests)))  # requests[live[j]] is row j of the running batch
        live_index = torch.arange(len(requests), device=self._device)
        prompt_width = mask.size(1) - sampling.max_new_tokens
        for step in range(sampling.max_new_tokens):
            forced = [requests[row].forced[step : step + 1] for row in live]
            tokens = self._append_token(
                [rows[row] for row in live], logits, uniforms[live_index, step], sampling, forced
            )
            continuing = self._mark_stopped(rows, live, stop_ids, sampling.stop)
            if step + 1 == sampling.max_new_tokens:
                continuing = []
            for row in [live[j] for j in continuing if requests[live[j]].sample_id in aborted]:
                rows[row].finish_reason = "abort"
            continuing = [j for j in continuing if rows[live[j]].finish_reason != "abort"]
            ended = [live[j] for j in sorted(set(range(len(live))) - set(continuing))]
            yield {row: self._output(requests[row], rows[row], sampling) for row in ended}
            if not continuing:
                return
            if len(continuing) < len(live):
                keep = torch.tensor(continuing, device=self._device)
                cache.reorder_cache(keep)
                live = [live[j] for j in continuing]
                live_index = live_index[keep]
                tokens = tokens[keep]
                mask = mask[keep]
                positions = positions[keep]
            positions = positions + 1
            is_padded = any(len(requests[row].prompt_tokens) < prompt_width for row in live)
            cache.is_compileable = is_padded  # build the mask, do not look whether it is all True
            with self._recording(sampling):
                logits = self._forward(
                    tokens[:, None],
                    mask[:, : prompt_width + step + 1] if is_padded else None,
                    cache,
                    {"position_ids": positions},
                    [requests[row].adapter for row in live],
                )
            if sampling.report_routed_experts:
                for row, routed_experts in zip(
                    live, self.routed_experts.last(len(live)), strict=True
                ):
                    rows[row].routed_experts.append(routed_experts)
            if sampling.report_indexer_topk:
                lengths = [len(requests[row].prompt_tokens) for row in live]
                for row, keys in zip(
                    live, self.indexers.last(lengths, prompt_width, step + 1), strict=True
                ):
                    rows[row].indexer_topk.append(keys)

    @contextmanager
    def _recording(self, sampling: SamplingParams) -> Iterator[None]:
        """Record during one forward pass what is to be reported."""
        with (
            self.routed_experts.recording(sampling.report_routed_experts),
            self.indexers.recording(sampling.report_indexer_topk),
        ):
            yield

    def _append_token(
        self,
        rows: Sequence[_Row],
        logits: Tensor,
        uniforms: Tensor,
        sampling: SamplingParams,
        forced: Sequence[tuple[int, ...]],
    ) -> Tensor:
        """Sample one token for each of B rows. Returns the tokens [B].

        Args:
            logits: [B, V].
            uniforms: [B].
            forced: Of each row the token to take instead, or ().
        """
        if reports_sampling_mask(sampling):
            assert not any(forced), "a forced token may be outside of the sampling mask"
            tokens, log_probs, kept = sample_from_sets(logits, uniforms, sampling, self._never)
            for row, members in zip(rows, kept.cpu(), strict=True):
                row.sampling_mask.append(members.nonzero()[:, 0].int())
        else:
            given = None
            if any(forced):
                given = torch.tensor([row[0] if row else -1 for row in forced], device=self._device)
            tokens, log_probs = sample_tokens(logits, uniforms, sampling, self._never, given)
        # one read for both, the only wait for a GPU: float64 holds tokens and float32 exactly
        both = torch.stack([tokens.double(), log_probs.float().double()]).tolist()
        for row, token, log_prob in zip(rows, *both, strict=True):
            row.tokens.append(int(token))
            row.log_probs.append(log_prob)
            row.weight_versions.append(self._version())
        return tokens

    def _prefill(
        self, requests: Sequence[GenerateRequest], max_new_tokens: int
    ) -> tuple[Tensor, _Cache, Tensor, Tensor]:
        """Compute each distinct prompt once, left-padded, then repeat it for its samples.

        Returns logits of the last prompt token [B, V], the cache, the mask [B, W + max_new_tokens]
        (response part all True; W is the longest prompt) and the largest position in the prompt
        [B, 1].
        """
        distinct = {request.prompt: request for request in requests}
        width = max(len(request.prompt_tokens) for request in requests)
        ids = torch.zeros(len(distinct), width, dtype=torch.long)
        mask = torch.ones(len(distinct), width + max_new_tokens, dtype=torch.long)
        for i, (prompt, *_) in enumerate(distinct):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, : width - len(prompt)] = 0
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        inputs = {"position_ids": positions}
        if self._images is not None and any(request.images for request in distinct.values()):
            inputs |= prefill_inputs(list(distinct.values()), ids, positions, self._images)
            positions = inputs["position_ids"]
            positions = positions if positions.dim() == 2 else positions.amax(0)
        ids = ids.to(self._device)
        mask = mask.to(self._device)
        last = positions.amax(1, keepdim=True).to(self._device)
        inputs = {name: value.to(self._device) for name, value in inputs.items()}
        cache = _Cache(config=self._model.config)
        adapters = [request.adapter for request in distinct.values()]
        logits = self._forward(ids, mask[:, :width], cache, inputs, adapters)
        place = {prompt: i for i, prompt in enumerate(distinct)}
        owner = torch.tensor([place[request.prompt] for request in requests], device=self._device)
        cache.reorder_cache(owner)
        return logits[owner], cache, mask[owner], last[owner]

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: _Cache,
        inputs: Mapping[str, Tensor],
        adapters: Sequence[str],
    ) -> Tensor:
        """Logits [B, V] after the last of ids [B, new]; extends the cache. mask covers cached and
        new tokens; None: none of them is padding. inputs: the model's other inputs. adapters: of
        the rows."""
        with self._adapters.of_rows(adapters):
            out = self._model(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **inputs,
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
            # Every token of a byte-level or SentencePiece vocabulary is at least one byte of text,
            # so a stop string completed by the last token spans at most as many tokens as it has
            # bytes; a few more keep the truncated prefix from affecting it.
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
        self, request: GenerateRequest, row: _Row, sampling: SamplingParams
    ) -> GenerateOutput:
        """Build the output. A non-finite log-prob, which only broken weights cause, truncates and
        aborts the response."""
        is_finite = [math.isfinite(value) for value in row.log_probs]
        finite = (*is_finite, False).index(False)
        finish_reason = row.finish_reason
        failure = None
        routed_experts = None
        if finite < len(row.tokens):
            finish_reason = "abort"
            failure = f"the log-prob of response token {finite} is {row.log_probs[finite]}"
        if row.routed_experts:
            routed_experts = pad_routed_experts(
                row.routed_experts, len(request.prompt_tokens) + finite
            )
        indexer_topk = None
        if row.indexer_topk:
            indexer_topk = pad_indexer_topk(row.indexer_topk, len(request.prompt_tokens) + finite)
        return GenerateOutput(
            sample_id=request.sample_id,
            tokens=tuple(row.tokens[:finite]),
            log_probs=tuple(row.log_probs[:finite]),
            finish_reason=finish_reason,
            weight_versions=tuple(row.weight_versions[:finite]),
            sampling_mask=tuple(row.sampling_mask[:finite])
            if reports_sampling_mask(sampling)
            else None,
            routed_experts=routed_experts,
            indexer_topk=indexer_topk,
            failure=failure,
        )


def prefill_inputs(
    requests: Sequence[GenerateRequest], ids: Tensor, positions: Tensor, processor: ImageProcessor
) -> dict[str, Tensor]:
    """What transformers' model takes for the images of prompts.

    Args:
        requests: B distinct prompts, of which some have images.
        ids: [B, W], left-padded.
        positions: [B, W], as of text.

    Returns:
        pixel_values, and image_grid_thw and position_ids [3, B, W] or the mask of placeholders.
    """
    with_images = [request for request in requests if request.images]
    pixels = concatenate([processor.inputs(request.images) for request in with_images])
    inputs = {"pixel_values": pixels.pixels}
    if pixels.grids is None:  # Gemma 3: the tokens of an image attend to each other both ways
        return inputs | {"token_type_ids": (ids == processor.rule.image_token).long()}
    by_axis = positions.repeat(AXES, 1, 1)
    for i, request in enumerate(requests):
        if request.images:
            tokens = torch.tensor(request.prompt_tokens)
            rows = image_rows(tokens, processor.inputs(request.images), processor.rule)
            assert rows.positions is not None
            by_axis[:, i, ids.size(1) - tokens.numel() :] = rows.positions
    return inputs | {"image_grid_thw": pixels.grids, "position_ids": by_axis}


def reports_sampling_mask(sampling: SamplingParams) -> bool:
    """Whether to report sampling masks; greedy sampling has none."""
    return sampling.report_sampling_mask and not sampling.greedy


class ChoiceRecorder:
    """What modules of a model choose in one forward pass."""

    def __init__(self) -> None:
        self._is_recording = False
        self._recorded: list[Tensor] = []  # of the last forward pass, one of each module

    @contextmanager
    def recording(self, enabled: bool) -> Iterator[None]:
        """Record during one forward pass."""
        self._is_recording = enabled
        self._recorded = []
        yield
        self._is_recording = False


class RouteRecorder(ChoiceRecorder):
    """Records router decisions of a transformers model, [n, topk] int16 of each layer, on the
    device. layers: number of MoE layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        # every family calls its experts module with (hidden states [n, H], expert ids [n, topk],
        # expert weights)
        experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self.layers = len(experts)
        for module in experts:
            module.register_forward_pre_hook(self._record)

    def _record(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._is_recording:
            self._recorded.append(inputs[1].to(torch.int16))

    def last(self, batch: int) -> Tensor:
        """Routed experts of the last forward pass over `batch` rows of equal length: [batch,
        length, layers, topk]."""
        assert len(self._recorded) == self.layers, "every expert layer is called once in a pass"
        return torch.stack(self._recorded, dim=1).unflatten(0, (batch, -1)).cpu()

    def of_prompts(self, prompts: Sequence[PromptKey]) -> list[Tensor]:
        """Routed experts of each prompt, [P, layers, topk], after a forward pass over the distinct
        ones of `prompts`, left-padded."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        routed_experts = self.last(len(distinct))
        return [
            routed_experts[distinct[prompt], routed_experts.size(1) - len(prompt[0]) :]
            for prompt in prompts
        ]


class IndexerRecorder(ChoiceRecorder):
    """Records the keys that the indexers of a transformers model select: [B, n, K] int32 of each,
    columns of the cache or, of DeepSeek-V4, whose rows have no padding, entries; for its last n
    queries that may have a choice.

    layers: Number of indexers.
    width: The most keys that a query attends to; queries with fewer have no choice and are not
        recorded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        indexers = [module for name, module in model.named_modules() if name.endswith(".indexer")]
        self.layers = len(indexers)
        self.width = _selection_width(indexers[0]) if indexers else 0
        for module in indexers:
            module.register_forward_hook(self._record)

    def _record(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self._is_recording:
            return
        if output.size(-2) > 1:  # a prompt's, of which columns before K have no choice
            output = output[..., self.width :, :]
        if output.dtype == torch.bool:  # [B, 1, n, columns], whether each is selected
            output = _columns(output.squeeze(1), self.width)
        missing = self.width - output.size(-1)  # DeepSeek-V4: there are fewer entries
        self._recorded.append(F.pad(output.int(), (0, missing), value=-1))

    def last(self, prompt_lengths: Sequence[int], prompt_width: int, count: int) -> list[Tensor]:
        """Keys of the last forward pass over one token of each row: [1, indexers, K] int32 each, or
        [0, indexers, K] of one without a choice.

        Args:
            prompt_lengths, prompt_width: Prompts are left-padded to the width.
            count: Which token of the responses it was, from 1.
        """
        keys = self._stacked()
        found = []
        for row, length in enumerate(prompt_lengths):
            has_choice = length + count > self.width
            part = keys[row] if has_choice else self._nothing()
            found.append(_of_sequence(part, prompt_width - length))
        return found

    def of_prompts(self, prompts: Sequence[PromptKey]) -> list[Tensor]:
        """Keys of each prompt, [max(0, P - K), indexers, K], after a forward pass over the distinct
        ones of `prompts`, left-padded."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        longest = max(len(tokens) for tokens, *_ in prompts)
        if longest <= self.width:
            return [self._nothing()] * len(prompts)
        keys = self._stacked()
        padding = [longest - len(tokens) for tokens, *_ in prompts]
        return [
            _of_sequence(keys[distinct[prompt], pad:], pad)
            for prompt, pad in zip(prompts, padding, strict=True)
        ]

    def _stacked(self) -> Tensor:
        """[B, n, indexers, K], on the host."""
        assert len(self._recorded) == self.layers, "every indexer is called once in a pass"
        return torch.stack(self._recorded, dim=2).cpu()

    def _nothing(self) -> Tensor:
        return torch.empty(0, self.layers, self.width, dtype=torch.int32)


def _selection_width(indexer: torch.nn.Module) -> int:
    """The most keys that a query attends to, by the attributes of transformers' indexers."""
    sizes = vars(indexer)
    if (budget := sizes.get("token_budget")) is not None:  # Qwen3.8: pools are always whole
        return int(budget + sizes["compress_ratio"] - 1)
    return int(sizes["index_topk"] + sizes.get("index_kpool", 1) - 1)


def _columns(selected: Tensor, width: int) -> Tensor:
    """[..., columns] bool -> [..., width] int32, the selected columns, then -1."""
    width = min(width, selected.size(-1))
    ranked = selected.to(torch.int8).sort(dim=-1, descending=True, stable=True)
    columns = ranked.indices[..., :width].where(ranked.values[..., :width] > 0, -1)
    return columns.int()


def _of_sequence(keys: Tensor, padding: int) -> Tensor:
    """Positions within a sequence of columns of the cache, which begins with padding."""
    return (keys - padding).where(keys >= 0, -1)


def draw_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[B, count] float64 in [0, 1). Row i is a stream keyed by seeds[i] only; a longer draw extends
    a shorter one.

    Philox (Salmon et al. 2011) is keyed by the full 64-bit seed; torch's CPU generator uses only
    the lower 32 bits, so seeds of the form (rollout << 32) + sample would repeat.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    sampling: SamplingParams,
    never: Sequence[int] = (),
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution in float64.

    logits [B, V]; uniforms [B] float64 (not read when greedy). Returns tokens [B] int64 and
    log_probs [B] float32, the latter under the temperature-scaled distribution before top-k and
    top-p. NaN logits give a NaN log-prob. never: tokens that are not sampled, as if top-k had left
    them out. given: [B] int64, tokens to take instead where they are not -1.
    """
    tokens, _, scores = _sample(logits, uniforms, sampling, never)
    if given is not None:
        tokens = torch.where(given < 0, tokens, given)
    return tokens, _log_prob(scores, tokens)


def sample_from_sets(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams, never: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sample_tokens`, but with log-probs after top-k and top-p, and the sampling mask [B, V]
    bool, which includes the sampled token."""
    tokens, kept, _ = _sample(logits, uniforms, sampling, never)
    return tokens, _log_prob(kept, tokens), kept > float("-inf")


def _sample(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams, never: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B], scaled logits after top-k and top-p [B, V], before them [B, V])."""
    scores = logits.float()
    if not sampling.greedy:
        scores = scores / sampling.temperature
    kept = scores
    if never:
        kept = scores.index_fill(-1, torch.tensor(never, device=scores.device), float("-inf"))
    if sampling.greedy:
        return kept.argmax(-1), kept, scores
    if sampling.top_k != -1 and sampling.top_k < scores.size(-1):
        kept = TopKLogitsWarper(sampling.top_k)(None, kept)
    if sampling.top_p < 1:
        kept = TopPLogitsWarper(sampling.top_p)(None, kept)
    cumulative = kept.double().softmax(-1).cumsum(-1)
    # below the total even after rounding: uniforms are at most 1 - 2^-53
    target = uniforms * cumulative[:, -1]
    # The first entry strictly above the target has positive probability; the clamp only matters for
    # NaN.
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.clamp(max=scores.size(-1) - 1), kept, scores


def _log_prob(scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)

"""Generation and grading: prompts in, graded sample groups out, distributed over the ranks.

Samples are assigned round-robin to the generating ranks (all ranks with a local engine, the first
with servers), which keep them; the other ranks get the metadata of `samples/index.py`. A sample's
randomness depends only on the run's seed and its id, so the number of ranks and the layout do not
change what is sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial as bind
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arguments.eval_sets import EvalSet
from arguments.schema import RolloutConfig
from slime_like.data.tokenizer import response_text
from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    num_generating_ranks,
)
from slime_like.images.processor import ImageProcessor
from slime_like.rewards.grader import Grader
from slime_like.rollout.episode import CustomGenerate, Model, SampleHook
from slime_like.samples.episodes import complete
from slime_like.samples.exchange import BUFFER_SIZE, gather_on_rank_zero, refresh_index, share_index
from slime_like.samples.groups import SampleGroup, split
from slime_like.samples.index import AnySample, holder_of
from slime_like.samples.indexer_topk import join_indexer_topk
from slime_like.samples.routed_experts import join_routed_experts
from slime_like.samples.sampling_mask import pad_sampling_mask, split_sampling_mask
from slime_like.types import FINISHED, PROMPT_SOURCE, Prompt, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def training_sampling(config: RolloutConfig) -> SamplingParams:
    """Sampling parameters of training rollouts."""
    return SamplingParams(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_new_tokens=config.rollout_max_response_len,
        stop=tuple(config.rollout_stop or ()),
        stop_token_ids=tuple(config.rollout_stop_token_ids or ()),
        report_sampling_mask=config.renormalize_sampled_log_probs,
        report_routed_experts=config.use_rollout_routing_replay,
        report_indexer_topk=config.use_rollout_indexer_replay,
        skip_special_tokens=config.rollout_skip_special_tokens,
    )


def eval_sampling(eval_set: EvalSet, rollout: RolloutConfig) -> SamplingParams:
    """Sampling parameters of an evaluation set; unset values are those of training."""
    base = training_sampling(rollout)
    names = ("temperature", "top_p", "top_k", "stop", "stop_token_ids")
    overrides = {name: getattr(eval_set, name) for name in names}
    return replace(
        base,
        max_new_tokens=eval_set.max_response_len or base.max_new_tokens,
        report_sampling_mask=False,
        report_routed_experts=False,
        report_indexer_topk=False,
        **{name: value for name, value in overrides.items() if value is not None},
    )


def sample_seed(seed: int, purpose: str, sample_id: int, position: int = 0) -> int:
    """A 63-bit seed determined by its arguments. position: current response length."""
    part = f"@{position}" if position else ""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{sample_id}{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Rollouter:
    """Generates and grades over all ranks. `purpose`, `seed` and a sample's id determine its
    randomness."""

    def __init__(
        self,
        engine: RolloutEngine,
        grader: Grader,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        custom_generate: CustomGenerate | None = None,
        sample_hook: SampleHook | None = None,
        sample_buffer_size: int = BUFFER_SIZE,
        image_processor: ImageProcessor | None = None,
        response_limits: Mapping[str, int] | None = None,
    ) -> None:
        """response_limits: longest response by source of a mix, where it has a limit."""
        self._response_limits = dict(response_limits or {})
        self.engine = engine
        self.grader = grader
        self.tokenizer = tokenizer
        self.seed = seed
        self.custom_generate = custom_generate
        self.sample_hook = sample_hook
        self.rollout_id: int | None = None  # current rollout, for user functions
        self.sample_buffer_size = sample_buffer_size
        self.image_processor = image_processor
        # group of its collectives; None: the default group, which the training thread uses
        self.group: dist.ProcessGroup | None = None

    def seed_of(self, purpose: str, sample_id: int, position: int) -> int:
        """The seed of a request. position: current response length."""
        return sample_seed(self.seed, purpose, sample_id, position)

    def sampling_of(self, sample: Sample, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters of a sample: those of its source, where it has a limit."""
        if not self._response_limits or PROMPT_SOURCE not in sample.metadata:
            return sampling
        limit = self._response_limits.get(sample.metadata[PROMPT_SOURCE]["name"])
        if limit is None or limit >= sampling.max_new_tokens:
            return sampling
        return replace(sampling, max_new_tokens=limit)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling: SamplingParams,
        *,
        purpose: str = "train",
        grader: Grader | None = None,
    ) -> list[SampleGroup]:
        """Generate and grade complete responses. Collective.

        Args:
            prompts: Equal on all ranks.
            n_samples: Responses per prompt.
            sampling: Sampling parameters.
            purpose: "train", or the name of an evaluation: part of the seed.
            grader: Grader of this evaluation; None: the run's.

        Returns:
            A group per prompt, in order, on all ranks.
        """
        groups: dict[int, list[AnySample]] = {prompt.group_id: [] for prompt in prompts}
        samples: list[Sample] = []
        for prompt in prompts:
            first = prompt.group_id * n_samples
            samples += [Sample.empty(prompt, first + j) for j in range(n_samples)]
        done = self.continue_generation(samples, sampling, purpose=purpose, grader=grader)
        for sample in done:
            groups[sample.group_id].append(sample)
        graded = self.grade_groups(list(groups.values()), grader=grader)
        return [SampleGroup(members[0].group_id, tuple(members)) for members in graded]

    def continue_generation(
        self,
        samples: Sequence[AnySample],
        sampling: SamplingParams,
        *,
        purpose: str = "train",
        limit: int | None = None,
        grader: Grader | None = None,
    ) -> list[AnySample]:
        """Continue unfinished responses, each on the rank that holds it. Collective.

        Args:
            samples: On all ranks, at least as metadata; empty samples are held by all.
            sampling: Sampling parameters; max_new_tokens is for the complete response.
            purpose: As in `generate`.
            limit: Maximum number of tokens to add; longer responses stay PARTIAL. None: no limit.
            grader: As in `generate`.

        Returns:
            The samples in order, on all ranks; finished ones are graded, except by a group reward.
        """
        rank = dist.get_rank()
        grader = grader or self.grader
        num_generating = num_generating_ranks(self.engine, dist.get_world_size())
        holders = holders_of(samples, rank, num_generating, by_group=grader.args.group_rm)
        local = complete(s for s, holder in zip(samples, holders) if holder == rank)
        local = self._generate_local(local, sampling, purpose, limit)
        if self.sample_hook is not None:
            local = asyncio.run(self._with_hooks(local, evaluation=purpose != "train"))
        if not grader.args.group_rm:
            local = grader.grade(local)
        continued = share_index(local, holders, self.group)
        return [before if is_empty(after) else after for before, after in zip(samples, continued)]

    def grade_groups(
        self, groups: Sequence[Sequence[AnySample]], *, grader: Grader | None = None
    ) -> list[list[AnySample]]:
        """Grade groups with a group reward (--group-rm), on the ranks that hold them; without one
        they are returned unchanged. Collective."""
        grader = grader or self.grader
        if not grader.args.group_rm:
            return [list(group) for group in groups]
        local = [complete(group) for group in groups if isinstance(group[0], Sample)]
        graded = iter(grader.grade_groups(local))
        samples: list[AnySample] = []
        for group in groups:
            samples += next(graded) if isinstance(group[0], Sample) else group
        graded_groups = split(refresh_index(samples, self.group), [len(group) for group in groups])
        return [list(group) for group in graded_groups]

    async def _with_hooks(self, samples: Sequence[Sample], *, evaluation: bool) -> list[Sample]:
        return [await self.with_hook(sample, evaluation=evaluation) for sample in samples]

    async def with_hook(self, sample: Sample, *, evaluation: bool) -> Sample:
        """Apply --rollout-sample-hook-path to a finished sample, before its reward."""
        if self.sample_hook is None or sample.status not in FINISHED:
            return sample
        return await self.sample_hook(sample, self.tokenizer, self.rollout_id, evaluation)

    def gather(self, samples: Sequence[AnySample]) -> list[AnySample]:
        """Gather the samples with text and metadata on rank 0. Collective."""
        return gather_on_rank_zero(samples, buffer_size=self.sample_buffer_size, group=self.group)

    def _generate_local(
        self, samples: Sequence[Sample], sampling: SamplingParams, purpose: str, limit: int | None
    ) -> list[Sample]:
        """Generate on this rank's engine. Requests with equal limits are batched."""
        if self.custom_generate is not None and samples:
            return self._generate_custom(samples, sampling, purpose, limit)
        longest = limit or sampling.max_new_tokens
        budgets = {}
        done: dict[int, Sample] = {}
        for s in samples:
            room = self.sampling_of(s, sampling).max_new_tokens - s.response_length
            if room > 0:
                budgets[s.sample_id] = min(longest, room)
            else:  # begun by a run with a higher limit
                done[s.sample_id] = replace(s, status=SampleStatus.TRUNCATED)
        for length in sorted(set(budgets.values())):
            chunk = [s for s in samples if budgets.get(s.sample_id) == length]
            requests = [
                GenerateRequest(
                    s.sample_id,
                    tuple(s.tokens.tolist()),
                    self.seed_of(purpose, s.sample_id, s.response_length),
                    s.images,
                )
                for s in chunk
            ]
            limited = sampling
            if length != sampling.max_new_tokens:
                limited = replace(sampling, max_new_tokens=length)
            outputs = self.engine.generate(requests, limited)
            for s, output in zip(chunk, outputs, strict=True):
                done[s.sample_id] = self.append_output(s, output, sampling)
        return [done[s.sample_id] for s in samples]

    def _generate_custom(
        self, samples: Sequence[Sample], sampling: SamplingParams, purpose: str, limit: int | None
    ) -> list[Sample]:
        """`_generate_local` by the user's function or agents; samples with equal sampling
        parameters together."""
        assert self.custom_generate is not None
        seed_of = bind(self.seed_of, purpose)
        parts: dict[int, list[Sample]] = {}
        for s in samples:
            parts.setdefault(self.sampling_of(s, sampling).max_new_tokens, []).append(s)
        done: dict[int, Sample] = {}
        for part in parts.values():
            own = self.sampling_of(part[0], sampling)
            model = Model(self.engine, self.tokenizer, own, seed_of, self.image_processor)
            evaluation = purpose != "train"
            outputs = self.custom_generate.run(part, model, evaluation=evaluation, limit=limit)
            done.update((s.sample_id, output) for s, output in zip(part, outputs, strict=True))
        return [done[s.sample_id] for s in samples]

    def append_output(
        self, sample: Sample, output: GenerateOutput, sampling: SamplingParams
    ) -> Sample:
        """Append engine output to a sample.

        Args:
            sample: The sample that was sent.
            output: The engine's output.
            sampling: Sampling parameters; max_new_tokens is for the complete response.
        """
        sampling = self.sampling_of(sample, sampling)
        output = truncate_at_stop(self.tokenizer, sample, output, sampling.stop)
        assert sample.rollout_log_probs is not None
        length = sample.response_length + len(output.tokens)
        aborted = output.finish_reason == "abort" and output.failure is None
        partial = length < sampling.max_new_tokens and (aborted or output.finish_reason == "length")
        status = SampleStatus.PARTIAL if partial else _STATUS[output.finish_reason]
        new = torch.full((len(output.tokens),), status != SampleStatus.ABORTED, dtype=torch.bool)
        tokens = torch.cat([sample.tokens, torch.tensor(output.tokens, dtype=torch.int64)])
        log_probs = torch.tensor(output.log_probs, dtype=torch.float32)
        sets = None
        if output.sampling_mask is not None:
            sets = pad_sampling_mask(
                [*split_sampling_mask(sample.sampling_mask), *output.sampling_mask]
            )
        routed_experts = join_routed_experts(
            sample.routed_experts, output.routed_experts, tokens.numel()
        )
        metadata = sample.metadata
        if output.failure is not None:
            metadata = {**metadata, "failure": output.failure}
        response = response_text(
            self.tokenizer,
            tokens[tokens.numel() - length :].tolist(),
            stopped=status == SampleStatus.COMPLETED,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        return replace(
            sample,
            tokens=tokens,
            response_length=length,
            loss_mask=torch.cat([sample.loss_mask, new]),
            rollout_log_probs=torch.cat([sample.rollout_log_probs, log_probs]),
            sampling_mask=sets,
            routed_experts=routed_experts,
            indexer_topk=join_indexer_topk(
                sample.indexer_topk, output.indexer_topk, tokens.numel()
            ),
            status=status,
            weight_versions=(*sample.weight_versions, *output.weight_versions),
            response=response,
            metadata=metadata,
        )


def holders_of(
    samples: Sequence[AnySample], rank: int, num_generating: int, *, by_group: bool
) -> list[int]:
    """The rank that continues each sample, equal on all ranks: its holder, or round-robin over the
    first `num_generating` ranks for new samples.

    Args:
        rank: This rank.
        by_group: Keep groups on one rank.
    """
    group_holders: dict[int, int] = {}
    for sample in samples:
        group_holders.setdefault(sample.group_id, len(group_holders) % num_generating)
    for sample in samples:
        if sample.response_length:
            group_holders[sample.group_id] = holder_of(sample, rank)
    holders = []
    for i, sample in enumerate(samples):
        if sample.response_length:
            holders.append(holder_of(sample, rank))
        else:
            holders.append(group_holders[sample.group_id] if by_group else i % num_generating)
    return holders


def is_empty(sample: AnySample) -> bool:
    """Whether the sample is empty and unfinished, so that every rank holds it."""
    return not sample.response_length and not sample.ended


_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def truncate_at_stop(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, output: GenerateOutput, stop: Sequence[str]
) -> GenerateOutput:
    """Truncate the output after a stop string that began in the sample's earlier tokens, which the
    engine cannot detect."""
    if not stop or not sample.response_length or not output.tokens:
        return output
    reach = max(len(s.encode()) for s in stop) + 4  # every token is at least a byte of text
    before = sample.tokens[max(sample.prompt_length, sample.total_length - reach) :].tolist()
    for count in range(1, min(reach, len(output.tokens)) + 1):
        text = tokenizer.decode([*before, *output.tokens[:count]], skip_special_tokens=False)
        if any(s in text for s in stop):
            sets = None if output.sampling_mask is None else output.sampling_mask[:count]
            return replace(
                output,
                tokens=output.tokens[:count],
                log_probs=output.log_probs[:count],
                weight_versions=output.weight_versions[:count],
                sampling_mask=sets,
                finish_reason="stop",
            )
    return output

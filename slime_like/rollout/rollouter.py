"""Prompts in, graded sample groups out: shares the work among the ranks and brings the results
together.

The ranks that ask (all of them for an engine in each, the first for servers) generate and grade
every so many-th sample; then all ranks get all of them, in the same order. A sample's randomness
depends on the run's seed and its own id alone, so neither the number of ranks nor the layout
changes what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arguments.eval_sets import EvalSet
from arguments.schema import RolloutConfig
from slime_like.compat.slime.samples import unwritten
from slime_like.rewards.grader import Grader
from slime_like.rollout.custom_generate import CustomGenerate
from slime_like.rollout.engines.base import (
    GenerateOutput,
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    asking_ranks,
)
from slime_like.rollout.seeds import sample_seed
from slime_like.types import Prompt, Sample, SampleGroup, SampleStatus


def training_sampling(config: RolloutConfig) -> SamplingParams:
    """Sampling of the rollouts that are trained on."""
    return SamplingParams(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_new_tokens=config.rollout_max_response_len,
        stop=tuple(config.rollout_stop or ()),
        stop_token_ids=tuple(config.rollout_stop_token_ids or ()),
        report_token_sets=config.renormalize_sampled_log_probs,
        report_routes=config.use_rollout_routing_replay,
    )


def eval_sampling(each: EvalSet, rollout: RolloutConfig) -> SamplingParams:
    """Sampling of an evaluation set: what it does not say is as in training."""
    base = training_sampling(rollout)
    return replace(
        base,
        temperature=base.temperature if each.temperature is None else each.temperature,
        top_p=base.top_p if each.top_p is None else each.top_p,
        top_k=base.top_k if each.top_k is None else each.top_k,
        max_new_tokens=each.max_response_len or base.max_new_tokens,
        stop=base.stop if each.stop is None else each.stop,
        stop_token_ids=base.stop_token_ids if each.stop_token_ids is None else each.stop_token_ids,
        report_token_sets=False,
        report_routes=False,
    )


class Rollouter:
    """Generation and grading over all ranks. `purpose` and `seed` decide the randomness together
    with each sample's id."""

    def __init__(
        self,
        engine: RolloutEngine,
        grader: Grader,
        tokenizer: Any,
        *,
        seed: int,
        custom_generate: CustomGenerate | None = None,
    ) -> None:
        self.engine = engine
        self.grader = grader
        self.tokenizer = tokenizer
        self.seed = seed
        self.custom_generate = custom_generate
        # of its collectives; None: the default, which the training thread uses
        self.group: dist.ProcessGroup | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling: SamplingParams,
        *,
        purpose: str = "train",
        grader: Grader | None = None,
    ) -> list[SampleGroup]:
        """`n_samples` graded samples for each prompt, equal on all ranks. purpose: "train", or the
        name of an evaluation, so that
        the same ids draw different randomness. grader: of this evaluation; None: the run's."""
        samples = [
            unwritten(prompt, prompt.group_id * n_samples + j)
            for prompt in prompts
            for j in range(n_samples)
        ]
        groups: dict[int, list[Sample]] = {prompt.group_id: [] for prompt in prompts}
        for sample in self.extend(samples, sampling, purpose=purpose, grader=grader):
            groups[sample.group_id].append(sample)
        graded = self.grade_groups(list(groups.values()), grader=grader)
        return [SampleGroup(members[0].group_id, tuple(members)) for members in graded]

    def extend(
        self,
        samples: Sequence[Sample],
        sampling: SamplingParams,
        *,
        purpose: str = "train",
        limit: int | None = None,
        grader: Grader | None = None,
    ) -> list[Sample]:
        """Unfinished samples go on, to their end or by at most `limit` tokens, which leaves them
        PARTIAL; those that end are graded, except by a reward of whole groups. Equal on all ranks,
        in the order of `samples`."""
        rank, world = dist.get_rank(), dist.get_world_size()
        grader = grader or self.grader
        asking = asking_ranks(self.engine, world)
        mine = self._write(
            list(samples[rank::asking]) if rank < asking else [], sampling, purpose, limit
        )
        if not grader.args.group_rm:
            mine = grader.grade(mine)
        return self._shared(mine, samples)

    def grade_groups(
        self, groups: Sequence[Sequence[Sample]], *, grader: Grader | None = None
    ) -> list[list[Sample]]:
        """Whole groups with the rewards of a function of groups (--group-rm), which ranks ask for
        in turn; else as they are."""
        grader = grader or self.grader
        if not grader.args.group_rm:
            return [list(group) for group in groups]
        mine = grader.grade_groups(groups[dist.get_rank() :: dist.get_world_size()])
        every = iter(
            self._shared(
                [s for group in mine for s in group], [s for group in groups for s in group]
            )
        )
        return [[next(every) for _ in group] for group in groups]

    def _shared(self, mine: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
        """What all ranks did, on all of them, in the order of `samples`, which all of them have as
        they were before."""
        shares: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(shares, [to_plain(s) for s in mine], group=self.group)
        by_id = {record["sample_id"]: record for share in shares for record in share}
        return [from_plain(by_id[sample.sample_id], sample) for sample in samples]

    def _write(
        self, samples: Sequence[Sample], sampling: SamplingParams, purpose: str, limit: int | None
    ) -> list[Sample]:
        """What this rank's engine adds. Requests that may grow alike are asked for together."""
        if self.custom_generate is not None and samples:

            def seed_of(sample_id: int, position: int) -> int:
                return sample_seed(self.seed, purpose, sample_id, position)

            return self.custom_generate.run(
                samples,
                self.engine,
                self.tokenizer,
                sampling,
                seed_of,
                evaluation=purpose != "train",
            )
        room = {
            s.sample_id: min(
                limit or sampling.max_new_tokens, sampling.max_new_tokens - s.response_length
            )
            for s in samples
        }
        written: dict[int, Sample] = {}
        for length in sorted(set(room.values())):
            part = [s for s in samples if room[s.sample_id] == length]
            seeds = [sample_seed(self.seed, purpose, s.sample_id, s.response_length) for s in part]
            requests = [
                GenerateRequest(s.sample_id, tuple(s.tokens.tolist()), seed)
                for s, seed in zip(part, seeds)
            ]
            outputs = self.engine.generate(requests, replace(sampling, max_new_tokens=length))
            written |= {
                s.sample_id: self.written(s, output, sampling)
                for s, output in zip(part, outputs, strict=True)
            }
        return [written[s.sample_id] for s in samples]

    def written(self, sample: Sample, output: GenerateOutput, sampling: SamplingParams) -> Sample:
        """The sample with what the engine added to it."""
        output = cut_at_stop(self.tokenizer, sample, output, sampling.stop)
        assert sample.rollout_log_probs is not None
        length = sample.response_length + len(output.tokens)
        asked = output.finish_reason == "abort" and output.failure is None
        partial = length < sampling.max_new_tokens and (asked or output.finish_reason == "length")
        status = SampleStatus.PARTIAL if partial else _STATUS[output.finish_reason]
        new = torch.full((len(output.tokens),), status != SampleStatus.ABORTED, dtype=torch.bool)
        tokens = torch.cat([sample.tokens, torch.tensor(output.tokens, dtype=torch.int64)])
        sets = (
            None
            if output.token_sets is None
            else pad_token_sets([*rows_of(sample.token_sets), *output.token_sets])
        )
        return replace(
            sample,
            tokens=tokens,
            response_length=length,
            loss_mask=torch.cat([sample.loss_mask, new]),
            rollout_log_probs=torch.cat(
                [sample.rollout_log_probs, torch.tensor(output.log_probs, dtype=torch.float32)]
            ),
            token_sets=sets,
            routes=joined_routes(sample.routes, output.routes, tokens.numel()),
            status=status,
            weight_versions=(*sample.weight_versions, *output.weight_versions),
            response=self.tokenizer.decode(
                tokens[tokens.numel() - length :], skip_special_tokens=True
            ),
            metadata=sample.metadata
            if output.failure is None
            else {**sample.metadata, "failure": output.failure},
        )


_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def cut_at_stop(
    tokenizer: Any, sample: Sample, output: GenerateOutput, stop: Sequence[str]
) -> GenerateOutput:
    """The output up to where a stop string is complete that began in what the sample had already,
    which the engine cannot see."""
    if not stop or not sample.response_length or not output.tokens:
        return output
    reach = max(len(s.encode()) for s in stop) + 4  # every token is at least a byte of text
    before = sample.tokens[max(sample.prompt_length, sample.total_length - reach) :].tolist()
    for count in range(1, min(reach, len(output.tokens)) + 1):
        text = tokenizer.decode([*before, *output.tokens[:count]], skip_special_tokens=False)
        if any(s in text for s in stop):
            sets = None if output.token_sets is None else output.token_sets[:count]
            return replace(
                output,
                tokens=output.tokens[:count],
                log_probs=output.log_probs[:count],
                weight_versions=output.weight_versions[:count],
                token_sets=sets,
                finish_reason="stop",
            )
    return output


def joined_routes(before: Tensor | None, now: Tensor | None, length: int) -> Tensor | None:
    """[length, layers, topk] of a sample that grew: where its tokens went when they were first
    computed, under the weights of then."""
    if now is None:  # not asked for, or nothing was added
        return before if before is not None and before.size(0) == length else None
    routes = now[:length].clone()
    if before is not None:
        known = routes[: before.size(0)]
        known.copy_(torch.where(before >= 0, before, known))
    return routes


def rows_of(token_sets: Tensor | None) -> list[Tensor]:
    """The sets of `pad_token_sets`, without what fills them up."""
    return [] if token_sets is None else [row[row >= 0] for row in token_sets]


def pad_token_sets(sets: Sequence[Tensor]) -> Tensor:
    """[R, K] int32 of R sets of at most K tokens, filled up with -1."""
    return (
        pad_sequence(list(sets), batch_first=True, padding_value=-1)
        if sets
        else torch.empty((0, 0), dtype=torch.int32)
    )


def to_plain(sample: Sample) -> dict[str, Any]:
    """What another rank needs of a sample that it did not generate: no torch tensors, without what
    its prompt tells."""
    told = sample.rollout_log_probs
    return {
        "sample_id": sample.sample_id,
        "tokens": sample.tokens.numpy(),
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask.numpy(),
        "rollout_log_probs": None if told is None else told.numpy(),
        "token_sets": None if sample.token_sets is None else sample.token_sets.numpy(),
        "routes": None if sample.routes is None else sample.routes.numpy(),
        "token_rewards": None if sample.token_rewards is None else sample.token_rewards.numpy(),
        "reward": sample.reward,
        "status": str(sample.status),
        "weight_versions": sample.weight_versions,
        "response": sample.response,
        "metadata": dict(sample.metadata),
    }


def from_plain(record: dict[str, Any], before: Sample) -> Sample:
    """before: the sample as all ranks have it."""
    arrays = ("tokens", "loss_mask", "rollout_log_probs", "token_sets", "routes", "token_rewards")
    tensors = {
        name: None if record[name] is None else torch.from_numpy(record[name]) for name in arrays
    }
    return replace(
        before,
        **{
            **record,
            **tensors,
            "status": SampleStatus(record["status"]),
            "weight_versions": tuple(record["weight_versions"]),
        },
    )

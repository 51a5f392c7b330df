"""Prompts in, graded sample groups out: shares the work among the ranks and brings the results together.

The ranks that ask (all of them for an engine in each, the first for servers) generate and grade every so many-th sample; then all ranks get
all of them, in the same order. A sample's randomness depends on
the run's seed and its own id alone, so neither the number of ranks nor the layout changes what is sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arguments.groups import EvalConfig, RolloutConfig
from slime_like.rewards.grader import Grader
from slime_like.rollout.engine import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams, asking_ranks
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
    )


def eval_sampling(config: EvalConfig, rollout: RolloutConfig) -> SamplingParams:
    """Sampling of evaluation: what is not set is as in training."""
    base = training_sampling(rollout)
    return replace(
        base,
        temperature=base.temperature if config.eval_temperature is None else config.eval_temperature,
        top_p=base.top_p if config.eval_top_p is None else config.eval_top_p,
        top_k=base.top_k if config.eval_top_k is None else config.eval_top_k,
        max_new_tokens=config.eval_max_response_len or base.max_new_tokens,
        report_token_sets=False,
    )


class Rollouter:
    """Generation and grading over all ranks. `purpose` and `seed` decide the randomness together with each sample's id."""

    def __init__(self, engine: RolloutEngine, grader: Grader, tokenizer: Any, *, seed: int) -> None:
        self.engine = engine
        self.grader = grader
        self.tokenizer = tokenizer
        self.seed = seed

    def generate(self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, *, purpose: str = "train") -> list[SampleGroup]:
        """`n_samples` graded samples for each prompt, equal on all ranks. purpose: "train", or the name of an evaluation, so that
        the same ids draw different randomness."""
        wanted = [(prompt, prompt.group_id * n_samples + j) for prompt in prompts for j in range(n_samples)]
        rank, world = dist.get_rank(), dist.get_world_size()
        asking = asking_ranks(self.engine, world)
        mine = wanted[rank::asking] if rank < asking else []
        requests = [GenerateRequest(sample_id, prompt.tokens, sample_seed(self.seed, purpose, sample_id)) for prompt, sample_id in mine]
        outputs = self.engine.generate(requests, sampling) if requests else []
        samples = [self._sample(prompt, output) for (prompt, _), output in zip(mine, outputs)]
        graded = self.grader.grade(samples)
        shares: list[list[dict[str, Any]]] = [[] for _ in range(world)]
        dist.all_gather_object(shares, [_to_plain(s) for s in graded])
        by_id = {record["sample_id"]: record for share in shares for record in share}
        groups: dict[int, list[Sample]] = {}
        for prompt, sample_id in wanted:
            groups.setdefault(prompt.group_id, []).append(_from_plain(by_id[sample_id], prompt))
        return [SampleGroup(group_id, tuple(members)) for group_id, members in groups.items()]

    def _sample(self, prompt: Prompt, output: GenerateOutput) -> Sample:
        status = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}[output.finish_reason]
        return Sample(
            group_id=prompt.group_id,
            sample_id=output.sample_id,
            tokens=torch.tensor([*prompt.tokens, *output.tokens], dtype=torch.int64),
            response_length=len(output.tokens),
            loss_mask=torch.full((len(output.tokens),), status != SampleStatus.ABORTED, dtype=torch.bool),
            rollout_log_probs=torch.tensor(output.log_probs, dtype=torch.float32),
            token_sets=None if output.token_sets is None else side_by_side(output.token_sets),
            status=status,
            weight_versions=output.weight_versions,
            text=prompt.text,
            response=self.tokenizer.decode(output.tokens, skip_special_tokens=True),
            label=prompt.label,
            metadata=prompt.metadata if output.failure is None else {**prompt.metadata, "failure": output.failure},
        )


def side_by_side(sets: Sequence[Tensor]) -> Tensor:
    """[R, K] int32 of R sets of at most K tokens, filled up with -1."""
    return pad_sequence(list(sets), batch_first=True, padding_value=-1) if sets else torch.empty((0, 0), dtype=torch.int32)


def sample_seed(seed: int, purpose: str, sample_id: int) -> int:
    """A 63-bit seed that depends on its arguments alone."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _to_plain(sample: Sample) -> dict[str, Any]:
    """What another rank needs of a sample that it did not generate: no tensors, without what its prompt tells."""
    assert sample.rollout_log_probs is not None
    return {
        "sample_id": sample.sample_id,
        "response_tokens": sample.tokens[sample.prompt_length :].tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "rollout_log_probs": sample.rollout_log_probs.tolist(),
        "token_sets": None if sample.token_sets is None else sample.token_sets.numpy(),
        "reward": sample.reward,
        "status": str(sample.status),
        "weight_versions": sample.weight_versions,
        "response": sample.response,
        "metadata": dict(sample.metadata),
    }


def _from_plain(record: dict[str, Any], prompt: Prompt) -> Sample:
    return Sample(
        group_id=prompt.group_id,
        sample_id=record["sample_id"],
        tokens=torch.tensor([*prompt.tokens, *record["response_tokens"]], dtype=torch.int64),
        response_length=len(record["response_tokens"]),
        loss_mask=torch.tensor(record["loss_mask"], dtype=torch.bool),
        rollout_log_probs=torch.tensor(record["rollout_log_probs"], dtype=torch.float32),
        token_sets=None if record["token_sets"] is None else torch.from_numpy(record["token_sets"]),
        reward=record["reward"],
        status=SampleStatus(record["status"]),
        weight_versions=tuple(record["weight_versions"]),
        text=prompt.text,
        response=record["response"],
        label=prompt.label,
        metadata=record["metadata"],
    )

"""A custom rollout function in slime's convention: over-sample prompts and train on the groups with
the largest reward spread.

    python train.py ... --rollout-function-path
    examples/own_rollout/widest_groups.py:generate_rollout --tis-ratio-type token

The best of the other groups are returned to the source (`data_source.add_samples`) and come first
in the next rollout: they are finished, so nothing is sampled again, but they are trained on with
newer weights than generated them, hence the off-policy correction. In slime the imports are from
``slime.rollout.sglang_rollout``, ``slime.rollout.base_types``, ``slime.utils.async_utils`` and
``slime.utils.types``.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from slime_like.compat.slime.api import (
    GenerateState,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    eval_rollout,
    generate_and_rm_group,
    run,
)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    wanted = args.rollout_batch_size
    groups = run(answered(args, data_source.get_samples(wanted + wanted // 2)))
    groups.sort(key=lambda group: (was_carried(group), spread(group)), reverse=True)
    kept, others = groups[:wanted], [group for group in groups[wanted:] if spread(group)]
    carried = others[: wanted // 4]
    for sample in (sample for group in carried for sample in group):
        sample.metadata["carried"] = True
    data_source.add_samples(carried)
    return RolloutFnTrainOutput(
        kept,
        metrics={
            "spread_mean": statistics.fmean(map(spread, kept)),
            "carried_groups": len(carried),
        },
    )


async def answered(args: Any, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Generate and grade groups; finished groups are returned unchanged."""
    sampling_params = GenerateState(args).sampling_params
    return list(
        await asyncio.gather(
            *(generate_and_rm_group(args, group, sampling_params) for group in groups)
        )
    )


def was_carried(group: list[Sample]) -> bool:
    return bool(group[0].metadata.get("carried"))


def spread(group: list[Sample]) -> float:
    """Standard deviation of the available rewards."""
    rewards = [sample.reward for sample in group if sample.reward is not None]
    return statistics.pstdev(rewards) if rewards else 0.0

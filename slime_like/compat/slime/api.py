"""The names that slime users import in their functions, for any rollout engine.

All of it is imported from ``slime_like.compat.slime.api``, or, where slime is not installed, from
slime's modules:

- ``slime.rollout.sglang_rollout``: GenerateState, generate, generate_and_rm, generate_and_rm_group,
  generate_rollout, eval_rollout, get_model_url
- ``slime.rollout.base_types``: RolloutFnTrainOutput, RolloutFnEvalOutput
- ``slime.rollout.data_source``: DataSource, RolloutDataSource, RolloutDataSourceWithBuffer,
  pop_first
- ``slime.rollout.rm_hub``: async_rm, batched_async_rm
- ``slime.rollout.filter_hub``: DynamicFilterOutput, check_reward_nonzero_std
- ``slime.utils.http_utils``: post
- ``slime.utils.processing_utils``: build_processor_kwargs, encode_image_for_rollout_engine
- ``slime.utils.async_utils``: run
- ``slime.utils.types``: Sample

`model_class` and `model_settings` are specific to slime_like: the class of a network and its
arguments, for model providers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_like.compat.slime.pictures import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
)
from slime_like.compat.slime.requests import GenerateState, get_model_url, post
from slime_like.compat.slime.rollout import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    async_rm,
    batched_async_rm,
    eval_rollout,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    run,
)
from slime_like.compat.slime.samples import SlimeArgs
from slime_like.compat.slime.samples import SlimeSample as Sample
from slime_like.compat.slime.sources import (
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    pop_first,
)
from slime_like.rollout.filters import DynamicFilterOutput, nonzero_std

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


def check_reward_nonzero_std(
    args: SlimeArgs, samples: Sequence[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """slime's filter, for functions that call it: keeps a group whose rewards differ."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return nonzero_std([reward for reward in rewards if reward is not None])


def model_class() -> type[LanguageModule]:
    """For model providers (--custom-model-provider-path): the class that the run would build the
    model chunk of, by --model-base: megatron-core's GPTModel, or HybridModel with GPTModel's
    arguments."""
    from slime_like.megatron.model import provided

    return provided.model_class()


def model_settings() -> dict[str, object]:
    """For model providers (--custom-model-provider-path): the arguments of `model_class` for the
    model chunk that is being built, without pre_process and post_process."""
    from slime_like.megatron.model import provided

    return provided.model_settings()


__all__ = [
    "DataSource",
    "DynamicFilterOutput",
    "GenerateState",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "async_rm",
    "batched_async_rm",
    "build_processor_kwargs",
    "check_reward_nonzero_std",
    "encode_image_for_rollout_engine",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
    "model_class",
    "model_settings",
    "pop_first",
    "post",
    "run",
]

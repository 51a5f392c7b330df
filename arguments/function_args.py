"""All settings of a run as slime's ``args`` for user functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from arguments.config_groups import ConfigGroups
from arguments.run_config import RunConfig
from slime_like.function_args import FunctionArgs, is_plain


def function_args(config: RunConfig) -> FunctionArgs:
    """Every setting by the name of its flag, and slime's names where they differ; those of
    --custom-arguments-path and --custom-config-path take precedence."""
    configs = config.megatron
    values: dict[str, object] = {}
    for core in (configs.ddp, configs.optimizer, configs.transformer):
        values |= _plain_fields(core)
    groups = [getattr(config, field.name) for field in dataclasses.fields(ConfigGroups)]
    for group in (config.policy_loss, *groups):
        if dataclasses.is_dataclass(group) and not isinstance(group, type):
            values |= _plain_fields(group)
        elif hasattr(group, "__dict__"):  # of a custom loss
            values |= {name: value for name, value in vars(group).items() if is_plain(value)}
    return FunctionArgs(
        {**values, "world_size": config.world_size, **_slime_names(config), **config.custom}
    )


def _plain_fields(config: object) -> Mapping[str, object]:
    """The fields that hold plain values, which reach the processes of rewards too."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    values = {field.name: getattr(config, field.name) for field in fields}
    return {name: value for name, value in values.items() if is_plain(value)}


def _slime_names(config: RunConfig) -> dict[str, object]:
    """Settings that have another name, or no flag, here."""
    correction = config.off_policy
    return {
        "grpo_std_normalization": not config.algorithm.disable_grpo_std_normalization,
        "rewards_normalization": True,
        "use_tis": correction.tis_ratio_type == "token",
        "tis_clip": correction.token_tis_ratio_clip_high,
        "tis_clip_low": correction.token_tis_ratio_clip_low,
        "rollout_global_dataset": config.scheduling.data_source_path is None,
        "use_dynamic_global_batch_size": False,
        "bf16": config.megatron.transformer.bf16,
        "fp16": config.megatron.transformer.fp16,
    }

"""All settings of a run as slime's ``args`` for user functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from arguments.config_groups import ConfigGroups
from arguments.run_config import RunConfig
from slime_like.function_args import FunctionArgs, is_plain


def function_args(run: RunConfig) -> FunctionArgs:
    """Every setting by the name of its flag, and slime's names where they differ; those of
    --custom-arguments-path and --custom-config-path take precedence."""
    configs = run.megatron
    values: dict[str, object] = {}
    for config in (configs.ddp, configs.optimizer, configs.transformer):
        values |= _plain_fields(config)
    groups = [getattr(run, field.name) for field in dataclasses.fields(ConfigGroups)]
    for group in (run.policy_loss, *groups):
        if dataclasses.is_dataclass(group) and not isinstance(group, type):
            values |= _plain_fields(group)
        elif hasattr(group, "__dict__"):  # of a custom loss
            values |= {name: value for name, value in vars(group).items() if is_plain(value)}
    return FunctionArgs({**values, "world_size": run.world_size, **_slime_names(run), **run.custom})


def _plain_fields(config: object) -> Mapping[str, object]:
    """The fields that hold plain values, which reach the processes of rewards too."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    values = {field.name: getattr(config, field.name) for field in fields}
    return {name: value for name, value in values.items() if is_plain(value)}


def _slime_names(run: RunConfig) -> dict[str, object]:
    """Settings that have another name, or no flag, here."""
    correction = run.off_policy
    return {
        "grpo_std_normalization": not run.algorithm.disable_grpo_std_normalization,
        "rewards_normalization": True,
        "use_tis": correction.tis_ratio_type == "token",
        "tis_clip": correction.token_tis_ratio_clip_high,
        "tis_clip_low": correction.token_tis_ratio_clip_low,
        "rollout_global_dataset": run.scheduling.data_source_path is None,
        "use_dynamic_global_batch_size": False,
        "bf16": run.megatron.transformer.bf16,
        "fp16": False,
    }

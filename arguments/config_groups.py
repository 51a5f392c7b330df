"""The groups of settings of a run, shared by the rules (`Settings`) and `RunConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import schema
from arguments.eval_sets import EvalSet
from arguments.prompt_mix import MixSource
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.value_loss import ValueLossConfig


@dataclass(frozen=True)
class ConfigGroups:
    """All groups of settings."""

    model: schema.ModelConfig
    lora: schema.LoraConfig
    gpt: schema.GPTModelConfig
    parallel: schema.ParallelConfig
    data: schema.DataConfig
    eval: schema.EvalConfig
    prompt_sources: tuple[MixSource, ...]  # of the mix that `data` names; () for one data file
    eval_sets: tuple[EvalSet, ...]  # the evaluation sets that `eval` and the mix name
    rollout: schema.RolloutConfig
    scheduling: schema.SchedulingConfig
    agents: schema.AgentsConfig
    hooks: schema.HooksConfig
    sglang: schema.SglangConfig
    vllm: schema.VllmConfig
    reward: schema.RewardConfig
    judge: schema.JudgeConfig
    algorithm: schema.AlgorithmConfig
    distillation: schema.DistillationConfig
    off_policy: OffPolicyConfig
    policy_loss: Any  # settings of the chosen loss
    critic: schema.CriticConfig
    value_loss: ValueLossConfig
    guards: schema.GuardConfig
    schedule: schema.ScheduleConfig
    checkpoint: schema.CheckpointConfig
    logging: schema.LoggingConfig
    debug: schema.DebugConfig
    profiling: schema.ProfilingConfig
    preflight: schema.PreflightConfig
    server: schema.ServerConfig
    slime: schema.SlimeConfig
    model_args: schema.ModelArgsConfig
    world_size: int

    @property
    def rewards_are_zero(self) -> bool:
        """Whether no sample gets a reward: --rm-type zero, and neither an agent nor a function of
        the user gives one."""
        return (
            self.reward.rm_type == "zero"
            and not self.agents.given
            and self.scheduling.custom_generate_function_path is None
            and self.scheduling.rollout_function_path is None
            and self.algorithm.custom_reward_post_process_path is None
        )

    @property
    def data_configs(self) -> tuple[schema.DataConfig, ...]:
        """The data settings of each source of prompts: of the mix, or of the only file; ()
        without --prompt-data."""
        if self.prompt_sources or self.data.prompt_data is None:
            return tuple(source.data_config(self.data) for source in self.prompt_sources)
        return (self.data,)

    @property
    def starts_from_reference(self) -> bool:
        """Whether the policy's initial weights are --ref-load's, where --load has none: for a
        command line written for slime, as there. With adapters they are the base's."""
        launch = (self.slime.actor_num_nodes, self.slime.actor_num_gpus_per_node)
        is_slime = launch != (None, None) and not self.lora.lora_rank
        return is_slime and self.model.ref_load is not None

    @property
    def starts_from(self) -> str | None:
        """Folder of the policy's initial weights where --load has none."""
        return self.model.ref_load if self.starts_from_reference else self.model.hf_checkpoint

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference model is the base model without LoRA adapters."""
        ref = self.model.ref_load
        base = self.model.hf_checkpoint
        return self.lora.lora_rank > 0 and (
            ref is None or (base is not None and Path(ref).resolve() == Path(base).resolve())
        )

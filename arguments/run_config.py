"""The complete, validated configuration of a run: the result of `parse_args`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.config_groups import ConfigGroups
from arguments.megatron_configs import MegatronConfigs
from arguments.schema import GPTModelConfig, ParallelConfig
from arguments.schema.data import learns_conversations
from arguments.schema.lora import TARGETS, UNEMBEDDING
from slime_like.advantages.registry import advantage_estimators, needs_critic, needs_energies

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class TeacherModel:
    """Model config of --opd-teacher-load in this run's layout and precision."""

    gpt: GPTModelConfig
    transformer: TransformerConfig  # megatron-core's TransformerConfig


@dataclass(frozen=True)
class CriticModel:
    """The critic's layout and model config."""

    parallel: ParallelConfig  # complete, as the policy's in `RunConfig`
    megatron: MegatronConfigs


@dataclass(frozen=True)
class RunConfig(ConfigGroups):
    """All settings of a run, with derived values filled in: `gpt` from the checkpoint;
    `model.transformer_impl` is "local" or "transformer_engine"; `algorithm.num_steps_per_rollout`
    and `algorithm.global_batch_size` are set and agree with the rollout's size, and `balance_data`
    is set; `algorithm.policy_loss_type` and `advantage_estimator` are registered names, not
    aliases; `parallel.num_virtual_stages_per_pipeline_rank` is set for the interleaved schedule,
    whichever flag selects it.

    With SGLang, `sglang.update_weight_transport` is set.

    With a critic, `critic.critic_lr` and `critic_min_lr` are set, and `critic_model` has its
    layout; without one it is None.
    """

    megatron: MegatronConfigs
    teacher: TeacherModel | None  # of on-policy distillation on Megatron, else None
    critic_model: CriticModel | None
    # values of the flags that --custom-arguments-path added, by their names
    custom: Mapping[str, object]
    argv: tuple[str, ...]  # the command line
    warnings: tuple[str, ...]  # to be printed once by the launcher
    # what differs from slime, for a command line that was written for it, and defaults that follow
    # from others; the launcher prints them once
    notes: tuple[str, ...]

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.parallel.model_parallel_size

    @property
    def trains_critic(self) -> bool:
        """Whether the run trains a critic."""
        wanted = needs_critic(advantage_estimators.get(self.algorithm.advantage_estimator))
        return wanted and not self.debug.debug_rollout_only

    @property
    def learns_conversations(self) -> bool:
        """Whether rows are conversations with the assistant turns trained on."""
        supervised = learns_conversations(self.algorithm.loss_type, self.data)
        return supervised and self.algorithm.pair_loss is None

    @property
    def log_prob_temperature(self) -> float:
        """Temperature of the log-probs: the sampling temperature, or 1 for given answers."""
        supervised = self.algorithm.loss_type == "sft_loss"
        return 1.0 if supervised else self.rollout.rollout_temperature

    @property
    def replayed(self) -> tuple[str, ...]:
        """The choices of the rollout engine that the trainer makes again, as fields of samples."""
        choices = {
            "routed_experts": self.rollout.use_rollout_routing_replay,
            "indexer_topk": self.rollout.use_rollout_indexer_replay,
        }
        return tuple(name for name, replays in choices.items() if replays)

    @property
    def old_is_current(self) -> bool:
        """Whether the forward pass of the only optimizer step can provide the old log-probs,
        because nothing needs them earlier."""
        algorithm = self.algorithm
        transformer = self.megatron.transformer
        estimator = advantage_estimators.get(algorithm.advantage_estimator)
        needed_before = (
            algorithm.kl_coef  # in the reward
            or self.distillation.use_opd
            or needs_energies(estimator)
            or self.off_policy.enabled
            or algorithm.use_routing_replay
            or self.replayed
            or self.critic.num_critic_only_steps
            or self.hooks.custom_advantage_function_path
            or self.hooks.rollout_data_postprocess_path
            or self.hooks.custom_megatron_before_log_prob_hook_path
        )
        dropout = transformer.hidden_dropout or transformer.attention_dropout
        return (
            algorithm.num_steps_per_rollout == 1
            and algorithm.loss_type == "policy_loss"
            and not (algorithm.use_rollout_logprobs or needed_before or dropout)
        )

    @property
    def unties_output_layer(self) -> bool:
        """Whether training unties the output layer from the embedding, which are tied in the
        checkpoint."""
        targets = {name for word in self.lora.lora_target_modules for name in TARGETS[word]}
        return (
            self.lora.lora_rank > 0
            and not self.gpt.untie_embeddings_and_output_weights
            and not targets.isdisjoint(UNEMBEDDING)
        )

    @property
    def sends_adapter(self) -> bool:
        """Whether servers get a LoRA adapter instead of whole weights."""
        return self.lora.lora_rank > 0 and self.lora.lora_sync == "adapter"

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks on each pipeline rank; None without the interleaved schedule."""
        return self.parallel.num_virtual_stages_per_pipeline_rank

"""The critic of --advantage-estimator ppo. The settings of its loss are declared in
slime_like/losses/value_loss.py.

Its layout has the fields of `ParallelConfig` with the prefix `critic_`;
`arguments.critic_layout.critic_parallel` puts both together."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class CriticConfig(CheckedSettings):
    critic_load: str | None = arg(
        None,
        "What the critic starts from: a Hugging Face folder, with a value head or without, or a folder with checkpoints of an earlier run's "
        "critic; default: the policy's weights. A resumed run goes on with the critic that was saved with the policy.",
    )
    critic_lora_rank: int = arg(
        0,
        "Rank of the adapters that the critic trains beside a value head, on the frozen base of the policy's adapters (--lora-rank), with their "
        "alpha and modules; 0: the critic trains all weights.",
        legal=NON_NEGATIVE,
    )
    critic_lr: float | None = arg(
        None, "Learning rate of the critic; default: --lr.", legal=POSITIVE
    )
    critic_min_lr: float | None = arg(
        None,
        "Where the critic's learning rate ends; default: the share of --critic-lr that --min-lr is of --lr.",
        legal=NON_NEGATIVE,
    )
    critic_lr_warmup_iters: int = arg(
        0, "Optimizer steps of linear warm-up of the critic's learning rate.", legal=NON_NEGATIVE
    )
    num_critic_only_steps: int = arg(
        0,
        "The first rollouts, on which the critic alone is trained: the policy and the engine stay as they are.",
        legal=NON_NEGATIVE,
    )
    critic_tensor_model_parallel_size: int | None = arg(
        None,
        "Of the critic's layout, on the same processes as the policy's; default: --tensor-model-parallel-size.",
        legal=AT_LEAST_ONE,
    )
    critic_pipeline_model_parallel_size: int | None = arg(
        None, "Of the critic's layout; default: --pipeline-model-parallel-size.", legal=AT_LEAST_ONE
    )
    critic_num_virtual_stages_per_pipeline_rank: int | None = arg(
        None,
        "Of the critic's layout, 1 for the plain schedule; default: the policy's interleaved schedule where the critic's pipeline has as many "
        "stages, else the plain one.",
        legal=AT_LEAST_ONE,
    )
    critic_num_layers_per_virtual_pipeline_stage: int | None = arg(
        None,
        "Of the critic's layout; excludes --critic-num-virtual-stages-per-pipeline-rank.",
        legal=AT_LEAST_ONE,
        excludes="critic_num_virtual_stages_per_pipeline_rank",
    )
    critic_context_parallel_size: int | None = arg(
        None, "Of the critic's layout; default: --context-parallel-size.", legal=AT_LEAST_ONE
    )
    critic_expert_model_parallel_size: int | None = arg(
        None, "Of the critic's layout; default: --expert-model-parallel-size.", legal=AT_LEAST_ONE
    )
    critic_expert_tensor_parallel_size: int | None = arg(
        None,
        "Of the critic's layout; default: --expert-tensor-parallel-size where the tensor-parallel sizes are the same, else the critic's.",
        legal=AT_LEAST_ONE,
    )
    critic_sequence_parallel: bool | None = arg(
        None,
        "Of the critic's layout; default: --sequence-parallel where the critic's tensor-parallel size is above 1.",
    )

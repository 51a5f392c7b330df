"""The critic of --advantage-estimator ppo. The settings of its loss are declared in
slime_like/losses/value_loss.py.

Its layout has the fields of `ParallelConfig` with the prefix `critic_`;
`arguments.critic_layout.critic_parallel` merges them with the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class CriticConfig(CheckedSettings):
    critic_load: str | None = arg(
        None,
        "Initial weights of the critic: a Hugging Face folder, with or without a value head, or a "
        "checkpoint folder of an earlier run with a critic; default: the policy's weights. A "
        "resumed run continues with the critic in its checkpoint.",
        excludes="critic_lora_rank, which takes the base model of the policy",
    )
    critic_lora_rank: int = arg(
        0,
        "LoRA rank of the critic, which trains adapters and a value head on the policy's frozen "
        "base model, with the alpha and target modules of --lora-rank; 0: the critic trains all "
        "weights.",
        legal=NON_NEGATIVE,
        needs="lora_rank, because the critic shares the frozen base model of the policy",
    )
    critic_lr: float | None = arg(
        None, "Learning rate of the critic; default: --lr.", legal=POSITIVE
    )
    critic_min_lr: float | None = arg(
        None,
        "Final learning rate of the critic; default: --critic-lr times --min-lr / --lr.",
        legal=NON_NEGATIVE,
        at_most="critic_lr|lr",
        idle_without="@decay",
    )
    critic_lr_warmup_iters: int = arg(
        0,
        "Optimizer steps of linear warm-up of the critic's learning rate.",
        legal=NON_NEGATIVE,
    )
    num_critic_only_steps: int = arg(
        0,
        "Number of initial rollouts that train only the critic (value pretraining); policy and "
        "engine keep their weights.",
        legal=NON_NEGATIVE,
        at_most="num_rollout",
    )
    critic_steps_per_policy_step: int = arg(
        1,
        "Optimizer steps of the critic for each one of the policy (SAO, arXiv 2607.07508: 2): it "
        "passes that many times over the batches of a rollout, before the policy's first step.",
        legal=AT_LEAST_ONE,
    )
    critic_only_train_params_name_list: list[str] = arg(
        [],
        "Regular expressions: train only the critic's parameters with a name that matches (search) "
        "one of them, e.g. mlp output_layer.",
        nargs="+",
        excludes=("critic_freeze_params_name_list", "critic_lora_rank"),
    )
    critic_freeze_params_name_list: list[str] = arg(
        [],
        "Regular expressions: freeze the critic's parameters with a name that matches (search) one "
        "of them; self_attention is SAO's frozen attention.",
        nargs="+",
        excludes="critic_lora_rank",
    )
    critic_tensor_model_parallel_size: int | None = arg(
        None,
        "Tensor-parallel size of the critic, on the policy's processes; default: "
        "--tensor-model-parallel-size.",
        legal=AT_LEAST_ONE,
    )
    critic_pipeline_model_parallel_size: int | None = arg(
        None,
        "Pipeline-parallel size of the critic; default: --pipeline-model-parallel-size.",
        legal=AT_LEAST_ONE,
    )
    critic_num_virtual_stages_per_pipeline_rank: int | None = arg(
        None,
        "Virtual pipeline stages of the critic; 1: 1F1B without interleaving. Default: the "
        "policy's if both pipelines have the same number of stages, otherwise 1.",
        legal=AT_LEAST_ONE,
    )
    critic_num_layers_per_virtual_pipeline_stage: int | None = arg(
        None,
        "Layers per virtual pipeline stage of the critic; excludes "
        "--critic-num-virtual-stages-per-pipeline-rank.",
        legal=AT_LEAST_ONE,
        excludes="critic_num_virtual_stages_per_pipeline_rank",
    )
    critic_context_parallel_size: int | None = arg(
        None,
        "Context-parallel size of the critic; default: --context-parallel-size.",
        legal=AT_LEAST_ONE,
    )
    critic_expert_model_parallel_size: int | None = arg(
        None,
        "Expert-parallel size of the critic; default: --expert-model-parallel-size.",
        legal=AT_LEAST_ONE,
    )
    critic_expert_tensor_parallel_size: int | None = arg(
        None,
        "Expert tensor-parallel size of the critic; default: --expert-tensor-parallel-size if "
        "critic and policy have the same tensor-parallel size, otherwise the critic's "
        "tensor-parallel size.",
        legal=AT_LEAST_ONE,
    )
    critic_sequence_parallel: bool | None = arg(
        None,
        "Sequence parallelism of the critic; default: --sequence-parallel if the critic's "
        "tensor-parallel size is above 1.",
    )

    def policy_steps(self, train_batches: int, batches_per_rollout: int) -> int:
        """Optimizer steps of the policy in a run of so many train batches: those of the first
        rollouts may train the critic only."""
        return max(0, train_batches - self.num_critic_only_steps * batches_per_rollout)

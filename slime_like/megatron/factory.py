"""Build networks and losses from the run's configuration. Every function that builds a network is
collective."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from arguments.hf.model import HfModel
from arguments.run_config import RunConfig
from arguments.schema import CriticConfig, GPTModelConfig, ScheduleConfig
from slime_like.checkpoints.folders import checkpoint_folder, is_checkpoint_root, newest_step
from slime_like.images.settings import VisionSettings
from slime_like.logs import warn_rank_0
from slime_like.losses.custom import custom_loss
from slime_like.losses.registry import policy_losses
from slime_like.losses.total import LossTerms
from slime_like.megatron.checkpoint import SavedNetwork, load_weights
from slime_like.megatron.frozen_parameters import FrozenParameters
from slime_like.megatron.init import make_further_layout
from slime_like.megatron.lora import LoraBase, LoraNetwork, critic_lora_spec, lora_spec
from slime_like.megatron.model.policy import LogProbHead
from slime_like.megatron.network import Network
from slime_like.megatron.objectives import Objective, TokenLoss
from slime_like.megatron.offload import OffloadedWeights
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.reshard import copy_same_layout, copy_weights
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.megatron.weight_average import AveragedNetwork

logger = logging.getLogger(__name__)

HEAD = "output_layer."

FrozenModel = Network | OffloadedWeights  # can compute log-probs


class TrainingSettings(TypedDict):
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    total_steps: int


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """megatron-core's and our own settings of how a network is built and trained."""

    transformer: TransformerConfig
    gpt: GPTModelConfig
    transformer_impl: str
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig

    @property
    def shape(self) -> tuple[TransformerConfig, GPTModelConfig, str]:
        """The first arguments of a `Network`."""
        return self.transformer, self.gpt, self.transformer_impl

    def training(
        self, *, total_steps: int, optimizer: OptimizerConfig | None = None
    ) -> TrainingSettings:
        """The keyword arguments of a `TrainedNetwork`.

        Args:
            total_steps: Length of the schedule.
            optimizer: Overrides that of these settings.
        """
        return TrainingSettings(
            ddp=self.ddp,
            optimizer=self.optimizer if optimizer is None else optimizer,
            schedule=self.schedule,
            total_steps=total_steps,
        )


def network_settings(config: RunConfig) -> NetworkSettings:
    """The settings of the policy."""
    megatron = config.megatron
    impl = config.model.transformer_impl
    shape = (megatron.transformer, config.gpt, impl)
    return NetworkSettings(*shape, megatron.ddp, megatron.optimizer, config.schedule)


def critic_settings(config: RunConfig) -> NetworkSettings:
    """The policy's model, in the critic's layout and with its learning rate and warm-up."""
    assert config.critic_model is not None
    megatron = config.critic_model.megatron
    # its tower is the one of --hf-checkpoint
    gpt = dataclasses.replace(config.gpt, vision=frozen_tower(config.gpt.vision))
    return NetworkSettings(
        megatron.transformer,
        gpt,
        config.model.transformer_impl,
        megatron.ddp,
        critic_optimizer(megatron.optimizer, config.critic),
        critic_schedule(config.schedule, config.critic),
    )


def frozen_tower(vision: VisionSettings | None) -> VisionSettings | None:
    return None if vision is None else dataclasses.replace(vision, trained=False)


def make_policy(
    config: RunConfig, layout: ParallelLayout, hf: HfModel | None, *, total_steps: int
) -> Network:
    """The policy with the weights of --hf-checkpoint, if given; a reward model starts with a zero
    head.

    Args:
        hf: The parsed config.json.
        total_steps: Train batches in the whole run; the first may train the critic only.
    """
    steps = config.critic.policy_steps(total_steps, config.algorithm.num_steps_per_rollout or 1)
    settings = network_settings(config)
    shape = (*settings.shape, layout)
    training = settings.training(total_steps=max(1, steps))
    policy: Network
    if config.debug.debug_rollout_only:
        policy = Network(*shape)
    elif config.lora.lora_rank:
        assert hf is not None, "checked on the command line"
        policy = LoraNetwork(
            LoraBase(*shape, hf=hf), lora_spec(config.lora, config.model.seed), **training
        )
    else:
        is_reward_model = config.algorithm.trains_reward_model
        tied = not (config.gpt.untie_embeddings_and_output_weights or is_reward_model)
        # a bias cancels in score differences, and sequence classifiers have none
        extra = (f"^{HEAD}bias$",) if is_reward_model else ()
        parameters = FrozenParameters.of(config.model, tied=tied, extra=extra)
        policy = TrainedNetwork(*shape, **training, value_head=is_reward_model, frozen=parameters)
    if config.model.hf_checkpoint:
        policy.load_hf(config.model.hf_checkpoint)
    return policy


def make_critic(config: RunConfig, policy: Network, *, total_steps: int) -> TrainedNetwork:
    """The critic, with random weights (see `start_from_policy`), or an adapter on the policy's
    base. total_steps: train batches in the whole run, on each of which the critic takes
    --critic-steps-per-policy-step optimizer steps."""
    settings = critic_settings(config)
    steps = total_steps * config.critic.critic_steps_per_policy_step
    training = settings.training(total_steps=steps)
    if config.critic.critic_lora_rank:
        assert isinstance(policy, LoraNetwork), "checked on the command line"
        return LoraNetwork(
            policy.base,
            critic_lora_spec(config.lora, config.critic.critic_lora_rank, config.model.seed),
            **training,
        )
    layout = critic_layout(config, policy.layout)
    frozen = FrozenParameters.of_critic(config.critic)
    return TrainedNetwork(*settings.shape, layout, **training, value_head=True, frozen=frozen)


def critic_layout(config: RunConfig, policy: ParallelLayout) -> ParallelLayout:
    """The policy's layout if the sizes are equal, otherwise a separate one over the same
    processes."""
    assert config.critic_model is not None
    parallel = config.critic_model.parallel
    if parallel.grid == config.parallel.grid:
        return policy
    return make_further_layout(
        parallel,
        virtual_stages=parallel.num_virtual_stages_per_pipeline_rank,
        seed=config.model.seed,
    )


def start_from_policy(critic: TrainedNetwork, policy: Network) -> None:
    """Initialise the critic from the policy's current transformer (with LoRA: its base) and a zero
    head. A LoRA critic is initialised on construction."""
    if isinstance(critic, LoraNetwork):
        return
    policy.finish_updates()
    copy = copy_same_layout if critic.layout is policy.layout else copy_weights
    copy(policy, critic, include=lambda name: not name.startswith(HEAD))
    with torch.no_grad():
        for chunk in critic.chunks:
            for name, parameter in chunk.named_parameters():
                if name.startswith(HEAD):
                    parameter.zero_()
    critic.weights_changed()


def critic_optimizer(policy: OptimizerConfig, critic: CriticConfig) -> OptimizerConfig:
    """The policy's optimizer settings with the critic's learning rate, for embedding and head
    too."""
    config = copy.copy(policy)
    config.lr = critic.critic_lr
    config.min_lr = critic.critic_min_lr
    config.decoupled_lr = config.decoupled_min_lr = None
    return config


def critic_schedule(policy: ScheduleConfig, critic: CriticConfig) -> ScheduleConfig:
    """The policy's schedule with the critic's warm-up, from 0. Its lengths, which are in steps of
    the policy, are stretched to the critic's."""

    def stretched(steps: int | None) -> int | None:
        return None if steps is None else steps * critic.critic_steps_per_policy_step

    return dataclasses.replace(
        policy,
        lr_decay_iters=stretched(policy.lr_decay_iters),
        lr_wsd_decay_iters=stretched(policy.lr_wsd_decay_iters),
        lr_warmup_iters=critic.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
    )


def make_reference(config: RunConfig, policy: Network) -> FrozenModel | None:
    """The reference model, in the policy's layout: with LoRA the base model, otherwise a separate
    network; None if no loss term needs it."""
    if not config.algorithm.needs_reference:
        return None
    if isinstance(policy, LoraNetwork) and config.reference_is_base:
        return policy.base
    assert config.model.ref_load is not None, "checked on the command line"
    verify = not config.checkpoint.no_verify_checkpoint
    load = partial(
        load_network,
        root=config.model.ref_load,
        flag="--ref-load",
        step=config.model.ref_ckpt_step,
        verify=verify,
    )
    if config.model.ref_offload:
        return OffloadedWeights(policy.base if isinstance(policy, LoraNetwork) else policy, load)
    transformer, gpt, impl = network_settings(config).shape
    plain = dataclasses.replace(gpt, mtp_num_layers=None)
    return frozen(Network(transformer, plain, impl, policy.layout), load)


def make_teacher(config: RunConfig, layout: ParallelLayout) -> FrozenModel | None:
    """The Megatron teacher of on-policy distillation; None without one."""
    if config.teacher is None:
        return None
    assert config.distillation.opd_teacher_load is not None
    teacher = Network(
        config.teacher.transformer, config.teacher.gpt, config.model.transformer_impl, layout
    )
    load = partial(
        load_network,
        root=config.distillation.opd_teacher_load,
        flag="--opd-teacher-load",
        step=config.distillation.opd_teacher_ckpt_step,
        verify=not config.checkpoint.no_verify_checkpoint,
    )
    return frozen(teacher, load)


def make_self_teacher(config: RunConfig, policy: Network) -> AveragedNetwork | None:
    """The teacher of self-distillation, if it has its own weights."""
    distillation = config.distillation
    if (
        not distillation.own_teacher
        or isinstance(policy, LoraNetwork)
        or config.debug.debug_rollout_only
    ):
        return None
    transformer, gpt, impl = network_settings(config).shape
    plain = dataclasses.replace(gpt, mtp_num_layers=None)
    rate = distillation.opd_ema_rate if distillation.opd_self_teacher == "ema" else 0.0
    teacher = AveragedNetwork(Network(transformer, plain, impl, policy.layout), rate)
    teacher.start(policy)
    return teacher


def self_teacher(config: RunConfig, policy: Network, averaged: AveragedNetwork | None) -> Network:
    """The network that computes the teacher's log-probs in self-distillation."""
    if averaged is not None:
        return averaged.network
    if config.distillation.opd_self_teacher == "base" and isinstance(policy, LoraNetwork):
        return policy.base
    return policy


def load_network(
    network: Network,
    root: str,
    *,
    flag: str,
    step: int | None,
    verify: bool,
    name: str = "policy",
) -> None:
    """Load weights from a Hugging Face model, or from the network `name` in a checkpoint folder
    (step None: the newest). Raises ValueError for other shapes or damaged files."""
    if not is_checkpoint_root(root):
        network.load_hf(root)
        return
    if step is None:
        step, warning = newest_step(root, flag)
        warn_rank_0(logger, warning)
    saved = SavedNetwork(network.chunks, None, None, network.layout)
    load_weights(checkpoint_folder(root, step), name, saved, verify=verify)


def frozen(network: Network, load: Callable[[Network], None]) -> Network:
    """Load and freeze a network."""
    load(network)
    network.freeze()
    return network


def make_head(config: RunConfig, layout: ParallelLayout, *, temperature: float) -> LogProbHead:
    """The output head. temperature: divides the logits."""
    return LogProbHead(
        config.gpt.vocab_size or 0,
        temperature,
        layout,
        sequence_parallel=config.megatron.transformer.sequence_parallel,
        chunk_size=config.algorithm.log_probs_chunk_size,
        softcap=getattr(config.megatron.transformer, "logit_softcap", None),
    )


def make_prediction_loss(config: RunConfig, head: LogProbHead) -> TokenLoss | None:
    """The loss of multi-token prediction layers, None without any."""
    if not config.gpt.mtp_num_layers:
        return None
    from slime_like.megatron.prediction_loss import PredictionLoss

    return PredictionLoss(head, config.gpt.mtp_loss_scaling_factor, config.gpt.mtp_soft_targets)


def make_objective(config: RunConfig) -> Objective:
    """The training objective of the policy."""
    algorithm = config.algorithm
    terms = LossTerms(
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_loss_type=algorithm.kl_loss_type or "low_var_kl",
        use_unbiased_kl=algorithm.use_unbiased_kl,
        entropy_coef=algorithm.entropy_coef,
        positive_nll_coef=algorithm.positive_nll_coef,
        observation_loss_coef=algorithm.observation_loss_coef,
        distillation_coef=config.distillation.opd_kl_coef if config.distillation.opd_topk else 0.0,
        distillation_alpha=config.distillation.opd_alpha,
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
        estr_threshold=algorithm.estr_threshold,
        estr_entropy_floor=algorithm.estr_entropy_floor,
    )
    level = config.off_policy.tis_ratio_type or "token"
    path = algorithm.custom_loss_function_path
    loss = policy_losses.get(algorithm.policy_loss_type) if path is None else custom_loss(path)
    return Objective(loss, config.policy_loss, terms, importance_level=level)

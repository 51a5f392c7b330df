"""The critic: its network, how that is trained, and what it starts from."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from arguments.run_config import RunConfig
from arguments.schema import CriticConfig, ScheduleConfig
from slime_like.megatron.init import make_further_layout
from slime_like.megatron.lora import LoraNetwork, critic_lora_spec
from slime_like.megatron.network import Network
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.reshard import copy_weights
from slime_like.megatron.trained_network import TrainedNetwork

HEAD = "output_layer."


def make_critic(run: RunConfig, policy: Network, *, total_steps: int) -> TrainedNetwork:
    """The critic, its weights still random; see `start_from_policy`. Or an adapter on the policy's
    base. total_steps: the critic's optimizer steps in the whole run."""
    model = run.critic_model
    assert model is not None
    training: dict[str, Any] = dict(
        ddp=model.megatron.ddp,
        optimizer=critic_optimizer(model.megatron.optimizer, run.critic),
        schedule=critic_schedule(run.schedule, run.critic),
        total_steps=total_steps,
    )
    if run.critic.critic_lora_rank:
        assert isinstance(policy, LoraNetwork), "checked on the command line"
        return LoraNetwork(
            policy.base,
            critic_lora_spec(run.lora, run.critic.critic_lora_rank, run.model.seed),
            **training,
        )
    shape = (
        model.megatron.transformer,
        run.gpt,
        run.model.transformer_impl,
        critic_layout(run, policy.layout),
    )
    return TrainedNetwork(*shape, **training, value_head=True)


def critic_layout(run: RunConfig, policy: ParallelLayout) -> ParallelLayout:
    """The policy's, where both are cut alike, else one of the critic's own over the same processes."""
    assert run.critic_model is not None
    parallel = run.critic_model.parallel
    if parallel.grid == run.parallel.grid:
        return policy
    return make_further_layout(
        parallel, virtual_stages=parallel.num_virtual_stages_per_pipeline_rank, seed=run.model.seed
    )


def start_from_policy(critic: TrainedNetwork, policy: Network) -> None:
    """Give the critic the policy's transformer as it is now (of an adapter: its base), and a head
    of zeros. A critic that is an adapter has its start from its construction."""
    if isinstance(critic, LoraNetwork):
        return
    policy.finish_updates()
    if critic.layout is policy.layout:
        _copy_here(critic, policy)
    else:
        copy_weights(policy, critic, wanted=lambda name: not name.startswith(HEAD))
    with torch.no_grad():
        for chunk in critic.chunks:
            for name, parameter in chunk.named_parameters():
                if name.startswith(HEAD):
                    parameter.zero_()
    critic.weights_changed()


@torch.no_grad()
def _copy_here(critic: Network, policy: Network) -> None:
    """Between networks that have the same part of the model on each rank."""
    for mine, theirs in zip(critic.chunks, policy.chunks, strict=True):
        weights = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        for name, tensor in (*mine.named_parameters(), *mine.named_buffers()):
            if not name.startswith(HEAD):
                tensor.copy_(weights[name])


def critic_optimizer(policy: OptimizerConfig, critic: CriticConfig) -> OptimizerConfig:
    """The policy's optimizer at the critic's learning rate, which holds for the embedding and the
    head too."""
    config = copy.copy(policy)
    config.lr, config.min_lr = critic.critic_lr, critic.critic_min_lr
    config.decoupled_lr = config.decoupled_min_lr = None
    return config


def critic_schedule(policy: ScheduleConfig, critic: CriticConfig) -> ScheduleConfig:
    """The policy's schedule with a warm-up of the critic's own, from 0."""
    return dataclasses.replace(
        policy,
        lr_warmup_iters=critic.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
    )

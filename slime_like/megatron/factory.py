"""The networks and the loss that a run's settings describe. Every function that makes a network is
called by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from arguments.hf.model import HfModel
from arguments.run_config import RunConfig
from arguments.schema import AlgorithmConfig
from slime_like.checkpoints.folders import checkpoint_folder, is_checkpoint_root, newest_step
from slime_like.logs import warn_rank_0
from slime_like.losses.custom import custom_loss
from slime_like.losses.registry import policy_losses
from slime_like.losses.total import LossTerms
from slime_like.megatron.checkpoint import SavedNetwork, load_weights
from slime_like.megatron.lora import LoraBase, LoraNetwork, lora_spec
from slime_like.megatron.network import Network
from slime_like.megatron.objectives import LogProbHead, Objective
from slime_like.megatron.offload import OffloadedWeights
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork

logger = logging.getLogger(__name__)

FrozenModel = Network | OffloadedWeights  # what computes log-probs


def make_policy(
    run: RunConfig, layout: ParallelLayout, hf: HfModel | None, *, total_steps: int
) -> Network:
    """With the weights of --hf-checkpoint, where there is one. hf: what that says. total_steps:
    optimizer steps of the whole run; the first may be the critic's alone."""
    policy_steps = max(
        1,
        total_steps - run.critic.num_critic_only_steps * (run.algorithm.num_steps_per_rollout or 1),
    )
    megatron = run.megatron
    shape = (megatron.transformer, run.gpt, run.model.transformer_impl, layout)
    training: dict[str, Any] = dict(
        ddp=megatron.ddp,
        optimizer=megatron.optimizer,
        schedule=run.schedule,
        total_steps=policy_steps,
    )
    policy: Network
    if run.debug.debug_rollout_only:
        policy = Network(*shape)
    elif run.lora.lora_rank:
        assert hf is not None, "checked on the command line"
        policy = LoraNetwork(
            LoraBase(*shape, hf=hf), lora_spec(run.lora, run.model.seed), **training
        )
    else:
        policy = TrainedNetwork(*shape, **training)
    if run.model.hf_checkpoint:
        policy.load_hf(run.model.hf_checkpoint)
    return policy


def make_reference(run: RunConfig, policy: Network) -> FrozenModel | None:
    """Where a KL term uses it: the base of the policy's adapter, or a network of its own, in the
    policy's layout."""
    if not needs_reference(run.algorithm):
        return None
    if isinstance(policy, LoraNetwork) and run.reference_is_base:
        return policy.base
    assert run.model.ref_load is not None, "checked on the command line"
    verify = not run.checkpoint.no_verify_checkpoint
    load = partial(
        load_network,
        root=run.model.ref_load,
        flag="--ref-load",
        step=run.model.ref_ckpt_step,
        verify=verify,
    )
    if run.model.ref_offload:
        return OffloadedWeights(policy.base if isinstance(policy, LoraNetwork) else policy, load)
    return frozen(
        Network(run.megatron.transformer, run.gpt, run.model.transformer_impl, policy.layout), load
    )


def make_teacher(run: RunConfig, layout: ParallelLayout) -> FrozenModel | None:
    """Of on-policy distillation on Megatron."""
    if run.teacher is None:
        return None
    assert run.distillation.opd_teacher_load is not None
    teacher = Network(run.teacher.transformer, run.teacher.gpt, run.model.transformer_impl, layout)
    return frozen(teacher, partial(Network.load_hf, folder=run.distillation.opd_teacher_load))


def load_network(
    network: Network,
    root: str,
    *,
    flag: str,
    step: int | None,
    verify: bool,
    name: str = "policy",
) -> None:
    """Weights for a network, from a Hugging Face model or from the network `name` in a folder of
    checkpoints (step: None is the newest). Raises ValueError when they are shaped otherwise, or
    damaged."""
    if not is_checkpoint_root(root):
        network.load_hf(root)
        return
    found, warning = (step, None) if step is not None else newest_step(root, flag)
    warn_rank_0(logger, warning)
    there = checkpoint_folder(root, found)
    load_weights(
        there,
        name,
        SavedNetwork(network.chunks, None, None, network.layout),
        verify=verify,
    )


def frozen(network: Network, load: Callable[[Network], None]) -> Network:
    """The network with the weights that `load` gives it, never to be trained."""
    load(network)
    network.freeze()
    return network


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """A reference model is resident when a KL term uses it."""
    return algorithm.use_kl_loss or algorithm.kl_coef != 0


def make_head(run: RunConfig, layout: ParallelLayout) -> LogProbHead:
    """Log-probs are those of the sampling distribution."""
    return LogProbHead(
        run.gpt.vocab_size or 0,
        run.log_prob_temperature,
        layout,
        sequence_parallel=run.megatron.transformer.sequence_parallel,
        chunk_size=run.algorithm.log_probs_chunk_size,
    )


def make_objective(run: RunConfig) -> Objective:
    """The loss that the settings describe."""
    algorithm = run.algorithm
    terms = LossTerms(
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_loss_type=algorithm.kl_loss_type or "low_var_kl",
        use_unbiased_kl=algorithm.use_unbiased_kl,
        entropy_coef=algorithm.entropy_coef,
        positive_nll_coef=algorithm.positive_nll_coef,
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
    )
    level = run.off_policy.tis_ratio_type or "token"
    path = algorithm.custom_loss_function_path
    loss = policy_losses.get(algorithm.policy_loss_type) if path is None else custom_loss(path)
    return Objective(loss, run.policy_loss, terms, importance_level=level)

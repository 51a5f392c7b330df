"""Build the parts of a trainer from the configuration of its run."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from arguments.run_config import RunConfig
from slime_like.advantages.registry import advantage_estimators
from slime_like.batching.builder import BatchBuilder
from slime_like.batching.factory import advantage_settings, outcome_readers
from slime_like.batching.settings import BatchSettings
from slime_like.batching.user_hooks import TrainHooks
from slime_like.distributed.signals import StopConditions
from slime_like.engines.base import RolloutEngine
from slime_like.guards.rollout import RolloutGuards
from slime_like.images.processor import ImageProcessor
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.progress import Progress
from slime_like.preflight.flops import forward_flops, peak_tflops
from slime_like.rollout.rollouter import training_sampling
from slime_like.text import mask_argv
from slime_like.trainer.checkpointing import RunCheckpoints, RunIdentity
from slime_like.trainer.sampling_factory import staleness_bound, train_rollout_limit
from slime_like.trainer.saved_settings import settings_of
from slime_like.trainer.strategy import ReinforcementLearning, Strategy, SupervisedFineTuning
from slime_like.trainer.throughput import Throughput
from slime_like.trainer.train_step import TrainStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.certify.run import Certifier


def make_certifier(
    config: RunConfig, backend: MegatronBackend, engine: RolloutEngine | None, output_dir: Path
) -> Certifier | None:
    """What writes the certificates of a run; None without --certify and --certify-interval."""
    if not (config.guards.certify or config.guards.certify_interval):
        return None
    from slime_like.certify.run import Certifier, CertifierSettings

    assert config.model.hf_checkpoint is not None, "checked on the command line"
    save = config.checkpoint.save
    settings = CertifierSettings(
        config.model.hf_checkpoint,
        config.rollout.rollout_engine,
        (output_dir, *((Path(save),) if save is not None else ())),
        config.data.rollout_seed,
        training_sampling(config.rollout),
        config.model.trust_remote_code,
        60 * config.guards.certify_search_minutes,
    )
    return Certifier(backend, engine, settings)


def num_rollouts(config: RunConfig, prompts: Sized | None) -> int:
    """Number of rollouts: --num-rollout, or derived from --num-epoch and the number of prompts."""
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    assert config.rollout.num_epoch is not None
    assert prompts is not None
    return max(1, len(prompts) * config.rollout.num_epoch // config.rollout.rollout_batch_size)


def steps_per_rollout(config: RunConfig) -> int:
    assert config.algorithm.num_steps_per_rollout is not None, (
        "completed when the command line is parsed"
    )
    return config.algorithm.num_steps_per_rollout


def make_progress(
    config: RunConfig, num_rollouts: int, rank: int, on_phase: Callable[[str], None]
) -> Progress:
    """Shown on rank 0."""
    return Progress(
        num_rollouts,
        show=rank == 0,
        plain=config.logging.no_progress,
        log_interval=config.logging.log_interval,
        on_phase=on_phase,
    )


def stop_conditions(config: RunConfig, rank: int) -> StopConditions:
    """When the run stops before its last rollout."""
    return StopConditions(
        every=config.checkpoint.exit_interval,
        minutes=config.checkpoint.exit_duration_in_mins,
        announce=rank == 0,
    )


def rollout_guards(config: RunConfig) -> RolloutGuards:
    return RolloutGuards(
        train_rollout_limit(config),
        config.guards.train_rollout_diff_patience,
        recorded=config.debug.load_debug_rollout_data is not None,
        exact=config.guards.true_on_policy_mode,
    )


def make_batch_builder(
    config: RunConfig,
    layout: ParallelLayout,
    backend: MegatronBackend,
    guards: RolloutGuards,
    progress: Progress,
    hooks: TrainHooks,
    image_processor: ImageProcessor | None = None,
) -> BatchBuilder:
    settings = BatchSettings(
        config.algorithm,
        off_policy=config.off_policy if config.off_policy.enabled else None,
        transformer=config.megatron.transformer,
        vocab_size=config.gpt.vocab_size or 0,
        replayed=config.replayed,
        distillation=config.distillation,
        advantages=advantage_settings(config),
        sample_buffer_size=config.rollout.sample_buffer_size,
        old_is_current=config.old_is_current,
        outcome_readers=outcome_readers(config),
        hooks=hooks,
        image_processor=image_processor,
    )
    return BatchBuilder(settings, layout, backend, guards, progress)


def make_train_step(
    config: RunConfig,
    backend: MegatronBackend,
    guards: RolloutGuards,
    progress: Progress,
    initial_policy: str | None,
    hooks: TrainHooks,
) -> TrainStep:
    """Build the optimizer-step driver. initial_policy: the Hugging Face model that the run starts
    from; None if it starts from something else."""
    reference = config.model.hf_checkpoint if config.reference_is_base else config.model.ref_load
    from_reference = False
    if reference is not None and initial_policy is not None:
        from_reference = Path(reference).resolve() == Path(initial_policy).resolve()
    return TrainStep(
        config.algorithm,
        backend,
        progress,
        guards,
        hooks,
        patience=config.guards.max_consecutive_skipped_steps,
        kl_vanishes_at=config.critic.num_critic_only_steps if from_reference else None,
    )


def make_strategy(config: RunConfig) -> Strategy:
    """The strategy of --loss-type."""
    if config.algorithm.loss_type == "sft_loss":
        return SupervisedFineTuning(config.rollout.rollout_max_response_len)
    path = config.scheduling.rollout_function_path
    estimator = advantage_estimators.get(config.algorithm.advantage_estimator)
    return ReinforcementLearning(
        recorded=config.debug.load_debug_rollout_data is not None,
        staleness=staleness_bound(config),
        source="the engine" if path is None else f"--rollout-function-path {path}",
        max_failed=config.guards.max_failed_samples,
        max_abs_reward=config.reward.max_abs_reward,
        reward_trains=not config.rewards_are_zero,
        divides_by_mean=getattr(estimator, "divides_by_mean", False),
    )


def throughput_of(config: RunConfig, backend: MegatronBackend) -> Throughput:
    """The throughput of a run. A teacher's FLOPs are not counted: its size may differ."""
    device = ""
    if backend.device.type == "cuda":
        device = torch.cuda.get_device_name(backend.device)
    passes = 0
    algorithm = config.algorithm
    if backend.teacher is None:
        passes = int(backend.reference is not None)
        if algorithm.scores_mismatches and passes:
            passes = 3  # the reference over both halves of the pairs, the policy over one
        elif algorithm.loss_type != "sft_loss":
            passes += not (config.old_is_current or algorithm.use_rollout_logprobs)
    return make_throughput(config, backend.layout.world_size, device, log_prob_passes=passes)


def make_throughput(
    config: RunConfig, devices: int, device: str, *, log_prob_passes: int
) -> Throughput:
    """device: its name; "" for the CPU, which has no known peak."""
    return Throughput(
        forward_flops(config.megatron.transformer, config.gpt),
        peak_tflops=config.profiling.device_peak_tflops or peak_tflops(device),
        devices=devices,
        log_prob_passes=log_prob_passes,
        lora=config.lora.lora_rank > 0,
        critic_lora=config.critic.critic_lora_rank > 0,
        critic_passes=config.critic.critic_steps_per_policy_step,
    )


def make_checkpoints(
    config: RunConfig,
    layout: ParallelLayout,
    backend: MegatronBackend,
    tokenizer: PreTrainedTokenizerBase,
) -> RunCheckpoints:
    model = config.model
    reference = model.hf_checkpoint if config.reference_is_base else model.ref_load
    identity = RunIdentity(
        settings_of(config),
        mask_argv(config.argv),
        hf_checkpoint=model.hf_checkpoint,
        starts_from=config.starts_from,
        with_adapter=config.lora.lora_adapter_path is not None,
        reference=reference if config.algorithm.needs_reference else None,
        reference_step=model.ref_ckpt_step,
    )
    return RunCheckpoints(config.checkpoint, config.critic, identity, layout, backend, tokenizer)

"""Build the parts of a trainer from the configuration of its run."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path

from arguments.run_config import RunConfig
from slime_like.batching.builder import BatchBuilder
from slime_like.batching.outcomes import advantage_settings, outcome_readers
from slime_like.batching.settings import BatchSettings
from slime_like.batching.user_hooks import TrainHooks
from slime_like.data.tokenizer import load_tokenizer
from slime_like.distributed.signals import StopConditions
from slime_like.guards.rollout import RolloutGuards, train_rollout_limit
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.progress import Progress
from slime_like.trainer.train_step import TrainStep


def run_tokenizer(config: RunConfig) -> object:
    """The tokenizer of --hf-checkpoint; None if the run only reads recorded tokens. Raises
    ValueError."""
    if config.model.hf_checkpoint is None:
        return None
    return load_tokenizer(
        config.model.hf_checkpoint,
        vocab_size=config.gpt.vocab_size,
        trust_remote_code=config.model.trust_remote_code,
    )


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
    )


def make_batch_builder(
    config: RunConfig,
    layout: ParallelLayout,
    backend: MegatronBackend,
    guards: RolloutGuards,
    progress: Progress,
    hooks: TrainHooks,
) -> BatchBuilder:
    settings = BatchSettings(
        config.algorithm,
        off_policy=config.off_policy if config.off_policy.enabled else None,
        transformer=config.megatron.transformer,
        vocab_size=config.gpt.vocab_size or 0,
        replays_rollout=config.rollout.use_rollout_routing_replay,
        distillation=config.distillation,
        advantages=advantage_settings(config),
        sample_buffer_size=config.rollout.sample_buffer_size,
        old_is_current=config.old_is_current,
        outcome_readers=outcome_readers(config),
        hooks=hooks,
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

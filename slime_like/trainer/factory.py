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


def run_tokenizer(run: RunConfig) -> object:
    """The tokenizer of --hf-checkpoint; None if the run only reads recorded tokens. Raises
    ValueError."""
    if run.model.hf_checkpoint is None:
        return None
    return load_tokenizer(
        run.model.hf_checkpoint,
        vocab_size=run.gpt.vocab_size,
        trust_remote_code=run.model.trust_remote_code,
    )


def num_rollouts(run: RunConfig, prompts: Sized | None) -> int:
    """Number of rollouts: --num-rollout, or derived from --num-epoch and the number of prompts."""
    if run.rollout.num_rollout is not None:
        return run.rollout.num_rollout
    assert run.rollout.num_epoch is not None
    assert prompts is not None
    return max(1, len(prompts) * run.rollout.num_epoch // run.rollout.rollout_batch_size)


def steps_per_rollout(run: RunConfig) -> int:
    assert run.algorithm.num_steps_per_rollout is not None, (
        "completed when the command line is parsed"
    )
    return run.algorithm.num_steps_per_rollout


def make_progress(
    run: RunConfig, num_rollouts: int, rank: int, on_phase: Callable[[str], None]
) -> Progress:
    """Shown on rank 0."""
    return Progress(
        num_rollouts,
        show=rank == 0,
        plain=run.logging.no_progress,
        log_interval=run.logging.log_interval,
        on_phase=on_phase,
    )


def stop_conditions(run: RunConfig, rank: int) -> StopConditions:
    """When the run stops before its last rollout."""
    return StopConditions(
        every=run.checkpoint.exit_interval,
        minutes=run.checkpoint.exit_duration_in_mins,
        announce=rank == 0,
    )


def rollout_guards(run: RunConfig) -> RolloutGuards:
    return RolloutGuards(
        train_rollout_limit(run),
        run.guards.train_rollout_diff_patience,
        recorded=run.debug.load_debug_rollout_data is not None,
    )


def make_batch_builder(
    run: RunConfig,
    layout: ParallelLayout,
    backend: MegatronBackend,
    guards: RolloutGuards,
    progress: Progress,
    hooks: TrainHooks,
) -> BatchBuilder:
    settings = BatchSettings(
        run.algorithm,
        off_policy=run.off_policy if run.off_policy.enabled else None,
        transformer=run.megatron.transformer,
        vocab_size=run.gpt.vocab_size or 0,
        replays_rollout=run.rollout.use_rollout_routing_replay,
        distillation=run.distillation,
        advantages=advantage_settings(run),
        sample_buffer_size=run.rollout.sample_buffer_size,
        old_is_current=run.old_is_current,
        outcome_readers=outcome_readers(run),
        hooks=hooks,
    )
    return BatchBuilder(settings, layout, backend, guards, progress)


def make_train_step(
    run: RunConfig,
    backend: MegatronBackend,
    guards: RolloutGuards,
    progress: Progress,
    initial_policy: str | None,
    hooks: TrainHooks,
) -> TrainStep:
    """Build the optimizer-step driver. initial_policy: the Hugging Face model that the run starts
    from; None if it starts from something else."""
    reference = run.model.hf_checkpoint if run.reference_is_base else run.model.ref_load
    from_reference = False
    if reference is not None and initial_policy is not None:
        from_reference = Path(reference).resolve() == Path(initial_policy).resolve()
    return TrainStep(
        run.algorithm,
        backend,
        progress,
        guards,
        hooks,
        patience=run.guards.max_consecutive_skipped_steps,
        kl_vanishes_at=run.critic.num_critic_only_steps if from_reference else None,
    )

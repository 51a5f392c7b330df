"""The training loop: rollout, log-probs, advantages, optimizer steps, weight sync; evaluation and
checkpoints when due."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.rules.agents import check_branches
from arguments.rules.learning_rate import run_warnings
from arguments.run_config import RunConfig
from slime_like.batching.builder import Batches
from slime_like.batching.user_hooks import make_train_hooks
from slime_like.checkpoints.files import writes_to
from slime_like.data.factory import run_image_processor, run_tokenizer
from slime_like.distributed.collectives import any_rank, from_rank_zero
from slime_like.distributed.signals import ExitRequest
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.logger import MetricsLogger, to_json
from slime_like.metrics.names import UNKNOWN_VERSIONS
from slime_like.metrics.timers import speed_and_memory
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.factory import load_prompts, make_source
from slime_like.samples.exchange import with_branches
from slime_like.samples.index import AnySample
from slime_like.samples.masking import check_sampling_masks
from slime_like.trainer.earlier_run import set_aside_earlier_run
from slime_like.trainer.factory import (
    make_batch_builder,
    make_certifier,
    make_checkpoints,
    make_progress,
    make_strategy,
    make_train_step,
    num_rollouts,
    rollout_guards,
    steps_per_rollout,
    stop_conditions,
    throughput_of,
)
from slime_like.trainer.rollout_record import record_rollout, record_training
from slime_like.trainer.run_record import start_trackers
from slime_like.trainer.sampling_factory import make_sampling

if TYPE_CHECKING:
    from slime_like.checkpoints.state import TrainerState


logger = logging.getLogger(__name__)


class Trainer:
    """Builds and owns every part of a run. All ranks execute the same calls."""

    def __init__(
        self,
        config: RunConfig,
        layout: ParallelLayout,
        output_dir: Path,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        traced: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            on_phase: Called at the start and end of each phase.
            traced: Context manager around each rollout, called with the number of finished
                rollouts.
        """
        self.config = config
        self.layout = layout
        self.output_dir = output_dir
        self._traced = traced
        self.strategy = make_strategy(config)
        self.tokenizer = tokenizer = run_tokenizer(config)
        # data is read before the model is built, so that bad data fails early
        images = run_image_processor(config, tokenizer)
        source = make_source(config, tokenizer, images)
        eval_prompts, notes = load_prompts(config, tokenizer, images)
        self.num_rollouts = num_rollouts(config, source)
        self.progress = progress = make_progress(config, self.num_rollouts, layout.rank, on_phase)
        self.hooks = hooks = make_train_hooks(config)
        hooks.megatron_init()
        total = self.num_rollouts * steps_per_rollout(config)
        if config.rollout.num_rollout is None:
            for text in run_warnings(config, total):
                warn_rank_0(logger, text)
        self.backend = backend = MegatronBackend(config, layout, total_steps=total)
        self._throughput = throughput_of(config, backend)
        # (tokens, tokens with a log-prob) of each sequence of the latest rollout, for `Throughput`
        self._lengths: list[tuple[int, int]] = []
        if backend.critic is not None and backend.critic.layout is not layout:
            logger.info(f"critic: {backend.critic.layout.describe()}")
        self.sampling = make_sampling(
            config,
            backend,
            tokenizer,
            progress,
            source=source,
            eval_prompts=eval_prompts,
            num_rollouts=self.num_rollouts,
            output_dir=output_dir,
            image_processor=images,
        )
        self.weight_version = 1  # of the policy; the engine's lags behind until the next sync
        self.start = 0  # the first rollout
        self._hidden = set[str]()  # prefixes of metrics that a user function logs instead
        self._evaluation_due = False  # of rollout `start`, trained before this process resumed
        for note in [*(source.notes if source is not None else ()), *notes]:
            warn_rank_0(logger, note)
        guards = rollout_guards(config)
        self.batch_builder = make_batch_builder(
            config, layout, backend, guards, progress, hooks, images
        )
        # a user's conversion makes the sequences to train on later, in `_converted`
        if config.scheduling.async_rollout and not (
            config.debug.debug_rollout_only or hooks.converts
        ):
            self.sampling.deliver_early(self.batch_builder.deliver_early)
        self.stop = stop_conditions(config, layout.rank)
        self.checkpoints = make_checkpoints(config, layout, backend, tokenizer)
        start = self.checkpoints.load()
        self.train_step = make_train_step(
            config, backend, guards, progress, start.initial_policy, hooks
        )
        if start.state is not None:
            self._restore(start.state)
        self._initial_policy = start.initial_policy
        self._certifier = make_certifier(config, backend, self.sampling.engine, output_dir)
        self.logger = self._open_logger(start.state or {})

    def _open_logger(self, state: TrainerState) -> MetricsLogger | None:
        """The metrics logger, on rank 0 only. state: trainer state of the resumed checkpoint."""
        config = self.config.logging
        if self.layout.rank != 0:
            return None
        tensorboard = None
        if not config.no_tensorboard:
            tensorboard = Path(config.tensorboard_dir or self.output_dir / "tensorboard")
        first = self.start + 1 if self.start else 0
        if not first:  # usually done before; the checkpoint may hold weights only
            set_aside_earlier_run(self.config.debug, self.output_dir, begun=True)
        trackers = None
        if config.trackers:
            trackers = start_trackers(self.config, self.output_dir, resumed=first > 0)
        return MetricsLogger(
            self.output_dir,
            tensorboard,
            start_step=first,
            last=state.get("metrics"),
            trackers=trackers,
        )

    def run(self) -> int:
        """Run all rollouts, from the first or from where the checkpoint left off. Returns the exit
        status: 0, or that of an `ExitRequest`."""
        config = self.config
        self.stop.catch(signal.SIGINT)
        if config.checkpoint.save is not None:
            self.stop.catch(signal.SIGTERM, signal.SIGHUP)
        self.progress.start_at(self.start)
        if self.start:
            logger.info(
                f"continuing at rollout {self.start + 1} of {self.num_rollouts}, from "
                f"{config.checkpoint.load}"
            )
        with self.progress:
            if config.guards.certify:
                return 1 if self._certify(self.start)["certificate/findings"] else 0
            if self._evaluation_due:
                self._make_up_evaluation()
            if self.start >= self.num_rollouts:
                logger.info(
                    f"nothing to do: the checkpoint has {self.start} of {self.num_rollouts} "
                    "rollouts"
                )
                self._export()  # perhaps the flag for it is what this start is for
                return 0
            if (
                self.start == 0
                and self.sampling.evaluator
                and not config.eval.skip_eval_before_train
            ):
                scores = self._evaluate(self.start)
                logger.info("before training: " + mean_scores(scores))
                self._log(-1, scores | self.progress.take_seconds())
            for step in range(self.start, self.num_rollouts):
                with self._traced(step):
                    stop = self._rollout(step)
                if stop is not None and step + 1 < self.num_rollouts:
                    saved = f", saved in {config.checkpoint.save}" if config.checkpoint.save else ""
                    logger.info(
                        f"stopped by {stop.reason} after rollout {step + 1} of "
                        f"{self.num_rollouts}{saved}"
                    )
                    return stop.status
        self._export()
        return 0

    def _rollout(self, step: int) -> ExitRequest | None:
        """Run one rollout, then evaluation, checkpoint and metrics as due. Returns the exit request
        that stops the run here, or None."""
        config = self.config
        metrics = self.step(step)
        metrics |= self._check_health(metrics)
        stop = self.stop.requested(step + 1, any_rank)
        due = self.sampling.evaluator is not None and is_due(
            step, config.eval.eval_interval, self.num_rollouts
        )
        # the sender of the signal may not wait for an evaluation: save first, and record in the
        # checkpoint that the evaluation is missing
        postponed = due and stop is not None and stop.urgent and config.checkpoint.save is not None
        if due and not postponed:
            metrics |= self._evaluate(step)
            stop = stop or self.stop.requested(step + 1, any_rank)
        is_final = step + 1 == self.num_rollouts
        last = stop is not None or is_final
        if self.checkpoints.wants(step + 1, last=last):
            with self.progress.phase("save"):
                state = {**self._state(metrics), "evaluation_due": postponed}
                metrics |= self.checkpoints.after_rollout(step + 1, state, last=last)
        if postponed and is_final:  # no later process would make it up
            metrics |= self._evaluate(step)
        elif postponed:
            logger.info(f"the evaluation of rollout {step + 1} is left to the run that resumes")
        metrics |= self.progress.take_seconds()
        metrics |= speed_and_memory(metrics)
        metrics |= self._throughput.metrics(self._lengths, metrics)
        self._log(step, metrics)
        self.progress.rollout_done(step, metrics)
        return stop

    def _certify(self, step: int) -> dict[str, float]:
        """Write the certificate of the weights before rollout `step`; returns metrics."""
        assert self._certifier is not None
        if self.strategy.samples_responses:
            self.sampling.take_engine(self.weight_version)
        source = self._initial_policy if self.weight_version == 1 else None
        with self.progress.phase("certify"):
            certificate = self._certifier.run(step, self.weight_version, source)
        return certificate.metrics

    def _make_up_evaluation(self) -> None:
        """Run the evaluation that a stopped run skipped, with the weights it had; it is logged with
        the metrics of that run's last rollout."""
        metrics_logger = self.logger

        def is_logged() -> bool:
            assert metrics_logger is not None, "on rank 0"
            return any(name.startswith("eval/") for name in metrics_logger.row(self.start))

        done = from_rank_zero(is_logged)
        if self.sampling.evaluator is None or done:
            return
        scores = self._evaluate(self.start - 1)
        logger.info(f"evaluation of rollout {self.start}: {mean_scores(scores)}")
        self.progress.take_seconds()
        if metrics_logger is not None:
            metrics_logger.amend(self.start, scores)

    def _export(self) -> None:
        """Write the exports of --lora-save-path and --save-hf at the end of the run."""
        config = self.config
        targets = (
            ("--lora-save-path", config.lora.lora_save_path, "adapter", self.backend.save_adapter),
            (
                "--save-hf",
                config.checkpoint.save_hf,
                "Hugging Face checkpoint",
                self.backend.save_hf,
            ),
        )
        for flag, path, name, save in targets:
            if path:
                with writes_to(flag, path):
                    done = max(self.start, self.num_rollouts)
                    folder = save(path.replace("{rollout_id}", str(done)))
                logger.info(f"{name}: {folder}")

    def close(self, *, finish_s: float | None = None) -> None:
        """End graders and engines and close files. finish_s: time limit for trackers in seconds.
        Idempotent."""
        self.sampling.close()
        if self.logger is not None:
            self.logger.close(finish_s)
            self.logger = None

    def step(self, step: int) -> dict[str, float]:
        """Run one rollout and its optimizer steps. step: the rollout, from 0. Returns metrics."""
        config = self.config
        samples, sequences, metrics = self._sample(step)
        self.strategy.check_failures(step, samples, metrics)
        if config.debug.debug_rollout_only:
            return metrics
        sequences = self._converted(sequences, len(samples))
        # KTO's mismatched answers are scored before the steps, and not trained on
        trained = sequences[::2] if config.algorithm.scores_mismatches else sequences
        self._lengths = [(s.total_length, s.active_tokens) for s in trained]
        batches, batch_metrics = self.strategy.build_batches(
            self.batch_builder, step, sequences, self.weight_version
        )
        metrics |= batch_metrics
        if config.debug.save_debug_rollout_data:
            record_training(config.debug.save_debug_rollout_data, step, batches, self.layout)
        return metrics | self._train(step, batches, metrics)

    def _sample(self, step: int) -> tuple[list[AnySample], list[AnySample], dict[str, float]]:
        """The graded samples of a rollout, all their sequences, and their metrics; sampled with the
        current weights."""
        config = self.config
        if self.strategy.samples_responses:
            self.sampling.sync_weights(self.weight_version)
        certified = {}
        if config.guards.certify_interval and step % config.guards.certify_interval == 0:
            certified = self._certify(step)
        self.hooks.begin_rollout(step)
        started = time.monotonic()
        generated = self.sampling.generate(step)
        samples = list(generated.samples)
        check_sampling_masks(samples, wanted=config.rollout.renormalize_sampled_log_probs)
        sequences = with_branches(samples)
        metrics = self.strategy.check_samples(
            step, samples, generated.metrics, self.weight_version, sequences
        )
        metrics |= certified
        seconds = time.monotonic() - started
        if self.hooks.log_rollout(samples, metrics, seconds):
            self._hidden.add("rollout/")
        if self.strategy.samples_responses:
            metrics |= self.sampling.release_engine()
        if config.debug.save_debug_rollout_data:
            target = config.debug.save_debug_rollout_data
            record_rollout(target, step, generated.groups, self.layout.rank, self.tokenizer)
        if self.logger is not None and self.logger.trackers is not None:
            self.logger.trackers.log_samples(step + 1, samples)
        return samples, sequences, metrics

    def _converted(self, sequences: list[AnySample], num_samples: int) -> list[AnySample]:
        """The sequences to train on: all branches of each episode, or what the user's conversion
        function makes of them."""
        sequences = self.hooks.convert(sequences)
        if len(sequences) > num_samples:
            check_branches(self.config)
        return sequences

    def _train(self, step: int, batches: Batches, metrics: Mapping[str, float]) -> dict[str, float]:
        """Train critic and policy; returns metrics. metrics: of the rollout so far."""
        config = self.config
        trained: dict[str, float] = {}
        if self.backend.critic is not None:
            values_abs = metrics.get("rollout/values_abs", 0.0)
            trained |= self.train_step.train_critic(
                batches.critic * config.critic.critic_steps_per_policy_step, values_abs=values_abs
            )
        if step < config.critic.num_critic_only_steps:
            return trained
        is_stale = metrics.get("rollout/staleness_max") or metrics.get(UNKNOWN_VERSIONS)
        trained |= self.train_step.train_policy(
            step, batches, weight_version=self.weight_version, on_policy=not is_stale
        )
        self.weight_version += 1
        interval = config.model.ref_update_interval
        if interval is not None and (step + 1) % interval == 0:
            self.backend.update_reference()
        return trained

    def _check_health(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Warn if the run does not learn; returns ``health/...`` metrics of this rollout."""
        if self.strategy.health is None:
            return {}
        health_metrics, warnings = self.strategy.health.check(metrics)
        for text in warnings:
            warn_rank_0(logger, text)
        return health_metrics

    def _evaluate(self, step: int) -> dict[str, float]:
        scores = self.sampling.evaluate(step, self.weight_version)
        evaluator = self.sampling.evaluator
        if isinstance(evaluator, Evaluator) and self.hooks.log_eval(step, evaluator.last, scores):
            self._hidden.add("eval/")
        return scores

    def _state(self, metrics: Mapping[str, float]) -> dict[str, object]:
        """Trainer state of a checkpoint as plain JSON. metrics: of the last rollout, which is not
        yet in metrics.jsonl."""
        health = self.strategy.health
        return {
            **self.sampling.rollout_manager.state_dict(),
            **self.train_step.state_dict(),
            "weight_version": self.weight_version,
            "batches": self.batch_builder.state_dict(),
            "health": None if health is None else health.state_dict(),
            "metrics": to_json(metrics),
            "output_dir": str(self.output_dir.resolve()),
        }

    def _restore(self, state: TrainerState) -> None:
        self.start = int(state["step"])
        self._evaluation_due = bool(state.get("evaluation_due"))
        try:
            self.weight_version = int(state["weight_version"])
            self.train_step.load_state_dict(state)
            self.batch_builder.load_state_dict(state["batches"])
            health = self.strategy.health
            if health is not None and (saved := state.get("health")):  # older ones have none
                health.load_state_dict(saved)
            warn_rank_0(logger, self.sampling.rollout_manager.load_state_dict(state))
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"--load {self.config.checkpoint.load}: trainer.json of step {self.start} is "
                f"damaged ({error!r})"
            ) from error

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        hidden = tuple(self._hidden)
        self._hidden.clear()
        if self.logger is not None:
            shown = {name: v for name, v in metrics.items() if not name.startswith(hidden)}
            self.logger.log(step + 1, shown)


def mean_scores(scores: Mapping[str, float]) -> str:
    """Mean score of every evaluation set, as text for the log."""
    return "  ".join(f"{k} {v:.4f}" for k, v in scores.items() if k.endswith("/mean"))


def is_due(step: int, interval: int | None, total: int) -> bool:
    """Whether an action is due: every `interval` rollouts, and after the last."""
    return step + 1 == total or (interval is not None and (step + 1) % interval == 0)

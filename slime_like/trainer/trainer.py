"""The loop: prompts, rollouts, log-probs, advantages, optimizer steps, weights to the engine;
evaluation and checkpoints when due."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.checkpoints.files import writes_to
from slime_like.compat.slime.function_results import UNKNOWN_VERSIONS
from slime_like.data.tokenizer import load_tokenizer
from slime_like.distributed.collectives import from_rank_zero
from slime_like.distributed.signals import ExitRequest, StopConditions
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.health import HealthMonitor
from slime_like.metrics.logger import MetricsLogger, to_json
from slime_like.metrics.progress import Progress
from slime_like.metrics.timers import STEP_SECONDS
from slime_like.rollout.evaluate import load_prompts, make_evaluator
from slime_like.rollout.metrics import (
    TRUNCATED_FRACTION,
    check_staleness,
    engine_troubles,
    failed_fraction,
    first_failure,
    rollout_metrics,
)
from slime_like.rollout.recording import save_rollout
from slime_like.rollout.step_plan import check_token_sets, flatten, usable
from slime_like.trainer.batch_builder import BatchMaker
from slime_like.trainer.checkpointing import RunCheckpoints
from slime_like.trainer.rollout_manager import (
    RolloutManager,
    function_evaluator,
    make_rollouter,
    make_source,
    make_teacher,
    staleness_bound,
)
from slime_like.trainer.train_step import TrainStep
from slime_like.trainer.weight_sync import WeightSync
from slime_like.types import Sample

logger = logging.getLogger(__name__)


class Trainer:
    """Owns the run: every part is built here and used by `run`. All ranks execute the same calls."""

    def __init__(
        self,
        run: RunConfig,
        layout: ParallelLayout,
        output_dir: Path,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.run_config = run
        self.layout = layout
        self.output_dir = output_dir
        self.is_sft = run.algorithm.loss_type == "sft_loss"
        tokenizer = run_tokenizer(run)
        source = make_source(run, tokenizer)
        eval_prompts, eval_notes = load_prompts(
            run, tokenizer
        )  # wrong ones: before the model is built
        self.num_rollouts = num_rollouts(run, None if source is None else len(source))
        self.progress = Progress(
            self.num_rollouts,
            show=layout.rank == 0,
            plain=run.logging.no_progress,
            log_interval=run.logging.log_interval,
            on_phase=on_phase,
        )
        total_steps = self.num_rollouts * steps_per_rollout(run)
        self.backend = MegatronBackend(run, layout, total_steps=total_steps)
        if self.backend.critic is not None and self.backend.critic.layout is not layout:
            logger.info(f"critic: {self.backend.critic.layout.describe()}")
        self.rollouter = make_rollouter(run, self.backend, tokenizer, output_dir=output_dir)
        teacher = make_teacher(run, tokenizer)
        self.weight_sync = (
            None
            if self.rollouter is None
            else WeightSync(run, self.backend, self.rollouter.engine, self.progress)
        )
        evaluator = make_evaluator(run, self.rollouter, eval_prompts)
        self.supply = RolloutManager(
            run,
            source,
            self.rollouter,
            evaluator,
            tokenizer,
            num_rollouts=self.num_rollouts,
            teacher=teacher,
        )
        self.evaluator = function_evaluator(run, self.rollouter, evaluator, self.supply)
        # of the policy; the engine has its own, which lags until the next sync
        self.weight_version = 1
        self.start = 0
        self._evaluation_due = False  # of rollout `start`, which another run trained
        self._warned_of_truncated_answers = False
        self.health = (
            None if self.is_sft else HealthMonitor(reward_trains=run.reward.rm_type != "zero")
        )
        for note in [*([] if source is None else source.notes), *eval_notes]:
            warn_rank_0(logger, note)
        self.batches = BatchMaker(run, layout, self.backend, self.progress)
        self.stop = StopConditions(
            every=run.checkpoint.exit_interval,
            minutes=run.checkpoint.exit_duration_in_mins,
            announce=layout.rank == 0,
        )
        self.checkpoints = RunCheckpoints(run, layout, self.backend, tokenizer)
        start = self.checkpoints.load()
        self.updates = TrainStep(
            run,
            self.backend,
            self.progress,
            rollout_gate=self.batches.rollout_gate,
            stale_gate=self.batches.stale_gate,
            initial_policy=start.initial_policy,
        )
        if start.state is not None:
            self._restore(start.state)
        tensorboard = (
            None
            if run.logging.no_tensorboard
            else Path(run.logging.tensorboard_dir or output_dir / "tensorboard")
        )
        self.logger: MetricsLogger | None = None
        if layout.rank == 0:
            last = None if start.state is None else start.state.get("metrics")
            self.logger = MetricsLogger(
                output_dir, tensorboard, start_step=self.start + 1 if self.start else 0, last=last
            )

    def run(self) -> int:
        """The whole run, from the first rollout or from where it was resumed. Returns the exit
        status: 0, or that of a `ExitRequest`."""
        run = self.run_config
        self.stop.catch(signal.SIGINT)
        if run.checkpoint.save is not None:
            self.stop.catch(signal.SIGTERM, signal.SIGHUP)
        self.progress.start_at(self.start)
        if self.start:
            logger.info(
                f"continuing at rollout {self.start + 1} of {self.num_rollouts}, from {run.checkpoint.load}"
            )
        with self.progress:
            if self._evaluation_due:
                self._make_up_evaluation()
            if self.start >= self.num_rollouts:
                logger.info(
                    f"nothing to do: the checkpoint has {self.start} rollouts and the run asks for {self.num_rollouts}"
                )
                return 0
            if self.start == 0 and self.evaluator and not run.eval.skip_eval_before_train:
                scores = self._evaluate(self.start)
                logger.info("before training: " + mean_scores(scores))
                self._log(-1, scores | self.progress.take_seconds())
            for step in range(self.start, self.num_rollouts):
                stop = self._rollout(step)
                if stop is not None and step + 1 < self.num_rollouts:
                    saved = f", saved in {run.checkpoint.save}" if run.checkpoint.save else ""
                    logger.info(
                        f"stopped by {stop.words} after rollout {step + 1} of {self.num_rollouts}{saved}"
                    )
                    return stop.status
        self._export()
        return 0

    def _rollout(self, step: int) -> ExitRequest | None:
        """One rollout, then what is due after it: evaluation, checkpoint, metrics. Returns why the
        run stops here, or None."""
        run = self.run_config
        metrics = self.step(step)
        metrics |= self._check_health(metrics)
        stop = self.stop.requested(step + 1, any_rank)
        due = self.evaluator is not None and is_due(step, run.eval.eval_interval, self.num_rollouts)
        # who asked may not wait for an evaluation: the checkpoint comes first, and knows what is
        # missing
        later = due and stop is not None and stop.hurried and run.checkpoint.save is not None
        if due and not later:
            metrics |= self._evaluate(step)
            stop = stop or self.stop.requested(step + 1, any_rank)
        is_final = step + 1 == self.num_rollouts
        last = stop is not None or is_final
        if self.checkpoints.wants(step + 1, last=last):
            with self.progress.phase("save"):
                state = {**self._state(metrics), "evaluation_due": later}
                metrics |= self.checkpoints.after_rollout(step + 1, state, last=last)
        if later and is_final:  # nobody may start this run again
            metrics |= self._evaluate(step)
        elif later:
            logger.info(f"the evaluation of rollout {step + 1} is left to the run that resumes")
        metrics |= self.progress.take_seconds()
        metrics |= speed_and_memory(metrics)
        self._log(step, metrics)
        self.progress.rollout_done(step, metrics)
        return stop

    def _make_up_evaluation(self) -> None:
        """The evaluation that a run left when it had to stop, under the weights that it had; in the
        metrics of its last rollout."""
        metrics_logger = self.logger
        done = from_rank_zero(
            lambda: (
                metrics_logger is not None
                and any(name.startswith("eval/") for name in metrics_logger.row(self.start))
            )
        )
        if self.evaluator is None or done:
            return
        scores = self._evaluate(self.start - 1)
        logger.info(f"evaluation of rollout {self.start}: {mean_scores(scores)}")
        self.progress.take_seconds()
        if metrics_logger is not None:
            metrics_logger.amend(self.start, scores)

    def _export(self) -> None:
        """What --lora-save-path and --save-hf ask for at the end."""
        run = self.run_config
        targets = (
            ("--lora-save-path", run.lora.lora_save_path, "adapter", self.backend.save_adapter),
            ("--save-hf", run.checkpoint.save_hf, "Hugging Face checkpoint", self.backend.save_hf),
        )
        for flag, path, name, save in targets:
            if path:
                with writes_to(flag, path):
                    folder = save(path.replace("{rollout_id}", str(self.num_rollouts)))
                logger.info(f"{name}: {folder}")

    def close(self) -> None:
        """End what this process started: graders, files. Closing twice is fine."""
        self.supply.close()
        if self.evaluator is not None:
            self.evaluator.close()
        if self.rollouter is not None:
            self.rollouter.grader.close()
            self.rollouter.engine.close()
            self.rollouter = None
        if self.logger is not None:
            self.logger.close()
            self.logger = None

    def step(self, step: int) -> dict[str, float]:
        """One rollout and its optimizer steps."""
        run = self.run_config
        if not self.is_sft:
            self._sync_weights()
        with self.progress.phase("generate"):
            groups, collected = self.supply.groups_of(step)
        samples = [usable(sample) for sample in flatten(groups)]
        check_token_sets(samples, wanted=run.rollout.renormalize_sampled_log_probs)
        recorded = (
            run.debug.load_debug_rollout_data is not None
        )  # under weight versions of another run
        metrics = (
            collected
            if self.is_sft
            else merged(
                rollout_metrics(samples, None if recorded else self.weight_version), collected
            )
        )
        if self.is_sft:
            self._warn_of_truncated_answers(metrics[TRUNCATED_FRACTION])
        if not self.is_sft and not recorded:
            self._check_staleness(step, samples)
        if self.rollouter is not None and not self.is_sft:
            metrics |= self.rollouter.engine.take_metrics()
            self.rollouter.engine.release_memory()
        if run.debug.save_debug_rollout_data and self.layout.rank == 0:
            target = run.debug.save_debug_rollout_data
            with writes_to("--save-debug-rollout-data", target):
                save_rollout(target, step, groups)
        failed = 0.0 if self.is_sft else failed_fraction(samples)
        if failed > run.gates.max_failed_samples:
            troubles = from_rank_zero(
                lambda: engine_troubles(metrics)
            )  # it alone has the counts, and any rank may be the one that tells
            raise RunError(
                f"rollout {step + 1}: {failed:.1%} of the samples have no usable response or reward, more than --max-failed-samples "
                f"{run.gates.max_failed_samples:g}; the first: {first_failure(samples)}{troubles}"
            )
        if failed:
            warn_rank_0(
                logger,
                f"rollout {step + 1}: {failed:.1%} of the samples have no usable response or reward; the first: {first_failure(samples)}",
            )
        if run.debug.debug_rollout_only:
            return metrics
        batches, batch_metrics = self.batches.make(samples, self.weight_version)
        metrics |= batch_metrics
        if self.backend.critic is not None:
            metrics |= self.updates.train_critic(
                batches.critic, values_abs=metrics.get("rollout/values_abs", 0.0)
            )
        if step >= run.critic.num_critic_only_steps:
            on_policy = not metrics.get("rollout/staleness_max") and not metrics.get(
                UNKNOWN_VERSIONS
            )
            metrics |= self.updates.train_policy(
                step, batches.policy, weight_version=self.weight_version, on_policy=on_policy
            )
            self.weight_version += 1
        return metrics

    def _warn_of_truncated_answers(self, share: float) -> None:
        """Once in a run: the model would not learn how such answers end."""
        if share and not self._warned_of_truncated_answers:
            self._warned_of_truncated_answers = True
            limit = self.run_config.rollout.rollout_max_response_len
            warn_rank_0(
                logger,
                f"{share:.1%} of the answers of this step are longer than --rollout-max-response-len {limit} and are cut there, without an end; "
                f"{TRUNCATED_FRACTION} has the share of every step",
            )

    def _check_health(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Warn of a run that learns nothing; ``health/...`` of this rollout."""
        if self.health is None:
            return {}
        counted, fresh = self.health.check(metrics)
        for text in fresh:
            warn_rank_0(logger, text)
        return counted

    def _check_staleness(self, step: int, samples: Sequence[Sample]) -> None:
        """Holds by itself, unless a function of the user's brings older samples or an engine lies."""
        path = self.run_config.scheduling.rollout_function_path
        source = "the engine" if path is None else f"--rollout-function-path {path}"
        bound = staleness_bound(self.run_config)
        check_staleness(samples, self.weight_version, bound, f"{source}, rollout {step + 1}")

    def _sync_weights(self) -> None:
        """Hand the policy's weights to the engine, unless it has them."""
        if self.weight_sync is not None:
            self.weight_sync.sync(self.weight_version)

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluator is not None
        self.supply.drain()
        self._sync_weights()
        with self.progress.phase("eval"):
            return self.evaluator.evaluate(step)

    def _state(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What a checkpoint holds beside the networks; plain JSON. metrics: of the last rollout,
        whose line is not written yet."""
        return {
            **self.supply.state_dict(),
            **self.updates.state_dict(),
            "weight_version": self.weight_version,
            "batches": self.batches.state_dict(),
            "health": None if self.health is None else self.health.state_dict(),
            "metrics": to_json(metrics),
            "output_dir": str(self.output_dir.resolve()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.start = int(state["step"])
        self._evaluation_due = bool(state.get("evaluation_due"))
        try:
            self.weight_version = int(state["weight_version"])
            self.updates.load_state_dict(state)
            self.batches.load_state_dict(state["batches"])
            if self.health is not None and state.get("health"):  # checkpoints of before have none
                self.health.load_state_dict(state["health"])
            warn_rank_0(logger, self.supply.load_state_dict(state))
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"--load {self.run_config.checkpoint.load}: trainer.json of step {self.start} is damaged ({error!r})"
            ) from error

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.logger is not None:
            self.logger.log(step + 1, metrics)


def run_tokenizer(run: RunConfig) -> Any:
    """The tokenizer of --hf-checkpoint; None in a run that reads recorded tokens only. Raises
    ValueError."""
    if run.model.hf_checkpoint is None:
        return None
    return load_tokenizer(
        run.model.hf_checkpoint,
        vocab_size=run.gpt.vocab_size,
        trust_remote_code=run.model.trust_remote_code,
    )


def num_rollouts(run: RunConfig, num_prompts: int | None) -> int:
    """--num-rollout, or what --num-epoch passes over the prompts make."""
    if run.rollout.num_rollout is not None:
        return run.rollout.num_rollout
    assert run.rollout.num_epoch is not None
    assert num_prompts is not None
    return max(1, num_prompts * run.rollout.num_epoch // run.rollout.rollout_batch_size)


def steps_per_rollout(run: RunConfig) -> int:
    assert run.algorithm.num_steps_per_rollout is not None, (
        "completed when the command line is parsed"
    )
    return run.algorithm.num_steps_per_rollout


def any_rank(flags: list[bool]) -> list[bool]:
    """Elementwise or over all ranks; collective."""
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]


def mean_scores(scores: Mapping[str, float]) -> str:
    """The mean of every set, for a line on screen."""
    return "  ".join(f"{k} {v:.4f}" for k, v in scores.items() if k.endswith("/mean"))


def is_due(step: int, interval: int | None, total: int) -> bool:
    """Every `interval` rollouts, and after the last."""
    return step + 1 == total or (interval is not None and (step + 1) % interval == 0)


def merged(ours: dict[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Raises ValueError for a name that is there twice, as a user's function may choose it."""
    twice = sorted(ours.keys() & theirs.keys())
    if twice:
        raise ValueError(
            f"--rollout-function-path: the metric {twice[0]!r} is one of the run's own; give it another name"
        )
    return {**ours, **theirs}


def speed_and_memory(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second over the whole step, and the peak memory of this process in GiB."""
    speed = {}
    if "rollout/tokens" in metrics and metrics.get(STEP_SECONDS):
        speed["perf/tokens_per_s"] = metrics["rollout/tokens"] / metrics[STEP_SECONDS]
    speed["perf/peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return speed

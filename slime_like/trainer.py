"""The loop: prompts, rollouts, log-probs, advantages, optimizer steps, weights to the engine; evaluation and checkpoints when due."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arguments.run_config import RunConfig
from slime_like.advantages import TokenEstimator, advantage_estimators
from slime_like.batch_maker import BatchMaker
from slime_like.data.prompts import PromptSource, load_eval_sets
from slime_like.data.sft import answer_problem, sft_samples
from slime_like.engines import WeightSync, make_engine
from slime_like.errors import RunError
from slime_like.megatron_backend.backend import MegatronBackend
from slime_like.megatron_backend.gates import SkippedStepGate, check_initial_kl, check_old_log_probs, check_old_values
from slime_like.megatron_backend.layout import ParallelLayout
from slime_like.metrics.logger import MetricsLogger
from slime_like.metrics.progress import Progress
from slime_like.metrics.timers import STEP_SECONDS
from slime_like.rewards.grader import Grader
from slime_like.rewards.registry import answer_check
from slime_like.rollout.ahead import RolloutsAhead
from slime_like.rollout.batch import check_token_sets, flatten, usable
from slime_like.rollout.buffer import GroupBuffer
from slime_like.rollout.collect import Collector
from slime_like.rollout.custom_generate import CustomGenerate
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.evaluate import Evaluator
from slime_like.rollout.greedy import with_greedy_rewards
from slime_like.rollout.metrics import engine_troubles, failed_fraction, first_failure, rollout_metrics
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.rollout.slime_samples import slime_args
from slime_like.run_checkpoints import RunCheckpoints
from slime_like.stopping import StopConditions
from slime_like.types import SampleGroup, StepResult, TrainBatch


class Trainer:
    """Owns the run: every part is built here and used by `run`. All ranks execute the same calls."""

    def __init__(
        self, run: RunConfig, layout: ParallelLayout, output_dir: Path, *, on_phase: Callable[[str], None] = lambda phase: None
    ) -> None:
        self.run_config = run
        self.layout = layout
        self.output_dir = output_dir
        self.is_sft = run.algorithm.loss_type == "sft_loss"
        self.tokenizer = load_tokenizer(run)
        gradable = answer_check(run.reward.rm_type, run.reward.custom_rm_path)
        self.source = None
        if run.data.prompt_data and not run.debug.debug_train_only:
            recorded = run.debug.load_debug_rollout_data is not None  # these prompts are counted then, not answered
            check = None if recorded else answer_problem if self.is_sft else gradable
            self.source = PromptSource(run.data, self.tokenizer, answer_check=check)
        notes = [] if self.source is None else list(self.source.notes)
        self.num_rollouts = num_rollouts(run, None if self.source is None else len(self.source))
        self.progress = Progress(
            self.num_rollouts,
            show=layout.rank == 0,
            plain=run.logging.no_progress,
            log_interval=run.logging.log_interval,
            on_phase=on_phase,
        )
        total_steps = self.num_rollouts * steps_per_rollout(run)
        self.backend = MegatronBackend(run, layout, total_steps=total_steps, tell=self.progress.message)
        if self.backend.critic is not None and self.backend.critic.layout is not layout:
            self.progress.message(f"critic: {self.backend.critic.layout.describe()}")
        self.rollouter = self._make_rollouter()
        self.collector = self._make_collector()
        self.ahead = self._make_ahead()
        self.evaluator: Evaluator | None = None
        self.weight_sync = None if self.rollouter is None else WeightSync(run, self.backend, self.rollouter.engine, self.progress)
        if run.eval.eval_interval is not None and self.rollouter is not None:
            flag = "--eval-config" if run.eval.eval_config is not None else "--eval-prompt-data"
            prompts, eval_notes = load_eval_sets(run.eval_sets, run.data, self.tokenizer, flag=flag, answer_check=gradable)
            self.evaluator = Evaluator(self.rollouter, run.eval_sets, prompts, run.rollout, run.reward)
            notes += eval_notes
        self.skip_gate = SkippedStepGate(run.gates.max_consecutive_skipped_steps)
        self.critic_gate = SkippedStepGate(run.gates.max_consecutive_skipped_steps, whose="critic's ")
        self.weight_version = 1  # of the policy; the engine has its own, which lags until the next sync
        self.start = 0
        for note in notes:
            self._warn(note)
        self.batches = BatchMaker(run, layout, self.backend, self.progress, self._warn)
        self.stop = StopConditions(every=run.checkpoint.exit_interval, minutes=run.checkpoint.exit_duration_in_mins)
        self.checkpoints = RunCheckpoints(run, layout, self.backend, self.progress.message)
        start = self.checkpoints.load()
        self.initial_policy = start.initial_policy  # None: not a Hugging Face model
        if start.state is not None:
            self._restore(start.state)
        tensorboard = None if run.logging.no_tensorboard else Path(run.logging.tensorboard_dir or output_dir / "tensorboard")
        self.logger = MetricsLogger(output_dir, tensorboard, start_step=self.start + 1 if self.start else 0) if layout.rank == 0 else None

    def run(self) -> int:
        """The whole run, from the first rollout or from where it was resumed. Returns the exit status: 0, or that of a `Stop`."""
        run = self.run_config
        if self.start >= self.num_rollouts:
            self.progress.message(f"nothing to do: the checkpoint has {self.start} rollouts and the run asks for {self.num_rollouts}")
            return 0
        if run.checkpoint.save is not None:
            self.stop.catch()
        self.progress.start_at(self.start)
        with self.progress:
            if self.start == 0 and self.evaluator and not run.eval.skip_eval_before_train:
                scores = self._evaluate()
                self.progress.message("before training: " + "  ".join(f"{k} {v:.4f}" for k, v in scores.items() if k.endswith("/mean")))
                self._log(-1, scores | self.progress.take_seconds())
            for step in range(self.start, self.num_rollouts):
                metrics = self._step(step)
                stop = self.stop.requested(step + 1, any_rank)
                if stop is None and is_due(step, run.eval.eval_interval, self.num_rollouts) and self.evaluator:
                    metrics |= self._evaluate()
                    stop = self.stop.requested(step + 1, any_rank)
                last = stop is not None or step + 1 == self.num_rollouts
                if self.checkpoints.wants(step + 1, last=last):
                    with self.progress.phase("save"):
                        metrics |= self.checkpoints.after_rollout(step + 1, self._state(), last=last)
                metrics |= self.progress.take_seconds()
                metrics |= speed_and_memory(metrics)
                self._log(step, metrics)
                self.progress.rollout_done(step, metrics)
                if stop is not None and step + 1 < self.num_rollouts:
                    saved = f", saved in {run.checkpoint.save}" if run.checkpoint.save else ""
                    self.progress.message(f"stopped by {stop.words} after rollout {step + 1} of {self.num_rollouts}{saved}")
                    return stop.status
        if run.lora.lora_save_path:
            folder = self.backend.save_adapter(run.lora.lora_save_path.replace("{rollout_id}", str(self.num_rollouts - 1)))
            self.progress.message(f"adapter: {folder}")
        if run.checkpoint.save_hf:
            folder = self.backend.save_hf(run.checkpoint.save_hf.replace("{rollout_id}", str(self.num_rollouts - 1)))
            self.progress.message(f"Hugging Face checkpoint: {folder}")
        return 0

    def close(self) -> None:
        """End what this process started: graders, files. Closing twice is fine."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None
        if self.evaluator is not None:
            self.evaluator.close()
        if self.rollouter is not None:
            self.rollouter.grader.close()
            self.rollouter.engine.close()
            self.rollouter = None
        if self.logger is not None:
            self.logger.close()
            self.logger = None

    def _step(self, step: int) -> dict[str, float]:
        """One rollout and its optimizer steps."""
        run = self.run_config
        if not self.is_sft:
            self._sync_weights()
        with self.progress.phase("generate"):
            groups, collected = self._next_groups(step)
        samples = [usable(sample) for sample in flatten(groups)]
        check_token_sets(samples, wanted=run.rollout.renormalize_sampled_log_probs)
        recorded = run.debug.load_debug_rollout_data is not None  # under weight versions of another run
        metrics = {} if self.is_sft else rollout_metrics(samples, None if recorded else self.weight_version) | collected
        if self.rollouter is not None and not self.is_sft:
            metrics |= self.rollouter.engine.take_metrics()
            self.rollouter.engine.release_memory()
        if run.debug.save_debug_rollout_data and self.layout.rank == 0:
            save_rollout(run.debug.save_debug_rollout_data, step, groups)
        failed = 0.0 if self.is_sft else failed_fraction(samples)
        if failed > run.gates.max_failed_samples:
            raise RunError(
                f"rollout {step}: {failed:.1%} of the samples have no usable response or reward, more than --max-failed-samples "
                f"{run.gates.max_failed_samples:g}; the first: {first_failure(samples)}{engine_troubles(metrics)}"
            )
        if failed:
            self._warn(
                f"rollout {step}: {failed:.1%} of the samples have no usable response or reward; the first: {first_failure(samples)}"
            )
        if run.debug.debug_rollout_only:
            return metrics
        batches, batch_metrics = self.batches.make(samples, self.weight_version)
        metrics |= batch_metrics
        if self.backend.critic is not None:
            metrics |= self._train_critic(batches.critic, values_abs=metrics.get("rollout/values_abs", 0.0))
        if step >= run.critic.num_critic_only_steps:
            on_policy = metrics.get("rollout/staleness_max", 0.0) == 0
            metrics |= self._train(step, batches.policy, on_policy=on_policy)
            self.weight_version += 1
        return metrics

    def _next_groups(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """Graded samples: recorded, supervised, or generated; and numbers about how they were collected."""
        run = self.run_config
        if run.debug.load_debug_rollout_data:
            return self._recorded_groups(run.debug.load_debug_rollout_data, step), {}
        if self.is_sft:
            assert self.source is not None
            prompts = self.source.next_prompts(run.rollout.rollout_batch_size)
            made = sft_samples(prompts, self.tokenizer, max_response_len=run.rollout.rollout_max_response_len)
            return [SampleGroup(s.group_id, (s,)) for s in made], {}
        assert self.ahead is not None
        self.ahead.allow(min(step + self.ahead.max_staleness, self.num_rollouts - 1))
        return self.ahead.take(step)

    def _sampled_groups(self, step: int) -> tuple[list[SampleGroup], dict[str, float]]:
        """Graded samples of a rollout, in the thread that samples."""
        run = self.run_config
        assert self.rollouter is not None and self.collector is not None
        collected = self.collector.collect(step)
        estimator = advantage_estimators.get(run.algorithm.advantage_estimator)
        if isinstance(estimator, TokenEstimator) and estimator.needs_greedy:
            groups = with_greedy_rewards(self.rollouter, collected.prompts, collected.groups, self.collector.sampling)
            return groups, collected.metrics
        return collected.groups, collected.metrics

    def _recorded_groups(self, template: str, step: int) -> list[SampleGroup]:
        rollout = self.run_config.rollout
        groups = load_rollout(template, step)
        found, wanted = sum(len(g.samples) for g in groups), rollout.rollout_batch_size * rollout.n_samples_per_prompt
        if found != wanted:
            raise ValueError(
                f"--load-debug-rollout-data {template}: rollout {step} has {found} samples, and --rollout-batch-size times "
                f"--n-samples-per-prompt is {wanted}; give the sizes of the recorded run"
            )
        return groups

    def _train(self, step: int, batches: Sequence[TrainBatch], *, on_policy: bool) -> dict[str, float]:
        """The optimizer steps of one rollout; metrics are averaged over them. on_policy: all tokens are of the current weights."""
        results = []
        with self.progress.phase("train"):
            for index, batch in enumerate(batches):
                pending = self.backend.accumulate(batch)
                if index == 0:
                    self._check_first_update(step, pending.metrics, on_policy=on_policy)
                result = self.backend.apply_gradients(pending)
                self._warn(self.skip_gate.check(result.skipped, result.grad_norm))
                results.append(result)
        return averages(results, self.skip_gate)

    def _train_critic(self, batches: Sequence[TrainBatch], *, values_abs: float) -> dict[str, float]:
        """As `_train`, for the critic. values_abs: mean absolute value of the rollout's values."""
        results = []
        with self.progress.phase("train_critic"):
            for index, batch in enumerate(batches):
                pending = self.backend.accumulate_critic(batch)
                if index == 0 and not self._has_dropout:
                    difference = pending.metrics.get("value_diff_abs", 0.0)
                    same_packing = self._same_packing(pending.network.layout)
                    check_old_values(difference, values_abs=values_abs, same_packing=same_packing, half_precision=self._half_precision)
                result = self.backend.apply_gradients(pending)
                self._warn(self.critic_gate.check(result.skipped, result.grad_norm))
                results.append(result)
        return averages(results, self.critic_gate, prefix="critic_")

    @property
    def _half_precision(self) -> bool:
        return self.run_config.megatron.transformer.bf16

    @property
    def _has_dropout(self) -> bool:
        transformer = self.run_config.megatron.transformer
        return bool(transformer.hidden_dropout or transformer.attention_dropout)

    def _same_packing(self, layout: ParallelLayout) -> bool:
        """Whether forward-only passes and updates of a network in this layout pack samples alike."""
        algorithm = self.run_config.algorithm
        same_size = algorithm.log_probs_micro_batch_size in (None, algorithm.micro_batch_size)
        same_size = same_size and not algorithm.use_dynamic_batch_size  # a pass over a whole rollout is filled otherwise than a step
        return same_size and layout.vp_size == 1  # interleaved stages pad to the longest of the step, or of the rollout

    def _check_first_update(self, step: int, metrics: Mapping[str, float], *, on_policy: bool) -> None:
        """Gates on the forward pass of a rollout's first optimizer step, before the weights change."""
        run = self.run_config
        if self.is_sft or self._has_dropout:
            return
        if run.algorithm.use_rollout_logprobs:
            if on_policy and not run.debug.load_debug_rollout_data:  # recorded rollouts may come from other weights
                gap = metrics.get("log_ratio_abs", 0.0)  # the old log-probs are the sampler's: this is the difference to it
                self._warn(self.batches.rollout_gate.check(gap, gap, 1.0, self.weight_version))
            return
        gap = metrics.get("log_ratio_abs", 0.0)
        check_old_log_probs(gap, same_packing=self._same_packing(self.layout), half_precision=self._half_precision)
        if step == run.critic.num_critic_only_steps and "kl_k3" in metrics and self._starts_at_the_reference():
            check_initial_kl(metrics["kl_k3"], half_precision=self._half_precision)

    def _starts_at_the_reference(self) -> bool:
        run = self.run_config
        reference = run.model.hf_checkpoint if run.reference_is_base else run.model.ref_load
        return None not in (reference, self.initial_policy) and Path(str(reference)).resolve() == Path(str(self.initial_policy)).resolve()

    def _sync_weights(self) -> None:
        """Hand the policy's weights to the engine, unless it has them."""
        if self.weight_sync is not None:
            self.weight_sync.hand_over(self.weight_version)

    def _evaluate(self) -> dict[str, float]:
        assert self.evaluator is not None
        if self.ahead is not None:
            self.ahead.drain()  # the engine and its weights are the evaluation's alone
        self._sync_weights()
        with self.progress.phase("eval"):
            return self.evaluator.evaluate()

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the networks; plain JSON. Rollouts that were sampled ahead are sampled again after a resume."""
        if self.ahead is not None:
            data = self.ahead.state()
        else:
            data = {"data": None if self.source is None else self.source.state_dict(), "waiting_groups": None}
        return {
            **data,
            "weight_version": self.weight_version,
            "skipped_steps": self.skip_gate.total,
            "skipped_in_a_row": self.skip_gate.in_a_row,
            "critic_skipped_steps": self.critic_gate.total,
            "critic_skipped_in_a_row": self.critic_gate.in_a_row,
            "batches": self.batches.state_dict(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.start = int(state["step"])
        self.weight_version = int(state["weight_version"])
        self.skip_gate.total = int(state["skipped_steps"])
        self.skip_gate.in_a_row = int(state["skipped_in_a_row"])
        self.critic_gate.total = int(state["critic_skipped_steps"])
        self.critic_gate.in_a_row = int(state["critic_skipped_in_a_row"])
        self.batches.load_state_dict(state["batches"])
        if self.source is not None:
            if state["data"] is None:
                raise ValueError("the checkpoint has no data position; --finetune starts at the first prompt")
            self.source.load_state_dict(state["data"])
        if self.collector is not None:
            self.collector.buffer.load_state_dict(state.get("waiting_groups") or [])

    def _make_rollouter(self) -> Rollouter | None:
        """The engine and the grader, unless this run never samples."""
        run = self.run_config
        if run.debug.debug_train_only or (self.is_sft and run.eval.eval_interval is None):
            return None
        engine = make_engine(run, self.layout.rank, self.backend.device, self.tokenizer, self.output_dir, self.progress.message)
        config = run.scheduling
        path = config.custom_generate_function_path
        custom = None if path is None else CustomGenerate(path, slime_args(run), timeout_s=config.custom_generate_timeout_s)
        grader = Grader(**dataclasses.asdict(run.reward))
        return Rollouter(engine, grader, self.tokenizer, seed=run.data.rollout_seed, custom_generate=custom)

    def _make_collector(self) -> Collector | None:
        """What collects the groups of each rollout, in a run that samples them."""
        if self.rollouter is None or self.source is None or self.is_sft or self.run_config.debug.load_debug_rollout_data:
            return None
        buffer = GroupBuffer(self.source, self.run_config.rollout.n_samples_per_prompt)
        return Collector(self.run_config, self.rollouter, buffer, training_sampling(self.run_config.rollout))

    def _make_ahead(self) -> RolloutsAhead | None:
        """What samples rollouts, perhaps ahead of the training."""
        config = self.run_config.scheduling
        if self.collector is None or self.rollouter is None:
            return None
        if not config.async_rollout:
            return RolloutsAhead(self._sampled_groups, self._data_state, max_staleness=0, threaded=False)
        self.rollouter.group = dist.new_group(backend="gloo")  # the training thread uses the others meanwhile
        bound = 1 if config.max_staleness is None else config.max_staleness
        return RolloutsAhead(self._sampled_groups, self._data_state, max_staleness=bound, threaded=True)

    def _data_state(self) -> dict[str, Any]:
        """Where sampling goes on."""
        assert self.source is not None and self.collector is not None
        return {"data": self.source.state_dict(), "waiting_groups": self.collector.buffer.state_dict()}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.logger is not None:
            self.logger.log(step + 1, metrics)

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self.progress.message(f"warning: {text}")


def load_tokenizer(run: RunConfig) -> Any:
    """The tokenizer of --hf-checkpoint; None in a run that reads recorded tokens only."""
    if run.model.hf_checkpoint is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(run.model.hf_checkpoint, trust_remote_code=run.model.trust_remote_code)


def num_rollouts(run: RunConfig, num_prompts: int | None) -> int:
    """--num-rollout, or what --num-epoch passes over the prompts make."""
    if run.rollout.num_rollout is not None:
        return run.rollout.num_rollout
    assert run.rollout.num_epoch is not None
    assert num_prompts is not None
    return max(1, num_prompts * run.rollout.num_epoch // run.rollout.rollout_batch_size)


def steps_per_rollout(run: RunConfig) -> int:
    assert run.algorithm.num_steps_per_rollout is not None, "completed when the command line is parsed"
    return run.algorithm.num_steps_per_rollout


def any_rank(flags: list[bool]) -> list[bool]:
    """Elementwise or over all ranks; collective."""
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]


def is_due(step: int, interval: int | None, total: int) -> bool:
    """Every `interval` rollouts, and after the last."""
    return step + 1 == total or (interval is not None and (step + 1) % interval == 0)


def averages(results: Sequence[StepResult], gate: SkippedStepGate, prefix: str = "") -> dict[str, float]:
    """Metrics of the optimizer steps of one rollout, averaged over them. prefix: of the names that every network has."""
    names = sorted({name for r in results for name in r.metrics})
    metrics = {n if n.startswith("perf/") else f"train/{n}": mean([r.metrics[n] for r in results if n in r.metrics]) for n in names}
    metrics[f"train/{prefix}grad_norm"] = mean([r.grad_norm for r in results])
    metrics[f"train/{prefix}lr"] = results[-1].learning_rate
    metrics[f"train/{prefix}skipped_steps"] = float(gate.total)
    return metrics


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def speed_and_memory(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second over the whole step, and the peak memory of this process in GiB."""
    speed = {}
    if "rollout/tokens" in metrics and metrics.get(STEP_SECONDS):
        speed["perf/tokens_per_s"] = metrics["rollout/tokens"] / metrics[STEP_SECONDS]
    speed["perf/peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return speed

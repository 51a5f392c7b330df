"""The trainer's view of Megatron: log-probs, optimizer steps, weights out, checkpoints. Every method is called by all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from arguments.groups import AlgorithmConfig
from arguments.hf_model import HfModel, read_hf_model
from arguments.run_config import RunConfig
from slime_like.convert.export import export_hf_weights
from slime_like.convert.load import load_hf_weights
from slime_like.convert.save import save_hf
from slime_like.losses.custom import custom_loss
from slime_like.losses.registry import policy_losses
from slime_like.losses.total import LossTerms
from slime_like.megatron_backend.checkpoint import load_checkpoint, save_checkpoint
from slime_like.megatron_backend.init import device_of_this_process
from slime_like.megatron_backend.layout import ParallelLayout
from slime_like.megatron_backend.loss_closure import Head, Objective, gradient_scale, log_prob_step, training_step
from slime_like.megatron_backend.model import build_chunks, to_model_precision, wrap_for_training
from slime_like.megatron_backend.optimizer import build_optimizer, build_scheduler, limits_kept, resume_schedule, step_if_finite
from slime_like.megatron_backend.packing import pack_all, split_micro_batches, unpack, with_selection_seeds
from slime_like.megatron_backend.schedule import run_schedule
from slime_like.metrics.typed import MetricAccumulator
from slime_like.types import MicroBatch, StepResult, TrainBatch, TrainSample


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Forward-only results of one sample, on the host, over its response. Zero where the loss mask is False."""

    log_probs: Tensor  # [R] float32
    entropy: Tensor  # [R] float32


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Gradients that are accumulated and reduced, and the metrics of their forward pass; the weights are still the old ones."""

    metrics: dict[str, float]


class MegatronBackend:
    """Policy, optional reference model, optimizer and schedule of this rank."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, *, total_steps: int) -> None:
        """total_steps: optimizer steps of the whole run, for the learning-rate schedule."""
        self.layout = layout
        self.algorithm = run.algorithm
        self.gpt = run.gpt
        self.transformer = run.megatron.transformer
        self.device = device_of_this_process()
        self.hf: HfModel | None = read_hf_model(run.model.hf_checkpoint) if run.model.hf_checkpoint else None
        self.head = Head(run.gpt.vocab_size or 0, temperature_of(run), layout)
        self.objective = make_objective(run)
        self._hf_checkpoint = run.model.hf_checkpoint
        self._transformer_impl = run.model.transformer_impl
        self._seed = run.model.seed

        self.chunks = build_chunks(self.transformer, self.gpt, self._transformer_impl, layout)
        if run.model.hf_checkpoint:
            self._load_weights(self.chunks, run.model.hf_checkpoint)
        self.ref_chunks = None
        self.trained: list[Any] = to_model_precision(self.chunks, self.transformer)
        if needs_reference(run.algorithm):
            assert run.model.ref_load is not None, "checked on the command line"
            ref = build_chunks(self.transformer, self.gpt, self._transformer_impl, layout)
            self._load_weights(ref, run.model.ref_load)
            self.ref_chunks = [chunk.eval().requires_grad_(False) for chunk in to_model_precision(ref, self.transformer)]

        self._overlap_param_gather = run.megatron.ddp.overlap_param_gather and not run.debug.debug_rollout_only
        self.optimizer = None
        self.scheduler = None
        if not run.debug.debug_rollout_only:
            self.trained = list(wrap_for_training(self.trained, self.transformer, run.megatron.ddp))
            self.optimizer = build_optimizer(run.megatron.optimizer, self.trained)
            self.scheduler = build_scheduler(self.optimizer, run.megatron.optimizer, run.schedule, total_steps=total_steps)
            self._connect_schedule_hooks(run)

    def _load_weights(self, chunks: Sequence[Any], folder: str) -> None:
        load_hf_weights(chunks, folder, hf=read_hf_model(folder), gpt=self.gpt, layout=self.layout)

    def _connect_schedule_hooks(self, run: RunConfig) -> None:
        """What Megatron's schedules and gradient finalisation expect to find on the model's config."""
        assert self.optimizer is not None
        config, ddp = self.transformer, run.megatron.ddp
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.trained]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def compute_log_probs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[TokenStatistics]:
        """Log-probs of the response tokens and entropies, at the sampling temperature, for this data-parallel rank's samples.

        reference: by the reference model. All pipeline stages get the result.
        """
        chunks = self.trained
        if reference:
            assert self.ref_chunks is not None
            chunks = self.ref_chunks
        size = self.algorithm.log_probs_micro_batch_size or self.algorithm.micro_batch_size
        groups = split_micro_batches(TrainBatch(tuple(samples)), size)
        batches = self._pack(groups)
        training = [chunk.training for chunk in chunks]
        for chunk in chunks:
            chunk.eval()
        outputs = run_schedule(chunks, batches, log_prob_step(self.head), self.layout, forward_only=True)
        for chunk, was_training in zip(chunks, training):
            chunk.train(was_training)
        flat = torch.zeros(2, sum(int(b.tokens.numel()) for b in batches), device=self.device)
        if self.layout.is_last_stage:
            flat = torch.cat([torch.stack(output) for output in outputs], dim=1).detach()
        flat = self._from_last_stage(flat).cpu()
        results: list[TokenStatistics] = []
        for group, values in zip(groups, flat.split([int(b.tokens.numel()) for b in batches], dim=1)):
            results += [TokenStatistics(lp.clone(), h.clone()) for lp, h in zip(unpack(values[0], group), unpack(values[1], group))]
        return results

    def accumulate(self, batch: TrainBatch) -> PendingStep:
        """Forward and backward over one optimizer step's samples; gradients are reduced, weights not yet changed.

        The metrics are those of the whole step, reduced over the data-parallel ranks and equal on all ranks.
        """
        assert self.optimizer is not None and self.scheduler is not None
        for chunk in self.trained:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self._pack(split_micro_batches(batch, self.algorithm.micro_batch_size))
        batches = with_selection_seeds(batches, self._seed, self.scheduler.num_steps, self.layout.dp_rank)
        step = training_step(self.head, self.objective, gradient_scale(self.layout, len(batches)))
        outputs = run_schedule(self.trained, batches, step, self.layout, forward_only=False)
        metrics: dict[str, float] = {}
        if self.layout.is_last_stage:
            accumulator = MetricAccumulator()
            for output in outputs:
                accumulator.add(output["metrics"])
            metrics = accumulator.reduce(self.layout.dp_cp_group)
        return PendingStep(self._object_from_last_stage(metrics))

    def apply_gradients(self, pending: PendingStep) -> StepResult:
        """The optimizer step of `accumulate`; skipped on all ranks when the gradient norm is not finite."""
        assert self.optimizer is not None and self.scheduler is not None
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        stepped, grad_norm = step_if_finite(self.optimizer)
        if stepped:
            self.scheduler.step(increment=1)
        return StepResult(metrics=pending.metrics, grad_norm=grad_norm, learning_rate=learning_rate, skipped=not stepped)

    def update(self, batch: TrainBatch) -> StepResult:
        """One optimizer step."""
        return self.apply_gradients(self.accumulate(batch))

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) pairs of the policy, on every rank, a layer's worth of memory at a time."""
        assert self.hf is not None, "weights have Hugging Face names only with --hf-checkpoint"
        self._finish_param_gather()
        return export_hf_weights(self.chunks, hf=self.hf, gpt=self.gpt, layout=self.layout)

    def save_hf(self, folder: str) -> str:
        """Write the policy as a Hugging Face checkpoint that transformers loads, beside the tokenizer of --hf-checkpoint."""
        assert self._hf_checkpoint is not None
        save_hf(folder, self.export_weights(), self._hf_checkpoint)
        return folder

    def save(self, root: str, step: int, trainer_state: dict[str, Any], *, with_optimizer: bool, with_rng: bool) -> None:
        """Write a checkpoint; see `checkpoint.save_checkpoint`. The schedule's state joins `trainer_state`."""
        assert self.scheduler is not None
        self._finish_param_gather()
        save_checkpoint(
            root,
            step,
            chunks=self.chunks,
            optimizer=self.optimizer if with_optimizer else None,
            save_rng=with_rng,
            trainer_state={**trainer_state, "scheduler": self.scheduler.state_dict()},
            layout=self.layout,
        )

    def load(self, folder: Path, *, with_optimizer: bool, with_rng: bool) -> dict[str, Any]:
        """Restore a checkpoint; returns the trainer's state, with `changed_schedule` (see `resume_schedule`). Without the optimizer its
        fp32 copies start from the loaded weights and the schedule at its first step."""
        optimizer = self.optimizer if with_optimizer else None
        with nullcontext() if optimizer is None else limits_kept(optimizer):
            state = load_checkpoint(folder, chunks=self.chunks, optimizer=optimizer, load_rng=with_rng, layout=self.layout)
        if optimizer is not None and self.scheduler is not None:
            state["changed_schedule"] = resume_schedule(self.scheduler, state["scheduler"])
        elif self.optimizer is not None:
            self.optimizer.reload_model_params()
        return state

    def load_hf(self, folder: str) -> None:
        """Take the weights of a Hugging Face model, and start the optimizer's copies from them. Raises ValueError when it is shaped
        otherwise than --hf-checkpoint."""
        self._load_weights(self.chunks, folder)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def _finish_param_gather(self) -> None:
        """With --overlap-param-gather a rank's parameters are stale between a step and the next forward pass; whoever reads them
        otherwise must ask for them first."""
        if self._overlap_param_gather:
            for chunk in self.trained:
                chunk.start_param_sync(force_sync=True)

    def _pack(self, groups: Sequence[Sequence[TrainSample]]) -> list[MicroBatch]:
        """megatron-core 0.16 exchanges the shapes of an interleaved schedule in an order that two stages confuse (each is the other's
        neighbour on both sides), so there all micro-batches get one shape."""
        return pack_all(
            groups,
            multiple=self.layout.tp_size if self.transformer.sequence_parallel else 1,
            equal_lengths=self.layout.vp_size > 1,
            device=self.device,
        )

    def _from_last_stage(self, values: Tensor) -> Tensor:
        if self.layout.pp_size > 1:
            source = dist.get_global_rank(self.layout.pp_group, self.layout.pp_size - 1)
            dist.broadcast(values, source, group=self.layout.pp_group)
        return values

    def _object_from_last_stage(self, value: dict[str, float]) -> dict[str, float]:
        if self.layout.pp_size == 1:
            return value
        holder = [value]
        source = dist.get_global_rank(self.layout.pp_group, self.layout.pp_size - 1)
        dist.broadcast_object_list(holder, source, group=self.layout.pp_group)
        return holder[0]


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """A reference model is resident when a KL term uses it."""
    return algorithm.use_kl_loss or algorithm.kl_coef != 0


def temperature_of(run: RunConfig) -> float:
    """Log-probs are those of the sampling distribution; supervised fine-tuning has no sampler."""
    return 1.0 if run.algorithm.loss_type == "sft_loss" else run.rollout.rollout_temperature


def make_objective(run: RunConfig) -> Objective:
    """The loss that the settings describe."""
    algorithm = run.algorithm
    if algorithm.loss_type == "sft_loss":
        loss = policy_losses.get("cross_entropy")
        return Objective(loss, loss.config_type(), LossTerms())
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

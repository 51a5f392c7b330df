"""A trained network: policy or critic of a run, or a model of the Tinker server.

Every method is collective, and runs in the network's own layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.schema import GPTModelConfig, ScheduleConfig
from slime_like.distributed.collectives import gather
from slime_like.megatron.checkpoint.networks import SavedNetwork
from slime_like.megatron.forward_step import TokenComputation, run_schedule
from slime_like.megatron.frozen_parameters import FrozenParameters
from slime_like.megatron.indexer_replay import begin_indexers
from slime_like.megatron.loss_scale import loss_scale_of, loss_scale_state
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.model.gpt import wrap_for_training
from slime_like.megatron.moe import begin_routing, expert_biases, restore_expert_biases
from slime_like.megatron.network import Network, PassOutput, SelectionSeed
from slime_like.megatron.optimizer import (
    AdamStep,
    allocate_moments,
    build_optimizer,
    build_scheduler,
    main_parameters,
    max_abs,
    moments,
    restart_fused_main_parameters,
    set_adam,
    set_group_steps,
    step_stays_finite,
)
from slime_like.megatron.packing import MicroBatches
from slime_like.megatron.parallel_layout import ParallelLayout, with_layout_active
from slime_like.megatron.transfer import numbers_on_device
from slime_like.metrics.typed import Metric
from slime_like.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def no_op() -> None:
    """Default of a callback."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """State of the gradient buffers."""

    expert_biases: Sequence[Tensor] = ()  # copies made before accumulation started
    accumulated: bool = False
    reduced: bool = False


class TrainedNetwork(Network):
    """A network with gradient buffers, an optimizer and a learning-rate schedule.

    Gradients accumulate locally over any number of `forward_backward` calls; `optim_step` reduces
    them over the ranks and applies them. Losses are sums, so it does not matter how the samples of
    a step are split over calls.
    """

    layers_differ = False  # see `SavedNetwork`

    def __init__(
        self,
        transformer: TransformerConfig,
        gpt: GPTModelConfig,
        transformer_impl: str,
        layout: ParallelLayout,
        *,
        ddp: DistributedDataParallelConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
        value_head: bool = False,
        frozen: FrozenParameters | None = None,
    ) -> None:
        """
        Args:
            total_steps: Optimizer steps of the run.
            frozen: The parameters that are not trained.
        """
        super().__init__(transformer, gpt, transformer_impl, layout, value_head=value_head)
        if frozen is not None:
            self.layers_differ = frozen.apply(self.chunks, self.config, layout)
        self._set_up_training(
            self.modules, ddp=ddp, optimizer=optimizer, schedule=schedule, total_steps=total_steps
        )
        self.modules = self.trained_modules
        if ddp.overlap_grad_reduce:
            no_sync = [module.no_sync for module in self.modules]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _set_up_training(
        self,
        modules: Sequence[MegatronModule],
        *,
        ddp: DistributedDataParallelConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
    ) -> None:
        """Wrap the modules with gradient buffers; build optimizer and schedule."""
        with self.layout.activate():
            self.trained_modules: list[MegatronModule] = list(
                wrap_for_training(modules, self.config, ddp)
            )
            self.optimizer = build_optimizer(optimizer, self.trained_modules)
            self.scheduler = build_scheduler(
                self.optimizer, optimizer, schedule, total_steps=total_steps
            )
        # Gradients are reduced in `optim_step`, not by the schedule after each pass, so its hook is
        # a no-op.
        self.config.finalize_model_grads_func = lambda *args, **keywords: None
        self._overlap_param_gather = ddp.overlap_param_gather
        self._overlap_grad_reduce = ddp.overlap_grad_reduce
        self.gradients = Gradients()

    def finalize_gradients(
        self, model: Sequence[object], num_tokens: Tensor | None = None, **others: object
    ) -> None:
        """Reduce the accumulated gradients over the ranks."""
        finalize_model_grads(list(model), num_tokens, **others)

    @property
    def saved_chunks(self) -> Sequence[MegatronModule]:
        """The modules whose parameters are trained and saved, without wrappers."""
        return self.chunks

    def saved(self, *, with_optimizer: bool = True, with_schedule: bool = True) -> SavedNetwork:
        """The network as an argument of checkpoint functions."""
        return SavedNetwork(
            self.saved_chunks,
            self.optimizer if with_optimizer else None,
            self.scheduler if with_schedule else None,
            self.layout,
            layers_differ=self.layers_differ,
        )

    @with_layout_active
    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        compute: TokenComputation,
        size: MicroBatchSize,
        *,
        selection: SelectionSeed | None = None,
        per_token: bool = False,
        before_change: Callable[[], None] = no_op,
    ) -> PassOutput:
        """Forward and backward over this data-parallel rank's samples. Accumulates gradients
        locally; weights do not change.

        Args:
            compute: Computes the loss of each micro-batch, a sum over its tokens.
            per_token: Return the columns of `compute`.
            before_change: Called after validation, just before gradients change.
        """
        prediction_layers = 0 if self.value_head else self.gpt.mtp_num_layers or 0
        split, batches = self._pack(samples, size, selection, prediction_layers=prediction_layers)
        before_change()
        assert not (self._overlap_grad_reduce and self.gradients.accumulated), (
            "--overlap-grad-reduce reduces gradients behind the backward pass: one pass a step"
        )
        self._begin_accumulation()
        for module in self.modules:
            module.train()
        if prediction_layers:
            from slime_like.megatron.model.prediction import update_embedding

            self.finish_updates()
            update_embedding(self.chunks, self.layout)
        begin_routing(self.chunks, batches, self.layout)
        begin_indexers(self.chunks)
        if loss_scale_of(self.optimizer) is not None:
            # here, because adapters share the config of their base
            self.config.grad_scale_func = self.optimizer.scale_loss
        with self.forward_context():
            outputs = run_schedule(self.modules, batches, compute, self.layout, forward_only=False)
        output = self._output(outputs, split, batches, per_token=per_token)
        return replace(output, packing=packing_metrics(split, batches, size))

    def _begin_accumulation(self) -> None:
        if not self.gradients.accumulated:
            self.clear_gradients()
            biases = expert_biases(self.chunks)
            self.gradients = Gradients(biases, accumulated=True)

    def clear_gradients(self) -> None:
        """Discard accumulated gradients."""
        for module in self.trained_modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.gradients = Gradients()

    def abandon_gradients(self) -> None:
        """Discard accumulated gradients and routing statistics after a failed pass."""
        if self.gradients.accumulated:
            restore_expert_biases(self.chunks, self.gradients.expert_biases)
        self.clear_gradients()

    @with_layout_active
    def reduce_gradients(self) -> None:
        """Reduce gradients over the ranks, once per optimizer step. `optim_step` calls this."""
        self._begin_accumulation()
        if not self.gradients.reduced:
            self.finalize_gradients(self.modules)
            self.gradients = replace(self.gradients, reduced=True)

    @with_layout_active
    def optim_step(
        self, adam: AdamStep | None = None, before_change: Callable[[], None] = no_op
    ) -> tuple[bool, float, float]:
        """Take one optimizer step with the accumulated gradients. Skipped on all ranks if the
        gradient norm is not finite or, with `adam`, if a weight might overflow.

        Args:
            adam: Settings of the step; None: the run's optimizer and schedule.
            before_change: Called just before weights change.

        Returns:
            Whether the step was taken, the global L2 gradient norm before clipping, and the
            learning rate.
        """
        self.reduce_gradients()
        if adam is not None:
            set_adam(self.optimizer, adam)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])

        def allowed() -> bool:
            if adam is not None and not step_stays_finite(self.optimizer, adam):
                return False
            before_change()
            return True

        stepped, grad_norm = step_if_finite(self.optimizer, allowed)
        if not stepped:
            restore_expert_biases(self.chunks, self.gradients.expert_biases)
        elif adam is None:
            self.scheduler.step(increment=1)
        self.gradients = Gradients()
        return stepped, grad_norm, learning_rate

    @property
    def loss_scale(self) -> float | None:
        """The factor on the loss of the next pass; None without loss scaling."""
        scale = loss_scale_of(self.optimizer)
        return None if scale is None else float(scale.scale)

    def load_hf(self, folder: str) -> None:
        super().load_hf(folder)
        self.weights_changed()

    @with_layout_active
    def weights_changed(self) -> None:
        """Reset the optimizer's fp32 copies to the model's weights, which were written from
        outside."""
        self.optimizer.reload_model_params()
        restart_fused_main_parameters(self.optimizer)

    def allocate_moments(self) -> None:
        """Allocate the optimizer state before the first step, so that `tensors` is complete."""
        allocate_moments(self.optimizer)

    def reset_training_state(self) -> None:
        """Discard gradients and reset the optimizer, after other weights were written."""
        self.clear_gradients()
        for tensor in moments(self.optimizer):
            tensor.zero_()
        set_group_steps(self.optimizer, None)
        if (scale := loss_scale_of(self.optimizer)) is not None:
            scale.reset()
        self.weights_changed()

    def has_non_finite(self) -> bool:
        """Whether a weight or an optimizer moment is NaN or infinite on any rank. Collective."""
        tensors = moments(self.optimizer)
        for chunk in self.saved_chunks:
            tensors += chunk.parameters()
        return any(gather(not math.isfinite(max_abs(tensors))))

    def tensors(self) -> list[Tensor]:
        """All state of this network: weights, gradients, and the optimizer's copies, moments, step
        counts and loss scale. Writing them in place turns it into another network of the same
        shape, together with `group_steps` of the optimizer."""
        tensors: list[Tensor] = []
        for chunk in self.saved_chunks:
            tensors += [t.data for t in (*chunk.parameters(), *chunk.buffers())]
        for module in self.trained_modules:
            buffers = (*module.buffers, *module.expert_parallel_buffers)
            tensors += [buffer.grad_data for buffer in buffers]
        tensors += main_parameters(self.optimizer) + moments(self.optimizer)
        tensors += loss_scale_state(self.optimizer)
        return list({(t.data_ptr(), t.numel()): t for t in tensors}.values())

    @with_layout_active
    def finish_updates(self) -> None:
        """Make every parameter current. Call before reading parameters outside a forward pass."""
        # With --overlap-param-gather the distributed optimizer updates only this rank's shard, and
        # the hooks of the next forward pass all-gather the rest. Until then an export or a
        # checkpoint would read stale parameters.
        if self._overlap_param_gather:
            for module in self.trained_modules:
                module.start_param_sync(force_sync=True)


@torch.no_grad()
def step_if_finite(
    optimizer: MegatronOptimizer, allowed: Callable[[], bool] | None = None
) -> tuple[bool, float]:
    """Clip and step, unless the gradient norm is not finite; returns (stepped, global L2 norm
    before clipping). With a loss scale, the gradients are unscaled first.

    The norm is reduced over all ranks that hold a part of the model, and gradients are equal on
    data-parallel ranks, so all ranks take the same branch. A skipped step leaves weights and
    optimizer state bit-unchanged.

    allowed: Called on all ranks once gradients are clipped, with the same result; False skips the
        step.
    """
    found_inf = optimizer.prepare_grads()
    if (scale := loss_scale_of(optimizer)) is not None:
        scale.settle(overflow=found_inf)
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return False, grad_norm
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        parameters = part.get_parameters()
        if part.config.clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    if allowed is not None and not allowed():
        return False, grad_norm
    return bool(optimizer.step_with_ready_grads()), grad_norm


def packing_metrics(
    split: MicroBatches, batches: Sequence[MicroBatch], size: MicroBatchSize
) -> dict[str, Metric]:
    """Packing of one optimizer step: micro-batches per rank, fraction of padding rows, and
    fraction of the token budget used."""
    tokens = sum(int(sample.tokens.numel()) for sample in itertools.chain(*split.groups))
    rows = sum(sum(batch.lengths) for batch in batches)  # over all context-parallel ranks
    means = {
        "perf/micro_batches": (len(batches), 1),
        "perf/padding_frac": (rows - tokens, rows),
    }
    if size.tokens is not None:
        means["perf/token_budget_used"] = (tokens, len(batches) * size.tokens)
    numbers = numbers_on_device([*itertools.chain(*means.values())], batches[0].tokens.device)
    return {
        name: Metric("mean", value, count)
        for name, value, count in zip(means, numbers[::2], numbers[1::2], strict=True)
    }

"""One model of the run on Megatron: the policy, the reference, any other. Frozen, or trained by an
optimizer and a schedule of its own.

Every method is called by all ranks together, and works in the network's own layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.hf.model import HfModel, read_hf_model
from arguments.schema import GPTModelConfig, ScheduleConfig
from slime_like.megatron.forward_step import ForwardStep
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.model.gpt import build_chunks, to_model_precision, wrap_for_training
from slime_like.megatron.moe import (
    begin_routing,
    expert_biases,
    recorded_routes,
    restore_expert_biases,
    routes_of_samples,
)
from slime_like.megatron.ops.router import routers_of
from slime_like.megatron.optimizer import build_optimizer, build_scheduler, step_if_finite
from slime_like.megatron.packing import join_context_ranks, unpack
from slime_like.megatron.parallel_layout import ParallelLayout, in_own_layout
from slime_like.megatron.pipeline import run_schedule
from slime_like.types import MicroBatch, TrainSample
from slime_like.weights.hf_export import export_hf_weights
from slime_like.weights.hf_import import load_hf_weights


class Network:
    """The chunks of one model on this rank.

    chunks: megatron-core's modules, whose weights are read, written and saved. modules: the same as
    they are called: in the precision of the model and, once trained, with gradient buffers.
    """

    def __init__(
        self,
        transformer: TransformerConfig,
        gpt: GPTModelConfig,
        transformer_impl: str,
        layout: ParallelLayout,
        *,
        value_head: bool = False,
    ) -> None:
        """value_head: a critic, which gives a value for each token in place of logits."""
        self.value_head = value_head
        self.config = copy.copy(
            transformer
        )  # training hangs a network's own functions on its config
        self.gpt = gpt
        self.layout = layout
        self.device = device_of_this_process()
        with layout.activate():
            self.chunks = build_chunks(
                self.config, gpt, transformer_impl, layout, value_head=value_head
            )
            self.modules: list[Any] = to_model_precision(self.chunks, self.config)

    @in_own_layout
    def load_hf(self, folder: str) -> None:
        """Take the weights of a Hugging Face checkpoint. Raises ValueError when it is shaped
        otherwise."""
        hf = read_hf_model(folder, value_head=self.value_head)
        load_hf_weights(
            self.chunks, folder, hf=hf, gpt=self.gpt, layout=self.layout, value_head=self.value_head
        )

    def freeze(self) -> None:
        """No dropout, no gradients."""
        for module in self.modules:
            module.eval().requires_grad_(False)

    def weights_changed(self) -> None:
        """To be called when the model's weights were written from outside."""

    def finish_updates(self) -> None:
        """Weights are current once this returns; before it, an update may still be on its way."""

    def in_use(self) -> AbstractContextManager[None]:
        """Around every pass through the modules."""
        return nullcontext()

    def export_hf(
        self, hf: HfModel, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """See `export_hf_weights`."""
        return export_hf_weights(
            self.chunks,
            hf=hf,
            gpt=self.gpt,
            layout=self.layout,
            dtype=dtype,
            value_head=self.value_head,
        )

    @in_own_layout
    def evaluate(
        self,
        step: ForwardStep,
        groups: Sequence[Sequence[TrainSample]],
        batches: Sequence[MicroBatch],
        *,
        record_routes: bool = False,
    ) -> list[list[Tensor]]:
        """Forward-only over `batches`, which hold the samples of `groups`. `step`'s closure gives a
        tuple of columns [T]; returns for each column the response values [R] of every sample, on
        the host of every pipeline stage and context-parallel rank. record_routes: keep which
        experts are chosen, for `recorded_routes`."""
        training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        begin_routing(self.chunks, batches, self.layout, record=record_routes)
        with torch.no_grad(), self.in_use():
            outputs = run_schedule(self.modules, batches, step, self.layout, forward_only=True)
        for module, was_training in zip(self.modules, training):
            module.train(was_training)
        return self.columns_of_samples(outputs, groups, batches)

    def columns_of_samples(
        self,
        outputs: Sequence[tuple[Tensor, ...]],
        groups: Sequence[Sequence[TrainSample]],
        batches: Sequence[MicroBatch],
    ) -> list[list[Tensor]]:
        """The columns [T] that the last pipeline stage computed for each of `batches`, as
        `evaluate` returns them."""
        table = (
            torch.cat([torch.stack(output) for output in outputs], dim=1).detach()
            if outputs
            else None
        )
        table = self._from_last_stage(table, tokens=sum(int(b.tokens.numel()) for b in batches))
        table = self._from_context_ranks(table, batches).cpu()
        columns: list[list[Tensor]] = [[] for _ in table]
        for group, batch, values in zip(
            groups, batches, table.split([int(b.cu_seqlens[-1]) for b in batches], dim=1)
        ):
            for column, row in zip(columns, values):
                column += [value.clone() for value in unpack(row, group, batch.cu_seqlens)]
        return columns

    @in_own_layout
    def recorded_routes(
        self, groups: Sequence[Sequence[TrainSample]], batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        """Of the last `evaluate`: the experts that each sample's tokens went to in this stage's
        layers, [L, expert layers, topk] int16."""
        routers = routers_of(self.chunks)
        if not routers:  # of this stage
            return [
                torch.zeros(sample.tokens.numel(), 0, 1, dtype=torch.int16)
                for group in groups
                for sample in group
            ]
        table = self._from_context_ranks(recorded_routes(routers, self.layout), batches)
        return routes_of_samples(table, groups, batches, topk=self.config.moe_router_topk)

    def _from_context_ranks(self, table: Tensor, batches: Sequence[MicroBatch]) -> Tensor:
        """The table of this rank's rows -> of the rows of all context-parallel ranks, in the order
        of the whole micro-batches."""
        size = self.layout.cp_size
        if size == 1:
            return table
        gathered = table.new_empty(size * table.size(0), table.size(1))
        dist.all_gather_into_tensor(gathered, table.contiguous(), group=self.layout.cp_group)
        return join_context_ranks(gathered.view(size, *table.shape), batches, size)

    def _from_last_stage(self, table: Tensor | None, *, tokens: int) -> Tensor:
        """The table [columns, tokens], which the last pipeline stage computed, on all of them."""
        if self.layout.pp_size == 1:
            assert table is not None
            return table
        source = dist.get_global_rank(self.layout.pp_group, self.layout.pp_size - 1)
        size = torch.tensor([0 if table is None else table.size(0)], device=self.device)
        dist.broadcast(size, source, group=self.layout.pp_group)
        if table is None:
            wide = torch.promote_types(
                torch.float32, self.config.params_dtype
            )  # as the head's results
            table = torch.zeros(int(size), tokens, dtype=wide, device=self.device)
        dist.broadcast(table, source, group=self.layout.pp_group)
        return table


class TrainedNetwork(Network):
    """A network with gradient buffers, an optimizer and a learning-rate schedule."""

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
    ) -> None:
        """total_steps: optimizer steps of the whole run."""
        super().__init__(transformer, gpt, transformer_impl, layout, value_head=value_head)
        self.modules = self._train(
            self.modules, ddp=ddp, optimizer=optimizer, schedule=schedule, total_steps=total_steps
        )
        # what Megatron's schedules and gradient finalisation expect to find
        self.config.finalize_model_grads_func = self.finalize_gradients
        if ddp.overlap_grad_reduce:
            no_sync = [module.no_sync for module in self.modules]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _train(
        self,
        modules: Sequence[Any],
        *,
        ddp: DistributedDataParallelConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
    ) -> list[Any]:
        """Give these modules' parameters gradient buffers and an optimizer; returns the modules
        wrapped."""
        with self.layout.activate():
            self.trained_modules: list[Any] = list(wrap_for_training(modules, self.config, ddp))
            self.optimizer = build_optimizer(optimizer, self.trained_modules)
            self.scheduler = build_scheduler(
                self.optimizer, optimizer, schedule, total_steps=total_steps
            )
        self._gathers_late = ddp.overlap_param_gather
        self._expert_biases: list[Tensor] = []  # of before the gradients that are accumulated
        return self.trained_modules

    def finalize_gradients(
        self, model: Sequence[Any], num_tokens: Tensor | None = None, **others: Any
    ) -> None:
        """Reduce what this rank has accumulated with what the others have; Megatron's schedules
        call it after the last micro-batch."""
        finalize_model_grads(list(model), num_tokens, **others)

    @property
    def saved_chunks(self) -> Sequence[Any]:
        """The modules whose parameters are trained and saved, without wrappers."""
        return self.chunks

    @in_own_layout
    def forward_backward(self, step: ForwardStep, batches: Sequence[MicroBatch]) -> list[Any]:
        """Forward and backward over one optimizer step; gradients are reduced, weights not yet
        changed. Returns what the loss closure reported for each micro-batch, on the last pipeline
        stage (empty elsewhere)."""
        for module in self.modules:
            module.train()
        for module in self.trained_modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._expert_biases = expert_biases(self.chunks)
        begin_routing(self.chunks, batches, self.layout)
        with self.in_use():
            return run_schedule(self.modules, batches, step, self.layout, forward_only=False)

    @in_own_layout
    def optim_step(self) -> tuple[bool, float, float]:
        """One optimizer step: (whether it was taken, global L2 gradient norm before clipping,
        learning rate). It is skipped on all ranks when the norm is not finite."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        stepped, grad_norm = step_if_finite(self.optimizer)
        if stepped:
            self.scheduler.step(increment=1)
        else:
            restore_expert_biases(self.chunks, self._expert_biases)
        return stepped, grad_norm, learning_rate

    def load_hf(self, folder: str) -> None:
        super().load_hf(folder)
        self.weights_changed()

    @in_own_layout
    def weights_changed(self) -> None:
        """Start the optimizer's copies from the model's weights, which were written from outside."""
        self.optimizer.reload_model_params()

    @in_own_layout
    def finish_updates(self) -> None:
        """Make every parameter current: call this before parameters are read outside a forward
        pass."""
        # With --overlap-param-gather the distributed optimizer updates only this rank's shard, and
        # the hooks of the next forward pass all-gather the rest. Until then an export or a
        # checkpoint would read the values of before the step.
        if self._gathers_late:
            for module in self.trained_modules:
                module.start_param_sync(force_sync=True)

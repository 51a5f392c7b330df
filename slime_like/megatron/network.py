"""A model on Megatron: policy, reference or any other. Trained ones are in trained_network.py.

Every method is collective, and runs in the network's own layout.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from arguments.hf.model import HfModel, read_hf_model
from arguments.schema import GPTModelConfig
from slime_like.megatron.forward_step import TokenComputation, run_schedule
from slime_like.megatron.indexer_replay import begin_indexers
from slime_like.megatron.init import device_of_this_process
from slime_like.megatron.micro_batching import MicroBatchSize
from slime_like.megatron.model.gpt import build_chunks, to_model_precision
from slime_like.megatron.moe import (
    begin_routing,
    decoder_routers,
    gather_recorded_experts,
    routed_experts_of_samples,
)
from slime_like.megatron.packed_batches import join_context_ranks
from slime_like.megatron.packing import (
    MicroBatches,
    make_micro_batches,
    pack_groups,
    unpack,
    with_selection_seeds,
)
from slime_like.megatron.parallel_layout import ParallelLayout, with_layout_active
from slime_like.megatron.tracing import StateRecorder, states_of_samples
from slime_like.metrics.typed import Metric, MetricAccumulator
from slime_like.types import MicroBatch, TokenOutput, TrainSample
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_export import HfExport
from slime_like.weights.hf_import import load_hf_weights
from slime_like.weights.hf_save import save_hf
from slime_like.weights.quantized import QuantizedWeight
from slime_like.weights.untrained import repeated_tensors, untrained_weights, with_tables_only

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Result of a forward (and backward) pass over samples on this rank."""

    # for each column of the computation, the response values [R] per sample, in the order of the
    # samples, on the host of every pipeline stage and context-parallel rank
    columns: list[list[Tensor]]
    metrics: MetricAccumulator  # of the computation, on the last pipeline stage, not reduced
    num_micro_batches: int
    # packing metrics of a training pass
    packing: Mapping[str, Metric] = field(default_factory=dict)
    # [L, MoE layers of this stage, topk] int16 per sample, if recorded
    routed_experts: list[Tensor] | None = None
    # by site of this stage, [L, C] per sample, if recorded; see `StateRecorder`
    states: Mapping[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SelectionSeed:
    """Seed of losses that select tokens at random."""

    seed: int
    step: int  # optimizer step of the pass


class Network:
    """The chunks of one model on this rank."""

    def __init__(
        self,
        transformer: TransformerConfig,
        gpt: GPTModelConfig,
        transformer_impl: str,
        layout: ParallelLayout,
        *,
        value_head: bool = False,
    ) -> None:
        """value_head: a critic, which returns a value per token instead of logits."""
        self.value_head = value_head
        self._exports: dict[tuple[torch.dtype | None, int, bool], HfExport] = {}
        self.config = copy.copy(transformer)  # a copy: training attaches functions to the config
        self.gpt = gpt
        self.layout = layout
        self.device = device_of_this_process()
        with layout.activate():
            # megatron-core's bare modules, used to read, write and save weights
            self.chunks = build_chunks(
                self.config, gpt, transformer_impl, layout, value_head=value_head
            )
            # the same in the wrappers to call them: model precision and, for a trained network,
            # gradient buffers
            self.modules: list[MegatronModule] = to_model_precision(self.chunks, self.config)

    @with_layout_active
    def load_hf(self, folder: str) -> None:
        """Load the weights of a Hugging Face checkpoint. Raises ValueError for other shapes."""
        hf = read_hf_model(folder, value_head=self.value_head)
        load_hf_weights(
            self.chunks, folder, hf=hf, gpt=self.gpt, layout=self.layout, value_head=self.value_head
        )

    def freeze(self) -> None:
        """Disable dropout and gradients."""
        for module in self.modules:
            module.eval().requires_grad_(False)

    def weights_changed(self) -> None:
        """Call after the model's weights were written from outside."""

    def finish_updates(self) -> None:
        """Wait for pending parameter gathers; the weights are current afterwards."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Context of every forward pass through the modules."""
        return nullcontext()

    def export_hf(
        self,
        hf: HfModel,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> WeightStream:
        """See `HfExport`."""
        return self.hf_export(hf, dtype, bucket_bytes, quantized).stream()

    def hf_export(
        self,
        hf: HfModel,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        quantized: Mapping[str, QuantizedWeight] | None = None,
        *,
        untied_head: bool = False,
    ) -> HfExport:
        """The export with these settings, built once. quantized: None, or the same in all calls."""
        settings = (dtype, bucket_bytes, bool(quantized))
        if settings not in self._exports:
            self._exports[settings] = HfExport(
                self.chunks,
                hf=hf,
                gpt=self.gpt,
                layout=self.layout,
                dtype=dtype,
                value_head=self.value_head,
                untied_head=untied_head,
                quantized=quantized,
                bucket_bytes=bucket_bytes,
            )
        return self._exports[settings]

    def save_hf(
        self,
        folder: str,
        hf: HfModel,
        source: str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> None:
        """Write the network as a Hugging Face model, with the tokenizer and untrained weights of
        the folder `source`; one with a value head as a sequence classifier. See `export_hf`."""
        self.finish_updates()
        weights = self.export_hf(hf, None, bucket_bytes, quantized)
        layers = self.gpt.mtp_num_layers
        if self.value_head:
            layers = None
            hf = with_tables_only(hf, self.hf_export(hf, None, bucket_bytes, quantized).fixed)
        untrained = untrained_weights(hf, source, layers, quantized=bool(quantized))
        save_hf(folder, weights, source, extra=untrained, duplicates=repeated_tensors(hf, layers))

    @with_layout_active
    def trace(
        self, samples: Sequence[TrainSample], recorder: StateRecorder, size: MicroBatchSize
    ) -> PassOutput:
        """A forward-only pass over this data-parallel rank's samples whose states are recorded."""
        with recorder.recording(self.chunks, self.layout):
            output = self.forward(samples, recorder, size)
        split, batches = self._pack(samples, size, None)
        states = {}
        for site, rows in recorder.states.items():
            table = self._gather_context_ranks(torch.cat(rows).T, batches)
            states[site] = split.restore_order(states_of_samples(table, split.groups, batches))
        return replace(output, states=states)

    @with_layout_active
    def forward(
        self,
        samples: Sequence[TrainSample],
        compute: TokenComputation,
        size: MicroBatchSize,
        *,
        selection: SelectionSeed | None = None,
        record_routed_experts: bool = False,
    ) -> PassOutput:
        """Forward-only pass over this data-parallel rank's samples, without dropout.
        record_routed_experts: record the routed experts."""
        split, batches = self._pack(samples, size, selection)
        training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        begin_routing(self.chunks, batches, self.layout, record=record_routed_experts)
        begin_indexers(self.chunks)
        with torch.no_grad(), self.forward_context():
            outputs = run_schedule(self.modules, batches, compute, self.layout, forward_only=True)
        for module, was_training in zip(self.modules, training):
            module.train(was_training)
        output = self._output(outputs, split, batches, per_token=True)
        if record_routed_experts:
            routed_experts = split.restore_order(self._recorded_experts(split.groups, batches))
            output = replace(output, routed_experts=routed_experts)
        return output

    def _pack(
        self,
        samples: Sequence[TrainSample],
        size: MicroBatchSize,
        selection: SelectionSeed | None,
        *,
        prediction_layers: int = 0,
    ) -> tuple[MicroBatches, list[MicroBatch]]:
        """Split the samples of a pass into micro-batches, and pack these for this layout."""
        split = make_micro_batches(samples, size, self.layout)
        batches = pack_groups(
            split.groups,
            transformer=self.config,
            layout=self.layout,
            device=self.device,
            equal_sequences=size.equal_sequences,
            prediction_layers=prediction_layers,
        )
        if selection is not None:
            batches = with_selection_seeds(
                batches, selection.seed, selection.step, self.layout.dp_rank
            )
        return split, batches

    def _output(
        self,
        outputs: Sequence[TokenOutput],
        split: MicroBatches,
        batches: Sequence[MicroBatch],
        *,
        per_token: bool,
    ) -> PassOutput:
        """Merge metrics and, with per_token, the columns of a pass."""
        metrics = MetricAccumulator()
        for output in outputs:
            metrics.add(output.metrics)
        columns = []
        if per_token:
            by_column = self._columns([o.columns for o in outputs], split.groups, batches)
            columns = [split.restore_order(column) for column in by_column]
        return PassOutput(columns, metrics, len(batches))

    def _columns(
        self,
        outputs: Sequence[tuple[Tensor, ...]],
        groups: Sequence[Sequence[TrainSample]],
        batches: Sequence[MicroBatch],
    ) -> list[list[Tensor]]:
        """Split each column [T] that the last pipeline stage computed for `batches` into response
        values [R] of the samples of `groups`."""
        # one table [columns, T of all micro-batches], so that stages and ranks exchange it at once
        table = None
        if outputs:  # on the last stage
            table = torch.cat([torch.stack(output) for output in outputs], dim=1).detach()
        num_tokens = sum(int(batch.tokens.numel()) for batch in batches)
        table = self._broadcast_from_last_stage(table, tokens=num_tokens)
        table = self._gather_context_ranks(table, batches).cpu()
        columns: list[list[Tensor]] = [[] for _ in table]
        sizes = [sum(batch.lengths) for batch in batches]
        for group, batch, values in zip(groups, batches, table.split(sizes, dim=1)):
            for column, row in zip(columns, values):
                # clones: a view of a few values would keep the table of all samples
                column += [value.clone() for value in unpack(row, group, batch.lengths)]
        return columns

    def _recorded_experts(
        self, groups: Sequence[Sequence[TrainSample]], batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        """Routed experts of each sample in the last recorded pass, in this stage's layers: [L, MoE
        layers, topk] int16."""
        routers = decoder_routers(self.chunks)
        if not routers:  # on this stage
            lengths = [sample.tokens.numel() for sample in itertools.chain(*groups)]
            return [torch.zeros(length, 0, 1, dtype=torch.int16) for length in lengths]
        table = self._gather_context_ranks(gather_recorded_experts(routers, self.layout), batches)
        return routed_experts_of_samples(table, groups, batches, topk=self.config.moe_router_topk)

    def _gather_context_ranks(self, table: Tensor, batches: Sequence[MicroBatch]) -> Tensor:
        """Gather a table of this rank's rows over the context-parallel ranks, in the row order of
        the full micro-batches."""
        size = self.layout.cp_size
        if size == 1:
            return table
        gathered = table.new_empty(size * table.size(0), table.size(1))
        dist.all_gather_into_tensor(gathered, table.contiguous(), group=self.layout.cp_group)
        return join_context_ranks(gathered.view(size, *table.shape), batches)

    def _broadcast_from_last_stage(self, table: Tensor | None, *, tokens: int) -> Tensor:
        """Broadcast the table [columns, tokens] from the last pipeline stage to all stages."""
        if self.layout.pp_size == 1:
            assert table is not None
            return table
        source = dist.get_global_rank(self.layout.pp_group, self.layout.pp_size - 1)
        # a number of the host goes over gloo, and nothing waits for the device
        size = torch.tensor([0 if table is None else table.size(0)])
        dist.broadcast(size, source, group=self.layout.pp_group)
        if table is None:
            # the dtype of the head's results
            dtype = torch.promote_types(torch.float32, self.config.params_dtype)
            table = torch.zeros(int(size), tokens, dtype=dtype, device=self.device)
        dist.broadcast(table, source, group=self.layout.pp_group)
        return table

"""Runs one micro-batch through a rank's modules on the meta device, forward and backward, and
measures what autograd stores, the peak of live memory, and the traffic of collectives. The modules
are those of the run, including the requested recomputation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_patches.packed_ops import FusedRMSNorm, can_fuse_norm
from slime_like.autograd import AutogradContext
from slime_like.megatron.model.delta_net import DeltaNet
from slime_like.megatron.model.hyper_connections import streams_of
from slime_like.megatron.ops.attention import PackedAttention, PackedRows, packed_rows
from slime_like.megatron.ops.context_parallel import columns_for_rows, rows_for_columns
from slime_like.megatron.ops.delta_rule import DeltaRows
from slime_like.megatron.ops.tables import compressed_tables, delta_tables
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.preflight.live_bytes import LiveBytes, MemoryTraffic, group_key
from slime_like.preflight.one_rank import OneRank


@dataclass(frozen=True, slots=True)
class Passes:
    """Costs of one micro-batch."""

    tokens: int
    kept: int  # bytes stored between its forward and its backward pass
    peak: int  # maximum live bytes in either pass, including kept
    traffic: Mapping[tuple[str, str], MemoryTraffic]  # of both passes, by (collective, dimension)

    def extrapolate(self, larger: Passes, smaller: Passes, times: float) -> Passes:
        """Add `times` the difference of two others, which must have the same working set."""
        traffic = {}
        for key in {*self.traffic, *larger.traffic}:
            a, b, c = (
                passes.traffic.get(key, MemoryTraffic()) for passes in (self, larger, smaller)
            )
            traffic[key] = MemoryTraffic(
                round(a.calls + times * (b.calls - c.calls)),
                round(a.bytes + times * (b.bytes - c.bytes)),
            )
        kept = self.kept + round(times * (larger.kept - smaller.kept))
        return Passes(self.tokens, kept, self.peak + kept - self.kept, traffic)


class _Attention(torch.autograd.Function):
    """Stand-in for attention that saves its inputs, its output and one fp32 number per row and
    head, as FlashAttention does (arXiv 2205.14135, algorithm 1; 2307.08691, section 3.1)."""

    @staticmethod
    def forward(ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.size(-1))
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Delta(torch.autograd.Function):
    """Stand-in for a delta net between its projections: saves its inputs, its output and one fp32
    number per row and decay, and recomputes the rest, as flash-linear-attention's kernels do."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, columns: int, decays: int, *weights: Tensor
    ) -> Tensor:
        out = x.new_empty(*x.shape[:-1], columns)
        decay = x.new_empty(*x.shape[:-1], decays, dtype=torch.float32)
        ctx.save_for_backward(x, out, decay, *weights)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _, _, *weights = ctx.saved_tensors
        return torch.empty_like(x), None, None, *(torch.empty_like(w) for w in weights)


class _Norm(torch.autograd.Function):
    """Stand-in for a norm that saves its input and one fp32 number per row, as Transformer Engine's
    does."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


_ALLOCATE = (torch.empty, torch.zeros, torch.ones)


class _Kernels(TorchFunctionMode):
    """Replaces computations on the meta device by stand-ins for the run's kernels. gpu: including
    those of Transformer Engine."""

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        if "device" in named and func in _ALLOCATE:
            named["device"] = "meta"  # megatron-core requests the current device
        if func is torch.autograd.backward:  # also called by recomputation
            with self:
                return _backward(*args, **named)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        if func is torch.nn.functional.rms_norm:
            return self._rms_norm(*args, **named)
        return func(*args, **named)

    def _rms_norm(
        self, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if self.gpu and weight is not None:
            return _Norm.apply(x, weight)
        if weight is not None and can_fuse_norm(x, weight, eps):
            return FusedRMSNorm.apply(x, x, weight, eps)
        return torch.nn.functional.rms_norm(x, shape, weight, eps)


def run_stage(rank: OneRank, tokens: int, *, gpu: bool) -> Passes:
    """Measure one micro-batch through all layers of the rank.

    Layers of the same kind store and communicate the same amounts, so only a few are run: one unit
    of each kind, then a second unit per kind. A unit has --recompute-num-layers layers, or one.
    With --recompute-method block, where layers differ, all are run.

    tokens: of the micro-batch, over all context-parallel ranks; padded as in the trainer.
    """
    config = rank.config
    decoders = [unwrap_model(chunk).decoder for chunk in rank.chunks]
    layers = list(chain.from_iterable(decoder.layers for decoder in decoders))
    if config.recompute_method == "block" and len(rank.chunks) == 1:
        return run_micro_batch(rank, layers, tokens, gpu=gpu)
    unit = config.recompute_num_layers or 1
    if config.recompute_granularity != "full" or len(layers) < unit:
        unit = 1
    kinds: dict[tuple[object, ...], list[object]] = {}
    for layer in layers:
        memory = getattr(layer, "ngram_memory", None)
        sizes = getattr(layer.self_attention, "sizes", None)  # of a SizedAttention
        rate = getattr(layer.self_attention, "rate", None)  # of a CompressedAttention
        kind = type(layer.mlp), type(layer.self_attention), sizes, type(memory), rate
        kinds.setdefault(kind, []).append(layer)
    units = [(of_kind * unit)[:unit] for of_kind in kinds.values()]
    minimal = list(chain.from_iterable(units))
    total = once = run_micro_batch(rank, minimal, tokens, gpu=gpu)
    for index, of_kind in enumerate(kinds.values()):
        times = len(of_kind) / unit - 1
        if times <= 0:
            continue
        # of other layers, since modules keep tensors of their own, and beside the first unit, since
        # what a layer keeps depends a little on the one after it
        another = (of_kind * 2 * unit)[unit : 2 * unit]
        order = chain.from_iterable([*units[: index + 1], another, *units[index + 1 :]])
        twice = run_micro_batch(rank, list(order), tokens, gpu=gpu)
        total = total.extrapolate(twice, once, times)
    return total


def run_micro_batch(
    rank: OneRank, layers: list[TransformerLayer], tokens: int, *, gpu: bool
) -> Passes:
    """Measure a micro-batch that passes through `layers` of the rank."""
    layout = rank.layout
    config = rank.config
    unit = layout.tp_size if config.sequence_parallel else 1
    unit = unit if layout.cp_size == 1 else 2 * unit * layout.cp_size
    tokens += -tokens % unit
    balance_experts(rank, tokens // layout.cp_size)
    rows = tokens // layout.cp_size // (layout.tp_size if config.sequence_parallel else 1)
    packed = packed_rows(torch.tensor([0, tokens], dtype=torch.int32))
    inputs = torch.empty(1, tokens // layout.cp_size, dtype=torch.int64, device="meta")
    live = LiveBytes(group_names(layout), config.moe_router_topk if config.num_moe_experts else 0)
    live.ignore([*rank.fixed, inputs])
    module = rank.modules[0].train()
    model = unwrap_model(rank.chunks[0])
    original = model.decoder.layers, model.decoder.num_layers_per_pipeline_rank
    model.decoder.layers = torch.nn.ModuleList(layers)
    model.decoder.num_layers_per_pipeline_rank = len(layers)
    attend_to_rows(layers, 1 if gpu else layout.cp_size)
    if any(isinstance(layer.self_attention, DeltaNet) for layer in layers):
        mix_rows(layers, meta_rows(packed, config), gpu=gpu)
    if hasattr(config, "entry_rates"):
        tables = compressed_tables(packed, config)
        own = replace(tables, places=tables.places[: tokens // layout.cp_size])
        packed.entries = own.on(torch.device("meta"))
    clear_rotary_caches(model)
    in_this_thread = torch.autograd.set_multithreading_enabled(False)  # as modes are
    with torch.compiler.set_stance("force_eager"), in_this_thread, _Kernels(gpu), live:
        if not model.pre_process:
            shape = (rows, streams_of(config), config.hidden_size)
            received = torch.empty(shape, dtype=config.params_dtype, device="meta")
            model.set_input_tensor(received.requires_grad_())
            del received  # the model holds it: it counts until the model lets go
        output = module(
            input_ids=inputs, position_ids=inputs, attention_mask=None, packed_seq_params=packed
        )
        kept = live.now
        model.set_input_tensor(None)
        if output.requires_grad:
            torch.autograd.backward(output, torch.empty_like(output))
        del output
    model.decoder.layers, model.decoder.num_layers_per_pipeline_rank = original
    return Passes(tokens, kept, live.peak, dict(live.traffic))


def group_names(layout: ParallelLayout) -> dict[int, str]:
    """The parallel dimension of each of this rank's groups, by group key."""
    return {
        group_key(group): name
        for name, group in (
            ("expert-tensor", layout.etp_group),
            ("expert", layout.ep_group),
            ("data", layout.dp_cp_group),
            ("context", layout.cp_group),
            ("pipeline", layout.pp_group),
            ("tensor", layout.tp_group),
        )
    }


def _backward(tensors: Any, grad_tensors: Any, **_: object) -> None:
    """torch.autograd.backward without disabling the active dispatch modes."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors)
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def balance_experts(rank: OneRank, rows: int) -> None:
    """Simulate balanced routing: all experts get equally many tokens. A dispatcher would normally
    read this from the router's output, which has no data on the meta device. rows: this rank's
    tokens before sequence parallelism."""
    for chunk in rank.chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
                sp = rank.layout.tp_size if rank.config.sequence_parallel else 1
                _balance(dispatcher, rows // sp)


def _balance(dispatcher: MoEAlltoAllTokenDispatcher, rows: int) -> None:
    experts = dispatcher.num_experts
    local = dispatcher.num_local_experts
    tp = dispatcher.tp_size
    ep = dispatcher.ep_size
    total = rows * dispatcher.config.moe_router_topk
    counts = torch.full((experts,), total // experts)
    counts[: total % experts] += 1
    local_counts = counts[dispatcher.local_expert_indices]
    sent = counts.view(ep, local).sum(dim=1)
    from_ranks = local_counts.repeat(tp * ep)
    received = int(local_counts.sum())
    dispatcher.sort_input_by_local_experts = torch.arange(experts * tp).view(-1, local).T.ravel()
    dispatcher.restore_output_by_local_experts = (
        torch.arange(experts * tp).view(local, -1).T.ravel()
    )

    def preprocess(routing_map: Tensor) -> Tensor:
        dispatcher.num_out_tokens = total
        dispatcher.input_splits = sent.tolist()
        dispatcher.output_splits = [received] * ep
        dispatcher.output_splits_tp = torch.full((tp,), received * ep)
        dispatcher.num_global_tokens_per_local_expert = from_ranks.view(-1, local)
        return local_counts * tp * ep

    dispatcher.preprocess = preprocess
    dispatcher._maybe_dtoh_and_synchronize = lambda point, tokens_per_expert=None: tokens_per_expert


def clear_rotary_caches(model: torch.nn.Module) -> None:
    """Clear the rotary embeddings that megatron-core caches between passes."""
    for module in model.modules():
        if clear := getattr(type(module).forward, "cache_clear", None):
            clear()


def attend_to_rows(layers: list[TransformerLayer], copies: int) -> None:
    """Simulate attention of this rank's rows to `copies` times its own keys and values: 1 if they
    are passed around a ring (Ring Attention, arXiv 2310.01889), otherwise all gathered ones."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        if copies > 1:
            key, value = (x.repeat(copies, 1, 1) for x in (key, value))
        out: Tensor = _Attention.apply(query, key, value)
        return out.reshape(out.size(0), -1)

    for layer in layers:
        for module in layer.modules():
            if isinstance(module, PackedAttention):
                module.forward = attend  # type: ignore[method-assign]


def meta_rows(packed: PackedRows, config: TransformerConfig) -> DeltaRows:
    """Row layout of the sequences, for activations on the meta device."""
    rows = delta_tables(packed, config)
    return DeltaRows(
        rows.cu_seqlens.to("meta"),
        rows.positions.to("meta"),
        rows.gather.to("meta"),
        rows.scatter.to("meta"),
        rows.steps,
    )


def mix_rows(layers: list[TransformerLayer], rows: DeltaRows, *, gpu: bool) -> None:
    """Simulate delta nets on the meta device. rows: row layout for plain torch. gpu: with a
    stand-in for flash-linear-attention's kernels."""

    def mix(net: DeltaNet, x: Tensor) -> Tensor:
        if not (gpu and net.has_kernels):
            return net.mix(x, rows, first=0)
        weights = (net.conv_weight, net.A_log, net.dt_bias, net.norm_weight)
        out: Tensor = _Delta.apply(x, net.values, net.decays, *weights)
        return out

    def forward(net: DeltaNet, hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        x = net.project(hidden_states)
        if net.cp_group.size() > 1:
            out = columns_for_rows(mix(net, rows_for_columns(x, net.cp_group)), net.cp_group)
        else:
            out = mix(net, x)
        output, bias = net.out_proj(out.flatten(1).unsqueeze(1))
        return output, bias

    for layer in layers:
        if isinstance(net := layer.self_attention, DeltaNet):
            net.forward = functools.partial(forward, net)  # type: ignore[method-assign]

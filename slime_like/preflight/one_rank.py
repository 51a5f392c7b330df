"""A rank's network on the meta device: megatron-core's modules, gradient buffers and optimizer
shards, with shapes but without memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from arguments.megatron_configs import MegatronConfigs
from arguments.schema import GPTModelConfig
from slime_like.megatron.frozen_parameters import FrozenParameters
from slime_like.megatron.model.gpt import build_chunks, to_model_precision, wrap_for_training
from slime_like.megatron.model.meta import OnMeta
from slime_like.megatron.muon import has_muon
from slime_like.megatron.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True)
class OneRank:
    """The networks of one rank on the meta device."""

    layout: ParallelLayout
    config: TransformerConfig  # megatron-core's, from `planned_config`
    gpt: GPTModelConfig
    megatron: MegatronConfigs
    chunks: list[MegatronModule]  # of its pipeline stage
    # the chunks in the model's precision, with gradient buffers if trained
    modules: list[MegatronModule]
    trained: bool

    @property
    def parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(chunk.parameters() for chunk in self.chunks))

    @property
    def fixed(self) -> Iterator[Tensor]:
        """Every tensor that exists between two passes."""
        yield from self.parameters
        for chunk in self.chunks:
            yield from chunk.buffers()
        for buffer in self.buffers if self.trained else ():
            yield buffer.grad_data
            if buffer.param_data is not None:
                yield buffer.param_data

    @property
    def buffers(self) -> Iterator[_ParamAndGradBuffer]:
        """megatron-core's gradient buffers, including those of experts."""
        for module in self.modules:
            yield from (*module.buffers, *module.expert_parallel_buffers)


def planned_config(transformer: TransformerConfig, *, gpu: bool) -> TransformerConfig:
    """The configuration for simulating the run's modules with plain torch: without kernels that are
    not installed here. These change what is computed at once, but not what is stored."""
    config = copy.copy(transformer)
    config.moe_grouped_gemm = config.moe_permute_fusion = config.moe_router_fusion = False
    config.gradient_accumulation_fusion = config.apply_rope_fusion = False
    config.masked_softmax_fusion = config.bias_dropout_fusion = False
    if config.num_moe_experts:
        config.moe_token_dispatcher_type = "alltoall"
    gated_silu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    config.bias_activation_fusion = gpu and gated_silu  # it keeps only its input
    return config


def build_rank(
    megatron: MegatronConfigs,
    gpt: GPTModelConfig,
    layout: ParallelLayout,
    *,
    gpu: bool,
    trained: bool = True,
    value_head: bool = False,
    frozen: FrozenParameters | None = None,
) -> OneRank:
    """Build the networks.

    Args:
        gpu: The run has Transformer Engine's kernels.
        trained: With gradient buffers.
        frozen: Parameters without gradients.
    """
    config = planned_config(megatron.transformer, gpu=gpu)
    with OnMeta():
        chunks = build_chunks(config, gpt, "local", layout, value_head=value_head)
        modules: list[MegatronModule] = to_model_precision(chunks, config)
        if frozen is not None:
            frozen.freeze(chunks, config, layout)
        if trained:
            modules = list(wrap_for_training(modules, config, megatron.ddp))
        else:
            for module in modules:
                module.requires_grad_(False)
    return OneRank(layout, config, gpt, megatron, chunks, modules, trained)


def weight_bytes(rank: OneRank) -> int:
    """Bytes of parameters as used in forward passes, and of modules' buffers."""
    parameters = {id(p): p for p in rank.parameters}.values()  # shared ones once
    if rank.trained and rank.megatron.ddp.use_distributed_optimizer:
        trained = sum(buffer.param_data.nbytes for buffer in rank.buffers)  # including padding
        return trained + sum(p.nbytes for p in parameters if not p.requires_grad)
    return sum(p.nbytes for p in parameters)


def gradient_bytes(rank: OneRank) -> int:
    """Bytes of megatron-core's gradient buffers, in the dtype of accumulation and with padding."""
    return sum(buffer.grad_data.nbytes for buffer in rank.buffers) if rank.trained else 0


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Optimizer memory."""

    main: int = 0  # fp32 copies of parameters with a narrower dtype
    moments: int = 0  # of Adam or Muon
    host: int = 0  # bytes that --optimizer-cpu-offload keeps off the device
    step: int = 0  # temporary memory during a step, in addition to the gradient buffers
    elements: int = 0  # parameters that this rank updates

    @property
    def device(self) -> int:
        return self.main + self.moments


def optimizer_bytes(rank: OneRank, *, gpu: bool) -> OptimizerBytes:
    """Memory of megatron-core's optimizer after its first step.

    Sources: `DistributedOptimizer._build_model_and_main_param_groups` (shards of 16-bit parameters
    are copied to fp32, shards of fp32 parameters are views), `Float16Optimizer...` (full copies),
    torch's and Transformer Engine's Adam (two moments per main parameter).
    """
    if not rank.trained:
        return OptimizerBytes()
    of_type: dict[torch.dtype, int] = {}
    step = 0
    for buffer in rank.buffers:
        elements = _owned(buffer, rank.megatron.ddp.use_distributed_optimizer)
        of_type[buffer.param_dtype] = of_type.get(buffer.param_dtype, 0) + elements
        if buffer.grad_dtype is not torch.float32:
            step += 4 * elements  # fp32 copy
    optimizer = rank.megatron.optimizer
    precise = optimizer.use_precision_aware_optimizer
    narrow = sum(count for dtype, count in of_type.items() if dtype.itemsize == 2)
    total = sum(of_type.values())
    main = 4 * narrow
    if precise:
        step = 0  # it reads the gradient buffers directly
        remainders = gpu and optimizer.main_params_dtype is torch.float32
        main = (2 if remainders else optimizer.main_params_dtype.itemsize) * narrow
    moments = total * _moment_size(optimizer)
    if optimizer.optimizer == "muon":  # one momentum instead of two moments
        parameters = chain.from_iterable(buffer.params for buffer in rank.buffers)
        moments -= 4 * sum(p.numel() for p in parameters if has_muon(p))
    if optimizer.optimizer_cpu_offload:
        share = optimizer.optimizer_offload_fraction
        away = int(share * total * (4 + _moment_size(optimizer)))
        kept = int((1 - share) * total)
        return OptimizerBytes(4 * kept, kept * _moment_size(optimizer), away, 0, total)
    return OptimizerBytes(main, moments, 0, step, total)


def _moment_size(optimizer: MegatronOptimizer) -> int:
    """Bytes of the moments per parameter."""
    if optimizer.optimizer == "sgd":
        return 4 if optimizer.sgd_momentum else 0
    if not optimizer.use_precision_aware_optimizer:
        return 8
    return int(optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize)


def _owned(buffer: _ParamAndGradBuffer, distributed: bool) -> int:
    """Number of parameters, without padding, that this rank updates."""
    if not distributed:
        return sum(parameter.numel() for parameter in buffer.params)
    ranges = DistributedOptimizer._build_gbuf_range_map(buffer)
    owned = 0
    for bucket in chain.from_iterable(ranges.values()):
        owned += sum(entry["param"].size for entry in bucket["param_map"].values())
    return owned

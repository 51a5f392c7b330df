"""Delta nets, which replace attention in a layer: what the gated delta nets of Qwen3-Next and
Qwen3.5 and Kimi delta attention (kimi_delta.py) have in common, and the former.

Everything that enters the recurrence is projected per group (the value heads that share one key
head). Groups are sharded over tensor-parallel ranks. The recurrence and its
convolution need full sequences: context-parallel ranks exchange their parts of all groups for full
sequences of some groups by an all-to-all, and back before the output projection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.own_parameters import parameter_device, sharded_state
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import columns_for_rows, rows_for_columns
from slime_like.megatron.ops.delta_rule import DeltaRows, causal_conv, delta_rule, fla_rule
from slime_like.megatron.ops.tables import delta_tables

SHARDED = ("conv_weight", "A_log", "dt_bias")  # over groups


@dataclass(frozen=True, slots=True)
class DeltaNetSubmodules:
    """The classes of a delta net's projections: column-parallel, and row-parallel."""

    in_proj: type[torch.nn.Module]
    out_proj: type[torch.nn.Module]


class DeltaNet(MegatronModule, ABC):
    """A delta net: [T, 1, hidden] -> [T, 1, hidden], with this rank's rows under sequence or
    context parallelism.

    key_dim, value_dim: of a head. heads: value heads per group. groups: of this tensor-parallel
    rank. channels: of the convolution, per group. decays: number of decays per group and token.
    """

    per_channel = False  # a decay for each channel of the key
    has_kernels = True  # flash-linear-attention's, on a GPU

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None, "the layer passes its process groups to its attention"
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.heads = config.linear_num_value_heads // config.linear_num_key_heads
        self.groups = config.linear_num_key_heads // self.tp_group.size()
        self.values = self.heads * self.value_dim  # per group
        self.channels = 2 * self.key_dim + self.values
        self.decays = self.heads * (self.key_dim if self.per_channel else 1)
        linear: dict[str, object] = dict(
            config=config, bias=False, is_expert=False, tp_group=self.tp_group
        )
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            config.linear_num_key_heads * self._projected(),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.out_proj = submodules.out_proj(
            config.linear_num_key_heads * self.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )
        # the tracked generator, which differs between tensor-parallel ranks, is that of the device
        device = parameter_device()
        for name, tensor in self._make_parameters(device):
            self.register_parameter(name, torch.nn.Parameter(tensor))
        for name in self.sharded():
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    @abstractmethod
    def _projected(self) -> int:
        """Columns of the input projection per group."""

    def project(self, hidden_states: Tensor) -> Tensor:
        """What enters the recurrence: this rank's rows of hidden states -> [T / cp, groups,
        width], all rows of the context-parallel rank, of the groups of the tensor-parallel rank."""
        mixed, _bias = self.in_proj(hidden_states)
        x: Tensor = mixed.squeeze(1).unflatten(1, (self.groups, -1))
        return x

    @abstractmethod
    def mix(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """Convolution, delta rule and gated norm of full sequences. x: [T, G, width], the G groups
        of this rank from index `first`. Returns [T, G, heads per group * value_dim]."""

    def sharded(self) -> tuple[str, ...]:
        """Parameters besides the projections that are sharded over groups, along dimension 0."""
        return SHARDED

    def _make_parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Parameters besides the projections, initialised as in Mamba: A = exp(A_log) is uniform in
        [1, 16] and dt_bias is 1."""
        taps = self.config.linear_conv_kernel_dim
        like = {"dtype": self.config.params_dtype, "device": device}
        conv = torch.empty(self.groups * self.channels, 1, taps, **like)
        decay = torch.empty(self.groups * self.heads, **like)
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                conv.uniform_(-(taps**-0.5), taps**-0.5)
                decay.uniform_(1, 16).log_()
        yield "conv_weight", conv
        yield "A_log", decay
        yield "dt_bias", torch.ones(self.groups * self.decays, **like)
        yield "norm_weight", torch.ones(self.value_dim, **like)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: object = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(packed_seq_params, PackedRows) and attention_mask is None, (
            "rows are packed by slime_like.megatron.ops.attention.packed_rows, without a mask"
        )
        if packed_seq_params.delta is None:  # shared by all layers
            packed_seq_params.delta = delta_tables(packed_seq_params, self.config)
        rows: DeltaRows = packed_seq_params.delta
        x = self.project(hidden_states)
        if packed_seq_params.context is None:
            out = self.mix(x, rows, first=0)
        else:
            natural = packed_seq_params.context.natural
            first = self.groups // self.cp_group.size() * self.cp_group.rank()
            # all rows of this rank's groups, [T, groups / cp, n]
            out = self.mix(rows_for_columns(x, self.cp_group)[natural], rows, first)
            out = torch.zeros_like(out).index_copy(0, natural, out)
            out = columns_for_rows(out, self.cp_group)
        output, bias = self.out_proj(out.flatten(1).unsqueeze(1))
        return output, bias

    def _convolved(
        self, mixed: Tensor, rows: DeltaRows, first: int, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Short convolution of queries, keys and values, and SiLU.

        Args:
            mixed: [T, G, channels].
            first: Index of the first of the G groups.
            bias: Of all channels of this tensor-parallel rank.

        Returns:
            Query and key [T, G, key_dim], and value [T, G * heads, value_dim].
        """
        size = mixed.size(1)
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        channels = slice(first * self.channels, (first + size) * self.channels)
        weight = self.conv_weight[channels].squeeze(1).to(dtype)
        convolved = causal_conv(mixed.flatten(1).to(dtype), weight, rows)
        if bias is not None:
            convolved = convolved + bias[channels].to(dtype)
        out = F.silu(convolved).to(mixed.dtype)
        parts = out.unflatten(1, (size, -1)).split([self.key_dim, self.key_dim, self.values], -1)
        query, key, value = parts
        return query, key, value.reshape(value.size(0), -1, self.value_dim)

    def _delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        rows: DeltaRows,
    ) -> Tensor:
        """`delta_rule`, by flash-linear-attention where that is possible."""
        fla = None
        if value.is_cuda and not self.config.deterministic_mode:
            fla = fla_rule(per_channel=self.per_channel)
        rule = delta_rule if fla is None or value.dtype != torch.bfloat16 else fla
        return rule(query, key, value, log_decay, rate, rows)

    def _norm_weight(self) -> Tensor:
        """The replicated weight for this rank's heads: backward sums its gradient over the
        tensor-parallel ranks."""
        weight: Tensor = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return weight

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """As for megatron-core's modules."""
        sharded = dict.fromkeys(self.sharded(), 0)
        return sharded_state(self, sharded, prefix, sharded_offsets, metadata)


class GatedDeltaNet(DeltaNet):
    """Gated delta net (arXiv 2412.06464). The input projection yields query, key, values, gates,
    rates and decays per group."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the input projection per group, by what they are."""
        return self.channels, self.values, self.heads, self.heads

    def _projected(self) -> int:
        return sum(self.widths)

    def mix(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """See `DeltaNet.mix`."""
        size = x.size(1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        heads = slice(first * self.heads, (first + size) * self.heads)
        mixed, gate, rate, decay = x.split(self.widths, -1)
        query, key, value = self._convolved(mixed, rows, first)
        a_log = self.A_log[heads].to(dtype)
        bias = self.dt_bias[heads].to(dtype)
        log_decay = -a_log.exp() * F.softplus(decay.flatten(1).to(dtype) + bias)
        rates = rate.flatten(1).to(dtype).sigmoid()
        out = self._delta_rule(query, key, value, log_decay, rates, rows)
        return self._gated_norm(out, gate.reshape(value.shape)).view(x.size(0), size, -1)

    def _gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head times silu of its gate, or sigmoid. out, gate: [T, heads,
        value_dim]."""
        dtype = torch.promote_types(out.dtype, torch.float32)
        is_sigmoid = getattr(self.config, "linear_output_gate", "silu") == "sigmoid"
        gate = gate.to(dtype).sigmoid() if is_sigmoid else F.silu(gate.to(dtype))
        normed = F.rms_norm(out.to(dtype), out.shape[-1:], eps=self.config.layernorm_epsilon)
        return (self._norm_weight() * normed.to(out.dtype) * gate).to(out.dtype)

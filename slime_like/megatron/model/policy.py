"""The policy network: a language model that returns hidden states, and the head that computes
log-probs from them. Logits are never materialised; see ops/fused_linear_logprob.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime_like.megatron.model.bases import on_base
from slime_like.megatron.model.vision import SeesImages
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.fused_linear_logprob import (
    DEFAULT_CHUNK_SIZE,
    Projection,
    fused_linear_log_probs,
    scaled_logits,
)
from slime_like.megatron.ops.soft_cross_entropy import soft_cross_entropy
from slime_like.megatron.ops.top_tokens import top_tokens
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import MicroBatch, TokenOutput


class AdapterSlot:
    """Active adapter of a layer, if any. Not a module, so that an adapter is not part of the
    model."""

    __slots__ = ("active",)

    def __init__(self) -> None:
        self.active: Callable[[Tensor], Tensor] | None = None


class HeadWeight(ColumnParallelLinear):
    """Holds the weight of the output layer under its usual name. `forward` returns hidden states,
    divided by `logits_scaling`, or, while a critic's value head is active, values [T, 1, 1].

    It must be called where megatron-core calls the output layer, although it computes nothing: with
    --overlap-param-gather a forward hook on this module waits for the weight.
    """

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        self.weight = layer.weight  # None if tied to the embedding on the same stage
        self.value_slot = AdapterSlot()

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        if self.value_slot.active is not None:
            return self.value_slot.active(hidden), None
        scaling = getattr(self.config, "logits_scaling", 1.0)
        return hidden if scaling == 1.0 else hidden / scaling, None


class PolicyModel(SeesImages):
    """A chunk of the policy, on a base (bases.py). The last pipeline stage returns hidden states
    [1, T, H]; under sequence parallelism this rank's [1, T / tp, H]."""

    output_layer: Any
    mtp: Any  # multi-token prediction layers of the last chunk (prediction.py), if any

    def __init__(self, config: TransformerConfig, **settings: object) -> None:
        super().__init__(config=config, **settings)
        self.end_at_hidden_states()

    def end_at_hidden_states(self) -> None:
        """Replace the output layer by `HeadWeight`. Call once."""
        self.head_slot = AdapterSlot()
        if self.post_process:
            self.output_layer = HeadWeight(self.output_layer)

    def rotary_embedding(self, hidden: Tensor, packed: PackedRows) -> Tensor | None:
        """Rotary embedding of packed rows, for layers outside the decoder block."""
        if (of_images := self.angles_of_images(packed)) is not None:
            return of_images
        kind = self.position_embedding_type
        if self.config.multi_latent_attention or kind not in ("rope", "yarn"):
            return None
        rotary = self.rotary_pos_emb
        length = rotary.get_rotary_seq_len(None, self.decoder, hidden, self.config, packed)
        angles = rotary(length, packed_seq=True)
        found: Tensor = angles[0] if kind == "yarn" else angles  # YaRN's scale is in attention
        return found

    def base_head_weight(self) -> Tensor:
        """The output weight [V_padded / tp, H], on the last stage; with tied embeddings the
        embedding weight or its copy there."""
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        assert isinstance(weight, Tensor), "the head's weight is on the last pipeline stage"
        return weight

    def head_weight(self) -> Tensor:
        """`base_head_weight` plus the active adapter's update."""
        weight = self.base_head_weight()
        return weight if self.head_slot.active is None else self.head_slot.active(weight)


def as_policy(model: LanguageModule) -> PolicyModel:
    """Change the model's class to a subclass that is also a `PolicyModel`."""
    # the user's function has built the model: its constructor cannot be called again, and a copy
    # of its state would miss attributes and hooks that it refers to itself
    model.__class__ = on_base(PolicyModel, type(model))
    assert isinstance(model, PolicyModel)
    model.end_at_hidden_states()
    return model


@contextmanager
def keep_float32_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Keep the buffers that modules name in `float32_buffers` while the block casts the model. They
    select experts or keys, or count, and bfloat16 has no integers between 256 and 258.
    (megatron-core widens the bias of a router on the first forward pass, when the digits of the
    file are lost, and the counts never.)"""
    buffers = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "float32_buffers", ())
    ]
    yield
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


class HalfPrecisionModule(Float16Module):
    """megatron-core's Float16Module, with two differences. The last stage's output is not converted
    to float32: here that output is hidden states, of which only active rows are used. Some buffers
    stay in float32, see `keep_float32_buffers`."""

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        with keep_float32_buffers(module):
            super().__init__(config, module)

    def forward(self, *inputs: object, fp32_output: bool = False, **keywords: object) -> Tensor:
        output: Tensor = super().forward(*inputs, fp32_output=fp32_output, **keywords)
        return output


def head_weight(module: torch.nn.Module) -> Tensor:
    """`PolicyModel.head_weight` of a chunk in its wrappers."""
    model = unwrap_model(module)
    assert isinstance(model, PolicyModel), type(model)
    return model.head_weight()


def base_head_weight(module: torch.nn.Module) -> Tensor:
    """`PolicyModel.base_head_weight` of a chunk in its wrappers."""
    model = unwrap_model(module)
    assert isinstance(model, PolicyModel), type(model)
    return model.base_head_weight()


def logit_softcap(module: torch.nn.Module) -> float | None:
    """The cap of a network's logits, if it has one."""
    cap: float | None = getattr(unwrap_model(module).config, "logit_softcap", None)
    return cap


def logits_of(module: torch.nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., V_padded / tp] of a last chunk's hidden states, all at once: for comparisons."""
    logits = hidden @ head_weight(module).t()
    cap = logit_softcap(module)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass(frozen=True, slots=True)
class LogProbHead:
    """Computes log-probs from hidden states; see `fused_linear_log_probs`."""

    vocab_size: int
    temperature: float
    layout: ParallelLayout
    sequence_parallel: bool = False
    chunk_size: int = DEFAULT_CHUNK_SIZE
    # forward-only passes: add a column with the sum of squared probabilities
    squared_probs: bool = False
    top_k: int = 0  # add columns with the most likely tokens
    softcap: float | None = None  # of the model's logits; it does not change their order

    def log_probs_and_entropy(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """[T] each, zero at inactive rows, which skip the projection. hidden, weight: of the last
        stage; see `PolicyModel`."""
        log_probs, entropy, *_ = self._columns(hidden, weight, batch, batch.labels[0])
        return log_probs, entropy

    def log_probs_of_sets(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `log_probs_and_entropy`, plus the log-probs [T, K] of the batch's label sets."""
        assert batch.label_sets is not None
        labels = torch.cat([batch.labels[0].unsqueeze(1), batch.label_sets], dim=1)
        log_probs, entropy, *_ = self._columns(hidden, weight, batch, labels)
        return log_probs[:, 0], entropy, log_probs[:, 1:]

    def _columns(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: MicroBatch,
        labels: Tensor,
        *,
        squared: bool = False,
    ) -> tuple[Tensor, ...]:
        """Like `log_probs_and_entropy`, for labels [T] or [T, K]; with `squared`, plus the sum of
        squared probabilities [T]."""
        rows = active_rows(batch)
        dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        squares = torch.zeros(len(rows), dtype=dtype, device=hidden.device) if squared else None
        log_probs, entropy = fused_linear_log_probs(
            hidden[0],
            weight,
            labels,
            rows=rows,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
            sampling_mask=batch.sampling_mask,
            squared_out=squares,
            softcap=self.softcap,
        )
        # both depend on hidden states and weight even without active tokens, so that every rank
        # runs backward and takes part in its collectives
        columns = [log_probs, entropy]
        if squares is not None:
            columns.append(squares)
        return tuple(self._on_all_rows(column, rows, batch) for column in columns)

    def soft_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Cross-entropy with the distributions given by the states `targets` [T, H]: [T], 0 at
        inactive rows."""
        assert self.softcap is None, "no family with prediction layers has a cap of logits"
        rows = active_rows(batch)
        losses = soft_cross_entropy(
            hidden[0],
            targets.index_select(0, rows),
            weight,
            vocab_size=self.vocab_size,
            rows=rows,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
        )
        return self._on_all_rows(losses, rows, batch)

    def _on_all_rows(self, column: Tensor, rows: Tensor, batch: MicroBatch) -> Tensor:
        """Scatter [N] or [N, K] of the active rows to all T rows, 0 elsewhere."""
        empty = column.new_zeros(batch.loss_mask.numel(), *column.shape[1:])
        return empty.index_copy(0, rows, column)

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        """Columns: log-probs, entropies; optionally sums of squared probabilities, log-probs of
        label sets, and top-k tokens. A teacher may have another cap of logits."""
        weight = head_weight(model)
        head = replace(self, softcap=logit_softcap(model))
        if batch.label_sets is not None:
            log_probs, entropy, label_log_probs = head.log_probs_of_sets(hidden, weight, batch)
            return TokenOutput((log_probs, entropy, *label_log_probs.unbind(1)))
        labels = batch.labels[0]
        squared = self.squared_probs
        columns = head._columns(hidden, weight, batch, labels, squared=squared)
        if self.top_k:
            columns += self._top_tokens(hidden, weight, batch).to(columns[0].dtype).unbind(1)
        return TokenOutput(columns)

    def scaled_logits(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """The logits [N, V] of the N active rows that `__call__` makes log-probs of, at the
        temperature. Without tensor parallelism."""
        assert self.layout.tp_size == 1, "checked on the command line"
        projection = Projection(
            hidden[0].index_select(0, active_rows(batch)),
            head_weight(model),
            None,
            self.temperature,
            self.vocab_size,
            self.chunk_size,
            softcap=logit_softcap(model),
        )
        return scaled_logits(projection)

    def _top_tokens(self, hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
        """The most likely tokens, [T, top_k] int64, 0 at inactive rows."""
        rows = active_rows(batch)
        tokens = top_tokens(
            hidden[0],
            weight,
            k=self.top_k,
            vocab_size=self.vocab_size,
            rows=rows,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
        )
        return self._on_all_rows(tokens, rows, batch)


def active_rows(batch: MicroBatch) -> Tensor:
    """[N] int64: the rows that the head computes."""
    assert batch.active_rows is not None, "packed by slime_like.megatron.packing.pack_all"
    return batch.active_rows

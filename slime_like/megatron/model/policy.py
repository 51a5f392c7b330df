"""The policy's network: GPTModel that ends at its hidden states. Logits are made by nobody; see
ops/lean_head.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor


class Slot:
    """Where a low-rank adapter acts on a layer; empty while none is active. No module: what is in
    it is not a part of the model."""

    __slots__ = ("active",)

    def __init__(self) -> None:
        self.active: Callable[[Tensor], Tensor] | None = None


class HeadWeight(ColumnParallelLinear):
    """The output layer's weight under the output layer's name, in checkpoints too; forward gives
    hidden states back, or, while a critic's value head is active here, values [T, 1, 1].

    It is called where megatron-core calls its output layer, although nothing is computed: with
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
        self.weight = layer.weight  # None where the embedding on the same stage has it
        self.value_slot = Slot()

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        return hidden if self.value_slot.active is None else self.value_slot.active(hidden), None


class PolicyModel(GPTModel):
    """A chunk of the policy. The last pipeline stage gives hidden states [1, T, H]; under sequence
    parallelism this rank's [1, T / tp, H]. mtp: layers of multi-token prediction (prediction.py), on a last
    chunk that has some."""

    output_layer: Any
    mtp: Any

    def __init__(self, config: TransformerConfig, **settings: object) -> None:
        super().__init__(config=config, **settings)
        self.end_at_hidden_states()

    def end_at_hidden_states(self) -> None:
        """Once, in a model that has an output layer."""
        self.head_slot = Slot()
        if self.post_process:
            self.output_layer = HeadWeight(self.output_layer)

    def rotary_embedding(self, hidden: Tensor, packed: object) -> Tensor | None:
        """Of the positions of packed rows, for layers beyond the model's own."""
        found = self._preprocess(None, None, decoder_input=hidden, packed_seq_params=packed)
        rotary: Tensor | None = found[1]
        return rotary

    def own_head_weight(self) -> Tensor:
        """[V_padded / tp, H], on the last stage; with tied embeddings the embedding's, or its twin
        there."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        assert isinstance(weight, Tensor), "the head's weight is on the last pipeline stage"
        return weight

    def head_weight(self) -> Tensor:
        """`own_head_weight`, and what the active adapter adds to it."""
        weight = self.own_head_weight()
        return weight if self.head_slot.active is None else self.head_slot.active(weight)


def as_policy(model: GPTModel) -> PolicyModel:
    """The same model, of a subclass of its class that is a `PolicyModel` too."""
    kind = type(model)
    policy = PolicyModel if kind is GPTModel else type(kind.__name__, (PolicyModel, kind), {})
    model.__class__ = policy
    assert isinstance(model, PolicyModel)
    model.end_at_hidden_states()
    return model


class HalfPrecisionModule(Float16Module):
    """megatron-core's, without its copy of the last stage's output in float32: that is hidden
    states here, of which few may be needed."""

    def forward(self, *inputs: object, fp32_output: bool = False, **keywords: object) -> Tensor:
        output: Tensor = super().forward(*inputs, fp32_output=fp32_output, **keywords)
        return output


def head_weight(module: torch.nn.Module) -> Tensor:
    """`PolicyModel.head_weight` of a chunk in its wrappers."""
    model = unwrap_model(module)
    assert isinstance(model, PolicyModel), type(model)
    return model.head_weight()

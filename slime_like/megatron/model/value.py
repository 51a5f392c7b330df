"""The critic's network: the policy's transformer with a scalar head in place of the vocabulary
projection.

A critic that is an adapter has the head alone of this module: `lora/adapter.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """hidden states [T, 1, hidden] -> values [T, 1, 1] float32, a linear layer with a bias as in
    Hugging Face's *ForTokenClassification.

    It is whole on every tensor-parallel rank. It starts at zero: every value is 0 in the first
    rollout, so that its advantages are the discounted returns and hold no noise of an untrained
    head, and every layout starts from the same numbers. Computed in float32: values are compared
    with their targets to fewer digits than bfloat16 has.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        # megatron-core's mark of its own output layer: the optimizer treats both alike
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in self.parameters():
            # each rank sees its part of the sequence there, and megatron-core adds the gradients of
            # parameters with this mark
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Called as megatron-core calls its output layer; weight and runtime_gather_output are that
        layer's."""
        return self.values(hidden), None

    def values(self, hidden: Tensor) -> Tensor:
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # the loss that follows is the same on every tensor-parallel rank: backward takes this
            # rank's part, and adds nothing up
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values


class ValueModel(GPTModel):
    """A chunk of the critic. The last pipeline stage gives values [1, T, 1], on every
    tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, **settings: object) -> None:
        # the embedding has no twin on the last stage
        settings["share_embeddings_and_output_weights"] = False
        super().__init__(config=config, **settings)
        if self.post_process:
            self.output_layer = ValueHead(config)

    def sharded_state_dict(self, *arguments: object, **keywords: object) -> object:
        """megatron-core lets the output layer be cut or padded on loading, for vocabularies differ.
        A value head must not be made of one."""
        state = super().sharded_state_dict(*arguments, **keywords)
        for name in ("output_layer.weight", "output_layer.bias"):
            if name in state:
                state[name].allow_shape_mismatch = False
        return state

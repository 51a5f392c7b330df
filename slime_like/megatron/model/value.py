"""The critic network: the policy's transformer with a scalar head instead of the vocabulary
projection.

A critic trained as a LoRA adapter uses only the head: see `lora/adapter.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.vision import SeesImages


class ValueHead(torch.nn.Module):
    """Hidden states [T, 1, hidden] -> values [T, 1, 1] float32: a linear layer with bias, as in
    Hugging Face's *ForTokenClassification.

    It is replicated over tensor-parallel ranks and initialised to zero. All values are 0 in the
    first rollout, so its advantages are discounted returns without noise from an untrained head,
    and all layouts start from the same numbers. It computes in float32, because bfloat16 is too
    coarse for the difference between values and their targets.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        # set by megatron-core on its own output layer, so that the optimizer treats both alike
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in self.parameters():
            # each rank has some of the rows; megatron-core sums the gradients of parameters with
            # this mark
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Interface of megatron-core's output layer; the other two arguments are unused."""
        return self.values(hidden), None

    def values(self, hidden: Tensor) -> Tensor:
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # all tensor-parallel ranks compute the same loss: backward takes this rank's part and
            # does not sum
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values


class ValueModel(SeesImages):
    """A chunk of the critic, on a base (bases.py). The last pipeline stage returns values
    [1, T, 1], equal on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, **settings: object) -> None:
        # the value head cannot be tied to the embedding
        settings["share_embeddings_and_output_weights"] = False
        super().__init__(config=config, **settings)
        if self.post_process:
            self.output_layer = ValueHead(config)

    def sharded_state_dict(self, *arguments: object, **keywords: object) -> object:
        """megatron-core allows the output layer to be truncated or padded when loading, since
        vocabulary sizes differ. A value head must not be loaded from such a layer."""
        state = super().sharded_state_dict(*arguments, **keywords)
        for name in ("output_layer.weight", "output_layer.bias"):
            if name in state:
                state[name].allow_shape_mismatch = False
        return state

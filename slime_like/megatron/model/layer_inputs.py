"""Inputs of layers beside the hidden state (Gemma 4 E2B and E4B, whose files call them per-layer
embeddings): each layer has a short vector for every token, of a table and of the token's embedding,
takes it through a gate, and adds what it makes of it. Also its layers that share keys and values,
whose MLP may be twice as wide.

    x_l = (rms(W_l e / sqrt(H)) + sqrt(d) table_l[token]) / sqrt(2)
    h = h + rms(P_l (gelu(G_l h) * x_l))

The first pipeline stage makes the inputs of all layers. They go to its first layer, and from stage
to stage, as further vectors beside the hidden state: [T, N, H], of which N - 1 hold the inputs of
all layers one after the other, and zeros. The first layer of a stage lends them to the others
(ops/side_tensors.py).

The rows of the table are sharded over tensor-parallel ranks, as those of the embedding. Everything
else is on every rank; under sequence parallelism a rank has the gradient of its own rows.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.hyper_connections import streams_of
from slime_like.megatron.model.layer_specs import layers_of_chunk
from slime_like.megatron.model.norms import PostNormLayer, rms_norm
from slime_like.megatron.model.own_parameters import parameter_device
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.side_tensors import SideTensor, borrow, lend
from slime_like.weights.attention_sizes import layers_of

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

INPUTS = "layer inputs"  # in PackedRows.sides


def _register(module: Any, tensors: dict[str, Tensor], config: TransformerConfig) -> None:
    """Parameters of every tensor-parallel rank. Matrices are initialised as megatron-core's."""
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and config.perform_initialization:
            config.init_method(tensor)
        parameter = torch.nn.Parameter(tensor)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        module.register_parameter(name, parameter)


class LayerInputs(MegatronModule):
    """Makes the inputs of all layers, on the first pipeline stage."""

    projection_weight: Tensor  # [layers * d, hidden]
    norm_weight: Tensor  # [d], of the inputs of every layer

    def __init__(
        self, config: TransformerConfig, vocabulary: int, groups: ProcessGroupCollection
    ) -> None:
        """vocabulary: padded."""
        super().__init__(config=config)
        self.size = config.layer_input_size
        width = config.num_layers * self.size
        self.table = VocabParallelEmbedding(
            vocabulary,
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=groups.tp,
        )
        self.table.weight.is_embedding_or_output_parameter = True  # not for Muon
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": parameter_device()}
        tensors = {
            "projection_weight": torch.zeros(width, config.hidden_size, **like),
            "norm_weight": torch.ones(self.size, **like),
        }
        _register(self, tensors, config)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """tokens: [1, T]; embedded: [t, 1, H], under sequence parallelism this rank's rows.
        Returns [t, N, H]."""
        config = self.config
        found = self.table(tokens)
        found = found if config.sequence_parallel else found.transpose(0, 1)
        found = found * torch.tensor(float(self.size) ** 0.5, dtype=found.dtype)
        made = F.linear(embedded, self.projection_weight) * config.hidden_size**-0.5
        made = made.unflatten(-1, (-1, self.size))
        made = rms_norm(made, self.norm_weight, config.layernorm_epsilon).flatten(-2)
        return beside(embedded, (made + found) * 2.0**-0.5)


def beside(hidden: Tensor, inputs: Tensor) -> Tensor:
    """[t, 1, H] and the inputs of all layers [t, 1, L d] -> [t, N, H]."""
    size = hidden.size(-1)
    rest = F.pad(inputs, (0, -inputs.size(-1) % size))
    return torch.cat([hidden, rest.unflatten(-1, (-1, size)).flatten(1, 2)], dim=1)


class LayerInput(torch.nn.Module):
    """What one layer adds to the hidden state [t, 1, H] of its input [t, 1, d]."""

    gate_weight: Tensor  # [d, hidden]
    projection_weight: Tensor  # [hidden, d]
    norm_weight: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        size = config.layer_input_size
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": parameter_device()}
        tensors = {
            "gate_weight": torch.zeros(size, config.hidden_size, **like),
            "projection_weight": torch.zeros(config.hidden_size, size, **like),
            "norm_weight": torch.ones(config.hidden_size, **like),
        }
        _register(self, tensors, config)

    def forward(self, hidden: Tensor, own: Tensor) -> Tensor:
        gated = self.config.activation_func(F.linear(hidden, self.gate_weight)) * own
        added = F.linear(gated, self.projection_weight)
        return hidden + rms_norm(added, self.norm_weight, self.config.layernorm_epsilon)


class LayerWithInput(PostNormLayer):
    """A layer that takes its input after the MLP."""

    hands_on = False  # the last one of a stage with others after it

    def __init__(self, config: TransformerConfig, *args: object, **settings: object) -> None:
        super().__init__(config, *args, **settings)
        self.layer_input = LayerInput(config)

    def forward(self, hidden_states: Tensor, *args: object, **settings: Any) -> object:
        if hidden_states.size(1) > 1:  # the first layer of a stage
            rows: PackedRows = settings["packed_seq_params"]
            inputs = hidden_states[:, 1:].flatten(1).unsqueeze(1)
            hidden = hidden_states[:, :1].contiguous()
            hidden_states = lend(hidden, inputs, rows.sides, INPUTS)
        return super().forward(hidden_states, *args, **settings)

    def end(self, hidden: Tensor, rows: PackedRows | None) -> Tensor:
        assert rows is not None, "every network here has packed rows"
        side: SideTensor = rows.sides[INPUTS]
        size = self.config.layer_input_size
        start = (self.layer_number - 1) * size
        with_input = self.layer_input(hidden, borrow(hidden, side, start, start + size))
        ended = super().end(with_input, rows)
        return beside(ended, borrow(ended, side)) if self.hands_on else ended


def add_layer_inputs(chunk: LanguageModule, vocabulary: int) -> None:
    """Make the inputs of layers after the embedding, and hand them on at the end of a stage.
    vocabulary: padded."""
    config = chunk.config
    if chunk.pre_process:
        chunk.layer_inputs = LayerInputs(config, vocabulary, chunk.pg_collection)
        made = partial(_make_inputs, chunk.layer_inputs)
        chunk.embedding.register_forward_hook(made, with_kwargs=True)
    if not chunk.post_process and len(chunk.decoder.layers):
        chunk.decoder.layers[-1].hands_on = True
    if chunk.post_process and not len(chunk.decoder.layers):
        chunk.decoder.final_layernorm.register_forward_pre_hook(_hidden_alone)


def _make_inputs(
    inputs: LayerInputs,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    settings: dict[str, Any],
    embedded: Tensor,
) -> Tensor:
    wide: Tensor = inputs(args[0] if args else settings["input_ids"], embedded)
    assert wide.size(1) == streams_of(inputs.config)
    return wide


def _hidden_alone(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    wide, *rest = inputs
    return wide[:, :1], *rest


class WideMLP(MLP):
    """An MLP of twice the inner size."""

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any) -> None:
        own = copy.copy(config)
        own.ffn_hidden_size = 2 * config.ffn_hidden_size
        settings["ffn_hidden_size"] = own.ffn_hidden_size
        super().__init__(own, *args, **settings)


def widen_mlps(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> None:
    """Replace the MLPs of layers that take the keys of another one. Such layers share a spec, which
    says what is alike in checkpoints and in HybridModel's pattern."""
    wide: dict[int, Any] = {}
    of_model = layers_of(config)
    for index, number in enumerate(layers_of_chunk(config, vp_stage)):
        if not of_model[number].reads_keys:
            continue
        spec = block.layer_specs[index]
        if id(spec) not in wide:
            wide[id(spec)] = _widened(spec)
        block.layer_specs[index] = wide[id(spec)]


def _widened(layer: Any) -> Any:
    layer = copy.copy(layer)
    layer.submodules = copy.copy(layer.submodules)
    mlp = layer.submodules.mlp
    if isinstance(mlp, partial):  # since megatron-core 0.18
        layer.submodules.mlp = partial(WideMLP.as_mlp_submodule, *mlp.args, **mlp.keywords)
    else:
        layer.submodules.mlp = copy.copy(mlp)
        layer.submodules.mlp.module = WideMLP
    return layer

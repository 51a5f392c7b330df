"""megatron-core's HybridModel, built from the layers of a GPTModel.

HybridModel has a pattern with one letter per layer, which names one of several kinds of layers, and
a "|" between pipeline stages. GPT's layers are whole here, attention and MLP: a letter is one of
them, and only says which layers are alike. So layers, their numbers, the names of parameters and
the tensors of checkpoints are those of GPTModel, per-layer settings are those of the run, and
recomputation counts the same layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    _get_block_submodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

# letters under which HybridStack builds a layer with the number that it is given -> their field
KINDS = {"*": "attention_layer", "E": "moe_layer", "-": "mlp_layer", "G": "gdn_layer"}
COUNTS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


class LayerStack(HybridStack):
    """HybridStack with the final norm of the specs, under GPTModel's name; its own is Transformer
    Engine's. Random numbers and sharded tensors are GPTModel's too."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        final_norm: ModuleSpec | type,
        **settings: Any,
    ) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **settings)
        if self.post_process:
            self.final_layernorm = build_module(
                final_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

    def forward(self, hidden_states: Tensor | None, *inputs: object, **settings: object) -> Tensor:
        # under sequence parallelism every rank has other rows: other dropout too
        tracker = get_cuda_rng_tracker()
        with tracker.fork() if self.config.sequence_parallel else nullcontext():
            hidden: Tensor = super().forward(hidden_states, *inputs, **settings)
        if self.post_process:
            # schedules free the output, which must be no view
            normed = self.final_layernorm(hidden)
            hidden = make_viewless_tensor(inp=normed, requires_grad=True, keep_graph=True)
        return hidden

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """In GPTModel's checkpoints, layers that are all alike are parts of one tensor with an axis
        of layers."""
        config = self.config
        by_layer = (metadata or {}).get("non_homogeneous_layers", False)
        by_layer = by_layer or config.hetereogenous_dist_checkpoint
        if by_layer or config.moe_layer_freq != 1 or config.linear_attention_freq:
            state: dict[str, object] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return state
        state = {}
        for index, layer in enumerate(self.layers):
            start = f"{prefix}layers.{index}."
            offsets = [(0, layer.layer_number - 1, config.num_layers)]
            part = layer.sharded_state_dict(start, offsets, metadata)
            replace_prefix_for_sharding(part, start, f"{prefix}layers.")
            state |= part
        if self.post_process:
            state |= sharded_state_dict_default(
                self.final_layernorm,
                f"{prefix}final_layernorm.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        return state


class HybridChunk(HybridModel):
    """HybridModel with the arguments of GPTModel."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        *,
        vp_stage: int | None = None,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        **settings: Any,
    ) -> None:
        """Raises ValueError if there are more kinds of layers than letters."""
        block = _get_block_submodules(config, transformer_layer_spec, vp_stage)
        kinds, letters = _kinds(block.layer_specs)
        pattern = _pattern(config, vp_stage, letters)
        with _without_counts(config):
            super().__init__(
                config=config,
                hybrid_stack_spec=ModuleSpec(
                    LayerStack, params={"final_norm": block.layer_norm}, submodules=kinds
                ),
                hybrid_layer_pattern=pattern,
                vp_stage=vp_stage,
                **settings,
            )
        if self.position_embedding_type == "yarn":  # which HybridModel does not pass on
            rotary: Any = self.rotary_pos_emb  # type: ignore[has-type]
            rotary.rotary_interleaved = config.rotary_interleaved
        plain = self.position_embedding_type == "rope" and not config.multi_latent_attention
        if plain and (rope_scaling or config.rotary_interleaved):  # HybridModel has neither
            self.rotary_pos_emb = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=settings.get("rotary_percent", 1.0),
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=settings.get("seq_len_interpolation_factor"),
                rotary_base=settings.get("rotary_base", 10000),
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )


def _kinds(layers: Sequence[ModuleSpec]) -> tuple[HybridStackSubmodules, str]:
    """The different ones of the layers of a chunk, and the letter of each layer."""
    kinds: list[ModuleSpec] = []
    for layer in layers:
        if layer not in kinds:
            kinds.append(layer)
    if len(kinds) > len(KINDS):
        raise ValueError(
            f"the layer spec has {len(kinds)} kinds of layers; --model-base hybrid supports "
            f"{len(KINDS)}"
        )
    of_letter = dict(zip(KINDS, kinds, strict=False))
    letters = [next(a for a, kind in of_letter.items() if kind == layer) for layer in layers]
    parts = {KINDS[letter]: kind for letter, kind in of_letter.items()}
    return HybridStackSubmodules(**parts), "".join(letters)


def _pattern(config: TransformerConfig, vp_stage: int | None, letters: str) -> str:
    """The pattern of the whole model. Of the other chunks, HybridModel only counts the layers."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = config.virtual_pipeline_model_parallel_size
    segments = [
        "*" * _layers_of(config, chunk, stage)
        for chunk in ([None] if chunks is None else range(chunks))
        for stage in range(stages)
    ]
    own = (vp_stage or 0) * stages + parallel_state.get_pipeline_model_parallel_rank()
    assert len(segments[own]) == len(letters)
    segments[own] = letters
    return "|".join(segments)


def _layers_of(config: TransformerConfig, vp_stage: int | None, stage: int) -> int:
    """The number of layers of any chunk."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return get_num_layers_to_build(config, vp_stage, stage)
    # with a layout, the function above returns that of this rank
    count: int = layout.get_num_layers_to_build(LayerType.decoder, vp_stage, stage)
    return count


@contextmanager
def _without_counts(config: TransformerConfig) -> Iterator[None]:
    """Hide the sizes of the first and the last stage, which HybridModel refuses beside the "|" that
    say the same."""
    counts = {name: getattr(config, name) for name in COUNTS}
    for name in COUNTS:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, count in counts.items():
            setattr(config, name, count)

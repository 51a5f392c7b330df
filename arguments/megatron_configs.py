"""Build megatron-core's config objects from flags. megatron-core is only imported when they are
built."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from arguments.cuda import cuda_available
from arguments.megatron import megatron_fields
from arguments.megatron_fields import OPTIMIZER_DTYPES
from arguments.schema import ModelConfig, ParallelConfig
from slime_like.config import Problem, flag_name
from slime_like.ngrams import NgramSettings
from slime_like.yarn import Yarn

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

T = TypeVar("T")


LAYER_CONFIG_FIELDS = {
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "without_pre_norms",
    "qk_norm_of_all_heads",
    "yarn_rotary_scaling_factor",
    "residual_multiplier",
    "llama3_original_length",
}
# of attention whose heads differ by layer
SIZED_FIELDS = {"window_groups", "value_channels"}
PRECISION_AWARE_FIELDS = {
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    *OPTIMIZER_DTYPES,
}


# of fp16; megatron-core's 2**32 overflows about twenty times before the first step
INITIAL_LOSS_SCALE = 2.0**16

# What megatron-core raises for settings that it does not support
OBJECTIONS = (
    AssertionError,
    ValueError,
    RuntimeError,
    ImportError,
    TypeError,
    ZeroDivisionError,
)


@dataclass(frozen=True)
class MegatronConfigs:
    """megatron-core's own configuration objects, complete. (They are mutable by megatron-core's
    design; we only add hooks.)"""

    transformer: TransformerConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """Installed packages and devices, which decide defaults."""

    cuda: bool
    transformer_engine: bool
    gradient_fusion: bool  # Apex's extension is installed
    apex: bool = False
    engine_without_extension: bool = False  # Transformer Engine cannot be imported
    planned: bool = False  # another machine that is only planned for, with this one's packages

    @classmethod
    def with_gpus(cls) -> Machine:
        """A machine of a GPU job, for planning on another machine (preflight)."""
        return cls(cuda=True, transformer_engine=True, gradient_fusion=True, planned=True)

    @classmethod
    def here(cls) -> Machine:
        from megatron_patches import patch

        def installed(name: str) -> bool:
            return importlib.util.find_spec(name) is not None

        return cls(
            cuda_available(),
            patch.has_transformer_engine(),
            installed("fused_weight_gradient_mlp_cuda"),
            patch.has_apex(),
            patch.has_engine_without_extension(),
        )


def resolve_transformer_impl(model: ModelConfig, machine: Machine) -> str:
    """What --transformer-impl auto means on this machine."""
    if model.transformer_impl != "auto":
        return model.transformer_impl
    return "transformer_engine" if machine.cuda and machine.transformer_engine else "local"


@dataclass(slots=True)
class Build:
    """Input of the three config objects."""

    values: Mapping[str, Any]  # field name -> value, from flags and checkpoint
    parallel: ParallelConfig
    virtual_stages: int | None
    transformer_impl: str
    nccl: bool
    machine: Machine
    problems: list[Problem] = field(default_factory=list)


def build_megatron_configs(
    values: Mapping[str, object],
    *,
    model: ModelConfig,
    parallel: ParallelConfig,
    virtual_stages: int | None,
    machine: Machine,
) -> tuple[MegatronConfigs | None, list[Problem]]:
    """Build the three config objects, or return megatron-core's objections as problems. Imports
    megatron-core; needs no process group.

    values: field name -> value, of any of the three; absent fields have their defaults.
    """
    if machine.planned:
        machine = Machine.here()
        model = dataclasses.replace(model, transformer_impl="local")
        values = {**values, "moe_permute_fusion": False}  # a Transformer Engine kernel
    nccl = parallel.distributed_backend == "nccl" or (
        parallel.distributed_backend == "auto" and machine.cuda
    )
    build = Build(
        values, parallel, virtual_stages, resolve_transformer_impl(model, machine), nccl, machine
    )
    with warnings.catch_warnings():
        # missing Transformer Engine and Apex, and deprecated defaults
        warnings.simplefilter("ignore")
        transformer = _attempt(build, _transformer)
        optimizer = _attempt(build, _optimizer)
        ddp = _attempt(build, _ddp)
    if build.problems:
        return None, build.problems
    return MegatronConfigs(transformer, optimizer, ddp), []


def _attempt(build: Build, make: Callable[[Build], T]) -> T | None:
    """Turn megatron-core's assertions and errors into problems that name a flag."""
    try:
        return make(build)
    except OBJECTIONS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        fields = [n for n in megatron_fields() if re.search(rf"\b{re.escape(n)}\b", message)]
        field = max(fields, key=len, default=None)
        flag = "megatron-core" if field is None else flag_name(field)
        value = None if field is None else build.values.get(field)
        build.problems.append(Problem(flag, value, f"rejected by megatron-core: {message}"))
        return None


def _dtype(build: Build) -> object:
    import torch

    if build.values.get("fp16"):
        return torch.float16
    return torch.bfloat16 if build.values.get("bf16") else torch.float32


def _of(config_type: type, values: Mapping[str, object]) -> dict[str, object]:
    return {f.name: values[f.name] for f in dataclasses.fields(config_type) if f.name in values}


def _transformer(build: Build) -> object:
    from megatron.core.transformer.enums import AttnBackend

    parallel = build.parallel
    dtype = _dtype(build)
    values = {**_fusions(build), **build.values}
    if "activation_func" in values:
        values["activation_func"] = activation_function(values["activation_func"])
    values["attention_backend"] = AttnBackend[values.get("attention_backend", "auto")]
    overlap = values.get("overlap_p2p_comm", build.nccl and build.virtual_stages is not None)
    values |= {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": build.virtual_stages,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "transformer_impl": build.transformer_impl,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # the token mean is part of our token weights; megatron-core would divide again
        "calculate_per_token_loss": False,
        # Packed rows differ in length, so the schedule exchanges shapes (and requires this
        # dispatcher even without experts). The interleaved schedule gets rows of equal length
        # instead, because two stages would confuse the shapes of forward and backward messages.
        "variable_seq_lengths": parallel.pipeline_model_parallel_size > 1
        and build.virtual_stages is None,
        "moe_token_dispatcher_type": values.get("moe_token_dispatcher_type", "alltoall"),
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": build.nccl and not overlap,
        # works around a race of old torch, by stopping the device after every message
        "batch_p2p_sync": False,
        "barrier_with_L1_time": False,
    }
    config_type = transformer_config_type(values)
    return config_type(**_of(config_type, values))


def transformer_config_type(values: Mapping[str, object]) -> type[TransformerConfig]:
    """The config class with the fields that the network described by `values` needs."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if values.get("entry_rates"):
        return _compressed_config()
    if values.get("stream_rank"):
        return _gated_streams_config()
    if values.get("residual_streams"):
        return _streams_config()
    if values.get("linear_decay_per_channel"):
        return _kimi_config()
    if values.get("short_conv"):
        return _short_conv_config()
    if "mamba_smallest_step" in values:
        return _mamba_config()
    if SIZED_FIELDS & values.keys():
        return _sized_config()
    if values.get("multi_latent_attention"):
        return _sparse_config() if values.get("index_topk") else MLATransformerConfig
    return _layer_config() if LAYER_CONFIG_FIELDS & values.keys() else TransformerConfig


@functools.cache
def _layer_config() -> type[TransformerConfig]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class LayerConfig(TransformerConfig):
        """TransformerConfig with fields for features that megatron-core's layers lack."""

        post_self_attn_layernorm: bool = False  # normalise the output before the residual add
        post_mlp_layernorm: bool = False
        without_pre_norms: bool = False  # do not normalise the inputs of attention and MLP
        qk_norm_of_all_heads: bool = False  # one norm over all query heads, one over all key heads
        window_rotary_base: float | None = None  # rotary base of layers with a sliding window
        embedding_scale: float = 1.0  # in the dtype of the embeddings
        embedding_multiplier: float = 1.0
        residual_multiplier: float = 1.0  # of the outputs of attention and MLP
        logit_softcap: float | None = None  # logits z are cap * tanh(z / cap)
        logits_scaling: float = 1.0  # divides the hidden states before the output layer
        # of Llama 3's rotary embedding, if other than its own, which megatron-core has
        llama3_low_frequency: float | None = None
        llama3_high_frequency: float | None = None
        llama3_original_length: int | None = None
        # YaRN settings, which GPTModel reads from the config
        yarn_rotary_scaling_factor: float = 1.0
        yarn_original_max_position_embeddings: int = 4096
        yarn_beta_fast: float = 32.0
        yarn_beta_slow: float = 1.0
        yarn_mscale: float = 1.0
        yarn_mscale_all_dim: float = 0.0
        yarn_correction_range_round_to_int: bool = True

    return LayerConfig


@functools.cache
def _sized_config() -> type[TransformerConfig]:
    @dataclasses.dataclass
    class SizedConfig(_layer_config()):  # type: ignore[misc]
        """LayerConfig with fields for slime_like/megatron/model/sized_attention.py."""

        # of layers with a sliding window, if other than in the rest
        window_heads: int | None = None
        window_groups: int | None = None
        window_channels: int | None = None
        value_channels: int | None = None  # size of a value, if other than of a key
        value_scale: float = 1.0
        value_norm: bool = False  # values are normalised by head, without a weight
        keys_are_values: bool = False  # in layers without a window
        # share of the pairs that layers without a window turn, the fastest ones
        rotary_share: float = 1.0
        layer_scalars: bool = False  # each layer's output is multiplied by a number of the file
        # experts and a dense MLP work on the same hidden state, see model/beside_mlp.py
        experts_beside_mlp: bool = False
        sinks_of_windows: bool = False  # only layers with a window have the learned sinks
        # number of last layers that attend to the keys and values of the last one of their kind,
        # with a window or without, before them; and whether their MLPs are twice as wide
        shared_key_layers: int = 0
        wide_mlps: bool = False
        layer_input_size: int = 0  # of the input of each layer, see model/layer_inputs.py
        head_gates: bool = False  # a gate for the output of each head
        # dimensions of a head that are rotated in layers with a window, if other than in the rest
        window_rotary_width: int | None = None
        # bounds of what the activations of experts, and of MLPs and shared experts, return, by
        # layer; 0: none. See model/clamped_mlp.py
        expert_clamps: list[float] | None = None
        mlp_clamps: list[float] | None = None

        def __post_init__(self) -> None:
            self.hetereogenous_dist_checkpoint = True  # tensors of layers differ in shape
            super().__post_init__()

    return SizedConfig


@functools.cache
def _sparse_config() -> type[TransformerConfig]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    @dataclasses.dataclass
    class SparseConfig(MLATransformerConfig):
        """MLATransformerConfig with fields for slime_like/megatron/model/sparse_attention.py."""

        index_topk: int = 2048  # keys selected per query
        index_n_heads: int = 64
        index_head_dim: int = 128
        index_rotary_interleaved: bool = False
        index_shared: list[int] | None = None  # per layer: 1 reuses the previous layer's selection
        index_pool: int = 1  # consecutive keys that are scored and selected as one

    return SparseConfig


@functools.cache
def _kimi_config() -> type[TransformerConfig]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    @dataclasses.dataclass
    class KimiConfig(MLATransformerConfig):
        """MLATransformerConfig with fields for slime_like/megatron/model/kimi_delta.py."""

        linear_decay_per_channel: bool = False  # of the key, in delta nets
        linear_decay_bound: float | None = None  # lower bound of the logarithm of such a decay
        latent_unrotated: bool = False  # latent attention without rotary embedding

    return KimiConfig


@functools.cache
def _streams_config() -> type[TransformerConfig]:
    @dataclasses.dataclass
    class StreamsConfig(_kimi_config(), _sparse_config()):  # type: ignore[misc]
        """The fields of GLM-5.3: those of slime_like/megatron/model/hyper_connections.py, and those
        of Kimi delta attention and of sparse attention."""

        residual_streams: int = 4
        sinkhorn_iterations: int = 20
        sinkhorn_epsilon: float = 1e-6
        latent_norm_epsilon: float = 1e-6  # of latent attention's norms

    return StreamsConfig


@functools.cache
def _gated_streams_config() -> type[TransformerConfig]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class GatedStreamsConfig(TransformerConfig):
        """TransformerConfig with fields for slime_like/megatron/model/gated_streams.py and
        ngram_memory.py; those of the indexer are as in SparseConfig."""

        residual_streams: int = 4
        stream_rank: int = 320  # of the gates
        index_topk: int = 2048
        index_n_heads: int = 8
        index_head_dim: int = 128
        index_pool: int = 16
        index_shared: list[int] | None = None  # of no layer
        ngram_memory: NgramSettings | None = None
        linear_output_gate: str = "silu"  # of delta nets

    return GatedStreamsConfig


@functools.cache
def _compressed_config() -> type[TransformerConfig]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class CompressedConfig(TransformerConfig):
        """TransformerConfig with fields for slime_like/megatron/model/compressed_attention.py, for
        hyper-connections, and for routers of other kinds."""

        residual_streams: int = 4
        sinkhorn_iterations: int = 20
        sinkhorn_epsilon: float = 1e-6
        q_lora_rank: int = 1024
        # by layer: tokens of an entry, 0 without entries; whether an indexer selects some of them
        entry_rates: list[int] = field(default_factory=list)
        entry_selection: list[int] = field(default_factory=list)
        entry_topk: int = 512  # entries that it selects per query
        index_n_heads: int = 64
        index_head_dim: int = 128
        output_groups: int = 8  # of the output projection, and the rank of each
        output_rank: int = 1024
        rotary_width: int = 64  # of a head: its last dimensions
        window_rotary_base: float = 10000.0  # of layers without entries
        entry_rotary_base: float = 160000.0
        entry_yarn: Yarn | None = None
        # score of an expert: its logit's, in place of moe_router_score_function
        router_scores: str = "sqrtsoftplus"
        # number of first layers that select experts by a table of the file, with a row per token
        hashed_layers: int = 0
        hashed_tokens: int = 0

        def __post_init__(self) -> None:
            self.hetereogenous_dist_checkpoint = True  # tensors of layers differ
            super().__post_init__()

    return CompressedConfig


@functools.cache
def _short_conv_config() -> type[TransformerConfig]:
    @dataclasses.dataclass
    class ShortConvConfig(_layer_config()):  # type: ignore[misc]
        """LayerConfig with fields for slime_like/megatron/model/short_conv.py."""

        short_conv: bool = False  # in place of delta nets, whose sizes are its own
        # added to the sum of the selected experts' weights, by which they are divided
        router_epsilon: float = 0.0

    return ShortConvConfig


@functools.cache
def _mamba_config() -> type[TransformerConfig]:
    @dataclasses.dataclass
    class MambaConfig(_layer_config()):  # type: ignore[misc]
        """LayerConfig with fields for slime_like/megatron/model/mamba.py."""

        # of layers that are one block, a letter per layer, as in Nemotron-H's files: M Mamba-2,
        # * attention, - MLP, E experts
        block_pattern: str = ""
        mamba_smallest_step: float = 0.0  # lower bound of the step sizes of Mamba-2

    return MambaConfig


def _fusions(build: Build) -> dict[str, bool]:
    """Fused kernels: on if a GPU and Transformer Engine are present, since some are compiled at run
    time; never on the CPU."""
    values = build.values
    gpu = build.machine.cuda and build.machine.transformer_engine
    gated = bool(values.get("gated_linear_unit"))
    fusable = values.get("activation_func", "gelu") in (("silu", "quick_gelu") if gated else ())
    if values.get("activation_func_clamp_value") is not None:
        fusable = values["activation_func"] == "quick_gelu"  # fused SwiGLU would not be clamped
    return {
        "bias_activation_fusion": gpu and fusable,
        # grouped experts with biases do not support it
        "bias_dropout_fusion": gpu
        and not (values.get("num_moe_experts") and values.get("add_bias_linear", True)),
        "masked_softmax_fusion": gpu,
        "apply_rope_fusion": gpu
        and build.transformer_impl == "transformer_engine"
        and not values.get("rotary_interleaved", False)
        and "yarn_rotary_scaling_factor" not in values  # YaRN scales cosines and sines
        # megatron-core's kernel for MLA supports only YaRN
        and not (values.get("multi_latent_attention") and values.get("rope_type") != "yarn"),
        "gradient_accumulation_fusion": build.machine.cuda and build.machine.gradient_fusion,
    }


def activation_function(name: str) -> object:
    """The callable for TransformerConfig.activation_func."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu

    # megatron.core.activations has another of this name; fused layers compare with this one
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    def gelu_tanh(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    return {
        "gelu_tanh": gelu_tanh,
        "gelu": F.gelu,
        "silu": F.silu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }[name]


def _optimizer(build: Build) -> object:
    from megatron.core.optimizer import OptimizerConfig

    values = {
        "min_lr": 0.0,
        "optimizer_offload_fraction": 1.0,
        "muon_tp_mode": "duplicated",
        # Transformer Engine's Adam would keep of fp32 parameters only the 16 bits that the bf16
        # ones lack; megatron-core saves these as if they were the parameters, and cannot load them
        "store_param_remainders": False,
        "initial_loss_scale": INITIAL_LOSS_SCALE,
        **build.values,
        "params_dtype": _dtype(build),
    }
    values |= {name: _torch_dtype(values[name]) for name in OPTIMIZER_DTYPES if name in values}
    if _main_gradients_in_bf16(build):
        values["main_grads_dtype"] = _torch_dtype("bf16")
    fields = _of(OptimizerConfig, values)
    if build.machine.transformer_engine or not fields.get("use_precision_aware_optimizer"):
        return OptimizerConfig(**fields)
    # megatron-core requires Transformer Engine's Adam here; megatron_patches/precision_adam.py
    # replaces it
    config = OptimizerConfig(
        **{name: value for name, value in fields.items() if name not in PRECISION_AWARE_FIELDS}
    )
    for name in PRECISION_AWARE_FIELDS & fields.keys():
        setattr(config, name, fields[name])
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True  # fp8 is rejected elsewhere
    config.store_param_remainders = False
    return config


def _main_gradients_in_bf16(build: Build) -> bool:
    """Whether main gradients are bf16: only with the precision-aware optimizer, which reads the
    gradient buffers directly."""
    values = build.values
    if not values.get("use_precision_aware_optimizer") or not values.get("bf16"):
        return False
    return values.get("main_grads_dtype") == "bf16" or values.get("grad_reduce_in_fp32") is False


def _torch_dtype(word: str) -> object:
    """The torch.dtype for Megatron-LM's name of an optimizer-state dtype."""
    import torch

    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.uint8,
    }[word]


def _ddp(build: Build) -> object:
    from megatron.core.distributed import DistributedDataParallelConfig

    # a non-finite gradient is counted and its step skipped, on all ranks; megatron-core's check
    # would raise
    half = bool(build.values.get("bf16") or build.values.get("fp16"))
    in_fp32 = half and not _main_gradients_in_bf16(build)
    values = {"grad_reduce_in_fp32": in_fp32, **build.values, "check_for_nan_in_grad": False}
    return DistributedDataParallelConfig(**_of(DistributedDataParallelConfig, values))

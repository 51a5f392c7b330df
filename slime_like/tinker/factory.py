"""Builds the parts of the server's workers from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arguments.hf.model import read_hf_model
from arguments.run_config import RunConfig
from slime_like.data.factory import run_image_processor
from slime_like.engines.registry import engine_traits
from slime_like.megatron.factory import make_head, network_settings
from slime_like.megatron.model.gpt import model_shape
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.tinker.model_pool import ModelPool
from slime_like.tinker.sampler import SnapshotSampler
from slime_like.tinker.worker_backend import HostSettings, ModelHost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_like.images.processor import ImageProcessor
    from slime_like.tinker.sglang_sampler import SglangSampler


def make_sampler(
    config: RunConfig,
    layout: ParallelLayout,
    tokenizer: PreTrainedTokenizerBase | None,
    images: ImageProcessor | None = None,
) -> SnapshotSampler | SglangSampler:
    """The sampler for --rollout-engine. tokenizer, images: of the base model. Collective."""
    if not engine_traits(config.rollout.rollout_engine).has_servers:
        return SnapshotSampler(
            config.model,
            layout,
            tokenizer,
            max_engines=config.server.max_sampler_engines,
            max_adapters=config.server.max_sampler_adapters,
            local_batch_size=config.rollout.rollout_local_batch_size,
            dtype=config.megatron.transformer.params_dtype,
            images=images,
        )
    from slime_like.tinker.sglang_factory import make_sglang_sampler

    return make_sglang_sampler(config, layout, images)


def make_model_host(
    config: RunConfig, layout: ParallelLayout, tokenizer: PreTrainedTokenizerBase | None = None
) -> ModelHost:
    """The models of the server and their sampler. Collective.

    Args:
        config: Of the server.
        layout: Of this rank.
        tokenizer: Of the base model, for stop texts and images; None disables them.
    """
    base = config.model.hf_checkpoint
    assert base is not None
    hf = read_hf_model(base)
    pool = ModelPool(
        network_settings(config),
        layout,
        hf,
        base=base,
        seed=config.model.seed,
        max_models=config.server.max_resident_models,
        max_adapters=config.server.max_resident_adapters,
    )
    settings = HostSettings(
        base,
        hf,
        shape=model_shape(config.megatron.transformer, config.gpt),
        seed=config.model.seed,
        max_tokens_per_gpu=config.algorithm.max_tokens_per_gpu,
        verify_checkpoints=not config.checkpoint.no_verify_checkpoint,
        serves_quantized=engine_traits(config.rollout.rollout_engine).takes_quantized,
    )
    images = None if tokenizer is None else run_image_processor(config, tokenizer)
    sampler = make_sampler(config, layout, tokenizer, images)
    head = make_head(config, layout, temperature=1.0)
    return ModelHost(settings, layout, pool, sampler, head, images)

"""Build the local engine from the run's configuration."""

from __future__ import annotations

from slime_like.rollout.engines.engine_registry import EngineContext
from slime_like.rollout.engines.local.engine import LocalEngine


def make_local_engine(context: EngineContext) -> LocalEngine:
    """The local engine; each rank has one, with the full model."""
    config = context.config
    assert config.model.hf_checkpoint is not None
    return LocalEngine(
        config.model.hf_checkpoint,
        context.tokenizer,
        local_batch_size=config.rollout.rollout_local_batch_size,
        device=context.device,
        dtype=config.megatron.transformer.params_dtype,
        trust_remote_code=config.model.trust_remote_code,
        tied=False if config.unties_output_layer else None,
    )

"""Build the local engine from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.local.on_policy import OnPolicyEngine, TrainersDraws
from slime_like.engines.registry import EngineContext
from slime_like.megatron.factory import make_head


def make_local_engine(context: EngineContext) -> LocalEngine:
    """The local engine; each rank has one, with the full model."""
    config = context.config
    assert config.model.hf_checkpoint is not None
    make: Callable[..., LocalEngine] = LocalEngine
    if config.guards.true_on_policy_mode:
        assert context.policy is not None, "a run that trains"
        head = make_head(config, context.policy.layout, temperature=config.log_prob_temperature)
        make = partial(OnPolicyEngine, TrainersDraws(context.policy, head))
    return make(
        config.model.hf_checkpoint,
        context.tokenizer,
        local_batch_size=config.rollout.rollout_local_batch_size,
        device=context.device,
        dtype=config.megatron.transformer.params_dtype,
        trust_remote_code=config.model.trust_remote_code,
        tied=False if config.unties_output_layer and not config.sends_adapter else None,
        images=context.image_processor,
        lora_scale=config.lora.lora_alpha / config.lora.lora_rank if config.sends_adapter else None,
    )

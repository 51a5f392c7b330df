"""A rollout engine: a transformers model in this process, one request at a time, without a KV
cache. Slow, but short."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slime_like.engines.base import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.engines.registry import EngineContext, register_rollout_engine


class PlainEngine(RolloutEngine):
    def __init__(self, context: EngineContext) -> None:
        config = AutoConfig.from_pretrained(context.config.model.hf_checkpoint)
        self._model = AutoModelForCausalLM.from_config(config).to(context.device).eval()
        self._model.requires_grad_(False)
        self._device, self._end_id = context.device, context.tokenizer.eos_token_id

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        parameters = self._model.state_dict()  # shares memory with the model
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self.weight_version = version

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """Log-probs are over the full vocabulary, at the sampling temperature."""
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        tokens = list(request.prompt_tokens)
        log_probs: list[float] = []
        reason = "length"
        while len(log_probs) < sampling.max_new_tokens and reason == "length":
            logits = self._model(torch.tensor([tokens], device=self._device)).logits[0, -1].float()
            row = (logits / (sampling.temperature or 1.0)).log_softmax(-1).cpu()
            if sampling.greedy:
                token = int(row.argmax())
            else:
                token = int(torch.multinomial(row.exp(), 1, generator=generator))
            tokens.append(token)
            log_probs.append(float(row[token]))
            reason = "stop" if token == self._end_id else "length"
        response = tuple(tokens[len(request.prompt_tokens) :])
        versions = (self.weight_version,) * len(response)
        return GenerateOutput(request.sample_id, response, tuple(log_probs), reason, versions)


@register_rollout_engine("plain", help="transformers, one request at a time.")
def make_plain_engine(context: EngineContext) -> PlainEngine:
    return PlainEngine(context)

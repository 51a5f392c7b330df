"""The engine and real servers: weights replaced while they generate, when every token has the version that it was sampled under and the log-prob
of those weights; memory released and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.rollout.engine import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.sglang.engine import RequestSettings, SglangEngine
from slime_like.rollout.sglang.fleet import Fleet, HealthSettings
from slime_like.rollout.sglang.weight_update import Transport, UpdateSettings, WeightUpdater

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SAMPLING = SamplingParams(max_new_tokens=160, stop_token_ids=())
REQUESTS = [GenerateRequest(i, (7, 20 + i, 30, 40, 8), seed=i) for i in range(12)]


@contextlib.contextmanager
def engine_of(model: str, servers: list[str], transport: Transport, *, colocated: bool = False) -> Iterator[SglangEngine]:
    fleet = Fleet([f"http://{server}" for server in servers], [], None, HealthSettings(), 5.0, print)
    fleet.start()
    updater = WeightUpdater(fleet, UpdateSettings(transport, timeout_s=120), model, torch.device("cpu"))
    engine = SglangEngine(fleet, updater, RequestSettings(), model, check_updates=True, colocated=colocated)
    try:
        yield engine
    finally:
        engine.close()


def weights(model: str, factor: float) -> Iterator[tuple[str, Tensor]]:
    return iter((name, tensor * factor) for name, tensor in load_file(Path(model) / "model.safetensors").items())


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor"])
def test_versions_and_log_probs_of_tokens_around_an_update(demo: Path, servers: list[str], transport: Transport) -> None:
    model = str(demo / "model")
    with engine_of(model, servers, transport) as engine:
        assert engine.fleet is not None
        engine.update_weights(weights(model, 1.0), 1)
        outputs: list[GenerateOutput] = []
        generating = threading.Thread(target=lambda: outputs.extend(engine.generate(REQUESTS, SAMPLING)))
        generating.start()
        while not any(worker.in_flight for worker in engine.fleet.workers):
            pass
        asyncio.run(asyncio.sleep(0.5))
        engine.pause()
        engine.update_weights(weights(model, 1.1), 2)
        engine.resume()
        generating.join(120)
        assert len(outputs) == len(REQUESTS) and all(o.failure is None for o in outputs), [o.failure for o in outputs]
        changed = [o for o in outputs if len(set(o.weight_versions)) == 2]
        assert changed, "the update came too early or too late"
        networks = {}
        for version, factor in ((1, 1.0), (2, 1.1)):
            networks[version] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            networks[version].load_state_dict(dict(weights(model, factor)), strict=False)
            networks[version].tie_weights()
        for request, output in zip(REQUESTS, outputs, strict=True):
            assert list(output.weight_versions) == sorted(output.weight_versions)
            ids = torch.tensor([[*request.prompt_tokens, *output.tokens]])
            with torch.no_grad():
                own = {v: network(ids).logits[0, len(request.prompt_tokens) - 1 : -1].log_softmax(-1) for v, network in networks.items()}
            for place, (token, version) in enumerate(zip(output.tokens, output.weight_versions, strict=True)):
                assert abs(output.log_probs[place] - float(own[version][place, token])) < 1e-4, (output.sample_id, place, version)


def test_memory_is_released_and_taken_back(demo: Path, servers: list[str]) -> None:
    """As around training on shared GPUs. A server without one takes the calls, and would end over one that is out of order."""
    model = str(demo / "model")
    with engine_of(model, servers, "tensor", colocated=True) as engine:
        assert engine.fleet is not None
        engine.update_weights(weights(model, 1.0), 1)
        before = engine.generate(REQUESTS[:2], GREEDY)
        for version in (2, 3):
            engine.release_memory()
            assert engine.weight_version == -1
            engine.update_weights(weights(model, 1.0), version)
            after = engine.generate(REQUESTS[:2], GREEDY)
            assert [o.tokens for o in after] == [o.tokens for o in before] and set(after[0].weight_versions) == {version}
        assert engine.fleet.evictions == 0

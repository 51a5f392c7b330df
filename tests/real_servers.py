"""What tests with real servers of every kind share: weights of a version, requests in the background,
and a judge of tokens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.served import ServedEngine

EXACT = 1e-4  # largest difference between log-probs of a server and of transformers


def weights(model: str, factor: float) -> Iterator[tuple[str, Tensor]]:
    return iter(
        (name, tensor * factor)
        for name, tensor in load_file(Path(model) / "model.safetensors").items()
    )


def network(model: str, factor: float) -> torch.nn.Module:
    """The network of `weights`; not loaded by name, as transformers has other names for experts."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(factor)
    return found


def assert_versions_tell_the_weights(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[GenerateOutput],
    networks: dict[int, torch.nn.Module],
) -> None:
    """Every token has the log-prob of the network of its version, and versions never fall."""
    for request, output in zip(requests, outputs, strict=True):
        assert list(output.weight_versions) == sorted(output.weight_versions) and len(
            output.tokens
        ) == len(output.weight_versions)
        ids = torch.tensor([[*request.prompt_tokens, *output.tokens]])
        with torch.no_grad():
            own = {
                v: networks[v](ids).logits[0, len(request.prompt_tokens) - 1 : -1].log_softmax(-1)
                for v in set(output.weight_versions)
            }
        for place, (token, version) in enumerate(
            zip(output.tokens, output.weight_versions, strict=True)
        ):
            assert abs(output.log_probs[place] - float(own[version][place, token])) < EXACT, (
                output.sample_id,
                place,
                version,
            )


@contextlib.contextmanager
def in_background(
    engine: ServedEngine, requests: Sequence[GenerateRequest], sampling: SamplingParams
) -> Iterator[list[GenerateOutput]]:
    """Outputs, which are there when the context ends."""
    outputs: list[GenerateOutput] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(engine.generate(requests, sampling)), daemon=True
    )
    thread.start()
    yield outputs
    thread.join(120)
    assert not thread.is_alive(), "requests hang"


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s: {what}"
        time.sleep(0.05)

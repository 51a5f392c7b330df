"""Shared by the Tinker examples: connection, prompts, a reward without data, and sampling.

    python scripts/make_demo.py --output-dir outputs/demo
    python -m slime_like.tinker --hf-checkpoint outputs/demo/model
    python examples/tinker/grpo.py --model outputs/demo/model

The reward is the fraction of vowels in the response. The task is a toy, but the loops are those of
real training.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

PROMPTS = ("sing a song", "say something", "speak", "tell me", "hum", "go on", "again", "what now")
VOWELS = set("aeiou")


@dataclass(frozen=True)
class Response:
    """A sampled response."""

    tokens: list[int]  # prompt and response
    start: int  # index of the first response token
    log_probs: list[float]  # of the response tokens, from the sampler
    reward: float

    def inputs(self) -> types.ModelInput:
        """All tokens except the last: position i predicts token i + 1."""
        return types.ModelInput.from_ints(self.tokens[:-1])

    def spread(self, values: Any) -> np.ndarray[Any, Any]:
        """Place per-token values of the response at the positions that predict them; 0
        elsewhere."""
        whole = np.zeros(len(self.tokens) - 1, dtype=np.float32)
        whole[self.start - 1 :] = values
        return whole


def json_lines(path: Path | str) -> list[Any]:
    """The values of a file of JSON lines. `str.splitlines` would also split within strings that
    have U+2028 or U+0085."""
    with Path(path).open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def settings(**defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in {
        "base_url": "http://127.0.0.1:8000",
        "model": "outputs/demo/model",
        "seed": 0,
        **defaults,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def connect(options: argparse.Namespace) -> tinker.ServiceClient:
    """A server on this machine without --api-key-file takes any key."""
    return tinker.ServiceClient(base_url=options.base_url, api_key="tml-local-example")


def reward_of(text: str) -> float:
    return sum(character in VOWELS for character in text) / max(1, len(text))


def sample(
    training: tinker.TrainingClient, tokenizer: Any, *, group: int, seed: int, max_tokens: int = 8
) -> list[list[Response]]:
    """Sample a group of responses per prompt from the current weights."""
    sampler = training.save_weights_and_get_sampling_client().result()
    prompts = [
        tokenizer.encode(f"<|user|>{text}<|assistant|>", add_special_tokens=False)
        for text in PROMPTS
    ]
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            group,
            types.SamplingParams(max_tokens=max_tokens, seed=1000 * seed + i, stop=[]),
        )
        for i, prompt in enumerate(prompts)
    ]
    groups = []
    for prompt, future in zip(prompts, futures, strict=True):
        group_of = []
        for sequence in future.result().sequences:
            written = list(sequence.tokens)
            reward = reward_of(tokenizer.decode(written))
            group_of.append(
                Response([*prompt, *written], len(prompt), list(sequence.logprobs), reward)
            )
        groups.append(group_of)
    return groups


def mean_reward(groups: list[list[Response]]) -> float:
    return float(np.mean([response.reward for group in groups for response in group]))

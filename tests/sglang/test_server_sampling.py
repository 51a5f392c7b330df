"""The Tinker API with real SGLang servers as its sampler: the unmodified SDK gets what transformers
computes from the same snapshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.api_server import ApiServer, batch, sampler_folder
from tests.sglang.conftest import Servers

PROMPT = [40, 50, 60, 45, 52]
EXACT = 2e-4


def greedy(model: torch.nn.Module, count: int) -> tuple[list[int], list[float], list[float]]:
    """(tokens, their log-probs, log-probs of the prompt but its first token)."""
    row = list(PROMPT)
    scores = []
    with torch.no_grad():
        for _ in range(count):
            log_probs = model(torch.tensor([row])).logits[0].log_softmax(-1)
            row.append(int(log_probs[-1].argmax()))
            scores.append(float(log_probs[-1, row[-1]]))
        prompt = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return (
        row[len(PROMPT) :],
        scores,
        [float(prompt[i, token]) for i, token in enumerate(PROMPT[1:])],
    )


def sample(
    client: tinker.SamplingClient, count: int = 1, **settings: object
) -> types.SampleResponse:
    wanted = types.SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "stop": [], **settings})  # type: ignore[arg-type]
    return client.sample(
        types.ModelInput.from_ints(PROMPT), count, wanted, include_prompt_logprobs=True
    ).result()


def assert_of(response: types.SampleResponse, folder: Path) -> list[int]:
    """Greedy tokens, log-probs and prompt log-probs are those of the weights in the folder."""
    tokens, scores, prompt = greedy(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 6
    )
    (sequence,) = response.sequences
    assert list(sequence.tokens) == tokens and sequence.stop_reason == "length"
    assert list(sequence.logprobs or []) == pytest.approx(scores, abs=EXACT)
    found = response.prompt_logprobs
    assert (
        found is not None
        and (found[0] is None or np.isnan(found[0]))
        and list(found[1:]) == pytest.approx(prompt, abs=EXACT)
    )
    return tokens


def test_snapshots_of_several_clients(demo: Path, servers: Servers, tmp_path: Path) -> None:
    flags = ("--rollout-engine", "sglang", *servers.flags_without_router)
    with ApiServer(demo / "model", tmp_path, *flags) as server:
        service = server.client()
        base = service.create_sampling_client(base_model=str(server.model))
        before = assert_of(sample(base), server.model)
        training = service.create_lora_training_client(
            str(server.model), rank=4, seed=1, train_unembed=False
        ).result()
        training.forward_backward(batch(8, 3), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        path = training.save_weights_for_sampler("trained").result().path
        trained = service.create_sampling_client(model_path=path)
        after = assert_of(sample(trained), sampler_folder(server, path))
        assert after != before, "another snapshot, so that it can be seen which one answers"
        training.forward_backward(batch(8, 4), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        pending = [
            client.sample(
                types.ModelInput.from_ints(PROMPT),
                1,
                types.SamplingParams(temperature=0.0, max_tokens=6, stop=[]),
            )
            for client in (base, trained) * 3
        ]
        assert [list(p.result().sequences[0].tokens) for p in pending] == [before, after] * 3, (
            "each its own, and fixed"
        )

        many = sample(trained, 3, temperature=1.0)
        assert [len(s.tokens) for s in many.sequences] == [6] * 3
        assert len({tuple(s.tokens) for s in sample(trained, 8, temperature=2.0).sequences}) > 1
        assert list(sample(trained, temperature=3.0, top_k=1).sequences[0].tokens) == after
        assert list(sample(trained, temperature=3.0, top_p=1e-6).sequences[0].tokens) == after
        ended = sample(trained, stop=[after[1]]).sequences[0]
        first = after.index(after[1])
        assert (list(ended.tokens), ended.stop_reason) == (after[: first + 1], "stop")
        text = AutoTokenizer.from_pretrained(server.model).decode(after[1:2])
        if text:
            cut = sample(trained, stop=[text]).sequences[0]
            assert (
                cut.stop_reason == "stop"
                and list(cut.tokens) == after[: len(cut.tokens)]
                and len(cut.tokens) <= 2
            )
        with pytest.raises(
            tinker.RequestFailedError, match="sglang-enable-deterministic-inference"
        ):
            sample(trained, seed=7)
        assert training.forward(batch(2), "cross_entropy").result().metrics["loss:sum"], (
            "the models are as they were"
        )

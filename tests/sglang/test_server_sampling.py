"""The Tinker API with real SGLang servers as its sampler: the unmodified SDK gets what transformers
computes from the same snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_tiny_model import make_tiny_model
from slime_like.images.encoded import EncodedImage
from tests.e2e.api_server import ApiServer, batch, policy, sampler_folder
from tests.sglang.conftest import PYTHON, Servers
from tests.vision import picture, processor_of

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


def trainers_scores(training: tinker.TrainingClient, row: list[int]) -> list[float]:
    """Its log-probs of a row but for the first token."""
    targets = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs=targets,  # type: ignore[arg-type]
    )
    (output,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    return [float(value) for value in output["logprobs"].data]


def test_adapters_of_several_clients_beside_the_base(tmp_path: Path) -> None:
    """On a server that the server starts, which holds two at a time: of other ranks and modules, the
    SDK's defaults with a tied output layer among them. Each is what the trainer computes."""
    model = tmp_path / "model"
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    make_tiny_model("Qwen3-", model, **sizes)
    flags = ["--rollout-engine", "sglang", "--rollout-num-gpus", "1", "--no-sglang-router"]
    flags += ["--sglang-python", PYTHON, "--sglang-max-running-requests", "16"]
    flags += ["--lora-sync", "adapter", "--max-adapter-rank", "8", "--max-sampler-adapters", "2"]
    with ApiServer(model, tmp_path / "server", *flags) as server:
        clients = [server.client(), server.client()]
        with pytest.raises(tinker.RequestFailedError, match="rank 9 is above 8"):
            policy(clients[0], server, rank=9)
        models = [
            policy(clients[0], server, rank=4, seed=1),
            policy(clients[1], server, rank=8, seed=2, train_mlp=False, train_unembed=False),
            policy(clients[1], server, rank=2, seed=3, train_attn=False, train_unembed=False),
        ]
        for number, training in enumerate(models):
            for step in range(2):
                training.forward_backward(batch(4, 10 * number + step), "cross_entropy")
                training.optim_step(types.AdamParams(learning_rate=0.02)).result()
        samplers = [training.save_weights_and_get_sampling_client() for training in models]
        base = clients[0].create_sampling_client(base_model=str(model))
        prompt = types.ModelInput.from_ints(PROMPT)
        wanted = types.SamplingParams(temperature=1.0, max_tokens=6, stop=[])
        futures = [
            sampler.sample(prompt, 2, wanted, include_prompt_logprobs=True)
            for _ in range(2)
            for sampler in samplers
        ]
        for number, future in enumerate(futures):
            response = future.result()
            training = models[number % 3]
            own = trainers_scores(training, PROMPT)
            assert response.prompt_logprobs is not None
            assert list(response.prompt_logprobs[1:]) == pytest.approx(own, abs=EXACT)
            for sequence in response.sequences:
                row = [*PROMPT, *sequence.tokens]
                own = trainers_scores(training, row)[len(PROMPT) - 1 :]
                assert list(sequence.logprobs or []) == pytest.approx(own, abs=EXACT)
        assert_of(sample(base), model)
        whole = policy(clients[0], server, rank=0)
        with pytest.raises(tinker.RequestFailedError, match="train an adapter"):
            whole.save_weights_for_sampler("whole").result()


def test_images(seeing: Path, seeing_servers: Servers, tmp_path: Path) -> None:
    """In prompts and datums: what a server samples about a picture is what the trainer computes."""
    model = seeing / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = processor_of(model, tokenizer)
    file = EncodedImage(picture(1, 37, 50))
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(processor.written(rendered), add_special_tokens=False)["input_ids"]
    place = ids.index(processor.rule.image_token)
    (count,) = processor.token_counts([file])
    image = types.ImageChunk(data=file.data, format="png", expected_tokens=count)
    before, after = (
        types.EncodedTextChunk(tokens=part) for part in (ids[:place], ids[place + 1 :])
    )
    flags = ("--rollout-engine", "sglang", "--serve-images", *seeing_servers.flags_without_router)
    with ApiServer(model, tmp_path, *flags) as server:
        training = policy(server.client(), server, rank=0)
        for step in range(2):
            training.forward_backward(batch(4, step), "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampler = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput(chunks=[before, image, after])
        wanted = types.SamplingParams(temperature=1.0, max_tokens=5, stop=[])
        for sequence in sampler.sample(prompt, 2, wanted).result().sequences:
            tail = types.EncodedTextChunk(tokens=[*after.tokens, *sequence.tokens[:-1]])
            start = len(before.tokens) + count + len(after.tokens) - 1
            targets = [5] * start + list(sequence.tokens)
            weights = [0.0] * start + [1.0] * len(sequence.tokens)
            datum = types.Datum(
                model_input=types.ModelInput(chunks=[before, image, tail]),
                loss_fn_inputs={"target_tokens": targets, "weights": weights},  # type: ignore[dict-item]
            )
            (output,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
            own = [float(value) for value in output["logprobs"].data][start:]
            assert list(sequence.logprobs or []) == pytest.approx(own, abs=EXACT)

"""Adapters that are sampled from beside the base model (--lora-sync adapter), through the unmodified
SDK: several clients at once, each with its own weights, which the trainer agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.api_server import ApiServer, batch, policy, sampler_folder
from tests.e2e.helpers import Workspace, make_workspace
from tests.e2e.test_server_lora import log_probs

ADAM = types.AdamParams(learning_rate=1e-2)
ROW = [10, 20, 30, 40, 50, 60]
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(ROW[:-1]),
    loss_fn_inputs={"target_tokens": ROW[1:], "weights": [1.0] * 5},  # type: ignore[arg-type]
)
UNMERGED = ("--lora-sync", "adapter")
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "dp2": ("--use-distributed-optimizer",),
    "experts ep2": ("--expert-model-parallel-size", "2"),
    "experts tp2 ep2": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"),
    ),
}
PARAMS = types.SamplingParams(max_tokens=8, seed=3, temperature=0.8)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("work"))


def train(training: tinker.TrainingClient, seed: int, steps: int = 2) -> None:
    for step in range(steps):
        training.forward_backward(batch(3, 10 * seed + step), "cross_entropy")
        training.optim_step(ADAM).result()


def scores_of(training: tinker.TrainingClient, row: list[int]) -> torch.Tensor:
    """The trainer's log-probs of a row but for its first token."""
    targets = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs=targets,  # type: ignore[arg-type]
    )
    (output,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    return output["logprobs"].to_torch()


def check_agreement(training: tinker.TrainingClient, answer: Any) -> torch.Tensor:
    """Of the trainer, the prompt's log-probs, and those of the sampled tokens at temperature 1."""
    prompt = torch.tensor(answer.prompt_logprobs[1:])
    torch.testing.assert_close(prompt, scores_of(training, ROW), atol=1e-5, rtol=1e-5)
    for sequence in answer.sequences:
        own = scores_of(training, [*ROW, *sequence.tokens])[len(ROW) - 1 :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), own, atol=1e-5, rtol=1e-5)
    return prompt


def test_several_are_sampled_from_at_once(work: Workspace, tmp_path: Path) -> None:
    """Of two sessions, of other ranks and modules, the SDK's defaults with a tied output layer among
    them, beside a model of all weights and the base model."""
    greedy = types.SamplingParams(max_tokens=8, seed=3, temperature=1.0)
    prompt = types.ModelInput.from_ints(ROW)
    with ApiServer(work.model, tmp_path, *UNMERGED, "--max-models", "10") as server:
        first, second = server.client(), server.client()
        models = [
            policy(first, server, rank=4, seed=1),
            policy(second, server, rank=8, seed=2, train_mlp=False, train_unembed=False),
            policy(second, server, rank=0),
        ]
        for seed, model in enumerate(models):
            train(model, seed)
        samplers = [model.save_weights_and_get_sampling_client() for model in models]
        base = first.create_sampling_client(base_model=str(server.model))
        untouched = torch.tensor(base.compute_logprobs(prompt).result()[1:])
        futures = [
            sampler.sample(prompt, 2, greedy, include_prompt_logprobs=True)
            for sampler in (*samplers, base)
            for _ in range(3)
        ]
        answers = [future.result() for future in futures]
        found = []
        for place, model in enumerate(models):
            for answer in answers[3 * place : 3 * place + 3]:
                found.append(check_agreement(model, answer))
        for answer in answers[9:]:
            torch.testing.assert_close(
                torch.tensor(answer.prompt_logprobs[1:]), untouched, atol=1e-6, rtol=1e-6
            )
        distinct = [*found[::3], untouched]
        for i, one in enumerate(distinct):
            assert not any(torch.allclose(one, other, atol=1e-3) for other in distinct[:i])

        top = samplers[0].sample(
            prompt, 1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=3
        )
        best = [row[0][1] for row in top.result().topk_prompt_logprobs[1:]]
        assert torch.all(torch.tensor(best) >= found[0] - 1e-5)

        before = samplers[0].compute_logprobs(prompt).result()[1:]
        train(models[0], 7)
        assert samplers[0].compute_logprobs(prompt).result()[1:] == before, "snapshots are fixed"

        snapshots = server.folder / "server" / "snapshots"
        kinds = sorted(
            "adapter" if (folder / "adapter_config.json").exists() else "whole"
            for folder in snapshots.iterdir()
        )
        assert kinds == ["adapter", "adapter", "whole"]
        assert "Traceback" not in server.log(), server.log()


@pytest.mark.extended
def test_inflight_weights_restarts_and_peft(work: Workspace, tmp_path: Path) -> None:
    """A later inflight save reaches earlier sessions. A named checkpoint is a folder of PEFT's format;
    a server that merges, started on the same folder, samples from it as well."""
    prompt = types.ModelInput.from_ints(ROW)
    with ApiServer(work.model, tmp_path, *UNMERGED) as server:
        client = server.client()
        training = policy(client, server, rank=4, seed=1)
        inflight = training.save_weights_and_get_sampling_client(kind="inflight")
        train(training, 1)
        training.save_weights_and_get_sampling_client(kind="inflight")
        answer = inflight.sample(prompt, 1, PARAMS, include_prompt_logprobs=True).result()
        torch.testing.assert_close(
            torch.tensor(answer.prompt_logprobs[1:]),
            scores_of(training, ROW),
            atol=1e-5,
            rtol=1e-5,
        )
        path = training.save_weights_for_sampler("end").result().path
        folder = sampler_folder(server, path)
        assert (
            sum(file.stat().st_size for file in folder.iterdir())
            < (work.model / "model.safetensors").stat().st_size
        )
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32), str(folder)
        )
        with torch.no_grad():
            own = log_probs(model, DATUM)
        torch.testing.assert_close(own, scores_of(training, ROW), atol=1e-5, rtol=1e-5)

        server.stop()
        server.flags = ()
        server.start()
        client = server.client()
        sampler = client.create_sampling_client(model_path=path)
        found = torch.tensor(sampler.compute_logprobs(prompt).result()[1:])
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
        merged = policy(client, server, rank=4, seed=1)
        end = merged.save_weights_for_sampler("end").result().path
        assert (sampler_folder(server, end) / "model.safetensors").exists()


def sampled(server: ApiServer, *, experts: bool) -> list[Any]:
    """Prompt log-probs, tokens and their log-probs, of three requests each of three adapters and of
    the base model, sent at once. The server's own trainer agrees with them."""
    client = server.client()
    settings: list[dict[str, Any]] = [
        {"rank": 4, "seed": 1, "train_mlp": not experts},
        {"rank": 8, "seed": 2, "train_mlp": False, "train_unembed": False},
        {"rank": 2, "seed": 3, "train_mlp": False},
    ]
    models = [policy(client, server, **each) for each in settings]
    for seed, model in enumerate(models):
        train(model, seed)
    samplers = [model.save_weights_and_get_sampling_client() for model in models]
    samplers.append(client.create_sampling_client(base_model=str(server.model)))
    greedy, random = (types.SamplingParams(max_tokens=6, seed=3, temperature=t) for t in (0.0, 1.0))
    prompt = types.ModelInput.from_ints(ROW)
    futures = [
        [
            sampler.sample(prompt, count, params, include_prompt_logprobs=True)
            for count, params in ((1, random), (3, random), (1, greedy))
        ]
        for sampler in samplers
    ]
    answers = [[future.result() for future in each] for each in futures]
    for model, each in zip(models, answers, strict=False):
        for answer in each[:2]:
            check_agreement(model, answer)
    return [
        (answer.prompt_logprobs[1:], [(s.tokens, s.logprobs) for s in answer.sequences])
        for each in answers
        for answer in each
    ]


@pytest.fixture(scope="module")
def alone(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Any]]:
    """Of one process: dense, and with experts."""
    found = {}
    for experts, model in ((False, work.model), (True, work.expert_model)):
        with ApiServer(model, tmp_path_factory.mktemp("alone"), *UNMERGED) as server:
            found[experts] = sampled(server, experts=experts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_sample_alike(
    work: Workspace, tmp_path: Path, alone: dict[bool, list[Any]], layout: str
) -> None:
    """Several adapters in one batch: factors are gathered of the trainer's ranks, and samples drawn on
    all of them."""
    experts = layout.startswith("experts")
    model = work.expert_model if experts else work.model
    with ApiServer(model, tmp_path, *UNMERGED, *LAYOUTS[layout], ranks=2) as server:
        found = sampled(server, experts=experts)
        assert "Traceback" not in server.log(), server.log()
        batches = (server.folder / "server" / "server.log").read_text()
        assert "executed alone" not in batches
    for (prompt, sequences), (own_prompt, own) in zip(found, alone[experts], strict=True):
        torch.testing.assert_close(
            torch.tensor(prompt), torch.tensor(own_prompt), atol=1e-4, rtol=1e-4
        )
        for (tokens, scores), (own_tokens, own_scores) in zip(sequences, own, strict=True):
            assert tokens == own_tokens
            torch.testing.assert_close(
                torch.tensor(scores), torch.tensor(own_scores), atol=1e-4, rtol=1e-4
            )

"""Adapters through the unmodified SDK: several on one base, each with its own optimizer, saved,
loaded, merged for sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from slime_like.megatron.lora.adapter import first_factor
from slime_like.megatron.lora.targets import Factor
from tests.e2e.api_server import ApiServer, batch, policy, sampler_folder, weights_of
from tests.e2e.helpers import Workspace, make_workspace

pytestmark = pytest.mark.extended

ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=5.0)
RANK, SEED = 4, 7


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def server(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(
        work.model,
        tmp_path_factory.mktemp("server"),
        "--max-models",
        "10",
        "--max-resident-adapters",
        "1",
    ) as running:
        yield running


def adapter(
    server: ApiServer, client: tinker.ServiceClient, seed: int, **settings: Any
) -> tinker.TrainingClient:
    return client.create_lora_training_client(
        str(server.model), rank=RANK, seed=seed, **settings
    ).result()


def reference(work: Workspace, seed: int) -> tuple[Any, list[torch.Tensor]]:
    """transformers' model with attention adapters of alpha 32 on hooks."""
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).requires_grad_(
        False
    )
    leaves = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out, fan_in = module.weight.shape
            a = first_factor(
                Factor(f"{name}.lora_A", (RANK, fan_in), None, None), seed
            ).requires_grad_()
            b = torch.zeros(out, RANK).requires_grad_()
            module.register_forward_hook(
                lambda _, x, y, a=a, b=b: y + 32 / RANK * (x[0] @ a.t() @ b.t())
            )
            leaves += [a, b]
    return model, leaves


def log_probs(model: Any, one: types.Datum) -> torch.Tensor:
    logits = model(torch.tensor([one.model_input.to_ints()])).logits[0]
    return logits.log_softmax(-1).gather(
        1, torch.tensor(one.loss_fn_inputs["target_tokens"].data)[:, None]
    )[:, 0]


def scores(training: tinker.TrainingClient, data: list[types.Datum]) -> list[torch.Tensor]:
    return [
        o["logprobs"].to_torch()
        for o in training.forward(data, "cross_entropy").result().loss_fn_outputs
    ]


@pytest.mark.extended
def test_adapters_on_one_base(server: ApiServer, work: Workspace) -> None:
    """One adapter trains as plain torch does, while another, and a model of all weights, stay as
    they are."""
    client = server.client()
    first, other = (
        adapter(server, client, seed, train_mlp=False, train_unembed=False) for seed in (SEED, 8)
    )
    full_run = policy(client, server)
    info = first.get_info()
    assert info.is_lora is True and info.lora_rank == RANK
    data = batch(2, 50)
    before = scores(other, data)
    for a, b in zip(before, scores(full_run, data), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    model, leaves = reference(work, SEED)
    adam = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(3):
        parts = batch(3, 2 * step), batch(2, 2 * step + 1)
        for part in parts:
            first.forward_backward(part, "cross_entropy")
        done = first.optim_step(ADAM)
        for one in [*parts[0], *parts[1]]:
            (
                -(log_probs(model, one) * torch.tensor(one.loss_fn_inputs["weights"].data)).sum()
            ).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 5.0)
        assert done.result().metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        for found, one in zip(scores(first, data), data, strict=True):
            torch.testing.assert_close(found, log_probs(model, one), atol=2e-3, rtol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, scores(other, data), strict=True)), (
        "the other adapter is another's"
    )

    path = first.save_state("middle").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == RANK
    ends = []
    for one_client in (first, resumed):
        one_client.forward_backward(batch(3, 20), "cross_entropy")
        one_client.optim_step(ADAM).result()
        ends.append(
            weights_of(
                sampler_folder(server, one_client.save_weights_for_sampler("end").result().path)
            )
        )
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]), (
        "adapter and optimizer were restored"
    )
    base = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).state_dict()
    assert {n for n, t in ends[0].items() if not torch.equal(t, base[n])} == {
        n for n in ends[0] if ".self_attn." in n and "_proj" in n
    }


def test_the_defaults_train_the_output_layer_of_a_tied_model(
    server: ApiServer, work: Workspace
) -> None:
    """The SDK asks for train_unembed. The embedding stays as it is, samplers get both, and other
    samplers the tied model."""
    client = server.client()
    training = client.create_lora_training_client(str(server.model), rank=RANK, seed=SEED).result()
    unchanged = client.create_sampling_client(base_model=str(server.model))
    (one,) = datum = batch(1, 60)
    prompt = types.ModelInput.from_ints(
        [*one.model_input.to_ints(), one.loss_fn_inputs["target_tokens"].data[-1]]
    )
    before = unchanged.compute_logprobs(prompt).result()[1:]
    for _ in range(3):
        training.forward_backward(datum, "cross_entropy")
        training.optim_step(ADAM).result()
    sampler = training.save_weights_and_get_sampling_client()
    (now,) = scores(training, datum)
    torch.testing.assert_close(
        torch.tensor(sampler.compute_logprobs(prompt).result()[1:]), now, atol=1e-5, rtol=1e-5
    )
    assert unchanged.compute_logprobs(prompt).result()[1:] == before

    folder = sampler_folder(server, training.save_weights_for_sampler("end").result().path)
    end, base = (
        weights_of(folder),
        AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).state_dict(),
    )
    assert torch.equal(end["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(end["lm_head.weight"], base["lm_head.weight"])
    torch.testing.assert_close(
        log_probs(AutoModelForCausalLM.from_pretrained(folder), one), now, atol=1e-5, rtol=1e-5
    )

"""Several ranks, and processes that die: the same gradient in every layout; what is lost is said,
what is not continues."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.api_server import (
    ApiServer,
    batch,
    critic,
    datum,
    policy,
    sampler_folder,
    tokens,
    weights_of,
)
from tests.e2e.helpers import Workspace
from tests.e2e.programs import ENVIRONMENT

LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "dp2": ("--use-distributed-optimizer",),
    "cp2": ("--context-parallel-size", "2"),
}


def sequence_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
    """Needs the log-probs of a whole datum."""
    mean = logprobs.mean()
    loss = ((logprobs - mean.detach()) * weights).sum() + (mean + 3).square()
    return loss, {"custom/mean:mean": mean, "custom/tokens:sum": (weights != 9).float().sum()}


def run(server: ApiServer) -> dict[str, Any]:
    """Two steps of a policy, of batches that leave a data-parallel rank without a sample and that
    need several micro-batches, and one of a custom loss; two critics'; a checkpoint; samples."""
    client = server.client()
    training = policy(client, server)
    norms, losses, scores = [], [], []
    for chunks in ([batch(5, 0), batch(1, 1)], [batch(4, 2)]):
        futures = [training.forward_backward(chunk, "cross_entropy") for chunk in chunks]
        step = training.optim_step(types.AdamParams(learning_rate=1e-3))
        norms.append(step.result().metrics["grad_norm"])
        losses += [future.result().metrics["loss:sum"] for future in futures]
        scores += [
            out["logprobs"].to_torch()
            for future in futures
            for out in future.result().loss_fn_outputs
        ]
    handle = client.create_custom_loss(sequence_loss, {"logprobs": 1, "weights": 1}).result()
    for chunk in (batch(5, 0), batch(1, 1)):
        metrics = training.forward_backward_custom(chunk, handle).result().metrics
        names = ("loss:sum", "surrogate_loss:sum", "custom/mean:mean", "custom/tokens:sum")
        losses += [metrics[name] for name in names]
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    norms.append(step.result().metrics["grad_norm"])
    adapters = [
        client.create_lora_training_client(
            str(server.model), rank=4, seed=s, train_unembed=False
        ).result()
        for s in (1, 2)
    ]
    for chunks in ([batch(5, 0), batch(1, 1)], [batch(3, 5), batch(3, 6)]):
        # the adapters take turns on the device, between passes whose gradients wait for the step
        for chunk in chunks:
            losses += [
                adapter.forward_backward(chunk, "cross_entropy").result().metrics["loss:sum"]
                for adapter in adapters
            ]
        steps = [adapter.optim_step(types.AdamParams(learning_rate=1e-2)) for adapter in adapters]
        norms += [step.result().metrics["grad_norm"] for step in steps]
    merged = weights_of(
        sampler_folder(server, adapters[1].save_weights_for_sampler("adapter").result().path)
    )
    targets = {"values": np.zeros(7, np.float32), "returns": np.ones(7, np.float32)}
    asked = [
        types.Datum(model_input=types.ModelInput.from_ints(tokens(7, 1)), loss_fn_inputs=targets)
    ]
    for judge in (critic(client, server), critic(client, server, rank=4)):
        for _ in range(2):  # the first step moves the head, and the second what is below it
            losses.append(judge.forward_backward(asked, "ppo_critic").result().metrics["loss:sum"])
            norms.append(
                judge.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"]
            )
    path = training.save_state("state").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    losses.append(resumed.forward([datum(6, 3)], "cross_entropy").result().metrics["loss:sum"])
    weights = weights_of(
        sampler_folder(server, training.save_weights_for_sampler("end").result().path)
    )
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([9, 8, 7])
    answer = sampler.sample(
        prompt, 3, types.SamplingParams(max_tokens=4, seed=5), include_prompt_logprobs=True
    ).result()
    weights |= {f"adapter {name}": tensor for name, tensor in merged.items()}
    return {
        "norms": norms,
        "losses": losses,
        "scores": scores,
        "weights": weights,
        "samples": [list(s.tokens) for s in answer.sequences],
    }


@pytest.fixture(scope="module")
def alone(api: ApiServer) -> dict[str, Any]:
    return run(api)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_gradient(
    layout: str, alone: dict[str, Any], work: Workspace, tmp_path: Path
) -> None:
    with ApiServer(
        work.model,
        tmp_path,
        *LAYOUTS[layout],
        "--max-tokens-per-gpu",
        "24",
        "--max-resident-adapters",
        "1",
        ranks=2,
    ) as server:
        found = run(server)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4, abs=1e-4)
    for one, other in zip(found["scores"], alone["scores"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, atol=2e-4, rtol=1e-3)
    assert found["samples"] == alone["samples"]


@pytest.mark.slow
def test_the_api_process_may_die(work: Workspace, tmp_path: Path) -> None:
    """It is started again, reads its journal, and asks the workers: models, results and the order
    of requests are as before."""
    with ApiServer(work.model, tmp_path) as server:
        training = policy(server.client(), server)
        first = training.forward_backward(batch(3), "cross_entropy").result().metrics["loss:sum"]
        for _ in range(2):
            before = server.api_pid
            os.kill(before, signal.SIGKILL)
            deadline = time.monotonic() + 200
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError, ValueError):
                    if server.api_pid != before:
                        break
                time.sleep(0.1)
            server.wait_until_up()
            assert training.forward(batch(3), "cross_entropy").result().metrics["loss:sum"] == first
        norm = training.optim_step(types.AdamParams()).result().metrics["grad_norm"]
        other = policy(server.client(), server)
        other.forward_backward(batch(3), "cross_entropy")
        assert other.optim_step(types.AdamParams()).result().metrics["grad_norm"] == norm, (
            "gradients lived through it"
        )


@pytest.mark.slow
def test_the_workers_may_die(work: Workspace, tmp_path: Path) -> None:
    """The caller hears which model is lost and where to continue; new workers come to the same API
    process."""
    with ApiServer(work.model, tmp_path, "--worker-restart-s", "600", ranks=2) as server:
        client = server.client()
        training = policy(client, server)
        training.forward_backward(batch(3), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        path = training.save_state("good").result().path
        expected = training.forward(batch(2), "cross_entropy").result().metrics["loss:sum"]
        ranks = [
            p
            for p in psutil.Process(server.process.pid).children(recursive=True)
            if "slime_like.tinker" in p.cmdline() and p.pid != server.api_pid
        ]
        assert len(ranks) == 2
        ranks[-1].kill()
        time.sleep(1.0)
        with pytest.raises(tinker.RequestFailedError, match=r"workers have ended|is lost"):
            training.forward(batch(2), "cross_entropy").result()
        with pytest.raises(
            tinker.RequestFailedError, match=rf"continue from its newest checkpoint, {path}"
        ):
            training.forward(batch(2), "cross_entropy").result()
        server.process.wait(timeout=200)
        api = server.api_pid
        server.start()
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward(batch(2), "cross_entropy").result().metrics[
            "loss:sum"
        ] == pytest.approx(expected, rel=1e-6)
        assert server.api_pid == api, "the API process lived on"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_memory_of_one_rank(work: Workspace, tmp_path: Path, layout: str) -> None:
    """One of two ranks runs out of memory: the pass fails and says why, the other rank leaves the
    collective, and every model goes on."""
    exhausted = tmp_path / "exhausted"
    program = ("-m", "tests.e2e.exhausted_server")
    environment = {**ENVIRONMENT, "EXHAUSTED_RANK_FILE": str(exhausted)}
    with ApiServer(
        work.model, tmp_path, *LAYOUTS[layout], ranks=2, program=program, environment=environment
    ) as server:
        client = server.client()
        models = [policy(client, server) for _ in range(2)]
        for model in models:
            model.forward_backward(batch(3), "cross_entropy").result()
        for rank in ("1", "0"):
            exhausted.write_text(rank)
            with pytest.raises(tinker.RequestFailedError, match=f"rank {rank}: out of memory"):
                models[0].forward(batch(5), "cross_entropy").result()
            exhausted.unlink()
        norms = [m.optim_step(types.AdamParams()).result().metrics["grad_norm"] for m in models]
        assert norms[0] == norms[1] > 0, "nor is a gradient lost"
        losses = [
            model.forward_backward(batch(2), "cross_entropy").result().metrics["loss:sum"]
            for model in models
        ]
        assert losses[0] == losses[1]

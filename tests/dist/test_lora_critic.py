"""A critic that is an adapter: one process against plain autograd in float64, other layouts against
one process, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import megatron_patches

megatron_patches.apply()

from benchmarks.parity.ranks import run_ranks  # noqa: E402
from benchmarks.parity.steps import relative  # noqa: E402
from slime_like.cli.tiny_model import save_model  # noqa: E402
from slime_like.megatron.lora.base import VALUE_HEAD  # noqa: E402
from slime_like.tinker.worker_backend import ModelHost  # noqa: E402
from tests.dist import lora_critic_worker as worker  # noqa: E402
from tests.dist.float64 import EXACT  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")

WIRE = 1e-6  # values and losses are reported in float32
LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2",
    "TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "DP2": "",
    "DP2 distributed optimizer": "--use-distributed-optimizer",
    "CP2": "--context-parallel-size 2",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=32, num_layers=2)
    return str(folder)


def base_of(host: ModelHost) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": p
        for i, chunk in enumerate(worker.network_of(host).chunks)
        for name, p in chunk.named_parameters()
    }


def reference(folder: str, start: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """transformers' decoder in float64 with the factors on hooks, and these and the head as leaves."""
    from transformers import AutoModelForCausalLM

    whole = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        .double()
        .eval()
        .requires_grad_(False)
    )
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in start.items()}
    for name, module in whole.named_modules():
        if f"{name}.lora_A" in leaves:
            a, b = leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"]
            module.register_forward_hook(
                lambda _, x, y, a=a, b=b: y + 32 / 3 * (x[0] @ a.t() @ b.t())
            )  # type: ignore[misc]
    return whole.model, leaves


def loss_of(model: Any, leaves: dict[str, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """(the loss, the values of all tokens), with PPO's clipping written out."""
    total, reported = torch.zeros((), dtype=torch.float64), []
    for datum in worker.arrays(seed):
        hidden = model(torch.from_numpy(datum["tokens"])[None]).last_hidden_state[0]
        values = hidden @ leaves[f"{VALUE_HEAD}.weight"][0] + leaves[f"{VALUE_HEAD}.bias"]
        old, returns, weights = (
            torch.from_numpy(datum[n]).double() for n in ("values", "returns", "loss_weights")
        )
        clipped = old + (values - old).clamp(-worker.CLIP, worker.CLIP)
        total = (
            total
            + (
                weights * 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
            ).sum()
        )
        reported.append(values.detach())
    return total, torch.cat(reported)


def scores(reported: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(reported["scores"], "<f4").copy())


def test_one_process_takes_the_steps_of_plain_autograd(
    alone: Any, model: str, tmp_path: Path
) -> None:
    """Values, losses, gradients of every factor and of the head, norms, and all of them after two
    steps of AdamW on a clipped gradient. A new critic gives values of 0. The base stays as it is
    bit by bit, and so does the policy's adapter, which has its own gradients waiting."""
    host = worker.make_host(model, alone)
    assert scores(worker.critic_pass(host, 0, forward_only=True)).tolist() == [0.0] * sum(
        worker.LENGTHS
    )
    before = {name: p.clone() for name, p in base_of(host).items()}
    policy = [
        p.clone()
        for adapter in worker.network_of(host, "policy").adapters
        for p in adapter.parameters()
    ]
    worker.start_from_noise(host)
    its, leaves = reference(model, worker.whole(host))
    assert len(leaves) == 2 * 7 * 2 + 2
    found = worker.train(host)
    for name, p in base_of(host).items():
        assert (
            torch.equal(p, before[name]) and not p.requires_grad and not hasattr(p, "main_grad")
        ), name
    moved = [
        p for adapter in worker.network_of(host, "policy").adapters for p in adapter.parameters()
    ]
    assert not all(map(torch.equal, policy, moved)) and found["norms"][-1] > 0, (
        "the policy took one step, of its own gradients"
    )

    groups = [
        {"params": [t for n, t in leaves.items() if n != f"{VALUE_HEAD}.bias"], "weight_decay": 0.1}
    ]
    groups.append({"params": [leaves[f"{VALUE_HEAD}.bias"]], "weight_decay": 0.0})
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    for step in range(worker.STEPS):
        for part in range(2):
            loss, values = loss_of(its, leaves, 2 * step + part)
            loss.backward()
            reported = found["reported"][2 * step + part]
            torch.testing.assert_close(scores(reported).double(), values, rtol=WIRE, atol=WIRE)
            assert float(np.frombuffer(reported["losses"], "<f4").sum()) == pytest.approx(
                loss.item(), rel=WIRE
            )
        for name, leaf in leaves.items():
            assert (
                leaf.grad is not None
                and relative(found["gradients"][f"step {step} {name}"].double(), leaf.grad) < EXACT
            ), name
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        assert found["norms"][step] == pytest.approx(norm.item(), rel=EXACT) and norm > 1.0
        adam.step()
        adam.zero_grad()
    for name, leaf in leaves.items():
        assert relative(found["end"][name].double(), leaf.detach()) < EXACT, name


@pytest.mark.extended
@pytest.mark.parametrize(
    "names",
    [
        ("TP2 SP", "PP2", "DP2 distributed optimizer"),
        pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_layouts_train_the_critic_of_one_process(
    names: tuple[str, ...], alone: Any, model: str, tmp_path: Path
) -> None:
    """Values, gradients, norms and the end; and each layout loads the state that one process has
    saved."""
    host = worker.make_host(model, alone)
    worker.start_from_noise(host)
    one = worker.train(host)
    host.execute({"op": "save", "model": "critic", "folder": str(tmp_path / "state")})
    (tmp_path / "out").mkdir()
    arguments = {
        "model": model,
        "out": str(tmp_path / "out"),
        "state": str(tmp_path / "state"),
        "layouts": {n: LAYOUTS[n] for n in names},
    }
    run_ranks(
        "tests.dist.lora_critic_worker:layouts", 2, tmp_path / "ranks", arguments, timeout_s=240
    )
    for name in names:
        for rank in range(2):
            found = torch.load(tmp_path / "out" / f"{name}-{rank}.pt")
            assert found["norms"] == pytest.approx(one["norms"], rel=EXACT), name
            for key in ("gradients", "end"):
                assert found[key].keys() == one[key].keys()
                for parameter, tensor in one[key].items():
                    assert relative(found[key][parameter], tensor) < EXACT, (
                        name,
                        rank,
                        key,
                        parameter,
                    )
            for parameter, tensor in one["end"].items():
                assert torch.equal(found["loaded"][parameter], tensor), (
                    name,
                    rank,
                    "loaded",
                    parameter,
                )
            if rank == 0:
                for local, its in zip(found["reported"], one["reported"], strict=True):
                    assert relative(scores(local), scores(its)) < WIRE, (name, "values")

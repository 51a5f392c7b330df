"""Workers of tests/dist/test_lora_critic.py, on one process and on several: a LoRA critic that
shares the base model with the policy's adapter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arguments.parse import SERVER, parse_args
from benchmarks.bench_server import ADAM, command_of, message_of
from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, whole_gradients
from slime_like.megatron.lora import LoraNetwork
from slime_like.megatron.lora.base import VALUE_HEAD
from slime_like.megatron.lora.gather import gather_factors, set_factors
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.tinker.factory import make_model_host
from slime_like.tinker.losses import CRITIC_LOSS
from slime_like.tinker.worker_backend import ModelHost
from tests.dist.float64 import WithoutFloat32, precise

STEPS = 2
LENGTHS = (
    9,
    4,
    7,
    12,
    5,
)  # of the datums of a pass: an odd number, so that data-parallel ranks have different ones
CLIP = 0.05
ADAPTER = {"rank": 3, "seed": 5, "train_attn": True, "train_mlp": True, "train_unembed": False}


def make_host(folder: str, layout: ParallelLayout, flags: str = "") -> ModelHost:
    """With a policy and its critic, adapters both."""
    host = make_model_host(
        precise(
            parse_args(["--hf-checkpoint", folder, *flags.split()], dist.get_world_size(), SERVER)
        ),
        layout,
    )
    for model in ("policy", "critic"):
        host.execute(
            {"op": "create", "model": model, "role": model, "policy": None, "lora": ADAPTER}
        )
    return host


def network_of(host: ModelHost, model: str = "critic") -> LoraNetwork:
    network = host.pool.network(model)
    assert isinstance(network, LoraNetwork)
    return network


def arrays(seed: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Tokens, old values, returns and weights of the datums of one pass."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(5, 90, n),
            "values": rng.normal(size=n).astype("<f4") * np.float32(0.1),
            "returns": rng.normal(size=n).astype("<f4"),
            "loss_weights": rng.random(n).astype("<f4"),
        }
        for n in LENGTHS
    ]


def critic_command(seed: int) -> dict[str, Any]:
    """The workers' input for a critic's pass, but for the model."""
    datums = arrays(seed)
    return {
        "forward_only": False,
        "lengths": list(LENGTHS),
        "tokens": b"".join(d["tokens"].astype("<i8").tobytes() for d in datums),
        "fields": {
            name: b"".join(d[name].tobytes() for d in datums)
            for name in ("values", "returns", "loss_weights")
        },
        "loss": {
            "kind": CRITIC_LOSS,
            "settings": {"value_clip": CLIP, "value_loss_scale": 0.5},
            "entropy_coef": 0.0,
        },
    }


def critic_pass(host: ModelHost, seed: int, **changes: Any) -> Any:
    return host.execute(
        {"op": "forward_backward", "model": "critic", **critic_command(seed), **changes}
    )


def whole(host: ModelHost, *, gradient: bool = False) -> dict[str, Tensor]:
    """Factors by name and the value head, or their gradients, on every rank. Gradients after they
    were reduced."""
    network = network_of(host)

    def value(parameter: torch.nn.Parameter) -> Tensor:
        return (parameter.main_grad if gradient else parameter.detach()).float()  # type: ignore[attr-defined]

    found = {name: tensor.clone() for name, tensor in gather_factors(network, value)}
    last = network.adapters[-1].value_head
    sizes = {"weight": (1, network.config.hidden_size), "bias": (1,)}
    for name, size in sizes.items():
        tensor = torch.zeros(size).double() if last is None else value(getattr(last, name)).clone()
        source = dist.get_global_rank(host.layout.pp_group, host.layout.pp_size - 1)
        dist.broadcast(tensor, source, group=host.layout.pp_group)
        found[f"{VALUE_HEAD}.{name}"] = tensor
    return found


def start_from_noise(host: ModelHost) -> None:
    """Second factors and a head that are not zero, so that gradients reach every factor at once."""
    g = torch.Generator().manual_seed(11)
    noisy = {name: t + 0.1 * torch.randn(t.shape, generator=g) for name, t in whole(host).items()}
    network = network_of(host)
    head = network.adapters[-1].value_head
    if head is not None:
        with torch.no_grad():
            head.weight.copy_(noisy[f"{VALUE_HEAD}.weight"])
            head.bias.copy_(noisy[f"{VALUE_HEAD}.bias"])
    set_factors(network, noisy)


def train(host: ModelHost) -> dict[str, Any]:
    """Steps of two passes each; gradients as the optimizer gets them, norms, what the passes report,
    what is trained at the end. In between the policy on the same base takes a pass."""
    reported: list[Any] = []
    gradients: dict[str, Tensor] = {}
    norms = []
    network = network_of(host)
    plain_step = network.finalize_gradients

    def finalize(*arguments: Any, **keywords: Any) -> None:
        plain_step(*arguments, **keywords)
        for module in network.trained_modules:
            whole_gradients(module)
        gradients.update(
            {f"step {step} {name}": t for name, t in whole(host, gradient=True).items()}
        )

    network.finalize_gradients = finalize  # type: ignore[method-assign]
    for step in range(STEPS):
        reported.append(critic_pass(host, 2 * step))
        host.execute(
            {"op": "forward_backward", "model": "policy", **command_of(message_of(3, 9, seed=step))}
        )
        reported.append(critic_pass(host, 2 * step + 1))
        settings = {
            **ADAM,
            "learning_rate": 1e-2,
            "eps": 1e-6,
            "weight_decay": 0.1,
            "grad_clip_norm": 1.0,
        }
        norms.append(
            host.execute({"op": "optim_step", "model": "critic", "adam": settings})["grad_norm"]
        )
    reported.append(critic_pass(host, 9, forward_only=True))
    norms.append(host.execute({"op": "optim_step", "model": "policy", "adam": ADAM})["grad_norm"])
    return dict(reported=reported, gradients=gradients, norms=norms, end=whole(host))


def layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Each layout of arguments["layouts"]: {name: flags}. A state that one layout has saved is
    loaded by the next ones."""
    for name, flags in arguments["layouts"].items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            host = make_host(arguments["model"], layout, flags)
            start_from_noise(host)
            found = train(host)
            host.execute(
                {"op": "load", "model": "critic", "folder": arguments["state"], "optimizer": True}
            )
            torch.save({**found, "loaded": whole(host)}, f"{arguments['out']}/{name}-{rank}.pt")
    return {}

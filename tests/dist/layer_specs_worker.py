"""Workers of tests/dist/test_layer_specs.py: checkpoints from megatron-core's local layers to
Transformer Engine layers and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.dist.transformer_engine_layers import install

install()

import megatron_patches  # noqa: E402
from megatron_patches import patch  # noqa: E402

patch.has_transformer_engine = lambda: (
    False
)  # it has layers, and neither optimizers nor what else the patches stand in for
megatron_patches.apply()

from megatron.core.extensions import transformer_engine  # noqa: E402

transformer_engine._get_extra_te_kwargs = lambda config: {
    "params_dtype": config.params_dtype
}  # and no CUDA device

from benchmarks.parity.cells import sizes_of  # noqa: E402
from benchmarks.parity.steps import parallel, random_samples, settings, share, weights  # noqa: E402
from slime_like.checkpoints.folders import checkpoint_folder  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.checkpoint import CheckpointSaver, SavePolicy  # noqa: E402
from slime_like.megatron.checkpoint.fingerprint import fingerprint  # noqa: E402
from slime_like.megatron.checkpoint.tensors import CheckpointTensors  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.megatron.run_state import load_state, save_state  # noqa: E402

FUSED = (
    "linear_qkv.layer_norm_weight",
    "linear_fc1.layer_norm_weight",
    "up_proj.layer_norm_weight",
    "experts.linear_fc1.weight0",
)


def build(folder: str, flags: str, layout: ParallelLayout, layers: str) -> MegatronBackend:
    config = settings(folder, flags)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, transformer_impl=layers)
    )
    config.megatron.transformer.transformer_impl = layers
    config.megatron.transformer.moe_grouped_gemm = layers == "transformer_engine"
    return MegatronBackend(config, layout, total_steps=8)


def train(backend: MegatronBackend, layout: ParallelLayout, steps: tuple[int, ...]) -> list[float]:
    results = [backend.update(share(random_samples(step), layout)) for step in steps]
    return [number for result in results for number in (result.metrics["loss"], result.grad_norm)]


def save(backend: MegatronBackend, root: Path) -> list[str]:
    """Names of what is in the checkpoint."""
    save_state(
        backend,
        CheckpointSaver(root, SavePolicy()),
        2,
        {"data": None},
        with_optimizer=True,
        with_rng=True,
    )
    return sorted(CheckpointTensors(checkpoint_folder(root, 2) / "policy").entries)


def load(backend: MegatronBackend, root: Path) -> None:
    load_state(
        backend,
        checkpoint_folder(root, 2),
        with_optimizer=True,
        with_rng=True,
        verify=True,
    )


def bits_of(backend: MegatronBackend) -> dict[str, str]:
    """Of weights, fp32 parameters, both moments and Adam's step, on this rank."""
    return fingerprint(backend.trained.saved())


def there_and_back(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By case: the three steps after the checkpoint of local layers that continued, of Transformer
    Engine's that took it up, and of local ones that took up what those saved; and the names on the
    disk."""
    found = {}
    for name, (folder, flags) in arguments["cases"].items():
        roots = [Path(arguments["out"]) / f"{name}-{world_size}-{kind}" for kind in ("local", "te")]
        with parallel(**sizes_of(flags)) as layout:
            local = build(folder, flags, layout, "local")
            train(local, layout, (1, 2))
            on_disk = [save(local, roots[0])]
            state, before = bits_of(local), weights(local)
            numbers = [train(local, layout, (3, 4, 5))]

            fused = build(folder, flags, layout, "transformer_engine")
            names = [n for chunk in fused.policy.chunks for n, _ in chunk.named_parameters()]
            load(fused, roots[0])
            same_weights = same(before, weights(fused))
            on_disk.append(save(fused, roots[1]))
            numbers.append(train(fused, layout, (3, 4, 5)) if layout.tp_size == 1 else [])

            back = build(folder, flags, layout, "local")
            load(back, roots[1])
            same_state = bits_of(back) == state
            numbers.append(train(back, layout, (3, 4, 5)))
        found[name] = {
            "numbers": numbers,
            "same": [same_weights, same_state],
            "fused": [word for word in FUSED if any(word in n for n in names)],
            "on_disk": on_disk,
        }
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)

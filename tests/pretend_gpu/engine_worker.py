"""Work of the processes of test_engine.py, in which Transformer Engine is installed."""

from __future__ import annotations

from tests.pretend_gpu.engine import start

start()  # before megatron-core

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import megatron_patches  # noqa: E402
from benchmarks.parity.cells import sizes_of  # noqa: E402
from benchmarks.parity.steps import (  # noqa: E402
    parallel,
    settings,
    share,
    train_samples,
    weights,
)
from slime_like.checkpoints.folders import checkpoint_folder  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.checkpoint import CheckpointSaver, SavePolicy  # noqa: E402
from slime_like.megatron.offload import StoredState  # noqa: E402
from slime_like.megatron.optimizer import plain_optimizers  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.megatron.run_state import load_state, save_state  # noqa: E402
from slime_like.weights.parameter_map import (  # noqa: E402
    expert_number,
    family_map,
    global_parameters,
)
from tests.pretend_gpu.worker import run_cells  # noqa: E402, F401


def adam(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By flags: what its Adam does where torch's has been tested."""
    megatron_patches.apply()
    with parallel() as layout:
        return {
            flags: _adam(arguments["model"], flags, layout, Path(arguments["folder"], str(i)))
            for i, flags in enumerate(arguments["flags"])
        }


def _build(model: str, flags: str, layout: ParallelLayout) -> MegatronBackend:
    words = f"--bf16 --lr 3e-3 --micro-batch-size 2 --transformer-impl local {flags}"
    return MegatronBackend(settings(model, words), layout, total_steps=9)


def _steps(built: MegatronBackend, *seeds: int) -> list[Any]:
    """Loss and norm of each step, and a weight after the last."""
    results = [built.update(share(train_samples(seed), built.layout)) for seed in seeds]
    total = sum(float(w.double().norm()) for w in weights(built).values())
    return [[r.metrics["loss"], r.grad_norm] for r in results] + [total]


def _adam(model: str, flags: str, layout: ParallelLayout, folder: Path) -> dict[str, Any]:
    built = _build(model, flags, layout)
    (kind, *_) = {type(plain).__module__ for plain in plain_optimizers(built.trained.optimizer)}
    built.trained.allocate_moments()
    count = len(built.trained.tensors())
    fresh = StoredState(built.trained)

    def save(step: int) -> None:
        saver = CheckpointSaver(folder, SavePolicy())
        save_state(built, saver, step, {"data": None}, with_optimizer=True, with_rng=True)

    def resumed(step: int) -> MegatronBackend:
        again = _build(model, flags, layout)
        saved = checkpoint_folder(folder, step)
        load_state(again, saved, with_optimizer=True, with_rng=True, verify=True)
        return again

    save(1)  # before the first step
    first = _steps(built, 1, 2)
    found = {"module": kind, "keeps its tensors": len(built.trained.tensors()) == count}
    found["starts from a checkpoint"] = _steps(resumed(1), 1, 2) == first
    save(2)
    stored = StoredState(built.trained)
    on = _steps(built, 3, 4)
    found["resumes"] = _steps(resumed(2), 3, 4) == on
    fresh.restore(built.trained)  # another model takes the place
    found["starts again"] = _steps(built, 1, 2) == first
    stored.restore(built.trained)
    found["gets its place back"] = _steps(built, 3, 4) == on
    fresh.restore(built.trained)
    built.trained.reset_training_state()
    found["is reset"] = _steps(built, 1, 2) == first
    return found


def layers(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By model: the kind of its layers, and weights that loading and exporting change."""
    megatron_patches.apply()
    found = {}
    with parallel() as layout:
        for name, (folder, flags) in arguments["models"].items():
            config = settings(
                folder, f"--bf16 --use-distributed-optimizer --micro-batch-size 2 {flags}"
            )
            built = MegatronBackend(config, layout, total_steps=1)
            kinds = {type(m).__module__ for c in built.policy.chunks for m in c.modules()}
            exported = {name: tensor.cpu() for name, tensor in built.export_weights()}
            source = read_weights(Path(folder))
            found[name] = {
                "impl": config.megatron.transformer.transformer_impl,
                "of Transformer Engine": any("transformer_engine" in kind for kind in kinds),
                "changed": sorted(
                    name
                    for name, tensor in exported.items()
                    if name not in source or not torch.equal(tensor, source[name].to(tensor.dtype))
                ),
                "exported": len(exported),
            }
            del built
    return found


def marks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[str]]:
    """By model and kind of layers: parameters that count as tensor-parallel and are whole on every
    rank, or the other way round."""
    megatron_patches.apply()
    found = {}
    for name, (folder, flags) in arguments["models"].items():
        with parallel(**sizes_of(flags)) as layout:
            for impl in ("local", "transformer_engine"):
                run = settings(folder, f"--transformer-impl {impl} {flags}")
                built = MegatronBackend(run, layout, total_steps=1)
                assert built.hf is not None
                gpt = built.gpt
                mappings = family_map(
                    built.hf.architecture,
                    built.policy.config,
                    tied=not gpt.untie_embeddings_and_output_weights,
                    mtp_layers=gpt.mtp_num_layers,
                )
                found[f"{name} {impl}"] = [
                    parameter_name
                    for parameter_name, parameter in global_parameters(built.policy.chunks)
                    if is_sharded(parameter)
                    != (
                        mappings[parameter_name].sharded
                        or expert_number(parameter_name) is not None
                    )
                ]
                del built
    return found


def is_sharded(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def norms(rank: int, world_size: int, arguments: dict[str, Any]) -> list[bool]:
    """megatron-core's norm of layers without Transformer Engine, under sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    megatron_patches.apply()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        sequence_parallel=True, normalization="RMSNorm",
    )  # fmt: skip
    norm: Any = WrappedTorchNorm(config, 8)
    dist.barrier()
    return [parameter.sequence_parallel for parameter in norm.parameters()]

"""Save and load adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. The
conversion is exact in both directions, since PEFT uses the same factors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arguments.hf.model import read_hf_model
from arguments.hf.peft_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    PeftAdapter,
    adapter_config,
    read_adapter_config,
)
from arguments.schema.lora import UNEMBEDDING
from slime_like.checkpoints.files import sync_path
from slime_like.checkpoints.folders import check_replaceable
from slime_like.checkpoints.replacement import folder_to_replace, replacing
from slime_like.distributed.collectives import from_rank_zero, together
from slime_like.megatron.lora.gather import gather_factors, set_factors
from slime_like.megatron.lora.network import LoraNetwork
from slime_like.megatron.lora.targets import peft_name
from slime_like.weights.families import EMBEDDING, head_name, model_families
from slime_like.weights.mappings import VocabParallel
from slime_like.weights.safetensors_reader import WeightFiles, listed
from slime_like.weights.safetensors_writer import save_tensors

BASE_DIGEST = "base_digest"  # of the tensors' metadata, which PEFT ignores
BASE_LAYER = "base_layer"  # PEFT saves that of an output layer with its factors


def save_adapter(
    folder: str, network: LoraNetwork, base_model: str | None, *, base_digest: str | None = None
) -> None:
    """Save the adapter of `network`. Collective; rank 0 writes, atomically.

    Args:
        base_model: Model name or path for PEFT.
        base_digest: `weights_digest` of the base model, stored with the tensors.

    Raises:
        OSError: E.g. a full disk; on every rank.
        ValueError: The folder contains something other than an adapter; on every rank.
    """
    tensors = {
        peft_name(name): tensor.cpu().contiguous() for name, tensor in gather_factors(network)
    }
    modules = itertools.chain.from_iterable(target.modules for target in network.targets)
    config = adapter_config(
        rank=network.spec.rank,
        alpha=network.spec.alpha,
        modules=sorted({module.rpartition(".")[2] for module in modules}),
        base_model=base_model,
    )
    metadata = {"format": "pt"} | ({} if base_digest is None else {BASE_DIGEST: base_digest})
    from_rank_zero(lambda: _write(Path(folder), config, tensors, metadata))


def load_adapter(folder: str, network: LoraNetwork, base_model: str) -> None:
    """Load an adapter into `network`. Collective.

    base_model: Hugging Face folder of the base model. Raises ValueError on every rank, before
    anything is modified, for another rank or alpha, for tensors that are missing, unexpected, not
    finite or of another shape, and for an output layer that differs from the base model's.
    """

    def read() -> dict[str, Tensor]:
        _check_config(folder, read_adapter_config(folder), network)
        return _read_tensors(Path(folder) / ADAPTER_WEIGHTS, network, base_model)

    set_factors(network, together(read))


def _write(
    folder: Path,
    config: dict[str, object],
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
) -> None:
    folder_to_replace(folder)  # which may restore it
    check_replaceable(folder, ADAPTER_CONFIG, "adapter")
    with replacing(folder) as new:
        save_tensors(new / ADAPTER_WEIGHTS, tensors, metadata)
        (new / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in [*new.iterdir(), new]:
            sync_path(path)


def _check_config(folder: str, adapter: PeftAdapter, network: LoraNetwork) -> None:
    spec = network.spec
    if (adapter.rank, adapter.alpha) != (spec.rank, spec.alpha):
        raise ValueError(
            f"adapter {folder} has rank {adapter.rank} and alpha {adapter.alpha:g}; here they are "
            f"{spec.rank} and {spec.alpha:g}"
        )


def _read_tensors(path: Path, network: LoraNetwork, base_model: str) -> dict[str, Tensor]:
    factors = itertools.chain.from_iterable(target.all_factors for target in network.targets)
    shapes = {factor.name: factor.shape for factor in factors}
    output_layer = head_name(network.base.hf.architecture).removesuffix(".weight")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {
                _factor_name(name, output_layer): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    base_head = f"{output_layer}.{BASE_LAYER}"
    head = tensors.pop(base_head, None)
    if head is not None and not torch.equal(head, read_output_layer(base_model).to(head.dtype)):
        raise ValueError(f"{path}: {base_head} is not the output layer of {base_model}")
    common = shapes.keys() & tensors.keys()
    problems = {
        "missing factors": shapes.keys() - tensors.keys(),
        "unexpected factors": tensors.keys() - shapes.keys(),
        "factors of another shape": {n for n in common if tuple(tensors[n].shape) != shapes[n]},
        "factors that are not finite numbers": {n for n, t in tensors.items() if not _is_finite(t)},
    }
    if any(problems.values()):
        parts = [f"{problem}: {listed(names)}" for problem, names in problems.items() if names]
        raise ValueError(f"{path}: {'; '.join(parts)}")
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def read_output_layer(folder: str) -> Tensor:
    """Read the output layer weight of a Hugging Face folder, [vocabulary, hidden]; the embedding if
    they are tied."""
    with WeightFiles(folder) as files:
        architecture = read_hf_model(folder).architecture
        name = head_name(architecture)
        if name not in files.names:
            embedding = model_families.get(architecture).parameters[EMBEDDING]
            assert isinstance(embedding, VocabParallel)
            name = embedding.hf
        return files.read(name, 0, 0, files.shape(name)[0])


def _factor_name(name: str, output_layer: str) -> str:
    """The factor of a tensor in a file, which may call any model's output layer lm_head."""
    factor = name.removeprefix(PEFT_PREFIX).removesuffix(".weight")
    module, dot, rest = factor.partition(".")
    return f"{output_layer}.{rest}" if module in UNEMBEDDING and dot else factor

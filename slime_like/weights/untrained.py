"""Weights of a Hugging Face folder that a run neither loads nor trains, e.g. MTP layers and vision
towers: they are copied unchanged when the model is saved."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from arguments.hf.model import HfModel
from slime_like.images.settings import VisionSettings
from slime_like.logs import warn_rank_0
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.families.base import PredictionNames, model_families
from slime_like.weights.safetensors_reader import TORCH_DTYPES, WeightFiles

logger = logging.getLogger(__name__)


def untrained_prefixes(hf: HfModel, mtp_layers: int | None = None) -> tuple[str, ...]:
    """Name prefixes of these weights. mtp_layers: number of multi-token prediction layers that are
    trained."""
    first = hf.transformer["num_layers"]
    layers = tuple(f"model.layers.{first + n}." for n in range(hf.untrained_layers))
    prefixes = layers + hf.untrained_prefixes
    names = model_families.get(hf.architecture).prediction
    if not mtp_layers or names is None:
        return prefixes
    trained = prediction_starts(names, first, mtp_layers)
    return tuple(prefix for prefix in prefixes if not _starts_any(trained, prefix))


def with_trained_tower(hf: HfModel, vision: VisionSettings) -> HfModel:
    """The model whose vision tower is trained: its weights are not untrained ones."""
    tower = tuple(prefix for _, prefix in vision.family.modules)
    others = tuple(p for p in hf.untrained_prefixes if not p.startswith(tower))
    return replace(hf, untrained_prefixes=others)


def with_tables_only(hf: HfModel, tables: Iterable[str]) -> HfModel:
    """The model of a value head, which is saved without untrained weights but those that it reads.

    tables: `HfExport.fixed`."""
    return replace(hf, untrained_layers=0, untrained_prefixes=tuple(tables))


def _starts_any(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def prediction_starts(names: PredictionNames, num_layers: int, count: int) -> list[str]:
    """Name prefixes of the tensors of each multi-token prediction layer."""
    first = num_layers if names.after_the_last else 0
    return [f"{names.layer}.".format(layer=first + n) for n in range(count)]


def repeated_tensors(hf: HfModel, mtp_layers: int | None) -> dict[str, str]:
    """Duplicates that a file with trained multi-token prediction layers may contain: name -> name
    of the model's own tensor."""
    names = model_families.get(hf.architecture).prediction
    if not mtp_layers or names is None:
        return {}
    duplicates: dict[str, str] = {}
    for n in range(mtp_layers):
        layer = hf.transformer["num_layers"] + n
        duplicates |= {copy.format(layer=layer): own for own, copy in names.copies.items()}
    return duplicates


def untrained_plans(
    files: WeightFiles,
    hf: HfModel,
    mtp_layers: int | None,
    *,
    quantized: bool,
    dtype: torch.dtype | None = None,
    kept: Collection[str] = (),
) -> list[TensorPlan]:
    """Plans of these weights for saving.

    Args:
        mtp_layers: See `untrained_prefixes`.
        quantized: As the stored tensors of a quantised folder; otherwise as weights.
        dtype: Of weights; None: as stored, and that of config.json for those that are quantised in
            the folder.
        kept: Tensors of the model that keep their dtype, whatever `dtype` is; so do those of the
            same names in other layers.
    """
    names = files.stored if quantized else files.names
    dequantized = dtype or getattr(torch, hf.dtype or "float32")
    same = {_within_layer(name) for name in kept}
    plans = []
    for name in sorted(names):
        if not name.startswith(untrained_prefixes(hf, mtp_layers)):
            continue
        if name in files.quantized and not quantized:
            plans.append(TensorPlan(name, files.shape(name), dequantized))
            continue
        own = files.stored_dtype(name)
        is_weight = name in files.names and name not in files.quantized and own.is_floating_point
        if is_weight and dtype is not None and _within_layer(name) not in same:
            own = dtype
        plans.append(TensorPlan(name, files.stored[name].shape, own))
    return plans


def _within_layer(name: str) -> str:
    """A tensor's name after the number of its layer."""
    return re.sub(r"^.*?layers\.\d+\.", "", name)


def read_untrained(files: WeightFiles, plan: TensorPlan) -> Tensor:
    if plan.name in files.quantized and plan.dtype in TORCH_DTYPES.values():
        out = torch.empty(plan.shape, dtype=plan.dtype)
        files.read_into(out, plan.name, 0, 0, plan.shape[0])
        return out
    return files.read_stored(plan.name).to(plan.dtype)


def untrained_weights(
    hf: HfModel, folder: str, mtp_layers: int | None = None, *, quantized: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield these weights of `folder`, one at a time; for mtp_layers and quantized see
    `untrained_plans`. Yields nothing, with a warning, if the weights cannot be read, e.g. if the
    folder has only config.json and tokenizer."""
    if not untrained_prefixes(hf, mtp_layers):
        return
    try:
        files = WeightFiles(folder)
    except ValueError as error:
        warn_rank_0(logger, f"untrained weights (e.g. MTP layers) are not saved: {error}")
        return
    with files:
        for plan in untrained_plans(files, hf, mtp_layers, quantized=quantized):
            yield plan.name, read_untrained(files, plan)

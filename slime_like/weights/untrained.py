"""Weights of a Hugging Face folder that a run neither loads nor trains, e.g. MTP layers and vision
towers: they are copied unchanged when the model is saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from arguments.hf.model import HfModel
from slime_like.logs import warn_rank_0
from slime_like.weights.families.base import PredictionNames, model_families
from slime_like.weights.gather import TensorPlan
from slime_like.weights.safetensors_reader import TORCH_DTYPES, WeightFiles

logger = logging.getLogger(__name__)


def untrained_prefixes(hf: HfModel, predicting: int | None = None) -> tuple[str, ...]:
    """Name prefixes of these weights. predicting: number of multi-token prediction layers that are
    trained."""
    first = hf.transformer["num_layers"]
    layers = tuple(f"model.layers.{first + n}." for n in range(hf.untrained_layers))
    prefixes = layers + hf.untrained_prefixes
    names = model_families.get(hf.architecture).prediction
    if not predicting or names is None:
        return prefixes
    trained = prediction_starts(names, first, predicting)
    return tuple(p for p in prefixes if not any(start.startswith(p) for start in trained))


def prediction_starts(names: PredictionNames, num_layers: int, count: int) -> list[str]:
    """Name prefixes of the tensors of each multi-token prediction layer."""
    first = num_layers if names.after_the_last else 0
    return [f"{names.layer}.".format(layer=first + n) for n in range(count)]


def repeated_tensors(hf: HfModel, predicting: int | None) -> dict[str, str]:
    """Duplicates that a file with trained multi-token prediction layers may contain: name -> name
    of the model's own tensor."""
    names = model_families.get(hf.architecture).prediction
    if not predicting or names is None:
        return {}
    first = hf.transformer["num_layers"]
    return {
        copy.format(layer=first + n): own
        for n in range(predicting)
        for own, copy in names.copies.items()
    }


def untrained_plans(
    files: WeightFiles, hf: HfModel, predicting: int | None, *, quantized: bool
) -> list[TensorPlan]:
    """Plans of these weights for saving. predicting: see `untrained_prefixes`. quantized: as the
    stored tensors of a quantised folder; otherwise as weights in the dtype that config.json
    names."""
    names = files.stored if quantized else files.names
    dtype = getattr(torch, hf.dtype or "float32")
    return [
        TensorPlan(name, files.stored[name].shape, files.stored_dtype(name))
        if quantized or name not in files.coded
        else TensorPlan(name, files.shape(name), dtype)
        for name in sorted(names)
        if name.startswith(untrained_prefixes(hf, predicting))
    ]


def read_untrained(files: WeightFiles, plan: TensorPlan) -> Tensor:
    if plan.name in files.coded and plan.dtype in TORCH_DTYPES.values():
        out = torch.empty(plan.shape, dtype=plan.dtype)
        files.read_into(out, plan.name, 0, 0, plan.shape[0])
        return out
    return files.read_stored(plan.name)


def untrained_weights(
    hf: HfModel, folder: str, predicting: int | None = None, *, quantized: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield these weights of `folder`, one at a time; for predicting and quantized see
    `untrained_plans`. Yields nothing, with a warning, if the weights cannot be read, e.g. if the
    folder has only config.json and tokenizer."""
    if not untrained_prefixes(hf, predicting):
        return
    try:
        files = WeightFiles(folder)
    except ValueError as error:
        words = f"weights that are not trained, as layers for predicting several tokens, are not saved with the model: {error}"
        warn_rank_0(logger, words)
        return
    with files:
        for plan in untrained_plans(files, hf, predicting, quantized=quantized):
            yield plan.name, read_untrained(files, plan)

"""Random configurations of every family against transformers: logits of packed rows and all gradients
in float64, and the exported weights bit for bit.

    make search-configurations SEED=1

runs 300 and more. What the reader refuses, or transformers' own class, is drawn again. docs/en/models.md
has the figures of the last run.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from arguments.hf.model import read_hf_model
from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.families import model_families
from tests.dist.test_families import LIMITS, measure_model
from tests.search.configurations import FURTHER, Configuration, random_configuration

SEED = os.environ.get("SEARCH_SEED", "0")
OF_EACH = int(os.environ.get("SEARCH_CONFIGURATIONS", "1"))  # of every family
LOG = os.environ.get("SEARCH_LOG")  # a file to which figures are appended
DRAWS = 40


def store(folder: Path, reference: Any, configuration: Configuration) -> None:
    """Write the model's files again, in another type and several parts. The reference has what they
    have then. Tables of integers stay as they are."""
    dtype = getattr(torch, configuration.dtype)

    def stored(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    with torch.no_grad():
        for tensor in reference.state_dict().values():
            tensor.copy_(stored(tensor))
    path = folder / "model.safetensors"
    tensors = {name: stored(tensor) for name, tensor in load_file(path).items()}
    path.unlink()
    names = [list(tensors)[part :: configuration.parts] for part in range(configuration.parts)]
    weight_map = {}
    for part, own in enumerate(names, start=1):
        file = f"model-{part:05}-of-{configuration.parts:05}.safetensors"
        weight_map |= dict.fromkeys(own, file)
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# name -> architecture, and further draws
MODELS = {**{name: (name, None) for name in model_families.names()}, **FURTHER}


def a_model(name: str, rng: random.Random, folder: Path) -> tuple[Any, Path, Configuration]:
    """transformers' model, its folder and what was drawn; what is refused is drawn again. name: in
    `MODELS`."""
    family, more = MODELS[name]
    refused = []
    for attempt in range(DRAWS):
        configuration = random_configuration(model_families.get(family), rng, more)
        path = folder / str(attempt)
        try:
            reference = make_tiny_model(family, path, **configuration.changes)
            read_hf_model(str(path))
        except (
            ValueError,
            RuntimeError,
            IndexError,
            KeyError,
            TypeError,
            ZeroDivisionError,
        ) as error:
            refused.append(f"{configuration}: {error}")
            continue
        except Exception as error:  # transformers' own checks of a configuration
            if "StrictDataclass" not in type(error).__name__:
                raise
            refused.append(f"{configuration}: {error}")
            continue
        store(path, reference, configuration)
        return reference, path, configuration
    raise AssertionError("everything was refused:\n" + "\n".join(refused))


@pytest.mark.search
@pytest.mark.parametrize("number", range(OF_EACH))
@pytest.mark.parametrize("family", MODELS)
def test_random_configurations(family: str, number: int, alone: Any, tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} {family} {number}")
    reference, folder, configuration = a_model(family, rng, tmp_path)
    exact = torch.float64
    # experts to which no token goes, and parts of a table of n-grams of which no row is read
    unused = (".experts.", "ngram_embedding.shard_")
    (measured,) = measure_model(
        reference, folder, alone, tmp_path / "grads", exact, unused=unused
    ).values()
    found = measured.of_transformers
    if LOG:
        logits = found["logits"]
        line = {
            "family": family, "number": number, "seed": SEED, "drawn": str(configuration),
            "logits": logits, "gradients": max(d for n, d in found.items() if n != "logits"),
        }  # fmt: skip
        with Path(LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
    wrong = {name: d for name, d in found.items() if not d <= LIMITS[exact]}
    assert not wrong, f"{configuration}\n{wrong}"

"""The command line knows which modules of a network have adapters."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from arguments.hf.lora_modules import absent_modules
from arguments.hf.model import HfModel, read_hf_model
from arguments.megatron_configs import transformer_config_type
from arguments.schema.lora import TARGETS
from scripts.make_tiny_model import make_tiny_model
from slime_like.megatron.lora.config import LoraSpec
from slime_like.megatron.lora.targets import targets_of
from slime_like.weights.families import head_name, model_families
from slime_like.weights.parameter_map import family_map, model_sizes


def with_factors(model: HfModel) -> set[str]:
    """Modules of the network that get factors, if all are asked for."""
    fields = dataclasses.fields(transformer_config_type(model.transformer))
    defaults = {field.name: field.default for field in fields}
    config = cast("Any", SimpleNamespace(**{**defaults, **model.transformer}))
    sizes = model_sizes(config, cast("Any", SimpleNamespace(vocab_size=1)))
    tied = not model.gpt["untie_embeddings_and_output_weights"]
    family = family_map(model.architecture, config, tied=tied)
    head = head_name(model.architecture)
    spec = LoraSpec(1, 1.0, frozenset(chain(*TARGETS.values())), 0)
    found = targets_of(spec, family, sizes, tied_head=head if tied else None)
    return {module.rpartition(".")[2] for target in found for module in target.modules}


def test_the_command_line_names_the_modules_of_every_network(tmp_path: Path) -> None:
    single = {name for name, modules in TARGETS.items() if modules == (name,)}
    for name in model_families.names():
        make_tiny_model(name, tmp_path / name)
        model = read_hf_model(str(tmp_path / name))
        assert single - set(absent_modules(model)) == with_factors(model), name

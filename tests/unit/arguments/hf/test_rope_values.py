"""Settings of rotary embeddings with odd values, in every form that files have them, are read or a
ConfigError."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.model import read_hf_model
from scripts.make_tiny_model import class_family, family_of, own_config, tiny_settings
from slime_like.config import ConfigError
from slime_like.weights.families import model_families

ODD: tuple[Any, ...] = (
    *(None, "x", "", [None], [], [1.5, "x"], {}, {"a": 1}, True),
    *(-1, 0, 1.5, 1e308, float("inf"), float("nan")),
)


def config_of(name: str) -> dict[str, Any]:
    """config.json of a tiny model, as transformers writes it."""
    from transformers import AutoConfig

    family = family_of(name)
    settings = tiny_settings(class_family(family), vocab_size=64, eos_token_id=1)
    config = AutoConfig.for_model(family.same_as or family.model_type, **settings).to_dict()
    return own_config(family, config)


def forms(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The file, and the keys of transformers 4 in place of rope_parameters."""
    yield config
    text = config.get("text_config", config)
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        old = copy.deepcopy(config)
        of_text = old.get("text_config", old)
        scaling = of_text.pop("rope_parameters")
        of_text["rope_theta"] = scaling.pop("rope_theta")
        of_text["rope_scaling"] = scaling
        yield old


def places(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if any(word in str(part) for part in (*at, key) for word in ("rope", "rotary")):
            yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


@pytest.mark.parametrize("name", sorted(model_families.names()))
def test_odd_values(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    legal = 0
    for config in forms(config_of(name)):
        file.write_text(json.dumps(config))
        try:
            read_hf_model(str(tmp_path))
        except ConfigError:
            continue  # a form that this family's files never had
        legal += 1
        for place in places(config):
            for value in ODD:
                changed = copy.deepcopy(config)
                parent = changed
                for key in place[:-1]:
                    parent = parent[key]
                parent[place[-1]] = value
                file.write_text(json.dumps(changed))
                with contextlib.suppress(ConfigError):
                    read_hf_model(str(tmp_path))
    assert legal

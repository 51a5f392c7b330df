"""The search draws every key of every family, or says why not."""

from __future__ import annotations

import random

import pytest

from scripts.make_tiny_model import SIZES
from slime_like.weights.families import model_families
from tests.search.configurations import FIXED, KEPT, random_configuration


@pytest.mark.parametrize("name", model_families.names())
def test_every_key_of_a_family_is_drawn(name: str) -> None:
    """Of its tiny model. A family with keys of its own needs draws of them."""
    family = model_families.get(name)
    drawn: dict[str, set[str]] = {}
    for seed in range(60):
        for key, value in random_configuration(family, random.Random(seed)).changes.items():
            drawn.setdefault(key, set()).add(repr(value))
    several = {key for key, values in drawn.items() if len(values) > 1}
    keys = {**SIZES, **family.tiny}.keys() - KEPT.keys() - set(FIXED.get(name, ()))
    missing = keys - several - {"hidden_size_per_layer_input"}  # of models in FURTHER
    assert not missing, "VALUES in tests/search/configurations.py has no draws of these"

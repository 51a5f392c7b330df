"""A key that config.json leaves out has the value of transformers' class of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from arguments.hf.config_keys import WITHOUT_EFFECT
from arguments.hf.model import read_hf_model
from scripts.make_tiny_model import tiny_settings
from slime_like.config import ConfigError
from slime_like.weights.families import ModelFamily, model_families

# that a tiny model has to have, or that say which weights a file has
GIVEN = {
    *("architectures", "model_type", "text_config", "vision_config", "num_hidden_layers"),
    *("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"),
    *("tie_word_embeddings", "num_nextn_predict_layers"),
}
# the name under which transformers saves it; it reads only one without the line
UNDERLINED = {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}
# what transformers derives from other keys, and saves; published files often leave it out
DERIVED = ("layer_types", "mlp_layer_types", "rope_parameters")
REFUSALS = (StrictDataclassError, ConfigError, ValueError, TypeError, KeyError, ArithmeticError)


def completed(family: ModelFamily, config: dict[str, Any]) -> dict[str, Any]:
    """The file that transformers would save after reading this one."""
    kind = family.same_as or family.model_type
    read = json.loads(json.dumps({**config, "model_type": kind}), object_hook=infinite)
    found = CONFIG_MAPPING[kind].from_dict(read)
    whole: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    return {**whole, "architectures": [family.architecture], "model_type": family.model_type}


def infinite(value: dict[str, Any]) -> object:
    """As transformers reads what it writes for infinity: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if "__float__" in value else value


def numbers(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    found = read_hf_model(str(folder))
    return {**found.transformer, **found.gpt}


def without(config: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    left = {key: value for key, value in config.items() if key not in keys}
    if "text_config" in left:
        left["text_config"] = without(left["text_config"], keys)
    return left


@pytest.mark.parametrize("name", model_families.names())
def test_an_absent_key_has_the_value_of_transformers(tmp_path: Path, name: str) -> None:
    family = model_families.get(name)
    kind = family.same_as or family.model_type
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    settings = tiny_settings(family, num_hidden_layers=6)
    text = settings["text_config"] if family.text_config else settings
    text |= {"vocab_size": 64, "eos_token_id": 2}
    whole = completed(family, settings)
    if "text_config" in whole and not family.text_config:
        pytest.skip(f"this transformers has only a {kind} with images")
    numbers(tmp_path, whole)  # the complete file is legal
    read = whole["text_config"] if family.text_config else whole
    tried = 0
    for key in sorted(set(read) - GIVEN - WITHOUT_EFFECT):
        if name in UNDERLINED and key == "sliding_window_pattern":
            continue
        for more in ((), DERIVED):
            config = without(whole, [key, *more])
            try:
                theirs = numbers(tmp_path, completed(family, config))
                ours = numbers(tmp_path, config)
            except REFUSALS:
                continue  # refused by either: nothing is silent
            different = {k: (v, theirs[k]) for k, v in ours.items() if v != theirs.get(k)}
            assert not different, f"{key} {more}: ours, theirs {different}"
            tried += 1
    assert tried > 5

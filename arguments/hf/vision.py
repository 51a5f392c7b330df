"""The vision tower of a Hugging Face config.json, for a run with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arguments.hf.model import HfModel
from slime_like.checkpoints.files import read_json
from slime_like.config import ConfigError, Problem
from slime_like.images.rows import PlaceholderRule
from slime_like.images.settings import RotaryAxes, VisionFamily, VisionSettings
from slime_like.weights.families import model_families

# transformers' defaults
MERGE_SIZE = 2
FEATURES = 256


def read_vision(
    folder: str,
    hf: HfModel,
    *,
    flag: str = "--hf-checkpoint",
    trained: bool = False,
    asked_by: str = "--multimodal-keys",
) -> VisionSettings:
    """The tower of the model in `folder`.

    Args:
        hf: What `read_hf_model` has read there.
        flag: The flag that names the folder.
        trained: Whether the run trains it.
        asked_by: The flag that asks for images.

    Raises:
        ConfigError: It has none, or one that is not supported; names the flag and what is missing.
    """
    where = f"{flag} {folder}"
    family = model_families.get(hf.architecture).vision
    if isinstance(family, str) or family is None:
        reason = family or "has no vision tower"
        raise _refusal(
            where,
            f"{hf.architecture} {reason}; use a model whose images are offered "
            f"({', '.join(seeing_models())}), or remove {asked_by} to train on text",
        )
    config: dict[str, Any] = read_json(Path(folder) / "config.json")
    tower = config.get("vision_config") or {}
    text = {**config, **(config.get("text_config") or {})}
    image_token = config.get(family.image_token, config.get("image_token_index"))
    if not isinstance(image_token, int) or not 0 <= image_token < hf.gpt["vocab_size"]:
        raise _refusal(
            where,
            f"config.json: {family.image_token} must be a token of the vocabulary of "
            f"{hf.gpt['vocab_size']}, not {image_token!r}",
        )
    sections: tuple[int, ...] = ()
    if family.features is None:
        merge_size = tower.get("spatial_merge_size", MERGE_SIZE)
        if not isinstance(merge_size, int) or merge_size < 1:
            raise _refusal(where, f"config.json: spatial_merge_size {merge_size!r} is no size")
        three_axes = family.axes is not None
        rule = PlaceholderRule(image_token, merge_size=merge_size, three_axes=three_axes)
    else:
        features = config.get(family.features, FEATURES)
        rule = PlaceholderRule(
            image_token, features=features, both_directions=family.both_directions
        )
    if family.axes is not None:
        sections = _sections(where, text, hf, family.axes)
    return VisionSettings(
        family,
        json.dumps(config),
        rule,
        sections,
        _deepstack_layers(where, tower, hf, family),
        trained,
    )


def seeing_models() -> list[str]:
    """A published name of each family whose images are offered, or its architecture."""
    families = map(model_families.get, model_families.names())
    seeing = (f for f in families if isinstance(f.vision, VisionFamily))
    return [next(iter(f.published), f.architecture) for f in seeing]


def _sections(where: str, text: dict[str, Any], hf: HfModel, axes: RotaryAxes) -> tuple[int, ...]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or axes.sections
    pairs = hf.transformer["kv_channels"] * hf.gpt["rotary_percent"] / 2
    if len(sections) != 3 or not all(isinstance(n, int) for n in sections):
        raise _refusal(where, f"config.json: mrope_section must be 3 integers, not {sections!r}")
    if sum(sections) != pairs:
        raise _refusal(
            where,
            f"config.json: mrope_section {list(sections)} has {sum(sections)} angles of a head's "
            f"{pairs:g}",
        )
    if rope.get("mrope_interleaved", axes.interleaved) != axes.interleaved:
        raise _refusal(
            where,
            f"config.json: mrope_interleaved {rope['mrope_interleaved']!r} is not how "
            f"{hf.architecture} has its axes",
        )
    scaled = hf.gpt["use_rope_scaling"] or hf.gpt["rotary_seq_len_interpolation_factor"]
    if hf.gpt["position_embedding_type"] not in ("rope", "yarn") or scaled:
        raise _refusal(
            where, "config.json: of scaled rotary positions of images only YaRN is supported"
        )
    return tuple(sections)


def _deepstack_layers(where: str, tower: dict[str, Any], hf: HfModel, family: VisionFamily) -> int:
    if family.deepstack is None:
        return 0
    layers = tower.get(family.deepstack)
    if not isinstance(layers, list) or len(layers) > hf.transformer["num_layers"]:
        raise _refusal(
            where,
            f"config.json: {family.deepstack} must be a list of at most "
            f"{hf.transformer['num_layers']} layers, not {layers!r}",
        )
    return len(layers)


def _refusal(where: str, message: str) -> ConfigError:
    return ConfigError([Problem("--multimodal-keys", None, f"{where}: {message}")])

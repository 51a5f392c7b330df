"""Tiny models of families with a vision tower, and rows with images for them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.hf.model import read_hf_model
from arguments.hf.vision import read_vision
from scripts.make_tiny_model import make_tiny_model
from slime_like.images.inputs import ImageInputs
from slime_like.images.rows import feature_counts, image_rows
from slime_like.images.settings import VisionSettings
from slime_like.types import TrainSample

IMAGE = 60  # the placeholder's id; text has smaller ones
FEATURES = 4  # of an image of Gemma 3
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
QWEN_TOWER = {
    **{"depth": 4, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "in_channels": 3},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32},
    **{"num_position_embeddings": 64},
}
ROPE = {"rope_type": "default", "rope_theta": 4321.0}
INTERLEAVED = {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
DEEPSTACK = {**QWEN_TOWER, "deepstack_visual_indexes": [0, 2]}
BLOCKS = {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}, "head_dim": None}
WINDOWS = {**QWEN_TOWER, "fullatt_block_indexes": [1, 3], "window_size": 16}
SMALL = {**QWEN_TOWER, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2}
QUARTER = {
    "head_dim": 32,
    "rope_parameters": {
        **ROPE,
        **{"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
GLM = {**QWEN_TOWER, "image_size": 32, "out_hidden_size": 64}
SIGLIP = {
    **{"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 32, "image_size": 16},
    **{"num_attention_heads": 2, "patch_size": 4, "vision_use_head": False},
}
# a key's bias adds the same to all scores of a query, which a softmax takes away (without rotary
# embeddings): the gradient is 0, and what is found is rounding
CANCELLING = re.compile(r"^vision_tower\..*k_proj\.bias$")
GEMMA3 = "Gemma3ForConditionalGeneration"
# architecture -> keys of the language model's configuration
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": {**INTERLEAVED, "vision_config": DEEPSTACK},
    "Qwen3VLMoeForConditionalGeneration": {**INTERLEAVED, "vision_config": DEEPSTACK},
    "Qwen2_5_VLForConditionalGeneration": {**BLOCKS, "vision_config": WINDOWS},
    "Qwen2VLForConditionalGeneration": {**BLOCKS, "vision_config": SMALL},
    "Glm4vForConditionalGeneration": {"vision_config": GLM},
    "Glm46VForConditionalGeneration": {"vision_config": GLM},
    "Glm4vMoeForConditionalGeneration": {"vision_config": {**GLM, "out_hidden_size": 32}},
    "Exaone4_5_ForConditionalGeneration": {"vision_config": {**WINDOWS, "num_key_value_heads": 2}},
    GEMMA3: {"vision_config": SIGLIP, "head_dim": 16},
    "Qwen3_5ForConditionalGeneration": {**QUARTER, "vision_config": QWEN_TOWER},
    "Qwen3_5MoeForConditionalGeneration": {**QUARTER, "vision_config": QWEN_TOWER},
}


def make_model(architecture: str, folder: Path, **more: Any) -> Any:
    """The model of transformers' class that lies in `folder` then. more: keys of the language
    model's configuration."""
    changes = {**SIZES, **MODELS[architecture], **more}
    model = make_tiny_model(architecture, folder, **changes)
    path = folder / "config.json"
    own = {"image_token_id": IMAGE}
    if architecture == GEMMA3:
        own = {"image_token_index": IMAGE, "mm_tokens_per_image": FEATURES}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    for name, value in own.items():
        setattr(model.config, name, value)
    return model


def vision_of(folder: Path | str, *, trained: bool = False) -> VisionSettings:
    return read_vision(str(folder), read_hf_model(str(folder)), trained=trained)


def images(vision: VisionSettings, seed: int, count: int) -> ImageInputs:
    """Random images of sizes of their own."""
    generator = torch.Generator().manual_seed(seed)
    tower = json.loads(vision.config)["vision_config"]
    merge_size = vision.rule.merge_size
    if merge_size is None:
        return ImageInputs(torch.randn(count, 3, 16, 16, generator=generator))
    sizes = torch.randint(1, 5, (count, 2), generator=generator) * merge_size
    grids = torch.cat([torch.ones(count, 1, dtype=torch.int64), sizes], dim=1)
    columns = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    pixels = torch.randn(int(grids.prod(1).sum()), columns, generator=generator)
    return ImageInputs(pixels, grids)


def with_images(
    sample: TrainSample, vision: VisionSettings, seed: int, inputs: ImageInputs
) -> TrainSample:
    """The sample with images in its prompt, each after a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt: list[Tensor] = []
    for count in feature_counts(inputs, vision.rule):
        text = int(torch.randint(1, 4, (), generator=generator))
        prompt.append(torch.randint(IMAGE, (text,), generator=generator))
        prompt.append(torch.full((count,), IMAGE))
    tokens = torch.cat([*prompt, sample.tokens % IMAGE])
    return replace(sample, tokens=tokens, images=image_rows(tokens, inputs, vision.rule))

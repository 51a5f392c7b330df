"""Small pictures, and a folder with what makes them tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from arguments.hf.model import read_hf_model
from arguments.hf.vision import read_vision
from slime_like.cli.tiny_model import IMAGE, make_tokenizer, save_image_processor
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import DEFAULT_LIMITS, ImageLimits
from slime_like.images.processor import ImageProcessor
from slime_like.images.rows import PlaceholderRule

VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}


def picture(
    seed: int = 0, height: int = 16, width: int = 24, kind: str = "PNG", **options: Any
) -> bytes:
    """A file with random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def turned(height: int = 16, width: int = 24) -> EncodedImage:
    """A JPEG that a camera has turned by a quarter; both sizes are of the image as it is seen."""
    tag = Image.Exif()
    tag[0x0112] = 6
    return EncodedImage(picture(0, width, height, "JPEG", exif=tag.tobytes()))


def processor_folder(folder: Path) -> tuple[Any, str]:
    """A folder with tokenizer, image processor ; and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(images=True)
    tokenizer.save_pretrained(folder)
    save_image_processor(folder, VISION)
    return tokenizer, str(folder)


def tiny_processor(
    folder: Path, limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[Any, ImageProcessor]:
    tokenizer, path = processor_folder(folder)
    rule = PlaceholderRule(tokenizer.convert_tokens_to_ids(IMAGE), merge_size=2)
    return tokenizer, ImageProcessor.load(path, tokenizer, rule, limits=limits)


def processor_of(folder: Path, tokenizer: Any) -> ImageProcessor:
    """The processor of a model's folder, as a run loads it."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "gemma3":  # of which only the engine takes images
        rule = PlaceholderRule(config["image_token_index"], features=config["mm_tokens_per_image"])
    else:
        rule = read_vision(str(folder), read_hf_model(str(folder))).rule
    return ImageProcessor.load(str(folder), tokenizer, rule)

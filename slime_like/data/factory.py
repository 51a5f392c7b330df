"""The tokenizer and the image processor of a run, from --hf-checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arguments.run_config import RunConfig
from slime_like.data.tokenizer import load_tokenizer
from slime_like.images.files import ImageLimits
from slime_like.images.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_tokenizer(config: RunConfig) -> object:
    """The tokenizer of --hf-checkpoint; None if the run only reads recorded tokens. Raises
    ValueError."""
    if config.model.hf_checkpoint is None:
        return None
    return load_tokenizer(
        config.model.hf_checkpoint,
        vocab_size=config.gpt.vocab_size,
        trust_remote_code=config.model.trust_remote_code,
    )


def run_image_processor(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageProcessor | None:
    """The image processor of --hf-checkpoint; None without --multimodal-keys and --serve-images.
    Raises ValueError."""
    data = config.data
    if config.gpt.vision is None or config.model.hf_checkpoint is None:
        return None
    return ImageProcessor.load(
        config.model.hf_checkpoint,
        tokenizer,
        config.gpt.vision.rule,
        limits=ImageLimits(
            int(data.max_image_mb * 2**20), data.max_image_pixels, data.image_decode_timeout_s
        ),
        trust_remote_code=config.model.trust_remote_code,
        asked_by="--serve-images" if config.server.serve_images else "--multimodal-keys",
    )

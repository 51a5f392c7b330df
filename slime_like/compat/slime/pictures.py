"""Counterparts of slime's names for pictures, for generate functions that call a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_like.images.files import as_image, encode
from slime_like.images.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SlimeProcessor:
    """Called as transformers' processor of the model: makes the tokens of a text, with all
    placeholders of its pictures, and what the vision tower takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor) -> None:
        self.tokenizer = tokenizer
        self._images = images

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        **options: object,
    ) -> dict[str, Any]:
        """
        Args:
            images: A picture of PIL, or a list.
            text: With the model's mark of an image for each. One: the tokens of several texts are
                not offered.
            options: Formats of the result, which are slime's whatever is asked for: lists of
                tokens, tensors of the pictures.

        Returns:
            ``input_ids`` and ``attention_mask``, lists with one list, and with pictures
            ``pixel_values`` and, of towers that take patches, ``image_grid_thw``.

        Raises:
            ValueError: Videos; or another number of pictures than marks.
        """
        texts = [text] if isinstance(text, str) else list(text or ())
        if videos:
            raise ValueError("the processor takes pictures, and no videos")
        if len(texts) != 1:
            raise ValueError(f"the processor takes one text at a time, not {len(texts)}")
        given = (
            list(images) if isinstance(images, list | tuple) else [images] * (images is not None)
        )
        files = [as_image(image) for image in given]
        written = self._images.written(texts[0])
        ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        if ids.count(self._images.rule.image_token) != len(files):
            raise ValueError(
                f"{len(files)} pictures, and the text has "
                f"{ids.count(self._images.rule.image_token)} marks {self._images.mark}"
            )
        tokens = self._images.expand(ids, self._images.token_counts(files))
        made: dict[str, Any] = {"input_ids": [tokens], "attention_mask": [[1] * len(tokens)]}
        if files:
            inputs = self._images.inputs(files)
            made["pixel_values"] = inputs.pixels
            if inputs.grids is not None:
                made["image_grid_thw"] = inputs.grids
        return made


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a processor for what a message has."""
    return {name: value for name, value in (multimodal_inputs or {}).items() if value}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A picture of PIL as a data URL, for ``image_data``."""
    return encode(image).data_url

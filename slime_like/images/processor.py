"""What a model's vision tower takes for an image, and how many tokens of the prompt it stands for:
transformers' image processor of the model's folder.

Every process makes pixels from a file's bytes with this function, always with transformers' Pillow
backend (the one for torchvision rounds otherwise), so that they are bit-equal in trainer and local
engine.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.images.encoded import EncodedImage
from slime_like.images.files import (
    DEFAULT_LIMITS,
    ImageLimits,
    ImageProblem,
    decode,
    exact,
)
from slime_like.images.inputs import ImageInputs, concatenate
from slime_like.images.rows import PlaceholderRule, feature_counts
from slime_like.lazy import torch
from slime_like.text import clean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
_CACHE_BYTES = 2**30  # of pixels, per process
_SERVED_BYTES = 2**28  # of files for engines
_REMEDY = "copy the model's files into it"


class LateImages:
    """An `ImageSource` of files: pixels that were dropped in between are made again."""

    def __init__(self, processor: ImageProcessor, images: Sequence[EncodedImage]) -> None:
        """Raises ImageProblem."""
        self.key = tuple(image.digest for image in images)
        self.grids = processor.inputs(images).grids
        self.num_images = len(images)
        self._processor = processor
        self._images = images

    def load(self) -> ImageInputs:
        return self._processor.inputs(self._images)


class ImageProcessor:
    """The image processor of a Hugging Face folder.

    Args:
        processor: transformers' image processor.
        rule: How the model writes images into its tokens.
        mark: What the chat template writes for an image.
        image_text: The text of a placeholder.
        written: What the tokenizer gets in the place of a mark, with one placeholder.
        limits: Of each image.
    """

    def __init__(
        self,
        processor: Any,
        rule: PlaceholderRule,
        mark: str,
        image_text: str,
        written: str,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.rule = rule
        self.mark = mark
        self.image_text = image_text
        self.limits = limits
        self._processor = processor
        self._written = written
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[str, ...], ImageInputs] = OrderedDict()
        self._served: OrderedDict[str, EncodedImage] = (
            OrderedDict()
        )  # by the digest of the original
        self._lock = threading.Lock()  # generation and training may be two threads

    @classmethod
    def load(
        cls,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        rule: PlaceholderRule,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        trust_remote_code: bool = False,
        asked_by: str = "--multimodal-keys",
    ) -> ImageProcessor:
        """Load the processor of a model.

        Args:
            rule: Of its config.json.
            asked_by: The flag that asks for images.

        Raises:
            ValueError: Names the folder: it has no image processor, one of another model, or the
                tokenizer is another model's.
        """
        where = f"{asked_by}: --hf-checkpoint {folder}"
        if not any((Path(folder) / name).is_file() for name in SETTINGS_FILES):
            raise ValueError(
                f"{where}: there is no image processor ({SETTINGS_FILES[0]}); {_REMEDY}, or use a "
                "model that takes images"
            )
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers and its dependencies raise nearly anything
            reason = clean(str(error).strip().split("\n", 1)[0] or repr(error), 300)
            raise ValueError(
                f"{where}: its image processor cannot be loaded "
                f"({type(error).__name__}: {reason}); {_REMEDY}"
            ) from error
        text = _text_of(tokenizer, rule.image_token, where)
        merge_size = getattr(processor, "merge_size", None)
        if merge_size != rule.merge_size:
            raise ValueError(
                f"{where}: its image processor has merge_size {merge_size}, and config.json "
                f"{rule.merge_size}; {_REMEDY}"
            )
        if merge_size is not None:
            return cls(processor, rule, text, text, text, limits=limits)
        # Gemma 3: whole images of one size, each between two tokens and line ends
        if getattr(processor, "do_pan_and_scan", None):
            raise ValueError(f"{where}: do_pan_and_scan is not offered; set it to false")
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        start, end = (
            _text_of(tokenizer, config.get(key), where)
            for key in ("boi_token_index", "eoi_token_index")
        )
        assert rule.features is not None
        written = f"\n\n{start}{text}{end}\n\n"
        return cls(processor, rule, start, text, written, limits=limits)

    def num_tokens(self, height: int, width: int) -> int:
        """The number of placeholders of an image. Raises ImageProblem for a size that the
        processor does not take."""
        if self.rule.merge_size is None:
            assert self.rule.features is not None
            return self.rule.features
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except Exception as error:  # e.g. an image 200 times as wide as high
            raise self._refused(error) from error
        return int(patches) // self.rule.merge_size**2

    def written(self, text: str) -> str:
        """A rendered text as the tokenizer gets it, with one placeholder for every mark."""
        return text if self._written == self.mark else text.replace(self.mark, self._written)

    def expand(self, tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The ids of a text with every placeholder repeated as often as its image has features.

        Args:
            tokens: With one placeholder for each image.
            counts: Of the images, in order; there may be more than placeholders here.
        """
        remaining = iter(counts)
        expanded: list[int] = []
        for token in tokens:
            expanded += [token] * (next(remaining) if token == self.rule.image_token else 1)
        return expanded

    def collapse(self, tokens: Sequence[int], images: Sequence[EncodedImage]) -> list[int]:
        """The ids with a single placeholder for every image, as SGLang takes them: the inverse of
        `expand`. Raises ValueError if they have other placeholders than these images'."""
        placeholder = self.rule.image_token
        remaining = iter(self.token_counts(images))
        collapsed: list[int] = []
        place = 0
        while place < len(tokens):
            collapsed.append(tokens[place])
            width = next(remaining, 0) if tokens[place] == placeholder else 1
            if not width or tokens[place : place + width] != (tokens[place],) * width:
                raise ValueError(f"the placeholder of an image at token {place} has no image")
            place += width
        if next(remaining, None) is not None:
            raise ValueError("there are more images than placeholders of images")
        return collapsed

    def served(self, image: EncodedImage) -> EncodedImage:
        """The image for an engine that decodes it by itself, as a PNG file of the pixels that this
        processor sees before it makes numbers of them. Programs differ in how they decode a JPEG,
        turn, fill and resize an image, and have nothing left to do with this one. The last ones
        stay in memory."""
        with self._lock:
            if image.digest in self._served:
                self._served.move_to_end(image.digest)
                return self._served[image.digest]
        made = exact(image, self._seen_size(image), self._processor.resample, self.limits)
        with self._lock:
            self._served[image.digest] = made
            while (
                len(self._served) > 1
                and sum(len(i.data) for i in self._served.values()) > _SERVED_BYTES
            ):
                self._served.popitem(last=False)
        return made

    def _seen_size(self, image: EncodedImage) -> tuple[int, int]:
        """Height and width in pixels of what the tower sees."""
        grids = self.inputs([image]).grids
        if grids is None:
            size = self._processor.size
            return int(size["height"]), int(size["width"])
        _, rows, columns = grids[0].tolist()
        return rows * self._processor.patch_size, columns * self._processor.patch_size

    def token_counts(self, images: Sequence[EncodedImage]) -> list[int]:
        """The number of placeholders of each image."""
        return feature_counts(self.inputs(images), self.rule) if images else []

    def inputs(self, images: Sequence[EncodedImage]) -> ImageInputs:
        """What the tower takes for these images, at least one, in order. The last ones stay in
        memory, and equal images are one object. Raises ImageProblem."""
        key = tuple(image.digest for image in images)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        # the engine may ask first, in inference mode, of which a trained tower can save no tensor
        with torch.inference_mode(False):
            if len(images) == 1:
                made = self._make(images[0])
            else:
                made = concatenate([self.inputs([image]) for image in images])
        with self._lock:
            self._cached[key] = made
            while len(self._cached) > 1 and self._cached_bytes() > self._cache_bytes:
                self._cached.popitem(last=False)
        return made

    def _cached_bytes(self) -> int:
        return sum(inputs.pixels.nbytes for inputs in self._cached.values())

    def _make(self, image: EncodedImage) -> ImageInputs:
        pixels = decode(image, self.limits)
        try:
            made = self._processor(images=[pixels], return_tensors="pt")
        except Exception as error:
            raise self._refused(error) from error
        return ImageInputs(made["pixel_values"].float(), made.get("image_grid_thw"))

    def _refused(self, error: Exception) -> ImageProblem:
        reason = clean(str(error).split("\n", 1)[0], 200)
        return ImageProblem(f"the model's image processor does not take the image: {reason}")


def _text_of(tokenizer: PreTrainedTokenizerBase, token: object, where: str) -> str:
    """The text of a special token. Raises ValueError if the tokenizer does not have it."""
    text = tokenizer.convert_ids_to_tokens(token) if isinstance(token, int) else None
    if not isinstance(text, str) or tokenizer(text, add_special_tokens=False)["input_ids"] != [
        token
    ]:
        raise ValueError(
            f"{where}: the tokenizer has no special token {token}, the placeholder of images in "
            f"config.json; {_REMEDY}"
        )
    return text

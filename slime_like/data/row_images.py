"""Images of a row (--multimodal-keys): in the parts of its messages, or beside them in a field,
each in the place of a mark. Both slime's and verl's rows, and what the Hugging Face library
`datasets` writes.

An image is a path relative to the data file, a data URL, the bytes of a file, or an object with one
of these. Checking a row reads headers alone; files are read and decoded when a prompt is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from slime_like.data.messages import (
    ASSISTANT,
    IMAGE_MARK,
    MessageProblem,
    content_text,
)
from slime_like.data.rendering import RowProblem
from slime_like.data.rows import Row
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import (
    ImageLimits,
    ImageProblem,
    from_base64,
    image_bytes,
    image_size,
    read_image,
)
from slime_like.images.processor import ImageProcessor
from slime_like.text import clean, shown

TEXT_MARK = "<image>"  # in texts: the place of the next image of the field; slime's and verl's
_OBJECT_KEYS = ("bytes", "path", "image", "url", "image_url")
ImageSource: TypeAlias = bytes | Path


class RowImages:
    """Takes the images out of rows.

    Args:
        processor: The model's.
        column: The field with images beside the messages.
        folder: Of the data file, for relative paths.
    """

    def __init__(self, processor: ImageProcessor, column: str, folder: Path) -> None:
        self.processor = processor
        self.column = column
        self._folder = folder

    @property
    def limits(self) -> ImageLimits:
        return self.processor.limits

    def split(self, row: Row, keys: Sequence[str]) -> tuple[Row, list[object]]:
        """The row without its images, with `IMAGE_MARK` where they belong, and the images.

        Args:
            keys: Fields with a list of messages, the first perhaps with a text. Several, as of a
                pair of answers, have the same images, or none.

        Raises:
            RowProblem: Names what does not fit together.
        """
        beside = _as_list(row.get(self.column))
        stripped = {key: value for key, value in row.items() if key != self.column}
        found: list[object] | None = None
        for key in keys:
            if key not in row or (isinstance(row[key], str) and key != keys[0]):
                continue
            stripped[key], images = self._conversation(row[key], key, beside)
            if found is not None and images and images != found:
                raise RowProblem(f"{key!r} has other images than the rest of the row")
            found = images or found
        if beside and found is None:
            raise RowProblem(self._count_problem(0, len(beside)))
        return stripped, found or []

    def _conversation(
        self, value: Any, key: str, beside: Sequence[object]
    ) -> tuple[Any, list[object]]:
        """A text or messages without images, and these images."""
        images: list[object] = []
        is_text = isinstance(value, str)
        messages = [{"role": "user", "content": value}] if is_text else value
        if not isinstance(messages, list):
            return value, []  # which the checks of prompts report
        texts = []
        for number, message in enumerate(messages):
            try:
                texts.append(self._message(message, images))
            except MessageProblem as problem:
                raise RowProblem(f"{key!r}: message {number}: {problem}") from problem
        places = images.count(None)
        if images and places != len(beside):
            raise RowProblem(self._count_problem(places, len(beside)))
        rest = iter(beside)
        resolved = [next(rest) if image is None else image for image in images]
        return (texts[0]["content"] if is_text else texts), resolved

    def _message(self, message: Any, images: list[object]) -> Any:
        if not isinstance(message, Mapping) or message.get("content") is None:
            return message
        content = message["content"]
        own: list[object] = []
        text = content if isinstance(content, str) else content_text(content, own)
        if text.count(IMAGE_MARK) != len(own):
            raise MessageProblem("the text has the reserved code point U+FDD0")
        for special in (self.processor.mark, self.processor.image_text):
            if special in text:
                raise MessageProblem(
                    f"the text has {special}, the model's own placeholder of an image; write "
                    f"{TEXT_MARK}, or remove it"
                )
        if own and message.get("role") == ASSISTANT:
            raise MessageProblem("an assistant's turn cannot have images")
        if isinstance(content, str) and message.get("role") != ASSISTANT:
            own = [None] * text.count(TEXT_MARK)
            text = text.replace(TEXT_MARK, IMAGE_MARK)
        images += own
        return {**message, "content": text}

    def _count_problem(self, places: int, count: int) -> str:
        return (
            f"{count} images in {self.column!r} (--multimodal-keys) and {places} places for them: "
            f"write {TEXT_MARK} into the text, or a part of type 'image' into the message, for each"
        )

    def problem(self, images: Sequence[object]) -> str | None:
        """What is wrong with a row's images, as far as their headers tell."""
        try:
            self.counts(images)
        except RowProblem as problem:
            return str(problem)
        return None

    def counts(self, images: Sequence[object]) -> list[int]:
        """The number of placeholders of each image, from its header. Raises RowProblem."""
        return self._each(images, self._count)

    def load(self, images: Sequence[object]) -> tuple[EncodedImage, ...]:
        """The images, decoded once, so that a damaged one is found here. Raises RowProblem."""
        return tuple(self._each(images, self._load))

    def _count(self, image: object) -> int:
        size = image_size(source_of(image, self._folder), self.limits)
        return self.processor.num_tokens(*size)

    def _load(self, image: object) -> EncodedImage:
        source = source_of(image, self._folder)
        encoded = (
            read_image(source, self.limits) if isinstance(source, Path) else EncodedImage(source)
        )
        (count,) = self.processor.token_counts([encoded])
        if count != self._count(image):
            raise ImageProblem("the file has changed while it was read")
        return encoded

    def _each(self, images: Sequence[object], read: Callable[[object], Any]) -> list[Any]:
        results = []
        for number, image in enumerate(images, start=1):
            try:
                results.append(read(image))
            except ImageProblem as problem:
                raise RowProblem(f"image {number} of {len(images)}: {problem}") from problem
        return results


def without_images(row: Row, column: str, keys: Sequence[str]) -> Row:
    """The row without the bytes of images, for the check of what recordings can hold."""
    kept = {key: value for key, value in row.items() if key != column}
    for key in keys:
        if isinstance(kept.get(key), list):
            kept[key] = [_without_parts(message) for message in kept[key]]
    return kept


def _without_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [part for part in content if not isinstance(part, dict) or part.get("type") == "text"]
    return {**message, "content": texts}


def source_of(image: object, folder: Path) -> ImageSource:
    """Bytes or path of an image in any of the forms of rows.

    Args:
        image: As the row has it.
        folder: Of the data file.

    Raises:
        ImageProblem: It has none of them.
    """
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, Mapping):
        given = {key: image[key] for key in image if image[key] is not None}
        for key in given:
            if key not in _OBJECT_KEYS and key not in ("type", "detail"):
                raise ImageProblem(f"{key!r} of an image is not offered")
        if isinstance(given.get("bytes"), str):
            return from_base64(given["bytes"])
        value = next((given[key] for key in _OBJECT_KEYS if key in given), None)
        if value is None:
            raise ImageProblem(f"an object must have one of {', '.join(map(repr, _OBJECT_KEYS))}")
        return source_of(value, folder)
    if not isinstance(image, str):
        raise ImageProblem(
            f"must be a path, a data URL, or an object with bytes or path, not {shown(image)}"
        )
    if image.startswith("data:"):
        return image_bytes(image)
    if image.startswith(("http://", "https://")):
        raise ImageProblem(
            f"{clean(image, 200)}: a run loads nothing from the network; download it and name the "
            "file"
        )
    return folder / image.removeprefix("file://")


def _as_list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]

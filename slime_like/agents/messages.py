"""Chat messages of all APIs in canonical form, so that the history a client sends can be compared
with the responses it received."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime_like.data import messages
from slime_like.data.messages import Message
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import ImageProblem, image_bytes

IMAGES = "images"  # key of a canonical message


class BadRequest(ValueError):
    """An invalid or unsupported request; the message is for the client."""


class ContextExceeded(BadRequest):
    """The conversation leaves no room for a completion."""


def canonical(message: object, index: int) -> dict[str, Any]:
    """The canonical form of a client's message, its index in the request. One with images has them
    under `IMAGES`, each in the place of an `IMAGE_MARK`.

    Raises:
        BadRequest: Names the message and the problem.
    """
    images: list[object] = []
    try:
        parsed = messages.canonical(message, images=images)
        if str(parsed["content"]).count(messages.IMAGE_MARK) != len(images):
            raise messages.MessageProblem("the text has the reserved code point U+FDD0")
        return parsed | ({IMAGES: [_image(image) for image in images]} if images else {})
    except (messages.MessageProblem, ImageProblem) as problem:
        raise BadRequest(f"messages[{index}]: {problem}") from None


def _image(image: object) -> EncodedImage:
    """The file of a data URL: a client's address or path is never opened. Raises ImageProblem."""
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise ImageProblem("a part of type 'image_url' must hold a data URL of an image")
    return EncodedImage(image_bytes(url))


def images_of(conversation: Iterable[Message]) -> tuple[EncodedImage, ...]:
    """The images of messages, in order."""
    return tuple(image for message in conversation for image in message.get(IMAGES, ()))


def for_record(message: Message) -> dict[str, Any]:
    """The message as plain JSON, with digests in place of images."""
    if IMAGES not in message:
        return dict(message)
    content = message["content"].replace(messages.IMAGE_MARK, "<image>")
    return {**message, "content": content, IMAGES: [i.digest for i in message[IMAGES]]}


def history_keys(history: Sequence[Message], tools: object) -> Iterator[bytes]:
    """Digests of the tools with each prefix of the history, from the shortest (empty) prefix
    on."""
    digest = hashlib.blake2b(_json(tools), digest_size=16).digest()
    yield digest
    for message in history:
        digest = hashlib.blake2b(digest + _json(message), digest_size=16).digest()
        yield digest


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()

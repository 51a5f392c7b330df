"""Read and check image files. They come from anyone: whatever is wrong with one is an
`ImageProblem`, before its pixels take memory, and decoding has a deadline."""

from __future__ import annotations

import base64
import io
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from slime_like.extras import pip_install
from slime_like.images.encoded import EncodedImage
from slime_like.text import clean

if TYPE_CHECKING:
    from PIL.Image import Image


T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})  # 8 bits a channel
_ORIENTATION = 0x0112  # EXIF tag, which cameras write
_TURNED = (5, 6, 7, 8)  # orientations in which height and width are exchanged
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "GIF": b";"}  # what a complete file ends with
_ENDS["MPO"] = _ENDS["JPEG"]  # Pillow's name of a JPEG with more pictures behind it, as of phones
_PNG_TAGS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may have an orientation
_PNG_HEAD = 8 + 25  # bytes of the signature and of the chunk with the size
_TAIL_BYTES = 2**16  # in which the end is looked for: some programs write more behind it


class ImageProblem(ValueError):
    """What is wrong with an image; whoever knows its row adds that."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may need."""

    max_bytes: int = 20 * 2**20  # of the file
    max_pixels: int = 2**26
    decode_s: float = 30.0  # seconds to read and decode one image


DEFAULT_LIMITS = ImageLimits()


def pillow() -> Any:
    """The module PIL.Image. Raises ValueError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"images need Pillow: {pip_install('vision')}") from error
    # `ImageLimits` are the limits, and end the image instead of warning
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


def read_image(path: Path, limits: ImageLimits) -> EncodedImage:
    """The file at `path`. Raises ImageProblem if there is none, it is too large, or reading it
    takes too long."""
    check_file(path, limits)
    return EncodedImage(_within(limits.decode_s, path.read_bytes))


def check_file(path: Path, limits: ImageLimits) -> None:
    """Check that `path` is a file within the limits. Raises ImageProblem."""
    name = clean(path, 200)
    try:
        if path.is_dir():
            raise ImageProblem(f"{name} is a folder")
        if not path.is_file():  # a pipe or a device would wait
            raise ImageProblem(f"{name}: no such file")
        size = os.path.getsize(path)
    except OSError as error:  # a name that is too long, a folder of another user
        raise ImageProblem(f"{name}: cannot be read: {error.strerror}") from error
    _check_bytes(size, limits)


def image_size(source: bytes | Path, limits: ImageLimits) -> tuple[int, int]:
    """Height and width of an image, turned as its EXIF tag says, from its header alone.

    Raises:
        ImageProblem: No image of `FORMATS`, too large, or without its end.
    """
    if isinstance(source, Path):
        check_file(source, limits)
        return _within(limits.decode_s, lambda: _size_of_file(source, limits))
    _check_bytes(len(source), limits)
    return _size(io.BytesIO(source), limits)


def decode(image: EncodedImage, limits: ImageLimits) -> Image:
    """The pixels in RGB, turned as the EXIF tag says, with transparent ones on white, as in
    transformers. Raises ImageProblem."""
    _check_bytes(len(image.data), limits)
    return _within(limits.decode_s, lambda: _decode(image.data, limits))


def image_bytes(url: str) -> bytes:
    """The file in a data URL. Raises ImageProblem."""
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise ImageProblem(f"the data URL {clean(head, 60)!r} is not of base64")
    return from_base64(data)


def from_base64(text: str) -> bytes:
    """Raises ImageProblem."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ImageProblem(f"not base64: {error}") from error


def as_image(value: object) -> EncodedImage:
    """An image of a user's function: a file's bytes or path, or an image of PIL. Raises
    ImageProblem."""
    if isinstance(value, EncodedImage):
        return value
    if isinstance(value, bytes):
        return EncodedImage(value)
    if isinstance(value, str | Path):
        return read_image(Path(value), DEFAULT_LIMITS)
    return encode(value)  # type: ignore[arg-type]


def exact(
    image: EncodedImage, size: tuple[int, int], resample: int, limits: ImageLimits
) -> EncodedImage:
    """A PNG file of the image's RGB pixels with this height and width: the image itself if it is
    one. Raises ImageProblem.

    Args:
        resample: Pillow's filter.
    """
    height, width = size
    file = io.BytesIO(image.data)
    opened = _open(file, limits)
    plain = opened.format == "PNG" and not _is_transparent(opened)
    plain = plain and _orientation(_png_tags(file)) == 1
    if plain and opened.size == (width, height):
        return image
    pixels = decode(image, limits)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), resample=resample)
    return encode(pixels, compress_level=1)


def encode(image: Image, **options: int) -> EncodedImage:
    """An image of Pillow's, turned as its EXIF tag says, as a PNG file. options: of Pillow. Raises
    ImageProblem."""
    file = io.BytesIO()
    if not hasattr(image, "save"):
        raise ImageProblem(f"a {type(image).__name__} is no image of PIL")
    _upright(image).save(file, "PNG", **options)
    return EncodedImage(file.getvalue())


def _check_bytes(count: int, limits: ImageLimits) -> None:
    if count == 0:
        raise ImageProblem("the image is empty")
    if count > limits.max_bytes:
        raise ImageProblem(
            f"the image has {count} bytes, more than --max-image-mb "
            f"{limits.max_bytes / 2**20:g} allows"
        )


def _open(file: BinaryIO, limits: ImageLimits) -> Image:
    """The image with its header read, after all checks that need no pixels."""
    opener = pillow()
    try:
        image: Image = opener.open(file, formats=FORMATS)
    except opener.DecompressionBombError as error:
        raise ImageProblem(f"{error}, more than --max-image-pixels allows") from error
    except opener.UnidentifiedImageError as error:
        raise ImageProblem(f"not a readable image; legal: {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's readers raise nearly anything for damaged headers
        raise _damaged(error) from error
    width, height = image.size
    if height * width > limits.max_pixels:
        raise ImageProblem(
            f"the image has {height} x {width} pixels, more than --max-image-pixels "
            f"{limits.max_pixels} allows; make it smaller"
        )
    if min(height, width) < 1:
        raise ImageProblem(f"the image has {height} x {width} pixels")
    if image.mode not in _MODES:
        raise ImageProblem(
            f"the image has pixels of mode {image.mode!r}; 8 bits a channel are offered; convert it"
        )
    return image


def _size_of_file(path: Path, limits: ImageLimits) -> tuple[int, int]:
    with path.open("rb") as file:
        return _size(file, limits)


def _size(file: BinaryIO, limits: ImageLimits) -> tuple[int, int]:
    image = _open(file, limits)
    width, height = image.size
    tagged = _png_tags(file) if image.format == "PNG" else image
    turned = _orientation(tagged) in _TURNED
    _check_end(file, image.format or "")
    return (width, height) if turned else (height, width)


def _upright(image: Image) -> Image:
    """The image, turned as its EXIF tag says, like transformers' `load_image`."""
    from PIL import ImageOps

    return image if _orientation(image) == 1 else ImageOps.exif_transpose(image)


def _orientation(image: Image | None) -> int:
    """The orientation in EXIF or XMP, 1 if there is none. It decodes a PNG file: see
    `_png_tags`."""
    if image is None:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged tag: as if there was none
        return 1


def _png_tags(file: BinaryIO) -> Image | None:
    """An image of one pixel with the tags of a PNG file, None if they are damaged. They may follow
    the pixels, all of which Pillow decodes to see them."""
    opener = pillow()
    pixel = io.BytesIO()
    opener.new("L", (1, 1)).save(pixel, "PNG")
    parts = [pixel.getvalue()[:_PNG_HEAD]]
    file.seek(_PNG_HEAD)
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        if kind == b"IEND":
            break
        if kind in _PNG_TAGS:  # with a right checksum, which Pillow ignores behind the pixels
            chunk = kind + file.read(length + 4)[:-4]
            parts.append(struct.pack(">I", len(chunk) - 4) + chunk)
            parts.append(struct.pack(">I", zlib.crc32(chunk)))
        else:
            file.seek(length + 4, os.SEEK_CUR)
    parts.append(pixel.getvalue()[_PNG_HEAD:])
    try:
        tagged: Image = opener.open(io.BytesIO(b"".join(parts)), formats=("PNG",))
    except Exception:  # nearly anything for damaged chunks
        return None
    return tagged


def _check_end(file: BinaryIO, kind: str) -> None:
    """Check that the file is not cut off, as far as that shows without decoding."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(12)
    declared = 0
    if kind == "WEBP":
        declared = struct.unpack("<I", head[4:8])[0] + 8
    elif kind == "BMP":
        declared = struct.unpack("<I", head[2:6])[0]
    file.seek(max(0, length - _TAIL_BYTES))
    if declared > length or _ENDS.get(kind, b"") not in file.read():
        raise ImageProblem(f"the {kind} file is truncated")


def _decode(data: bytes, limits: ImageLimits) -> Image:
    image = _open(io.BytesIO(data), limits)
    if image.format in ("GIF", "WEBP", "PNG") and getattr(image, "is_animated", False):
        raise ImageProblem("the image is animated, and only one frame would be seen; extract it")
    try:
        image.load()
        image = _upright(image)
        if _is_transparent(image):
            image = image.convert("RGBA")
            white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
            image = pillow().alpha_composite(white, image)
        return image.convert("RGB")
    except Exception as error:  # Pillow's readers raise nearly anything for damaged files
        raise _damaged(error) from error


def _is_transparent(image: Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _damaged(error: Exception) -> ImageProblem:
    reason = clean(str(error).split("\n", 1)[0], 200)
    return ImageProblem(f"the image cannot be decoded ({type(error).__name__}: {reason})")


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread that is abandoned at the deadline. Raises ImageProblem
    at the deadline, and what `work` raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="image-decode", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        error = errors[0]
        if isinstance(error, OSError):
            raise ImageProblem(f"cannot be read: {error}") from error
        raise error
    if not results:
        raise ImageProblem(
            f"the image was not decoded after {limit_s:g} s (--image-decode-timeout-s)"
        )
    return results[0]

"""Rows with images: their shapes, what is wrong with them, and the tokens of their prompts."""

import base64
import dataclasses
import io
import json
import struct
import time
import zlib

import pytest
from PIL import Image, ImageOps

from arguments.schema.data import DataConfig
from slime_like.data.prompts import PromptSource
from slime_like.images import files
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import ImageLimits, ImageProblem
from tests.vision import picture, tiny_processor

PNG = picture()
JPEG = picture(1, kind="JPEG")
URL = EncodedImage(PNG).data_url
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("model"))


def source_of_rows(folder, parts, rows, processor=None, **settings):
    tokenizer, made = parts
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        prompt_data=str(path),
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
        **settings,
    )
    return PromptSource(config, tokenizer, image_processor=processor or made)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "What?"}
SHAPES = {
    "slime's, a path": {"input": "<image>What?", "images": ["a.png"]},
    "one value in place of a list": {"input": "<image>What?", "images": "a.png"},
    "slime's geo3k, a data URL": {"input": "<image>What?", "images": [URL]},
    "verl's, an object with bytes": {
        "input": [{"role": "user", "content": "<image>What?"}],
        "images": [{"bytes": base64.b64encode(PNG).decode(), "path": None}],
    },
    "verl's, an object with a path": {
        "input": [{"role": "user", "content": "<image>What?"}],
        "images": [{"bytes": None, "path": "a.png"}],
    },
    "Qwen's, in the field": {"input": "<image>What?", "images": [{"image": "a.png"}]},
    "a part that the field fills": {"input": user({"type": "image"}, TEXT), "images": ["a.png"]},
    "a part with its image": {"input": user({"type": "image", "image": "a.png"}, TEXT)},
    "a part with null fields": {
        "input": user({"type": "image", "image": "a.png", "text": None}, TEXT)
    },
    "a part with a URL of a file": {"input": user({"type": "image", "url": "file://a.png"}, TEXT)},
    "a part with base64": {
        "input": user({"type": "image", "base64": base64.b64encode(PNG).decode()}, TEXT)
    },
    "a part with a data URL as base64": {"input": user({"type": "image", "base64": URL}, TEXT)},
    "OpenAI's": {
        "input": user({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, TEXT)
    },
    "OpenAI's responses": {"input": user({"type": "input_image", "image_url": URL}, TEXT)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_rows_are_one_prompt(tmp_path, parts, shape):
    (tmp_path / "a.png").write_bytes(PNG)
    (prompt,) = source_of_rows(tmp_path, parts, [SHAPES[shape]]).next_prompts(1)
    assert prompt.text == f"<|user|>{IMAGE}What?<|assistant|>"
    assert [image.data for image in prompt.images] == [PNG]
    placeholder = parts[1].rule.image_token
    assert prompt.tokens.count(placeholder) == 6  # 16 x 24 pixels, of which 8 x 8 are a feature
    assert len(prompt.tokens) == 6 + len("What?") + 4


def test_several_images_keep_their_order_and_sizes(tmp_path, parts):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(picture(1, 24, 32, "JPEG"))
    rows = [
        {"input": "One <image> and <image>.", "images": ["a.png", "b.jpg"]},
        {"input": "none"},
        {
            "input": [
                {"role": "user", "content": "<image>"},
                {"role": "assistant", "content": "<image> is no place"},
                *user({"type": "image", "image": "b.jpg"}),
            ],
            "images": ["a.png"],
        },
    ]
    first, second, third = source_of_rows(tmp_path, parts, rows).next_prompts(3)
    placeholder = parts[1].rule.image_token
    assert [image.kind for image in first.images] == ["png", "jpeg"]
    assert first.tokens.count(placeholder) == 6 + 12
    assert second.images == () and placeholder not in second.tokens
    assert [image.data for image in third.images] == [image.data for image in first.images]
    assert "<image> is no place" in third.text


def test_parquet_as_datasets_writes_it(tmp_path, parts):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    tokenizer, processor = parts
    table = pa.table({
        "problem": ["<image>What?", "<image><image>Both?"],
        "images": [[{"bytes": PNG, "path": "x.png"}], [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": None}]],
        "answer": ["a", "b"],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    config = DataConfig(
        prompt_data=str(tmp_path / "rows.parquet"),
        input_key="problem",
        label_key="answer",
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )
    first, second = PromptSource(config, tokenizer, image_processor=processor).next_prompts(2)
    assert [i.data for i in first.images] == [PNG]
    assert [i.data for i in second.images] == [PNG, JPEG]


def exif(orientation):
    tag = Image.Exif()
    tag[0x0112] = orientation
    return tag.tobytes()


def with_chunk(kind, data, place):
    """The PNG with one chunk more, before the pixels or at the end."""
    chunk = kind + data
    chunk = struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    at = 33 if place == "before" else len(PNG) - 12
    return PNG[:at] + chunk + PNG[at:]


def phone_jpeg(orientation):
    """A JPEG with a second picture behind the first, which Pillow calls MPO."""
    image = Image.open(io.BytesIO(PNG))
    file = io.BytesIO()
    image.save(file, "MPO", save_all=True, append_images=[image], exif=exif(orientation))
    return file.getvalue()


XMP = b'<rdf:Description tiff:Orientation="6"/>'
TAG = exif(6)
TURNED = {
    "jpeg": picture(0, kind="JPEG", exif=TAG),
    "webp": picture(0, kind="WEBP", exif=TAG),
    "mpo": phone_jpeg(6),
    "png": picture(0, exif=TAG),
    "png with EXIF behind the pixels": with_chunk(b"eXIf", TAG[6:], "behind"),
    "png with XMP": with_chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + XMP, "before"),
    "png with EXIF of ImageMagick": with_chunk(
        b"tEXt", b"Raw profile type exif\0\nexif\n  0\n" + TAG.hex().encode(), "behind"
    ),
}


@pytest.mark.parametrize("kind", TURNED)
def test_orientation_of_a_camera_turns_the_image(tmp_path, parts, kind):
    """As in transformers' `load_image`."""
    data = TURNED[kind]
    rows = [{"input": "<image>", "images": [EncodedImage(data).data_url]}]
    (prompt,) = source_of_rows(tmp_path, parts, rows).next_prompts(1)
    assert parts[1].inputs(prompt.images).grids.tolist() == [[1, 6, 4]]
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    for made in (
        files.decode(EncodedImage(data), files.DEFAULT_LIMITS),
        files.decode(files.as_image(Image.open(io.BytesIO(data))), files.DEFAULT_LIMITS),
    ):
        assert made.size == (16, 24) and made.tobytes() == upright.tobytes()


def test_an_image_that_the_engine_might_turn_again_is_written_anew():
    square = EncodedImage(picture(0, 16, 16, exif=exif(3)))
    written = files.exact(square, (16, 16), Image.Resampling.BICUBIC, files.DEFAULT_LIMITS)
    assert Image.open(io.BytesIO(written.data)).getexif() == {}
    upright = EncodedImage(picture(0, 16, 16))
    assert files.exact(upright, (16, 16), Image.Resampling.BICUBIC, files.DEFAULT_LIMITS) is upright


@pytest.mark.parametrize("place", ["before", "behind"])
def test_damaged_tags_are_as_none(tmp_path, parts, place):
    data = with_chunk(b"eXIf", b"nothing", place)
    rows = [{"input": "<image>", "images": [EncodedImage(data).data_url]}]
    (prompt,) = source_of_rows(tmp_path, parts, rows).next_prompts(1)
    assert parts[1].inputs(prompt.images).grids.tolist() == [[1, 4, 6]]


def gif():
    file = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def sixteen_bits():
    file = io.BytesIO()
    Image.new("I;16", (16, 16)).save(file, "PNG")
    return file.getvalue()


def damaged_pixels():
    data = bytearray(picture(0, 64, 64))
    start = data.index(b"IDAT") + 200
    data[start : start + 50] = bytes(50)
    return bytes(data)


FILES = {  # the file a.png, and what the message says
    "missing": (None, r"a\.png: no such file"),
    "empty": (b"", "the image is empty"),
    "text": (b"no picture at all", "not a readable image; legal: PNG, JPEG, WEBP, GIF, BMP"),
    "another type": (b"%PDF-1.4 and more", "not a readable image"),
    "cut off in the header": (PNG[:20], "cannot be decoded|not a readable image"),
    "cut off at the end": (PNG[:-20], "the PNG file is truncated"),
    "cut off jpeg": (JPEG[:-20], "the JPEG file is truncated"),
    "cut off jpeg of a phone": (phone_jpeg(1)[: phone_jpeg(1).index(b"\xff\xd9")], "the MPO file is truncated"),
    "cut off webp": (picture(0, kind="WEBP")[:-20], "cannot be decoded|the WEBP file is truncated"),
    "cut off bmp": (picture(0, kind="BMP")[:-20], "the BMP file is truncated"),
    "too many pixels": (picture(0, 200, 201), "the image has 200 x 201 pixels, more than --max-image-pixels 40000"),
    "too many bytes": (bytes(3 * 2**16), "the image has 196608 bytes, more than --max-image-mb 0.125 allows"),
    "16 bits": (sixteen_bits(), "mode 'I;16'"),
    "200 times as wide as high": (picture(0, 8, 2000), "does not take the image"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_a_bad_file_is_one_error_with_its_row(tmp_path, tmp_path_factory, fault):
    data, words = FILES[fault]
    limits = ImageLimits(max_bytes=2**17, max_pixels=40_000)
    parts = tiny_processor(tmp_path_factory.mktemp("model"), limits)
    (tmp_path / "good.png").write_bytes(PNG)
    if data is not None:
        (tmp_path / "a.png").write_bytes(data)
    rows = [
        {"input": "<image>", "images": "good.png"},
        {"input": "<image><image>", "images": ["good.png", "a.png"]},
    ]
    with pytest.raises(
        ValueError, match=rf"rows\.jsonl:2: image 2 of 2: .*({words}).*--skip-bad-rows"
    ):
        source_of_rows(tmp_path, parts, rows)
    source = source_of_rows(tmp_path, parts, rows, skip_bad_rows=1)
    assert len(source) == 1 and "skipped 1 bad rows" in source.notes[0]


@pytest.mark.parametrize(
    ("data", "words"), [(damaged_pixels(), "cannot be decoded"), (gif(), "animated")]
)
def test_what_only_the_pixels_tell_is_found_when_the_prompt_is_made(tmp_path, parts, data, words):
    (tmp_path / "a.png").write_bytes(data)
    source = source_of_rows(tmp_path, parts, [{"input": "<image>", "images": "a.png"}])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: image 1 of 1: .*{words}"):
        source.next_prompts(1)


ROWS = {
    "a place without an image": ({"input": "<image> and <image>", "images": ["a.png"]}, "1 images in 'images' .* and 2 places for them: write <image>"),
    "an image without a place": ({"input": "What?", "images": ["a.png"]}, "1 images in 'images' .* and 0 places"),
    "a part and no image": ({"input": user({"type": "image"})}, "0 images in 'images' .* and 1 places"),
    "the model's own placeholder": ({"input": "<|image_pad|>", "images": []}, "the text has <|image_pad|>, the model's own placeholder"),
    "an assistant with an image": ({"input": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}, *user(TEXT)]}, "an assistant's turn cannot have images"),
    "a video": ({"input": user({"type": "video", "video": "a.mp4"})}, "a part of type 'video' .* text and images are"),
    "a size of its own": ({"input": user({"type": "image", "image": "a.png", "max_pixels": 9})}, "'max_pixels' of a part of type 'image' is not offered"),
    "a size beside": ({"input": "<image>", "images": [{"image": "a.png", "max_pixels": 9}]}, "'max_pixels' of an image is not offered"),
    "the network": ({"input": "<image>", "images": ["https://example.com/a.png"]}, "loads nothing from the network"),
    "a part with no base64": ({"input": user({"type": "image", "base64": "a.png"})}, "not base64"),
    "a long name": ({"input": "<image>", "images": ["x" * 300 + ".png"]}, r"x{99,}\.\.\.: cannot be read: File name too long"),
    "no base64": ({"input": "<image>", "images": ["data:image/png;base64,%%%"]}, "not base64"),
    "another data URL": ({"input": "<image>", "images": ["data:image/svg+xml,<svg/>"]}, "is not of base64"),
    "a number": ({"input": "<image>", "images": [3]}, "must be a path, a data URL, or an object with bytes or path, not 3"),
    "an empty object": ({"input": "<image>", "images": [{}]}, "an object must have one of 'bytes', 'path'"),
    "a folder": ({"input": "<image>", "images": ["."]}, "is a folder"),
    "a reserved code point": ({"input": "\ufdd0<image>", "images": ["a.png"]}, "the reserved code point U.FDD0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ROWS)
def test_what_does_not_fit_together_is_one_error_with_its_row(tmp_path, parts, fault):
    row, words = ROWS[fault]
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{words.replace('|', '[|]')}"):
        source_of_rows(tmp_path, parts, [row])


def test_a_template_that_writes_no_image_is_refused(tmp_path, parts):
    tokenizer, processor = parts
    (tmp_path / "a.png").write_bytes(PNG)
    plain = (
        type(tokenizer).from_pretrained(tokenizer.name_or_path)
        if tokenizer.name_or_path
        else tokenizer
    )
    template = tokenizer.chat_template
    plain.chat_template = template.replace(IMAGE, "")
    try:
        with pytest.raises(
            ValueError, match=r"rows\.jsonl:1: the chat template writes 0 of the row's 1 images"
        ):
            source_of_rows(tmp_path, (plain, processor), [{"input": "<image>", "images": "a.png"}])
    finally:
        tokenizer.chat_template = template


def test_without_the_flag_images_are_refused_by_its_name(tmp_path, parts):
    row = {"input": user({"type": "image", "image": "a.png"}, TEXT)}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(prompt_data=str(tmp_path / "rows.jsonl"), apply_chat_template=True)
    with pytest.raises(
        ValueError, match=r"'image' .* is not offered; text is; images need --multimodal-keys"
    ):
        PromptSource(config, parts[0])


def test_decoding_has_a_deadline(monkeypatch, parts):
    def endless(data, limits):
        time.sleep(60)

    monkeypatch.setattr(files, "_decode", endless)
    limits = dataclasses.replace(parts[1].limits, decode_s=0.05)
    with pytest.raises(
        ImageProblem, match=r"not decoded after 0\.05 s \(--image-decode-timeout-s\)"
    ):
        files.decode(EncodedImage(PNG), limits)


def test_a_bomb_is_refused_by_its_header(tmp_path, parts):
    """A file of 30 kB with 10^10 pixels: nothing of their size is allocated."""
    data = bytearray(PNG)
    data[16:24] = (100_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(ImageProblem, match="--max-image-pixels"):
        files.image_size(bytes(data), parts[1].limits)
    with pytest.raises(ImageProblem, match="--max-image-pixels"):
        files.decode(EncodedImage(bytes(data)), parts[1].limits)


def test_long_prompts_are_measured_with_their_images(tmp_path, parts):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "big.png").write_bytes(picture(0, 160, 160))
    rows = [{"input": "<image>", "images": name} for name in ("a.png", "big.png")]
    source = source_of_rows(tmp_path, parts, rows, rollout_max_prompt_len=50)
    assert len(source) == 1 and "dropped 1 of 2 prompts" in source.notes[0]

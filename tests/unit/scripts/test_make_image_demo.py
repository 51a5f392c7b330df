"""The pictures of the demo with images."""

from __future__ import annotations

import io
import json
import random
import sys

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from arguments.schema.data import DataConfig
from scripts import make_image_demo
from slime_like.data.prompts import PromptSource
from tests.vision import processor_of


def bright_pixels(image: Image.Image) -> list[tuple[int, ...]]:
    rows = np.asarray(image.convert("RGB")).reshape(-1, 3).tolist()
    return [tuple(p) for p in rows if max(p) > 60]


def test_the_demo_is_what_a_run_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--output-dir", str(tmp_path), "--num-heldout", "700"])
    make_image_demo.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    processor = processor_of(tmp_path / "model", tokenizer)
    config = DataConfig(
        prompt_data=str(tmp_path / "train.jsonl"),
        input_key="question",
        label_key="answer",
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )
    source = PromptSource(config, tokenizer, image_processor=processor)
    assert len(source) == len(make_image_demo.every_picture()) - 700
    (prompt,) = source.next_prompts(1)
    number, colour = prompt.label.split()
    assert prompt.tokens.count(processor.rule.image_token) == 9  # a feature for each place
    bright = bright_pixels(Image.open(io.BytesIO(prompt.images[0].data)))
    assert len(bright) == int(number) * 36
    expected = make_image_demo.COLOURS[colour]
    assert max(abs(a - b) for a, b in zip(bright[0], expected)) <= 20
    heldout = (tmp_path / "heldout.jsonl").read_text().splitlines()
    assert len(heldout) == 700 and json.loads(heldout[0])["images"] == ["pictures/heldout_0.png"]


def test_every_picture_is_another(tmp_path):
    pictures = make_image_demo.every_picture()
    assert len(set(pictures)) == len(pictures)
    noise = random.Random(0)
    make_image_demo.draw(("red", (0,)), tmp_path / "a.png", noise)
    make_image_demo.draw(("red", (8,)), tmp_path / "b.png", noise)
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_square_is_where_its_place_is(tmp_path, place):
    make_image_demo.draw(("white", (place,)), tmp_path / "a.png", random.Random(0))
    image = Image.open(tmp_path / "a.png").convert("RGB")
    cell = make_image_demo.CELL
    box = (place % 3 * cell, place // 3 * cell, place % 3 * cell + cell, place // 3 * cell + cell)
    assert len(bright_pixels(image.crop(box))) == 36

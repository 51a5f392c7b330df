"""Pictures of recorded rollouts on the page."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from slime_like.images.encoded import EncodedImage
from slime_like.report import images
from slime_like.report.page import page
from slime_like.report.read import read_run
from slime_like.report.rollouts import read_samples
from slime_like.rollout.recording import save_rollout
from slime_like.samples.groups import SampleGroup
from tests.unit.report.runs import sample, write_run
from tests.vision import picture

LARGE = EncodedImage(picture(0, 400, 800))
SMALL = EncodedImage(picture(1, 16, 24))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two samples that share a picture; the second has another one too."""
    folder = write_run(tmp_path)
    both = [sample(0, 0, "ab", 1.0), sample(0, 1, "cd", 0.0)]
    pictures = [(LARGE,), (LARGE, SMALL)]
    group = [dataclasses.replace(s, images=own) for s, own in zip(both, pictures)]
    save_rollout(str(folder / "rollouts" / "{rollout_id}"), 8, [SampleGroup(0, tuple(group))])
    return folder


def test_pictures_are_on_the_page_once_and_small(run: Path) -> None:
    found = read_samples([read_run(run)], 100)
    with_images = [own for own in found.columns["images"] if own]
    assert with_images == [[0], [0, 1]] and len(found.thumbnails.urls) == 2
    sizes = []
    for url in found.thumbnails.urls:
        assert url is not None
        sizes.append(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size)
    assert sizes == [(192, 96), (24, 16)]
    text = page([read_run(run)], found)
    block = re.search(r'<script type="application/json" id="data-images-0">(.*?)</script>', text)
    assert block is not None and json.loads(block[1]) == found.thumbnails.urls
    assert "img-src data:" in text


def test_a_picture_that_is_gone_leaves_its_sample(run: Path) -> None:
    (run / "rollouts" / "images" / f"{LARGE.digest}.image").unlink()
    (run / "rollouts" / "images" / f"{SMALL.digest}.image").write_bytes(b"no picture")
    found = read_samples([read_run(run)], 100)
    assert [own for own in found.columns["images"] if own] == [[0], [0, 1]]
    assert found.thumbnails.urls == [None, None]


def test_pictures_have_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    found = read_samples([read_run(run)], 100)
    assert [own for own in found.columns["images"] if own] == [[0], [0, None]]
    assert "1 images are not shown" in found.problems


def test_a_digest_is_no_path(run: Path) -> None:
    path = run / "rollouts" / "9.json"
    path.write_text(path.read_text().replace(LARGE.digest, "../../" + LARGE.digest[6:]))
    found = read_samples([read_run(run)], 100)
    assert [own for own in found.columns["images"] if own] == [[0]]

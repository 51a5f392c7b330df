"""Observations with images."""

import pytest

from slime_like.engines.base import SamplingParams
from slime_like.images.encoded import EncodedImage
from slime_like.rollout.episode import Model, ObservationProblem, episode_of
from slime_like.types import Prompt, Sample
from tests.vision import picture, tiny_processor

IMAGE = EncodedImage(picture(0, 16, 24))  # six features
WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("model"))


def episode(parts, limit=40, processor=True):
    tokenizer, made = parts
    model = Model(
        None,
        tokenizer,
        SamplingParams(max_new_tokens=limit),
        lambda *_: 0,
        made if processor else None,
    )
    return episode_of(Sample.empty(Prompt(0, "a", (1, 2)), 0), model, evaluation=False)


@pytest.mark.parametrize("form", ["file", "bytes", "path", "picture"])
def test_an_observation_has_all_placeholders_of_its_images(parts, tmp_path, form):
    from slime_like.images.files import DEFAULT_LIMITS, decode

    (tmp_path / "a.png").write_bytes(IMAGE.data)
    given = {
        "file": IMAGE,
        "bytes": IMAGE.data,
        "path": str(tmp_path / "a.png"),
        "picture": decode(IMAGE, DEFAULT_LIMITS),
    }[form]
    played = episode(parts)
    assert played.observe(f"x{WRITTEN}y", images=[given])
    place = parts[1].rule.image_token
    assert played.tokens.count(place) == 6 and len(played.tokens) == 10
    assert len(played.images) == 1 and not any(played.loss_mask)


def test_an_image_that_does_not_fit_ends_the_episode_before_it(parts):
    played = episode(parts, limit=14)
    assert not played.observe(f"x{WRITTEN}y{WRITTEN}z", images=[IMAGE, IMAGE])
    place = parts[1].rule.image_token
    assert played.tokens.count(place) == 6 and len(played.images) == 1
    assert played.room == 0 and len(played.tokens) == 11


def test_placeholders_and_images_of_an_observation_must_fit(parts):
    for text, images in ((WRITTEN, []), ("x", [IMAGE]), (WRITTEN * 2, [IMAGE])):
        with pytest.raises(ObservationProblem, match=r"placeholders <.image_pad.> and [01] images"):
            episode(parts).observe(text, images=images)
    with pytest.raises(ObservationProblem, match="which need --multimodal-keys"):
        episode(parts, processor=False).observe("x", images=[IMAGE])
    assert episode(parts, processor=False).observe(WRITTEN)  # a text model's text

"""Images of slime's sample, as rewards and generate functions see them."""

import copy
import pickle

import pytest
import torch
from PIL import Image

from slime_like.compat.slime.samples import from_slime, to_slime
from slime_like.images.encoded import EncodedImage
from slime_like.rewards.grader import Grader
from slime_like.samples.slime_sample import SlimeSample
from slime_like.types import Sample, SampleStatus
from tests.vision import picture

IMAGES = tuple(EncodedImage(picture(seed, kind="JPEG")) for seed in (0, 1))


def sample_of(images=IMAGES):
    return Sample(
        group_id=0,
        sample_id=3,
        tokens=torch.tensor([1, 2, 3, 4]),
        response_length=2,
        loss_mask=torch.ones(2, dtype=torch.bool),
        status=SampleStatus.COMPLETED,
        weight_versions=(1, 1),
        response="ab",
        images=images,
    )


def test_functions_get_pictures_that_are_decoded_when_they_ask():
    converted = to_slime(sample_of())
    assert converted._pictures is None
    first, second = converted.multimodal_inputs["images"]
    assert first.size == second.size == (24, 16) and first.mode == "RGB"
    assert to_slime(sample_of(())).multimodal_inputs is None
    assert converted.added == {}
    assert "_pictures" not in converted.to_dict() and "images" not in SlimeSample().to_dict()
    again = SlimeSample.from_dict(converted.to_dict())
    assert again.image_files == IMAGES


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_keep_the_files(copied):
    converted = to_slime(sample_of())
    assert copied(converted).image_files == IMAGES
    assert converted.multimodal_inputs
    assert copied(converted).image_files == IMAGES


def test_what_a_function_adds_belongs_to_the_sample():
    class Args:
        rollout_skip_special_tokens = None
        reward_key = None

    converted = to_slime(sample_of())
    converted.multimodal_inputs["images"].append(Image.new("RGB", (8, 8), "red"))
    result = from_slime(converted, sample_of(), [], Args(), None, flag="--f")
    assert result.images[:2] == IMAGES  # their files, not new ones
    assert result.images[2].kind == "png" and len(result.images) == 3
    converted = to_slime(sample_of(()))
    converted.multimodal_inputs = {"images": [Image.new("RGB", (8, 8), "red")]}
    assert len(from_slime(converted, sample_of(()), [], Args(), None, flag="--f").images) == 1
    converted.multimodal_inputs = {"images": ["a.png"]}
    with pytest.raises(
        ValueError, match="--f: sample 3: multimodal_inputs: a str is no image of PIL"
    ):
        from_slime(converted, sample_of(()), [], Args(), None, flag="--f")
    converted.multimodal_inputs = None
    assert from_slime(converted, sample_of(()), [], Args(), None, flag="--f").images == ()


REWARD = """
def reward(args, sample):
    (picture, _) = sample.multimodal_inputs["images"]
    return float(picture.size[0] + len(sample.images))
"""


def test_rewards_see_the_images(tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    grader = Grader(custom_rm_path=f"{tmp_path}/own.py:reward")
    try:
        (graded,) = grader.grade([sample_of()])
    finally:
        grader.close()
    assert graded.reward == 26.0, graded.metadata

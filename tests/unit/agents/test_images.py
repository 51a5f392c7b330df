"""Images in requests of agents."""

import pytest

from slime_like.agents.messages import BadRequest, canonical, for_record, history_keys, images_of
from slime_like.agents.templates import ChatTemplate
from slime_like.images.encoded import EncodedImage
from tests.vision import picture, tiny_processor

RED, BLUE = (EncodedImage(picture(seed, 16, 24)) for seed in (0, 1))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("model"))


def asked(*images, text="?"):
    places = [{"type": "image_url", "image_url": {"url": image.data_url}} for image in images]
    return canonical({"role": "user", "content": [*places, {"type": "text", "text": text}]}, 0)


def template_of(parts, processor=True):
    tokenizer, made = parts
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id}, processor=made if processor else None)


def test_a_prompt_has_the_placeholders_of_its_images(parts):
    tokens = template_of(parts).prompt([asked(RED, BLUE)], None)
    assert tokens.count(parts[1].rule.image_token) == 12
    assert images_of([asked(RED), asked(BLUE)]) == (RED, BLUE)


def test_the_next_turn_adds_only_its_own(parts):
    answer = {"role": "assistant", "content": "red"}
    rest = template_of(parts).following(
        [asked(RED)], answer, [asked(BLUE)], None, parts[0].eos_token_id
    )
    assert rest.count(parts[1].rule.image_token) == 6


def test_other_images_are_another_conversation():
    same, other = ([*history_keys([asked(image)], None)][-1] for image in (RED, BLUE))
    assert same == [*history_keys([asked(RED)], None)][-1] != other


def test_records_have_digests():
    assert for_record(asked(RED)) == {"role": "user", "content": "<image>?", "images": [RED.digest]}


REFUSED = {
    "a path": ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "must hold a data URL"),
    "an address": ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "must hold a data URL"),
    "nothing": ({"type": "image_url"}, "a part of type 'image_url' must hold a data URL"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "not base64"),
    "a video": ({"type": "video_url", "video_url": {"url": "a"}}, "a part of type 'video_url'"),
}  # fmt: skip


@pytest.mark.parametrize("part", REFUSED)
def test_parts_that_are_no_image_are_refused(part):
    content, words = REFUSED[part]
    with pytest.raises(BadRequest, match=words):
        canonical({"role": "user", "content": [content]}, 0)


def test_what_cannot_be_seen_is_refused(parts):
    broken = EncodedImage(RED.data[:60])
    with pytest.raises(BadRequest, match="an image of the conversation: "):
        template_of(parts).prompt([asked(broken)], None)
    with pytest.raises(BadRequest, match="images need a run with --multimodal-keys"):
        template_of(parts, processor=False).prompt([asked(RED)], None)
    with pytest.raises(BadRequest, match="has 1 images, and its text 2 placeholders"):
        template_of(parts).prompt([asked(RED, text="<|image_pad|>")], None)
    with pytest.raises(BadRequest, match=r"U.FDD0"):
        canonical({"role": "user", "content": "\ufdd0"}, 0)

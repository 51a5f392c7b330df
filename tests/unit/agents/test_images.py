"""Images in requests of agents."""

import pytest

from slime_like.agents.anthropic_api import parse_messages_request
from slime_like.agents.messages import BadRequest, canonical, for_record, history_keys, images_of
from slime_like.agents.responses_api import parse_responses_request
from slime_like.agents.templates import ChatTemplate
from slime_like.engines.base import SamplingParams
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


def block(image, kind="base64"):
    if kind == "url":
        return {"type": "image", "source": {"type": "url", "url": image.data_url}}
    _, _, data = image.data_url.partition(",")
    source = {"type": "base64", "media_type": f"image/{image.kind}", "data": data}
    return {"type": "image", "source": source}


@pytest.mark.parametrize("kind", ["base64", "url"])
def test_blocks_of_anthropics_messages_are_the_same_images(parts, kind):
    """In a user's message and in the result of a tool, in their places."""
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(BLUE, kind)]}
    text = {"type": "text", "text": "?"}
    body = {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [block(RED, kind), text]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    asking, errors = parse_messages_request(body, SamplingParams())
    first, _, tool = asking.messages
    assert errors == 0 and first == asked(RED)
    assert tool["role"] == "tool" and images_of([tool]) == (BLUE,)
    tokens = template_of(parts).prompt(list(asking.messages[:1]), None)
    assert tokens == template_of(parts).prompt([asked(RED)], None)


def test_items_of_responses_are_the_same_images():
    """In a message and in the result of a function."""
    place = {"type": "input_image", "image_url": RED.data_url}
    seen = {"type": "input_image", "image_url": BLUE.data_url, "detail": "low"}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    body = {
        "input": [
            {"role": "user", "content": [place, {"type": "input_text", "text": "?"}]},
            call,
            {"type": "function_call_output", "call_id": "a", "output": [seen]},
        ]
    }
    first, _, tool = parse_responses_request(body, SamplingParams()).messages
    assert first == asked(RED)
    assert tool["role"] == "tool" and images_of([tool]) == (BLUE,)


SOURCES = {
    "an address": ({"type": "url", "url": "https://example.com/a.png"}, r"messages\[0\]: .*must hold a data URL"),
    "a file": ({"type": "file", "file_id": "f"}, "the source of an image must be of type base64 or url"),
    "no base64": ({"type": "base64", "media_type": "image/png", "data": "%%"}, "not base64"),
    "no image": ({"type": "base64", "media_type": "text/html", "data": "aa"}, "must hold a data URL"),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_sources_that_hold_no_image_are_refused(source):
    given, words = SOURCES[source]
    message = {"role": "user", "content": [{"type": "image", "source": given}]}
    with pytest.raises(BadRequest, match=words):
        parse_messages_request({"messages": [message]}, SamplingParams())


def test_an_assistants_block_is_no_image():
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [block(RED)]}]
    with pytest.raises(BadRequest, match="a block of type 'image' is not offered there"):
        parse_messages_request({"messages": [*messages, messages[0]]}, SamplingParams())


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

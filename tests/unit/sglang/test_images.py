"""Requests with images to SGLang servers, and what comes back."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.base import SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import decode, encode
from slime_like.sglang.protocol import generation_body
from tests.fake_sglang import FakeServer, changed, engine_of
from tests.unit.engines.local.test_images import IMAGES, Served
from tests.vision import picture, processor_of

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_end_tokens=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    model = make_tiny_model("Qwen3-VL", folder, images=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = processor_of(folder, tokenizer)
    return Served(
        model, folder, processor, tokenizer, LocalEngine(str(folder), tokenizer, images=processor)
    )


def test_the_body_has_one_placeholder_for_each_image(qwen):
    request = qwen.request(1, "ab", [0, 1])
    body: Any = generation_body(request, GREEDY, "r", qwen.processor)
    place = qwen.processor.rule.image_token
    assert body["input_ids"].count(place) == 2 and request.prompt_tokens.count(place) == 14
    assert qwen.processor.expand(body["input_ids"], [6, 8]) == list(request.prompt_tokens)
    assert body["image_data"] == [image.data_url for image in IMAGES[:2]]
    assert body["return_prompt_token_ids"] is True
    plain = generation_body(qwen.request(1, "ab", []), GREEDY, "r", qwen.processor)
    assert not {"image_data", "return_prompt_token_ids"} & plain.keys()
    json.dumps(body)


def test_placeholders_that_are_no_image_of_the_prompt_are_refused(qwen):
    request = qwen.request(1, "a", [0])
    place = qwen.processor.rule.image_token
    for tokens in ((*request.prompt_tokens, place), request.prompt_tokens[:4]):
        bad = dataclasses.replace(request, prompt_tokens=tokens)
        with pytest.raises(ValueError, match="the placeholder of an image at token"):
            generation_body(bad, GREEDY, "r", qwen.processor)
    with pytest.raises(ValueError, match="more images than placeholders"):
        generation_body(
            dataclasses.replace(request, images=IMAGES[:2]), GREEDY, "r", qwen.processor
        )


def transparent():
    pixels = Image.new("RGBA", (24, 16), (255, 0, 0, 0))
    return encode(pixels)


@pytest.mark.parametrize("kind", ["turned", "transparent"])
def test_servers_get_pixels_that_need_no_interpretation(qwen, kind):
    tag = Image.Exif()
    tag[0x0112] = 6
    image = (
        EncodedImage(picture(0, 16, 24, "JPEG", exif=tag.tobytes()))
        if kind == "turned"
        else transparent()
    )
    served = qwen.processor.served(image)
    limits = qwen.processor.limits
    assert served != image and served.kind == "png"
    assert decode(served, limits).tobytes() == decode(image, limits).tobytes()
    assert torch.equal(
        qwen.processor.inputs([served]).pixels, qwen.processor.inputs([image]).pixels
    )
    assert qwen.processor.served(IMAGES[0]) is IMAGES[0]


def test_a_server_answers_as_the_local_engine(qwen):
    from safetensors.torch import load_file

    qwen.engine.update_weights(iter(load_file(qwen.folder / "model.safetensors").items()), 1)
    requests = qwen.requests()
    expected = qwen.engine.generate(requests, GREEDY)
    with FakeServer(str(qwen.folder)) as server, engine_of(str(qwen.folder), [server]) as engine:
        outputs = engine.generate(requests, GREEDY)
        assert [o.tokens for o in outputs] == [o.tokens for o in expected]
        bodies = [body for path, body in server.seen if path == "/generate"]
        assert sum("image_data" in body for body in bodies) == 4


FAULTS = {
    "other tokens": (lambda a: a["prompt_token_ids"].__setitem__(0, 7), "token 0 of the prompt is 2, and the server read 7"),
    "an image of another size": (lambda a: a["meta_info"].__setitem__("prompt_tokens", 9), "a prompt of 11 tokens, and the server read 9"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_reads_another_prompt_is_found(qwen, fault):
    change, words = FAULTS[fault]
    with FakeServer(str(qwen.folder)) as server, engine_of(str(qwen.folder), [server]) as engine:
        server.faults = [changed(change)] * 3
        (output,) = engine.generate([qwen.request(0, "a", [0])], GREEDY)
        assert output.finish_reason == "abort" and words in output.failure

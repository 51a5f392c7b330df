"""Requests with images to SGLang servers, and what comes back."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from PIL import Image

from arguments.parse import parse_args
from slime_like.engines.base import SamplingParams
from slime_like.engines.served import ServedEngine
from slime_like.engines.sglang.factory import NO_FEATURE_CACHE, SglangKind, left_out
from slime_like.errors import RunError
from slime_like.images.encoded import EncodedImage
from slime_like.images.files import encode
from slime_like.servers.launches import engine_launches
from slime_like.servers.nodes import find_nodes
from slime_like.servers.weight_spec import checkpoint_shapes, compare_with_checkpoint
from slime_like.sglang.protocol import generation_body
from tests.fake_sglang import FakeServer, changed, engine_of
from tests.unit.command_lines import complete
from tests.unit.engines.local.test_images import IMAGES, served
from tests.vision import picture, turned

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_end_tokens=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return served(tmp_path_factory.mktemp("qwen"), "Qwen3-VL")


@pytest.fixture(scope="module", params=["Qwen3-VL", "GLM-4.1V-9B", "gemma-3-4b"])
def seeing(request, tmp_path_factory):
    return served(tmp_path_factory.mktemp("seeing"), request.param)


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


FILES = {
    "turned": turned(),
    "transparent": transparent(),
    "larger": EncodedImage(picture(0, 37, 50)),
    "smaller": EncodedImage(picture(0, 5, 9)),
    "jpeg": EncodedImage(picture(0, 16, 24, "JPEG")),
}


@pytest.mark.parametrize("kind", FILES)
def test_servers_get_the_pixels_that_the_trainer_sees(seeing, kind):
    """A PNG file, of which the processor makes bit-equal inputs, with no more work on it."""
    processor = seeing.processor
    served = processor.served(FILES[kind])
    assert served.kind == "png" and served != FILES[kind]
    assert torch.equal(processor.inputs([served]).pixels, processor.inputs([FILES[kind]]).pixels)
    assert processor.served(served) == served
    assert processor.served(FILES[kind]) is served  # made once


def test_a_png_of_the_right_size_is_sent_as_it_is(qwen):
    assert qwen.processor.served(IMAGES[0]) is IMAGES[0]


def test_a_server_answers_as_the_local_engine(qwen):
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


def parsed(folder, *more):
    line = complete(
        folder,
        *("--apply-chat-template", "--multimodal-keys", '{"image": "images"}', *more),
        without=("--hf-checkpoint",),
    )
    return parse_args(["--hf-checkpoint", str(folder / "model"), *line], 1)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_what_servers_keep_of_a_tower(qwen, tmp_path, tower):
    """Updates leave a frozen one out: nothing but the server itself can keep it. Of a trained one
    no features may be kept."""
    (tmp_path / "model").symlink_to(qwen.folder)
    config = parsed(tmp_path, *(["--train-vision-tower"] if tower == "trained" else []))
    sglang = dataclasses.replace(
        config.sglang, rollout_num_gpus=1, sglang_python="python", offload_rollout=True
    )
    run = dataclasses.replace(config, sglang=sglang)
    nodes = find_nodes(1, torch.device("cpu"))
    for device in ("cpu", "cuda"):
        program = SglangKind().program(run, torch.device(device))
        ((part,),) = engine_launches(sglang, program, nodes, logs=tmp_path)
        kept = "--enable-weights-cpu-backup" in part.launch.command
        assert kept == (tower == "frozen" and device == "cuda")
        off = NO_FEATURE_CACHE.items() <= part.launch.environment.items()
        assert off == (tower == "trained")
    axes = "rotary_emb.axis_map"
    assert left_out(config) == ((axes, "visual.") if tower == "frozen" else (axes,))
    assert left_out(parse_args(complete(tmp_path), 1)) == ()


def test_noise_leaves_out_what_no_update_brings_back(qwen, monkeypatch):
    bodies = []
    call_all = ServedEngine._call_all

    def record(self, call):
        if call.path == "/weights_checker":
            return bodies.append(dict(call.body))
        return call_all(self, call)

    monkeypatch.setattr(ServedEngine, "_call_all", record)
    with FakeServer(str(qwen.folder)) as server:
        for names in ((), ("visual.",)):
            with engine_of(str(qwen.folder), [server], check_updates=True, left_out=names):
                pass
    noise = {"action": "reset_tensors"}
    assert bodies == [noise, noise | {"skip_tensor_list": ["visual."]}]


def test_updates_have_a_whole_tower_or_none_of_it(qwen):
    folder = str(qwen.folder)
    every = checkpoint_shapes(folder)
    text = {name: shape for name, shape in every.items() if not name.startswith("model.visual.")}
    assert len(text) < len(every)
    compare_with_checkpoint(every, folder)
    compare_with_checkpoint(text, folder)
    lost = next(name for name in every if name not in text)
    for sent in (every, text):
        missing = lost if sent is every else next(n for n in text if "norm" in n)
        part = {name: shape for name, shape in sent.items() if name != missing}
        with pytest.raises(RunError, match=f"missing: {missing}"):
            compare_with_checkpoint(part, folder)

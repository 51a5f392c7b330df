"""The local engine with images, against transformers' whole model."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from arguments.hf.model import read_hf_model
from arguments.hf.vision import read_vision
from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.images.encoded import EncodedImage
from slime_like.images.processor import ImageProcessor
from slime_like.images.rows import PlaceholderRule
from slime_like.images.settings import VisionFamily
from slime_like.weights.families import model_families
from tests.vision import picture, processor_folder, processor_of

IMAGES = [EncodedImage(picture(*size)) for size in ((0, 16, 24), (1, 32, 16), (2, 16, 16))]
SIX = SamplingParams(max_new_tokens=6, ignore_end_tokens=True)
PROMPTS = [("a", [0]), ("bcd", [0, 1]), ("longer text", []), ("a", [2]), ("a", [0])]
FAMILIES = ("Qwen3-VL", "Qwen2.5-VL", "Qwen3-VL-30B-A3B", "Qwen3.5", "gemma-3-4b")


@dataclasses.dataclass
class Served:
    model: Any
    folder: Path
    processor: ImageProcessor
    tokenizer: Any
    engine: LocalEngine

    def request(self, number, text, images):
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(self.processor.written(rendered), add_special_tokens=False)[
            "input_ids"
        ]
        images = tuple(IMAGES[i] for i in images)
        tokens = self.processor.expand(ids, self.processor.token_counts(images))
        return GenerateRequest(number, tuple(tokens), number, images)

    def requests(self):
        return [self.request(i, *prompt) for i, prompt in enumerate(PROMPTS)]

    def log_probs(self, request, output):
        """Of transformers' whole model, which computes positions itself, in one pass."""
        ids = torch.tensor([[*request.prompt_tokens, *output.tokens]])
        placeholders = (ids == self.processor.rule.image_token).long()
        inputs = {}
        if request.images:
            made = self.processor.inputs(request.images)
            inputs = {"pixel_values": made.pixels}
            if made.grids is None:
                inputs["token_type_ids"] = placeholders
            else:
                inputs |= {"image_grid_thw": made.grids, "mm_token_type_ids": placeholders}
        with torch.no_grad():
            logits = self.model(input_ids=ids, **inputs).logits[0].float()
        count = len(output.tokens)
        return logits.log_softmax(-1)[-count - 1 : -1].gather(1, ids[0, -count:, None])[:, 0]


def served(folder, like):
    model = make_tiny_model(like, folder, images=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = processor_of(folder, tokenizer)
    engine = LocalEngine(str(folder), tokenizer, images=processor)
    engine.update_weights(iter(load_file(folder / "model.safetensors").items()), 1)
    return Served(model, folder, processor, tokenizer, engine)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return served(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return served(tmp_path_factory.mktemp("qwen"), "Qwen3-VL")


def largest_difference(served, requests, outputs):
    return max(
        float((served.log_probs(r, o) - torch.tensor(o.log_probs)).abs().max())
        for r, o in zip(requests, outputs)
    )


def test_log_probs_are_those_of_the_whole_model(family):
    requests = family.requests()
    outputs = family.engine.generate(requests, SIX)
    assert largest_difference(family, requests, outputs) < 5e-6
    # equal tokens and another image: another answer
    assert outputs[0].log_probs != outputs[3].log_probs


def test_an_interrupted_answer_continues_after_its_images(family):
    """As in partial rollouts: the answer's tokens are part of the next prompt."""
    requests = family.requests()
    outputs = family.engine.generate(requests, dataclasses.replace(SIX, max_new_tokens=3))
    longer = [
        dataclasses.replace(r, prompt_tokens=(*r.prompt_tokens, *o.tokens))
        for r, o in zip(requests, outputs)
    ]
    again = family.engine.generate(longer, SIX)
    assert largest_difference(family, longer, again) < 5e-6


def test_requests_of_agents_are_batched_with_their_images(qwen):
    requests = qwen.requests()

    async def all_at_once():
        return await asyncio.gather(*(qwen.engine.generate_one(r, SIX) for r in requests))

    together = asyncio.run(all_at_once())
    alone = [qwen.engine.generate([r], SIX)[0] for r in requests]
    assert [o.tokens for o in together] == [o.tokens for o in alone]


def test_the_tower_follows_the_trainer_or_stays(qwen):
    """A frozen tower is read from the folder, and need not be sent; a trained one is replaced."""
    weights = load_file(qwen.folder / "model.safetensors")
    text = {name: w for name, w in weights.items() if "visual" not in name}
    assert len(text) < len(weights)
    (request,) = [qwen.request(0, "a", [0])]
    (before,) = qwen.engine.generate([request], SIX)
    qwen.engine.update_weights(iter(text.items()), 2)
    (frozen,) = qwen.engine.generate([request], SIX)
    assert frozen.log_probs == before.log_probs
    moved = {name: w * 3 if "visual" in name else w for name, w in weights.items()}
    qwen.engine.update_weights(iter(moved.items()), 3)
    (trained,) = qwen.engine.generate([request], SIX)
    assert trained.log_probs != before.log_probs
    qwen.engine.update_weights(iter(weights.items()), 4)


def test_missing_text_weights_are_still_an_error(qwen):
    weights = load_file(qwen.folder / "model.safetensors")
    name = next(name for name in weights if "visual" not in name)
    with pytest.raises(ValueError, match="missing"):
        qwen.engine.update_weights(iter((n, w) for n, w in weights.items() if n != name), 5)
    qwen.engine.update_weights(iter(weights.items()), 6)


def test_a_placeholder_is_never_sampled(qwen):
    """Even where it is the most likely token; its probability still counts in the log-probs."""
    place = qwen.processor.rule.image_token
    weights = load_file(qwen.folder / "model.safetensors")
    head = weights["lm_head.weight"].clone()
    head[place] = 20 * head.mean(0).sign() * head.abs().max()
    qwen.engine.update_weights(iter((weights | {"lm_head.weight": head}).items()), 7)
    with torch.no_grad():
        before = qwen.model.lm_head.weight.clone()
        qwen.model.lm_head.weight.copy_(head)
    try:
        for sampling in (
            SIX,
            dataclasses.replace(SIX, temperature=0.0),
            dataclasses.replace(SIX, report_sampling_mask=True),
        ):
            requests = qwen.requests()
            outputs = qwen.engine.generate(requests, sampling)
            assert not any(place in output.tokens for output in outputs)
            if not sampling.report_sampling_mask:
                assert largest_difference(qwen, requests, outputs) < 1e-4
            else:
                assert not any(place in kept for o in outputs for kept in o.sampling_mask)
    finally:
        with torch.no_grad():
            qwen.model.lm_head.weight.copy_(before)
        qwen.engine.update_weights(iter(weights.items()), 8)


def test_placeholders_and_images_must_fit(qwen):
    good = qwen.request(3, "a", [0])
    bad = dataclasses.replace(good, images=(*good.images, IMAGES[1]))
    with pytest.raises(
        ValueError,
        match="sample 3: the prompt has 6 placeholders of images, and its 2 images have 14",
    ):
        qwen.engine.generate([bad], SIX)
    with pytest.raises(ValueError, match="has 6 placeholders of images, and its 0 images"):
        qwen.engine.generate([dataclasses.replace(good, images=())], SIX)


def test_an_engine_without_images_refuses_them(qwen):
    engine = LocalEngine(str(qwen.folder), qwen.tokenizer)
    engine.update_weights(
        iter(
            (n, w)
            for n, w in load_file(qwen.folder / "model.safetensors").items()
            if "visual" not in n
        ),
        1,
    )
    with pytest.raises(ValueError, match="sample 3 has images, which need --multimodal-keys"):
        engine.generate([qwen.request(3, "a", [0])], SIX)


def test_a_model_without_a_tower_is_refused(tmp_path):
    make_tiny_model("Qwen3-4B", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rule = PlaceholderRule(7, merge_size=2)
    with pytest.raises(ValueError, match="there is no image processor"):
        ImageProcessor.load(str(tmp_path), tokenizer, rule)
    with pytest.raises(ValueError, match="Qwen3-4B has no vision tower"):
        make_tiny_model("Qwen3-4B", tmp_path, images=True)


SEEING = [
    family.architecture
    for family in map(model_families.get, model_families.names())
    if isinstance(family.vision, VisionFamily)
]


@pytest.mark.parametrize("architecture", SEEING)
def test_tiny_models_of_every_family_that_sees_start_a_run(architecture, tmp_path):
    make_tiny_model(architecture, tmp_path, images=True)
    vision = read_vision(str(tmp_path), read_hf_model(str(tmp_path)))
    assert not vision.sections or min(vision.sections) > 0
    processor_of(tmp_path, AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"merge_size": 3}, "has merge_size 3, and config.json 2"),
        ({"image_processor_type": "Nobody"}, "its image processor cannot be loaded"),
    ],
)
def test_the_processor_of_another_model_is_refused(tmp_path, settings, words):
    tokenizer, folder = processor_folder(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    rule = PlaceholderRule(tokenizer.convert_tokens_to_ids("<|image_pad|>"), merge_size=2)
    with pytest.raises(ValueError, match=rf"--multimodal-keys: --hf-checkpoint .*{words}"):
        ImageProcessor.load(folder, tokenizer, rule)


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    tokenizer, folder = processor_folder(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer has no special token 5000"):
        ImageProcessor.load(folder, tokenizer, PlaceholderRule(5000, merge_size=2))

"""Images in datums and prompts of the Tinker server: a model with a vision tower learns what it sees,
and sampler and trainer see equal numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from scripts import make_image_demo
from tests.e2e.api_server import ApiServer, batch, policy

pytestmark = pytest.mark.extended

TOKENS = 9  # of a picture of 24 x 24 pixels
ADAM = types.AdamParams(learning_rate=5e-3)
ADAPTER_ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make", "--output-dir", str(folder), "--num-heldout", "8"])
        make_image_demo.main()
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[ApiServer]:
    with ApiServer(folder / "model", folder / "api", "--serve-images") as running:
        yield running


def picture(folder: Path, colour: str, places: tuple[int, ...] = (4,), seed: int = 0) -> bytes:
    path = folder / f"{colour}.png"
    make_image_demo.draw((colour, places), path, random.Random(seed))
    return path.read_bytes()


def chunk(data: bytes, expected_tokens: int | None = TOKENS) -> types.ImageChunk:
    return types.ImageChunk(data=data, format="png", expected_tokens=expected_tokens)


class Words:
    """The tokens around an image, as a chat template writes them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, data: bytes) -> list[Any]:
        start, end = (self.ids(f"<|vision_{edge}|>") for edge in ("start", "end"))
        text = types.EncodedTextChunk
        return [text(tokens=start), chunk(data), text(tokens=[*end, *self.ids("What is it?")])]

    def datum(self, data: bytes, answer: list[int]) -> types.Datum:
        """Scores the answer after the prompt; targets are shifted by one."""
        chunks = self.prompt(data)
        before = sum(each.length for each in chunks)
        row = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=answer[:-1])])
        targets = np.array([0] * (before - 1) + answer)
        weights = np.array([0.0] * (before - 1) + [1.0] * len(answer), dtype=np.float32)
        return types.Datum(
            model_input=row, loss_fn_inputs={"target_tokens": targets, "weights": weights}
        )


@pytest.fixture(scope="module")
def words(folder: Path) -> Words:
    return Words(folder)


@pytest.mark.parametrize(("rank", "adam"), [(0, ADAM), (16, ADAPTER_ADAM)])
def test_it_learns_what_it_sees(
    seeing: ApiServer, folder: Path, words: Words, rank: int, adam: types.AdamParams
) -> None:
    """Two pictures with two answers, told apart by nothing but their pixels; samples have the
    log-probs that the trainer has for them."""
    client = seeing.client()
    training = policy(client, seeing, rank=rank)
    pictures = [picture(folder, "red"), picture(folder, "white", places=tuple(range(9)))]
    answers = [words.ids("1 red"), words.ids("9 white")]
    data = [words.datum(*each) for each in zip(pictures, answers, strict=True)]
    losses = [100.0]
    while losses[-1] > 0.5 and len(losses) < 300:
        found = training.forward_backward(data, "cross_entropy")
        training.optim_step(adam).result()
        losses.append(found.result().metrics["loss:sum"])
    assert losses[-1] <= 0.5, losses[::20]
    sampler = training.save_weights_and_get_sampling_client().result()
    for data_of_one, answer in zip(pictures, answers, strict=True):
        prompt = types.ModelInput(chunks=words.prompt(data_of_one))
        greedy = types.SamplingParams(max_tokens=len(answer), temperature=0.0)
        (sequence,) = sampler.sample(prompt, 1, greedy).result().sequences
        assert sequence.tokens == answer
        warm = types.SamplingParams(max_tokens=6, seed=3)
        (sequence,) = sampler.sample(prompt, 1, warm).result().sequences
        scored = training.forward([words.datum(data_of_one, sequence.tokens)], "cross_entropy")
        log_probs = scored.result().loss_fn_outputs[0]["logprobs"].data[-len(sequence.tokens) :]
        assert log_probs == pytest.approx(sequence.logprobs, abs=1e-5)


def test_texts_go_on_with_images(seeing: ApiServer, folder: Path, words: Words) -> None:
    """Datums with and without an image in one call give what they give alone."""
    training = policy(seeing.client(), seeing)
    mixed = [*batch(2), words.datum(picture(folder, "blue"), words.ids("1 blue"))]
    together = training.forward(mixed, "cross_entropy").result().loss_fn_outputs
    for datum, found in zip(mixed, together, strict=True):
        (alone,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
        assert found["logprobs"].data == pytest.approx(alone["logprobs"].data, abs=1e-5)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (lambda png: chunk(png, 5), "expected_tokens is 5, and the model has 9 tokens"),
        (lambda png: chunk(b"no image"), "datum 0: image: "),
        (lambda png: chunk(png[:-60]), "datum 0: image: "),
        (lambda png: chunk(png[:100] + bytes(40) + png[140:]), "datum 0: image: "),
    ],
)
def test_an_image_that_cannot_be_taken(
    seeing: ApiServer, folder: Path, words: Words, image: Any, message: str
) -> None:
    """Refused with its datum, damage that only decoding shows included; the model goes on."""
    training = policy(seeing.client(), seeing)
    sound = words.datum(picture(folder, "pink"), words.ids("1 pink"))
    bad_chunk = image(picture(folder, "pink"))
    chunks = [bad_chunk if each.type == "image" else each for each in sound.model_input.chunks]
    bad = types.Datum(
        model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=sound.loss_fn_inputs
    )
    with pytest.raises(tinker.RequestFailedError, match=message):
        training.forward_backward([bad], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="send the batches again"):
        training.optim_step(ADAM).result()
    training.forward_backward([sound], "cross_entropy").result()
    assert "grad_norm" in training.optim_step(ADAM).result().metrics


def test_what_a_prompt_with_images_does_not_have(
    seeing: ApiServer, folder: Path, words: Words
) -> None:
    sampler = seeing.client().create_sampling_client(base_model=str(seeing.model)).result()
    prompt = types.ModelInput(chunks=words.prompt(picture(folder, "red")))
    params = types.SamplingParams(max_tokens=2)
    with pytest.raises(tinker.RequestFailedError, match="prompt_logprobs is not supported"):
        sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result()
    placeholder = words.ids("<|image_pad|>")
    with pytest.raises(tinker.RequestFailedError, match="is the placeholder of images"):
        sampler.sample(types.ModelInput.from_ints(placeholder), 1, params).result()
    assert sampler.sample(types.ModelInput.from_ints([10, 20]), 1, params).result().sequences


def test_two_ranks_give_what_one_gives(
    seeing: ApiServer, folder: Path, words: Words, tmp_path: Path
) -> None:
    """Data-parallel ranks have images of their own, one of them none in the second call."""
    data = [
        words.datum(picture(folder, colour, seed=seed), words.ids(f"1 {colour}"))
        for seed, colour in enumerate(("red", "green", "blue"))
    ]
    found = []
    with ApiServer(seeing.model, tmp_path, "--serve-images", ranks=2) as two:
        for server in (seeing, two):
            training = policy(server.client(), server)
            for part in (data, [*batch(1), data[0]]):
                training.forward_backward(part, "cross_entropy").result()
            norm = training.optim_step(ADAM).result().metrics["grad_norm"]
            outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
            found.append([norm, *(p for each in outputs for p in each["logprobs"].data)])
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-4)

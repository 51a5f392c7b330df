"""Images of samples: between ranks, in recordings and checkpoints, and as inputs of the model."""

import dataclasses
import gc
import json
from typing import Any

import pytest
import torch

from arguments.schema.data import DataConfig
from slime_like.batching.train_samples import images_of
from slime_like.data.group_buffer import PendingGroup
from slime_like.data.pairs import pair_samples
from slime_like.data.prompts import PromptSource
from slime_like.data.sft import sft_samples
from slime_like.images.encoded import EncodedImage
from slime_like.images.inputs import ImageInputs
from slime_like.megatron.packing import pack_all
from slime_like.rollout.group_rows import (
    groups_from_rows,
    groups_to_rows,
    waiting_from_rows,
    waiting_to_rows,
)
from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import remote_samples, rows_of
from slime_like.samples.payload import (
    pack_payload,
    pack_texts,
    payload_size,
    unpack_payload,
    with_texts,
)
from slime_like.types import NOT_SAMPLED, Prompt, Sample, TrainSample
from tests.unit.data.test_row_images import source_of_rows
from tests.vision import picture, tiny_processor

IMAGES = tuple(EncodedImage(picture(seed, 16, 24)) for seed in (0, 1))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("model"))


def sample_of(tokens, *, response=3, sample_id=5, **changes):
    fields = {
        "group_id": 2,
        "sample_id": sample_id,
        "tokens": torch.tensor(tokens),
        "response_length": response,
        "loss_mask": torch.ones(response, dtype=torch.bool),
        "rollout_log_probs": -torch.rand(response),
        "weight_versions": (4,) * response,
        "reward": 1.0,
    }
    return Sample(**(fields | changes))


@pytest.mark.parametrize("images", [(), IMAGES[:1], IMAGES, (*IMAGES, IMAGES[0])])
def test_payload_round_trip(images):
    branch = sample_of([7, 8, 9, 10], images=IMAGES[1:])
    sample = sample_of([1, 2, 3, 4, 5], images=images, branches=(branch,), text="a")
    (remote,) = remote_samples(*rows_of([sample], 0))
    payload = pack_payload(sample)
    assert payload.numel() == payload_size(sample) == payload_size(remote)
    received = with_texts(unpack_payload(remote, payload), pack_texts(sample))
    assert received.images == images and received.tokens.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(received.rollout_log_probs, sample.rollout_log_probs)
    assert received.branches[0].images == IMAGES[1:]


def test_checkpoints_hold_every_image_of_a_group_once():
    prompt = Prompt(2, "a", (1, 2), images=IMAGES[:1])
    samples = (Sample.empty(prompt, 4), sample_of([1, 2, 3, 4], images=IMAGES))
    rows: Any = waiting_to_rows([PendingGroup(prompt, samples)], [0, 0])
    assert sorted(rows[0]["images"]) == sorted(i.digest for i in IMAGES)
    (group,) = waiting_from_rows(rows, rank=0, num_holders=1)
    assert group.prompt.images == group.samples[0].images == IMAGES[:1]
    assert group.samples[1].images == IMAGES
    (ahead,) = groups_from_rows(groups_to_rows([SampleGroup(2, samples)]))
    assert [s.images for s in ahead.samples] == [IMAGES[:1], IMAGES]
    del rows[0]["images"], rows[0]["prompt"]["images"]
    for row in rows[0]["samples"]:
        del row["images"]
    assert (
        waiting_from_rows(rows, rank=0, num_holders=1)[0].prompt.images == ()
    )  # of older versions


def test_recordings_have_every_image_once_by_digest(tmp_path):
    template = str(tmp_path / "{rollout_id}.json")
    branch = sample_of([7, 8, 9, 10], images=IMAGES[1:])
    for number in range(2):
        samples = (
            sample_of([1, 2, 3, 4], images=IMAGES, branches=(branch,)),
            sample_of([1, 2, 3, 4], sample_id=6, images=IMAGES[:1]),
        )
        save_rollout(template, number, [SampleGroup(2, samples)])
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(
        f"{i.digest}.image" for i in IMAGES
    )
    (group,) = load_rollout(template, 1)
    assert [s.images for s in group.samples] == [IMAGES, IMAGES[:1]]
    assert group.samples[0].branches[0].images == IMAGES[1:]


def test_a_recording_without_its_image_names_the_file(tmp_path):
    template = str(tmp_path / "{rollout_id}.json")
    save_rollout(template, 0, [SampleGroup(2, (sample_of([1, 2, 3, 4], images=IMAGES[:1]),))])
    path = tmp_path / "images" / f"{IMAGES[0].digest}.image"
    path.write_bytes(IMAGES[1].data)
    with pytest.raises(ValueError, match=rf"{path.name}: damaged: another content"):
        load_rollout(template, 0)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name}: no such file, an image of the recording"):
        load_rollout(template, 0)
    text = (tmp_path / "1.json").read_text()
    (tmp_path / "1.json").write_text(text.replace(IMAGES[0].digest, "../" + IMAGES[0].digest[3:]))
    with pytest.raises(ValueError, match="images is"):
        load_rollout(template, 0)


def test_rows_of_the_model_are_placeholders_that_the_policy_did_not_write(parts):
    processor = parts[1]
    place = processor.rule.image_token
    tokens = [1, *[place] * 6, 9, 8, place, *[place] * 6, 3]
    versions = (4, 4, *[NOT_SAMPLED] * 6, 4)
    sample = sample_of(tokens, response=9, weight_versions=versions, images=IMAGES)
    rows = images_of(sample, processor)
    assert rows.rows.tolist() == [*range(1, 7), *range(10, 16)]
    assert rows.positions.shape == (3, len(tokens))
    assert images_of(sample_of([1, 2, 3, 4]), processor) is None
    with pytest.raises(
        ValueError, match="sample 5: 2 images have 12 features, and the tokens 13 placeholders"
    ):
        images_of(
            dataclasses.replace(
                sample, weight_versions=(), loss_mask=torch.zeros(9, dtype=torch.bool)
            ),
            processor,
        )
    with pytest.raises(ValueError, match="sample 5 has images; give --multimodal-keys"):
        images_of(sample, None)


def test_samples_of_a_prompt_share_their_pixels(parts):
    processor = parts[1]
    copies = [tuple(EncodedImage(bytes(bytearray(i.data))) for i in IMAGES) for _ in range(2)]
    assert processor.inputs(copies[0]) is processor.inputs(copies[1])
    assert processor.inputs(copies[0][:1]) is processor.inputs(copies[1][:1])


def test_memory_of_pixels_is_bounded(parts):
    processor = parts[1]
    processor._cached.clear()
    one = processor.inputs([EncodedImage(picture(7))]).pixels.nbytes
    limit, processor._cache_bytes = processor._cache_bytes, 3 * one
    try:
        for seed in range(10, 20):
            processor.inputs([EncodedImage(picture(seed))])
            assert len(processor._cached) <= 3
    finally:
        processor._cache_bytes = limit


def inputs_alive() -> list[ImageInputs]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, ImageInputs)]


def test_a_step_holds_no_pixels_but_those_of_the_cache(parts, monkeypatch):
    """Its micro-batches are packed at once; the tower makes the pixels of its own."""
    processor = parts[1]
    place = processor.rule.image_token
    files = [EncodedImage(picture(seed)) for seed in range(20, 30)]
    one = processor.inputs(files[:1]).pixels.nbytes
    monkeypatch.setattr(processor, "_cache_bytes", 2 * one)
    processor._cached.clear()
    before = inputs_alive()
    groups = []
    for number, image in enumerate(files):
        sample = sample_of([1, *[place] * 6, 9, 8, 7], sample_id=number, images=(image,))
        plan = dict(loss_weights=torch.ones(3), response_length=3, loss_mask=torch.ones(3).bool())
        made = TrainSample(tokens=sample.tokens, images=images_of(sample, processor), **plan)
        groups.append([made, made])
    batches = pack_all(groups, multiple=1, equal_lengths=False)
    kept = {id(each) for each in before}  # of other tests
    assert len([each for each in inputs_alive() if id(each) not in kept]) == 2
    for batch, image in zip(batches, files, strict=True):
        assert batch.images.inputs.num_images == 1  # of two samples
        assert torch.equal(batch.images.inputs.load().pixels, processor.inputs([image]).pixels)


def conversation(*messages):
    return {"input": [{"role": role, "content": text} for role, text in messages]}


def test_supervised_conversations_with_images_in_later_turns(tmp_path, parts):
    tokenizer, processor = parts
    (tmp_path / "a.png").write_bytes(IMAGES[0].data)
    (tmp_path / "b.png").write_bytes(IMAGES[1].data)
    row = conversation(
        ("user", "<image>One?"), ("assistant", "yes"), ("user", "And <image>?"), ("assistant", "no")
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"images": ["a.png", "b.png"]}))
    config = DataConfig(
        prompt_data=str(tmp_path / "rows.jsonl"), multimodal_keys={"image": "images"}
    )
    source = PromptSource(config, tokenizer, conversations=True, image_processor=processor)
    prompts = source.next_prompts(1)
    (sample,) = sft_samples(prompts, tokenizer, processor=processor)
    place = processor.rule.image_token
    assert sample.images == IMAGES and sample.tokens.tolist().count(place) == 12
    trained = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert tokenizer.decode(trained) == "yesno"
    assert images_of(sample, processor).rows.numel() == 12
    (short,) = sft_samples(
        prompts, tokenizer, max_response_len=sample.response_length - 1, processor=processor
    )
    assert images_of(short, processor).rows.numel() == 12
    with pytest.raises(
        ValueError, match="--rollout-max-response-len 14 cuts off an image of the conversation"
    ):
        sft_samples(prompts, tokenizer, max_response_len=14, processor=processor)


@pytest.mark.parametrize("as_messages", [False, True])
def test_pairs_share_their_images(tmp_path, parts, as_messages):
    tokenizer, processor = parts
    (tmp_path / "a.png").write_bytes(IMAGES[0].data)
    row = {"input": "<image>One?", "chosen": "yes", "rejected": "no", "images": ["a.png"]}
    if as_messages:
        start = [{"role": "user", "content": "<image>One?"}]
        row |= {
            key: [*start, {"role": "assistant", "content": row[key]}]
            for key in ("chosen", "rejected")
        }
        del row["input"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(
        prompt_data=str(tmp_path / "rows.jsonl"),
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
    )
    source = PromptSource(config, tokenizer, pairs=True, image_processor=processor)
    chosen, rejected = pair_samples(source.next_prompts(1), tokenizer, processor=processor)
    assert chosen.images == rejected.images == IMAGES[:1]
    assert (
        chosen.tokens[: chosen.prompt_length].tolist()
        == rejected.tokens[: rejected.prompt_length].tolist()
    )
    assert chosen.tokens.tolist().count(processor.rule.image_token) == 6


def test_answers_have_the_images_of_their_prompt(tmp_path, parts):
    tokenizer, processor = parts
    (tmp_path / "a.png").write_bytes(IMAGES[0].data)
    source = source_of_rows(
        tmp_path,
        parts,
        [{"input": "<image>", "label": "red", "images": "a.png"}],
        label_key="label",
    )
    (sample,) = sft_samples(source.next_prompts(1), tokenizer, processor=processor)
    assert sample.images == IMAGES[:1] and sample.response == "red"

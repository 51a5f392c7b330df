"""Images of a sequence: positions on three axes equal to transformers', and rows that survive
packing and the split over context-parallel ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slime_like.images.inputs import ImageInputs, ImageSource
from slime_like.images.rows import ImageRows, PlaceholderRule, feature_counts, image_rows
from slime_like.megatron.ops.context_parallel import rows_of_rank
from slime_like.megatron.packing import pack, pack_all
from slime_like.types import TrainSample

IMAGE = 90


def tokens_and_inputs(
    seed: int, num_images: int, merge_size: int = 2, width: int = 5
) -> tuple[Tensor, ImageInputs]:
    """Text, then an image, and so on; ends with text."""
    draw = random.Random(seed)
    grids = torch.tensor(
        [
            [1, merge_size * draw.randint(1, 5), merge_size * draw.randint(1, 5)]
            for _ in range(num_images)
        ]
    )
    inputs = ImageInputs(torch.rand(int(grids.prod(1).sum()), width), grids)
    tokens: list[int] = []
    for count in [*feature_counts(inputs, PlaceholderRule(IMAGE, merge_size)), 0]:
        tokens += [draw.randrange(IMAGE) for _ in range(draw.randint(1, 7))] + [IMAGE] * count
    return torch.tensor(tokens), inputs


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(kind: str) -> None:
    import transformers.models as models

    family = getattr(models, kind)
    name = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}.get(kind, "Qwen3VLModel")
    theirs = getattr(getattr(family, f"modeling_{kind}"), name)
    for seed in range(20):
        merge_size = 1 + seed % 3
        tokens, inputs = tokens_and_inputs(seed, 1 + seed % 4, merge_size)
        settings = SimpleNamespace(spatial_merge_size=merge_size, tokens_per_second=2)
        model = SimpleNamespace(config=SimpleNamespace(vision_config=settings))
        model.get_vision_position_ids = theirs.get_vision_position_ids.__get__(model)
        types = (tokens == IMAGE).int()
        expected, delta = theirs.get_rope_index(model, tokens[None], types[None], inputs.grids)
        found = image_rows(tokens, inputs, PlaceholderRule(IMAGE, merge_size)).positions
        assert found is not None
        assert torch.equal(found, expected[:, 0])
        # an answer continues at the largest position plus one, as the engine's
        assert int(found.max()) + 1 == len(tokens) + int(delta)


def test_a_placeholder_that_the_model_wrote_is_a_token_like_others() -> None:
    prompt, inputs = tokens_and_inputs(1, 2)
    tokens = torch.cat([prompt, torch.tensor([5, IMAGE, 6])])
    sampled = torch.arange(len(tokens)) >= len(prompt)
    images = image_rows(tokens, inputs, PlaceholderRule(IMAGE, 2), sampled)
    assert images.positions is not None
    assert images.rows.tolist() == (prompt == IMAGE).nonzero().flatten().tolist()
    assert images.positions[:, -3:].diff().eq(1).all()
    with pytest.raises(ValueError, match=r"2 images have \d+ features, and the tokens \d+"):
        image_rows(tokens, inputs, PlaceholderRule(IMAGE, 2))


def test_placeholders_of_one_image_that_are_apart_are_an_error() -> None:
    inputs = ImageInputs(torch.rand(8, 3), torch.tensor([[1, 2, 4]]))
    tokens = torch.tensor([1, IMAGE, 2, IMAGE])
    with pytest.raises(ValueError, match="the 2 placeholders of the image at token 1 are apart"):
        image_rows(tokens, inputs, PlaceholderRule(IMAGE, 2))


def train_sample(tokens: Tensor, images: ImageRows | None) -> TrainSample:
    mask = torch.ones(2, dtype=torch.bool)
    return TrainSample(tokens, 2, mask, torch.ones(2), images=images)


def samples_with_images() -> list[TrainSample]:
    """A text, two samples of one prompt with two images, a text, and another with one image."""
    rule = PlaceholderRule(IMAGE, 2)
    pair, pair_inputs = tokens_and_inputs(3, 2)
    single, single_inputs = tokens_and_inputs(4, 1)
    longer = torch.cat([pair, torch.arange(9)])
    return [
        train_sample(torch.arange(7), None),
        train_sample(pair, image_rows(pair, pair_inputs, rule)),
        train_sample(longer, image_rows(longer, pair_inputs, rule)),
        train_sample(torch.arange(11), None),
        train_sample(single, image_rows(single, single_inputs, rule)),
    ]


def marked(tokens: Tensor, images: ImageRows, table: Tensor) -> Tensor:
    """[n, D]: each row's feature, 0 at text."""
    out = torch.zeros(tokens.numel(), table.size(1))
    out[images.rows] = table[images.features]
    return out


def features(inputs: ImageSource) -> Tensor:
    """One row per feature: the mean of its four patches."""
    return inputs.load().pixels.unflatten(0, (-1, 4)).mean(1)


def test_packed_rows_take_the_features_and_positions_of_their_sequences() -> None:
    samples = samples_with_images()
    batch = pack(samples, multiple=4, at_least=101)
    assert batch.images is not None and batch.images.positions is not None
    # the two samples of one prompt share their images
    assert batch.images.inputs.num_images == 3
    found = marked(batch.tokens[0], batch.images, features(batch.images.inputs))
    start = 0
    for sample in samples:
        rows = slice(start, start + len(sample.tokens))
        own = torch.zeros(len(sample.tokens), 5)
        expected = torch.arange(len(sample.tokens)).expand(3, -1)
        if sample.images is not None:
            own = marked(sample.tokens, sample.images, features(sample.images.inputs))
            assert sample.images.positions is not None
            expected = sample.images.positions
        assert torch.equal(found[rows], own)
        assert torch.equal(batch.images.positions[:, rows], expected)
        start = rows.stop
    assert pack([samples[0], samples[3]], multiple=1).images is None


@pytest.mark.parametrize("cp_size", [2, 3])
def test_context_parallel_ranks_hold_the_features_of_their_rows(cp_size: int) -> None:
    samples = samples_with_images()
    settings = {"multiple": 2, "equal_lengths": False, "cp_size": cp_size}
    taken = 0
    for rank in range(cp_size):
        (batch,) = pack_all([samples], cp_rank=rank, **settings)
        own_rows = rows_of_rank(batch.cu_seqlens, cp_size, rank)
        assert batch.images is not None and batch.images.positions is not None
        assert batch.is_padding is not None
        table = features(batch.images.inputs)
        found = marked(batch.tokens[0], batch.images, table)
        taken += batch.images.rows.numel()
        assert torch.equal(batch.images.rows, batch.images.rows.sort().values)
        for row in (~batch.is_padding).nonzero().flatten().tolist():
            sample = samples[int(batch.seq_ids[row])]
            place = int(batch.position_ids[0, row])
            if sample.images is None:
                expected = torch.zeros(5)
                positions = torch.full((3,), place)
            else:
                own = features(sample.images.inputs)
                expected = marked(sample.tokens, sample.images, own)[place]
                assert sample.images.positions is not None
                positions = sample.images.positions[:, place]
            assert torch.equal(found[row], expected)
            # the rotary embedding takes the rank's own
            assert torch.equal(batch.images.positions[:, own_rows[row]], positions)
    assert taken == sum(s.images.rows.numel() for s in samples if s.images is not None)

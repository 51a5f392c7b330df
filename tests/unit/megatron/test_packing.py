"""Packing places every response value on the row whose label it speaks about, and unpacking takes
it back."""

import dataclasses

import pytest
import torch

from slime_like.megatron.packed_batches import join_context_ranks
from slime_like.megatron.packing import pack, pack_all, unpack, with_selection_seeds
from slime_like.types import TrainSample

CPU = torch.device("cpu")


def sample(prompt: int, response: int, first_token: int) -> TrainSample:
    tokens = torch.arange(first_token, first_token + prompt + response)
    mask = torch.ones(response, dtype=torch.bool)
    # each value shows which token it belongs to
    values = tokens[prompt:].float()
    return TrainSample(
        tokens, response, mask, values / 1000, advantages=values, old_log_probs=-values
    )


def test_values_stand_on_the_row_that_predicts_their_token() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(5, 1, 300)]
    batch = pack(samples, multiple=1)
    assert batch.tokens.shape == (1, 16)
    assert batch.cu_seqlens.tolist() == [0, 7, 10, 16]
    assert batch.max_seqlen == 7
    rows = batch.loss_mask.nonzero().squeeze(1)
    assert rows.numel() == 4 + 2 + 1
    assert batch.advantages is not None
    # a row's label is the next token of its own sequence, and its advantage was made from that
    # token
    assert torch.equal(batch.labels[0, rows].float(), batch.advantages[rows])
    assert torch.equal(batch.labels[0, rows], batch.tokens[0, rows + 1])
    assert batch.position_ids[0].tolist() == [*range(7), *range(3), *range(6)]
    assert batch.places is None
    assert batch.seq_ids.tolist() == [0] * 7 + [1] * 3 + [2] * 6
    assert batch.ref_log_probs is None


def test_a_sample_without_token_sets_leaves_those_of_the_others() -> None:
    """As one that was lost, of which nothing is trained on."""
    lost = dataclasses.replace(sample(2, 1, 200), loss_mask=torch.tensor([False]))
    sets = torch.tensor([[102, 7], [103, -1]], dtype=torch.int32)
    reported = dataclasses.replace(sample(2, 2, 100), sampling_mask=sets)
    batch = pack([lost, reported], multiple=1)
    assert batch.sampling_mask is not None
    assert torch.equal(batch.sampling_mask[batch.loss_mask], sets)
    assert bool((batch.sampling_mask[~batch.loss_mask] == -1).all())
    assert pack([lost], multiple=1).sampling_mask is None


def test_last_token_of_a_sequence_never_predicts_the_next_sequence() -> None:
    batch = pack([sample(2, 2, 100), sample(2, 2, 200)], multiple=1)
    assert not batch.loss_mask[3]
    assert batch.labels[0, 3] == 0


def test_unpack_inverts_pack() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(5, 0, 300)]
    batch = pack(samples, multiple=1)
    assert batch.advantages is not None
    for original, values in zip(samples, unpack(batch.advantages, samples, batch.lengths)):
        assert torch.equal(values, original.advantages)


def test_padding_is_a_sequence_without_active_tokens() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200)]
    plain, padded = (pack(samples, multiple=m) for m in (1, 4))
    assert padded.tokens.shape == (1, 12)
    assert padded.cu_seqlens.tolist() == [0, 7, 10, 12]
    assert padded.loss_mask.sum() == plain.loss_mask.sum()
    assert padded.num_seqs == 3
    assert plain.is_padding is not None and padded.is_padding is not None
    assert not plain.is_padding.any() and padded.is_padding.tolist() == [False] * 10 + [True] * 2


def test_selection_seeds_belong_to_a_place_in_the_step() -> None:
    """Two data-parallel ranks have the seeds of one with twice the micro-batches; another step, or
    run, has others. All fit in 32 bits."""
    one = pack([sample(3, 2, 100)], multiple=1)

    def seeds(count: int, *, seed: int = 5, step: int = 0, dp_rank: int = 0) -> list[int]:
        return [b.selection_seed for b in with_selection_seeds([one] * count, seed, step, dp_rank)]

    full = seeds(4)
    assert seeds(2) + seeds(2, dp_rank=1) == full
    everything = full + seeds(4, step=1) + seeds(4, seed=6)
    assert len(set(everything)) == 12
    assert all(0 <= s < 2**32 for s in everything)


@pytest.mark.parametrize(("cp_size", "multiple"), [(2, 1), (4, 1), (2, 4), (4, 3)])
def test_context_ranks_share_every_sequence(cp_size: int, multiple: int) -> None:
    """Each rank has two chunks of every sequence, mirrored; together they have every row once, and
    every row keeps what it speaks about."""
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(12, 7, 300)]
    (full,) = pack_all([samples], multiple=1, equal_lengths=False)
    ranks = [
        pack_all(
            [samples],
            multiple=multiple,
            equal_lengths=False,
            cp_size=cp_size,
            cp_rank=r,
        )[0]
        for r in range(cp_size)
    ]
    shares = {batch.tokens.numel() for batch in ranks}
    assert len(shares) == 1 and shares.pop() % multiple == 0
    found = []
    for r, batch in enumerate(ranks):
        lengths = batch.cu_seqlens.diff()
        assert not (lengths % (2 * cp_size)).any() and batch.max_seqlen == int(lengths.max())
        assert batch.seq_ids.bincount().tolist() == (lengths // cp_size).tolist()
        assert batch.places is not None and batch.advantages is not None
        rows = batch.loss_mask
        found += batch.places[rows].tolist()
        assert torch.equal(batch.labels[0, rows].float(), batch.advantages[rows])
        for name in ("tokens", "labels", "position_ids"):
            assert torch.equal(
                getattr(batch, name)[0, rows], getattr(full, name)[0, batch.places[rows]]
            ), name
        chunk = int(lengths[2]) // (2 * cp_size)
        third = batch.position_ids[0, batch.seq_ids == 2].tolist()
        mirrored = [
            *range(r * chunk, (r + 1) * chunk),
            *range((2 * cp_size - 1 - r) * chunk, (2 * cp_size - r) * chunk),
        ]
        assert third == [p if p < 19 else 0 for p in mirrored]
    assert sorted(found) == full.loss_mask.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_of_the_head_are_looked_up_when_packed(cp_size: int) -> None:
    """Trained, observed, and of each prediction layer the rows whose token so many further is
    trained on, across the chunks of context-parallel ranks."""
    generator = torch.Generator().manual_seed(2)
    samples = [
        dataclasses.replace(
            sample(prompt, response, 100),
            loss_mask=torch.rand(response, generator=generator) > 0.4,
            observation_weights=torch.rand(response, generator=generator).round(),
        )
        for prompt, response in ((3, 9), (1, 2), (2, 30))
    ]
    found: dict[str, list[int]] = {"active": [], "observed": [], "1": [], "2": [], "3": []}
    wanted: dict[str, list[int]] = {name: [] for name in found}
    for r in range(cp_size):
        (batch,) = pack_all(
            [samples],
            multiple=1,
            equal_lengths=False,
            cp_size=cp_size,
            cp_rank=r,
            prediction_layers=3,
        )
        places = torch.arange(batch.tokens.numel()) if batch.places is None else batch.places
        rows = {"active": batch.active_rows, "observed": batch.observed_rows}
        rows |= {str(k): of_layer for k, of_layer in enumerate(batch.predicted_rows, 1)}
        assert rows.keys() == found.keys()
        for name, of_head in rows.items():
            assert of_head is not None
            found[name] += places[of_head].tolist()
    starts = pack(samples, multiple=1).cu_seqlens.tolist()
    for start, each in zip(starts, samples, strict=False):
        weights = each.observation_weights
        assert weights is not None
        first = start + each.scored_rows.start
        for i, (trained, weight) in enumerate(zip(each.loss_mask.tolist(), weights.tolist())):
            if trained:
                wanted["active"].append(first + i)
                for k in (1, 2, 3):
                    if first + i - k >= start:
                        wanted[str(k)].append(first + i - k)
            if trained or weight:
                wanted["observed"].append(first + i)
    assert {name: sorted(rows) for name, rows in found.items()} == wanted


@pytest.mark.parametrize("cp_size", [2, 4])
def test_values_of_context_ranks_go_back_to_samples(cp_size: int) -> None:
    groups = [[sample(3, 4, 100), sample(1, 2, 200)], [sample(12, 7, 300)], [sample(1, 1, 400)]]
    ranks = [
        pack_all(groups, multiple=2, equal_lengths=True, cp_size=cp_size, cp_rank=r)
        for r in range(cp_size)
    ]
    assert len({batch.tokens.numel() for batch in ranks[0]}) == 1, (
        "equal lengths for the interleaved schedule"
    )
    table = torch.stack(
        [
            torch.stack(
                [
                    torch.cat([getattr(b, name) for b in batches])
                    for name in ("advantages", "old_log_probs")
                ]
            )
            for batches in ranks
        ]
    )
    joined = join_context_ranks(table, ranks[0])
    for group, batch, values in zip(
        groups,
        ranks[0],
        joined.split([int(b.cu_seqlens[-1]) for b in ranks[0]], dim=1),
        strict=True,
    ):
        for row, name in zip(values, ("advantages", "old_log_probs"), strict=True):
            for original, back in zip(group, unpack(row, group, batch.lengths), strict=True):
                assert torch.equal(back, getattr(original, name))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_sequences_padded_to_the_longest(cp_size: int) -> None:
    """bshd: a batch of S times the longest, every token where it would be alone, and padding that
    weighs nothing."""
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(5, 0, 300)]
    batch = pack(samples, multiple=1, cp_size=cp_size, equal_sequences=True)
    length = 7 if cp_size == 1 else 8
    assert (
        batch.cu_seqlens.tolist() == [0, length, 2 * length, 3 * length]
        and batch.max_seqlen == length
    )
    assert batch.is_padding is not None and batch.advantages is not None
    for i, (source, tokens, padding) in enumerate(
        zip(samples, batch.tokens[0].split(length), batch.is_padding.split(length), strict=True)
    ):
        size = source.tokens.numel()
        assert torch.equal(tokens[:size], source.tokens) and not tokens[size:].any(), i
        assert padding.tolist() == [False] * size + [True] * (length - size)
    assert not (batch.loss_mask & batch.is_padding).any() and batch.loss_mask.sum() == 4 + 2
    for original, values in zip(
        samples, unpack(batch.advantages, samples, batch.lengths), strict=True
    ):
        assert torch.equal(values, original.advantages)

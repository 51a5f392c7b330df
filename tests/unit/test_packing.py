"""Packing places every response value on the row whose label it speaks about, and unpacking takes it back."""

import torch

from slime_like.megatron_backend.packing import pack, split_micro_batches, unpack, with_selection_seeds
from slime_like.types import TrainBatch, TrainSample

CPU = torch.device("cpu")


def sample(prompt: int, response: int, first_token: int) -> TrainSample:
    tokens = torch.arange(first_token, first_token + prompt + response)
    mask = torch.ones(response, dtype=torch.bool)
    # each value tells which token it belongs to
    values = tokens[prompt:].float()
    return TrainSample(tokens, response, mask, values / 1000, advantages=values, old_log_probs=-values)


def test_values_stand_on_the_row_that_predicts_their_token() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(5, 1, 300)]
    batch = pack(samples, multiple=1, device=CPU)
    assert batch.tokens.shape == (1, 16)
    assert batch.cu_seqlens.tolist() == [0, 7, 10, 16]
    assert batch.max_seqlen == 7
    rows = batch.loss_mask.nonzero().squeeze(1)
    assert rows.numel() == 4 + 2 + 1
    assert batch.advantages is not None
    # a row's label is the next token of its own sequence, and its advantage was made from that token
    assert torch.equal(batch.labels[0, rows].float(), batch.advantages[rows])
    assert torch.equal(batch.labels[0, rows], batch.tokens[0, rows + 1])
    assert batch.position_ids[0].tolist() == [*range(7), *range(3), *range(6)]
    assert batch.seq_ids.tolist() == [0] * 7 + [1] * 3 + [2] * 6
    assert batch.ref_log_probs is None


def test_last_token_of_a_sequence_never_predicts_the_next_sequence() -> None:
    batch = pack([sample(2, 2, 100), sample(2, 2, 200)], multiple=1, device=CPU)
    assert not batch.loss_mask[3]
    assert batch.labels[0, 3] == 0


def test_unpack_inverts_pack() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200), sample(5, 0, 300)]
    batch = pack(samples, multiple=1, device=CPU)
    assert batch.advantages is not None
    for original, values in zip(samples, unpack(batch.advantages, samples)):
        assert torch.equal(values, original.advantages)


def test_padding_is_a_sequence_without_active_tokens() -> None:
    samples = [sample(3, 4, 100), sample(1, 2, 200)]
    plain, padded = (pack(samples, multiple=m, device=CPU) for m in (1, 4))
    assert padded.tokens.shape == (1, 12)
    assert padded.cu_seqlens.tolist() == [0, 7, 10, 12]
    assert padded.loss_mask.sum() == plain.loss_mask.sum()
    assert padded.num_seqs == 3


def test_micro_batches_keep_order() -> None:
    samples = tuple(sample(2, 2, 10 * i) for i in range(6))
    parts = split_micro_batches(TrainBatch(samples), 2)
    assert [s.tokens[0].item() for part in parts for s in part] == [0, 10, 20, 30, 40, 50]
    assert [len(p) for p in parts] == [2, 2, 2]


def test_selection_seeds_belong_to_a_place_in_the_step() -> None:
    """Two data-parallel ranks have the seeds of one with twice the micro-batches; another step, or run, has others. All fit in 32 bits."""
    one = pack([sample(3, 2, 100)], multiple=1, device=CPU)

    def seeds(count: int, *, seed: int = 5, step: int = 0, dp_rank: int = 0) -> list[int]:
        return [b.selection_seed for b in with_selection_seeds([one] * count, seed, step, dp_rank)]

    whole = seeds(4)
    assert seeds(2) + seeds(2, dp_rank=1) == whole
    everything = whole + seeds(4, step=1) + seeds(4, seed=6)
    assert len(set(everything)) == 12
    assert all(0 <= s < 2**32 for s in everything)

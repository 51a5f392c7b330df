"""A rank's samples cut into micro-batches, and put back in order; micro-batches that hold padding
only."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.schema import AlgorithmConfig
from slime_like.distributed.seqlen_balancing import linear_cost
from slime_like.megatron.micro_batching import MicroBatchSize, micro_batch_size, work_per_token
from slime_like.megatron.packing import empty_sample, make_micro_batches, pack, unpack
from slime_like.megatron.trained_network import packing_metrics
from slime_like.types import TrainSample

CPU = torch.device("cpu")


def layout(**sizes: int) -> Any:
    return SimpleNamespace(**{"dp_size": 1, "pp_size": 1, "vp_size": 1, "cp_size": 1, **sizes})


def sample(prompt: int, response: int, first_token: int = 1) -> TrainSample:
    tokens = torch.arange(first_token, first_token + prompt + response)
    values = tokens[prompt:].float()
    return TrainSample(
        tokens, response, torch.ones(response, dtype=torch.bool), values / 1000, advantages=values
    )


SAMPLES = [sample(2, response, 100 * i) for i, response in enumerate((60, 2, 5, 9, 3, 14, 1, 7))]


def lengths(groups: list[list[TrainSample]]) -> list[list[int]]:
    return [[s.tokens.numel() for s in group] for group in groups]


def test_by_number_samples_stay_in_order() -> None:
    parts = make_micro_batches(SAMPLES, MicroBatchSize(2, None), layout())
    assert parts.rows == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [s.tokens[0].item() for group in parts.groups for s in group] == [
        100 * i for i in range(8)
    ]


def test_by_tokens_every_sample_is_in_one_row_within_the_budget() -> None:
    parts = make_micro_batches(SAMPLES, MicroBatchSize(1, 20), layout())
    assert sorted(i for row in parts.rows for i in row) == list(range(8))
    for row, group in zip(parts.rows, lengths(parts.groups), strict=True):
        assert sum(group) <= 20 or row == [0], "only a sequence beyond the budget exceeds it, alone"
    assert len(parts.rows) == 1 + -(-sum(s.tokens.numel() for s in SAMPLES[1:]) // 20)


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_values_come_back_in_the_order_of_the_samples(budget: int) -> None:
    """Through packing and unpacking, as log-probs do."""
    parts = make_micro_batches(SAMPLES, MicroBatchSize(1, budget), layout(pp_size=3, vp_size=2))
    assert len(parts.rows) % 3 == 0, "the interleaved schedule's multiple"
    values = []
    for group in parts.groups:
        batch = pack(group, multiple=2)
        assert batch.advantages is not None
        values += unpack(batch.advantages, group, batch.lengths)
    for original, found in zip(SAMPLES, parts.restore_order(values), strict=True):
        assert original.advantages is not None and torch.equal(found, original.advantages)


def test_a_micro_batch_of_padding_weighs_nothing_and_has_the_fields_of_the_others() -> None:
    parts = make_micro_batches(SAMPLES[:2], MicroBatchSize(1, 100), layout(pp_size=4, vp_size=2))
    assert lengths(parts.groups) == [[62], [4], [0], [0]]
    real, padding = (pack(parts.groups[i], multiple=4) for i in (1, 2))
    assert (
        padding.tokens.shape == (1, 4)
        and padding.num_seqs == 1
        and padding.cu_seqlens.tolist() == [0, 4]
    )
    assert not padding.loss_mask.any() and not padding.loss_weights.any()
    assert padding.is_padding is not None and padding.is_padding.all()
    for field in fields(real):
        assert (getattr(real, field.name) is None) == (getattr(padding, field.name) is None), (
            field.name
        )


def test_a_sample_without_tokens() -> None:
    empty = empty_sample(SAMPLES[0])
    assert empty.tokens.numel() == empty.response_length == 0
    assert (
        empty.ref_log_probs is None
        and empty.advantages is not None
        and empty.advantages.numel() == 0
    )


def test_sizes_of_the_two_passes() -> None:
    plain = AlgorithmConfig(micro_batch_size=3, log_probs_micro_batch_size=6)
    assert micro_batch_size(plain, 1, forward_only=False) == MicroBatchSize(3, None)
    assert micro_batch_size(plain, 1, forward_only=True) == MicroBatchSize(6, None)
    dynamic = AlgorithmConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=50)
    assert [micro_batch_size(dynamic, cp, forward_only=True).tokens for cp in (1, 2)] == [50, 100]
    more = AlgorithmConfig(
        use_dynamic_batch_size=True, max_tokens_per_gpu=50, log_probs_max_tokens_per_gpu=70
    )
    assert [micro_batch_size(more, 1, forward_only=only).tokens for only in (False, True)] == [
        50,
        70,
    ]


def test_packing_metrics() -> None:
    size = MicroBatchSize(1, 50)
    parts = make_micro_batches(SAMPLES[1:5], size, layout())
    batches = [pack(group, multiple=8) for group in parts.groups]
    found = {
        name: float(m.value / m.count)
        for name, m in packing_metrics(parts, batches, size).items()
        if m.count is not None
    }
    tokens = sum(s.tokens.numel() for s in SAMPLES[1:5])
    assert found["perf/micro_batches"] == 1
    assert found["perf/padding_frac"] == pytest.approx(1 - tokens / (8 * -(-tokens // 8)))
    assert found["perf/token_budget_used"] == pytest.approx(tokens / 50)
    assert "perf/token_budget_used" not in packing_metrics(parts, batches, MicroBatchSize(4, None))


def test_work_of_a_mixture_of_experts_counts_the_experts_that_a_token_visits() -> None:
    shape = {
        "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16, "num_query_groups": 2, "num_layers": 3,
        "gated_linear_unit": True, "num_moe_experts": None, "moe_ffn_hidden_size": 40, "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 24,
    }  # fmt: skip

    def expected(ffn: int) -> float:
        return linear_cost(
            hidden_size=64,
            ffn_hidden_size=ffn,
            attention_size=64,
            key_value_size=32,
            gated=True,
            num_layers=3,
            vocab_size=500,
        )

    assert work_per_token(SimpleNamespace(**shape), 500) == expected(128)  # type: ignore[arg-type]
    assert work_per_token(SimpleNamespace(**{**shape, "num_moe_experts": 8}), 500) == expected(
        3 * 40 + 24
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, 1, 30, 1000])
def test_pairs_stay_together_in_their_order(budget: int | None) -> None:
    """Also beyond the budget, and with micro-batches of padding."""
    size = MicroBatchSize(4, budget, together=2)
    parts = make_micro_batches(SAMPLES, size, layout(pp_size=3, vp_size=2 if budget else 1))
    for row in parts.rows:
        assert all(place % 2 == 0 for place in row[::2])
        assert [place + 1 for place in row[::2]] == row[1::2]
    assert sorted(place for row in parts.rows for place in row) == list(range(8))
    assert budget != 30 or any(len(row) > 2 for row in parts.rows)

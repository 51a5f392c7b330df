"""Collecting a rollout: what is drawn, kept, dropped, carried over; against responses whose lengths
and rewards are written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from arguments.parse import parse_args
from slime_like.data.group_buffer import GroupBuffer, PendingGroup
from slime_like.data.prompts import PromptStream
from slime_like.engines.base import GenerateOutput, SamplingParams
from slime_like.errors import RunError
from slime_like.rollout.collector import Collector
from slime_like.rollout.failures import failed_fraction
from slime_like.rollout.group_rows import waiting_from_rows, waiting_to_rows
from slime_like.rollout.hooks import group_filters
from slime_like.rollout.rollouter import Rollouter, training_sampling, truncate_at_stop
from slime_like.samples.indexer_topk import join_indexer_topk, pad_indexer_topk, unknown_keys
from slime_like.samples.routed_experts import join_routed_experts
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.command_lines import complete

NONZERO = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


class Prompts(PromptStream):
    """A source without end."""

    def __init__(self) -> None:
        self.next_id = 0

    def next_prompts(self, n: int) -> list[Prompt]:
        self.next_id += n
        return [
            Prompt(i, f"prompt {i}", (1, 2), label=str(i), metadata={"at": (i, math.nan)})
            for i in range(self.next_id - n, self.next_id)
        ]

    def __len__(self) -> int:
        raise NotImplementedError

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_id = state["next"]


class Script:
    """Engine, rollouter and grader in one: sample i has length(i) tokens i and the reward(i),
    written under `version`."""

    group = None  # of collectives

    def __init__(self, length: Callable[[int], int], reward: Callable[[int], float]) -> None:
        self.length, self.reward, self.version = length, reward, 1

    def continue_generation(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, limit: int | None
    ) -> list[Sample]:
        return [self._grow(s, limit) for s in samples]

    def grade_groups(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        return [list(group) for group in groups]

    def gather(self, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def _grow(self, s: Sample, limit: int | None) -> Sample:
        assert not s.ended and s.rollout_log_probs is not None
        new = min(limit or 999, self.length(s.sample_id) - s.response_length)
        length = s.response_length + new
        ended = length == self.length(s.sample_id)
        return replace(
            s,
            tokens=torch.cat([s.tokens, torch.full((new,), s.sample_id)]),
            response_length=length,
            loss_mask=torch.cat([s.loss_mask, torch.ones(new, dtype=torch.bool)]),
            rollout_log_probs=torch.cat([s.rollout_log_probs, torch.full((new,), -0.1)]),
            weight_versions=(*s.weight_versions, *[self.version] * new),
            status=SampleStatus.COMPLETED if ended else SampleStatus.PARTIAL,
            reward=self.reward(s.sample_id) if ended else None,
        )


def collector(folder: Path, script: Script, *flags: str) -> Collector:
    """Rollouts of 2 groups of 2 samples: group g has the samples 2g and 2g + 1."""
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
    config = parse_args(
        complete(
            folder, *sizes, *flags, without=("--rollout-batch-size", "--n-samples-per-prompt")
        ),
        1,
    )
    buffer = GroupBuffer(Prompts(), 2)
    sampling = training_sampling(config.rollout)
    return Collector(
        config.scheduling,
        config.rollout,
        cast(Rollouter, script),
        buffer,
        sampling,
        group_filters(config),
        max_failed=config.guards.max_failed_samples,
    )


def waiting_of(c: Collector) -> list[PendingGroup]:
    return cast(GroupBuffer, c.buffer).waiting


def ids(groups: Sequence[Any]) -> list[int]:
    return [group.group_id for group in groups]


def test_without_scheduling_it_is_the_next_prompts(tmp_path: Path) -> None:
    c = collector(tmp_path, Script(lambda i: 3, float))
    first, second = c.collect(0), c.collect(1)
    assert (
        ids(first.groups) == [0, 1]
        and ids(second.groups) == [2, 3]
        and ids(second.prompts) == [2, 3]
    )
    assert first.metrics == {}
    assert [s.reward for g in second.groups for s in g.samples] == [4, 5, 6, 7]


def test_groups_without_spread_are_replaced(tmp_path: Path) -> None:
    """Groups 0 and 2 have equal rewards."""
    c = collector(
        tmp_path,
        Script(lambda i: 3, lambda i: 1.0 if i // 2 in (0, 2) else i % 2),
        "--dynamic-sampling-filter-path",
        NONZERO,
    )
    found = c.collect(0)
    assert ids(found.groups) == [1, 3] == ids(found.prompts)
    m = found.metrics
    assert (
        m["rollout/groups_drawn"],
        m["rollout/groups_kept"],
        m["rollout/groups_dropped"],
        m["rollout/draws"],
    ) == (4, 2, 2, 2)
    assert (
        m["rollout/dynamic_filter/drop_zero_std_1"] == 2 and m["rollout/wasted_tokens"] == 2 * 2 * 3
    )


def test_a_filter_that_keeps_nothing_ends_the_run(tmp_path: Path) -> None:
    c = collector(
        tmp_path,
        Script(lambda i: 3, lambda i: 0.5),
        "--dynamic-sampling-filter-path",
        NONZERO,
        "--max-num-gen-batches",
        "3",
    )
    with pytest.raises(
        RunError,
        match=r"rollout 8: 3 draws of 2 prompts .* gave 0 of 2 groups .* zero_std_0.5 6",
    ):
        c.collect(7)


def test_the_filter_with_fallback_draws_no_more(tmp_path: Path) -> None:
    """Of three groups one is spare: group 0, without spread, goes, and group 1, without it too, is
    needed."""
    flags = (
        "--dynamic-sampling-filter-path",
        f"{NONZERO}_with_fallback",
        "--over-sampling-batch-size",
        "3",
    )
    found = collector(
        tmp_path, Script(lambda i: 3, lambda i: i if i >= 4 else 0.0), *flags
    ).collect(0)
    assert (
        ids(found.groups) == [1, 2]
        and found.metrics["rollout/draws"] == 1
        and found.metrics["rollout/groups_dropped"] == 1
    )


def test_over_sampling_keeps_the_first_to_end(tmp_path: Path) -> None:
    """Groups 0 and 2 are long. A slice is 4 tokens; without one all of them end in the same round,
    and the first by id are kept."""
    script = Script(lambda i: 10 if i // 2 in (0, 2) else 3, float)
    sliced = collector(
        tmp_path, script, "--over-sampling-batch-size", "4", "--rollout-slice-len", "4"
    ).collect(0)
    assert ids(sliced.groups) == [1, 3]
    assert (
        sliced.metrics["rollout/groups_lost"] == 2
        and sliced.metrics["rollout/wasted_tokens"] == 2 * 2 * 4
    )
    full_one = collector(tmp_path, script, "--over-sampling-batch-size", "4").collect(0)
    assert ids(full_one.groups) == [0, 1] and full_one.metrics["rollout/groups_surplus"] == 2


def test_partial_groups_continue_in_the_next_rollout(tmp_path: Path) -> None:
    script = Script(lambda i: 10 if i // 2 in (0, 2) else 3, float)
    c = collector(
        tmp_path,
        script,
        "--over-sampling-batch-size",
        "4",
        "--partial-rollout",
        "--rollout-slice-len",
        "4",
    )
    first = c.collect(0)
    assert (
        ids(first.groups) == [1, 3]
        and first.metrics["rollout/groups_waiting"] == 2
        and first.metrics["rollout/wasted_tokens"] == 0
    )
    script.version = 2
    second = c.collect(1)
    assert (
        second.metrics["rollout/groups_resumed"] == 2
        and second.metrics["rollout/groups_drawn"] == 4
    )
    assert ids(second.groups) == [4, 5], "new short ones end before them"
    script.version = 3
    third = c.collect(2)
    assert ids(third.groups) == [0, 2] and third.metrics["rollout/groups_waiting"] == 2
    sample = third.groups[0].samples[1]
    assert (
        sample.weight_versions == (1,) * 4 + (2,) * 4 + (3,) * 2
        and sample.tokens.tolist() == [1, 2] + [1] * 10
    )
    assert sample.metadata["start_rollout_id"] == 0 and sample.loss_mask.all()


def test_older_tokens_are_masked_on_request(tmp_path: Path) -> None:
    script = Script(lambda i: 6 if i < 2 else 2, float)
    flags = (
        "--over-sampling-batch-size",
        "3",
        "--partial-rollout",
        "--rollout-slice-len",
        "4",
        "--mask-offpolicy-in-partial-rollout",
    )
    c = collector(tmp_path, script, *flags)
    assert ids(c.collect(0).groups) == [1, 2]
    second = c.collect(1)
    assert ids(second.groups) == [0, 3] and second.metrics["rollout/off_policy_masked_tokens"] == 8
    assert second.groups[0].samples[0].loss_mask.tolist() == [False] * 4 + [True] * 2
    assert second.groups[1].samples[0].loss_mask.all()


def test_the_buffer_goes_through_json_bit_by_bit(tmp_path: Path) -> None:
    """A collector that is restored in the middle continues as one that was not."""
    script = Script(lambda i: 5 + i % 7, lambda i: math.nan if i % 5 == 0 else i / 3)
    flags = ("--over-sampling-batch-size", "4", "--partial-rollout", "--rollout-slice-len", "2")
    c = collector(tmp_path, script, *flags)
    c.collect(0)
    waiting = waiting_of(c)
    assert {s.status for g in waiting for s in g.samples} == {
        SampleStatus.PARTIAL,
        SampleStatus.COMPLETED,
    }
    holders = [0] * sum(len(group.samples) for group in waiting)
    state = json.loads(json.dumps(waiting_to_rows(waiting, holders), allow_nan=False))
    other = collector(tmp_path, script, *flags)
    cast(GroupBuffer, other.buffer).waiting = waiting_from_rows(state, rank=0, num_holders=1)
    cast(Any, other.buffer).source.next_id = cast(Any, c.buffer).source.next_id
    assert [plain(g) for g in waiting_of(other)] == [plain(g) for g in waiting]
    for rollout in (1, 2):
        local, restored = c.collect(rollout), other.collect(rollout)
        assert [plain(g) for g in restored.groups] == [plain(g) for g in local.groups]


def plain(group: Any) -> list[Any]:
    return [
        (s.sample_id, s.tokens.tolist(), s.loss_mask.tolist(), s.rollout_log_probs.tolist(), repr(s.reward), s.status, s.weight_versions,
         repr(s.metadata), s.label, s.text)
        for s in group.samples
    ]  # fmt: skip


def test_a_buffer_filter_chooses_and_throws_away(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def newest(args, rollout_id, buffer, n):\n"
        "    assert args.rollout_batch_size == 2 and rollout_id == 1\n"
        "    assert buffer[0][0].status.value == 'aborted' and buffer[0][0].prompt == 'prompt 0'\n"
        "    del buffer[0]\n"
        "    taken = buffer[-1:]\n"
        "    del buffer[-1:]\n"
        "    return taken\n"
        "def invents(args, rollout_id, buffer, n):\n"
        "    return [buffer[0], buffer[0]]\n"
    )
    script = Script(lambda i: 9 if i // 2 < 3 else 2, float)
    flags = ("--over-sampling-batch-size", "5", "--partial-rollout", "--rollout-slice-len", "2")
    c = collector(
        tmp_path, script, *flags, "--buffer-filter-path", f"{tmp_path / 'mine.py'}:newest"
    )
    c.collect(0)
    assert ids(waiting_of(c)) == [0, 1, 2]
    found = c.collect(1)
    assert (
        found.metrics["rollout/groups_discarded"] == 1
        and found.metrics["rollout/wasted_tokens"] == 4
    )
    assert ids(waiting_of(c)) == [1, 7, 8, 2]
    c = collector(
        tmp_path, script, *flags, "--buffer-filter-path", f"{tmp_path / 'mine.py'}:invents"
    )
    c.collect(0)
    with pytest.raises(
        ValueError,
        match=r"--buffer-filter-path .*invents: returned groups \[0, 0\], must be at most 5",
    ):
        c.collect(1)


def test_a_sample_filter_empties_masks(tmp_path: Path) -> None:
    (tmp_path / "drop.py").write_text(
        "def odd(args, groups):\n    for g in groups:\n        for s in g:\n            s.remove_sample = s.index % 2 == 1\n"
    )
    found = collector(
        tmp_path,
        Script(lambda i: 3, float),
        "--rollout-sample-filter-path",
        f"{tmp_path / 'drop.py'}:odd",
    ).collect(0)
    assert [bool(s.loss_mask.any()) for g in found.groups for s in g.samples] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [("raise KeyError('x')", "group 0: the function raised KeyError: 'x'"), ("return None", "group 0: the function returned NoneType; return True")],
)  # fmt: skip
def test_a_wrong_dynamic_filter_is_named(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "wrong.py").write_text(f"def f(args, samples, **more):\n    {body}\n")
    c = collector(
        tmp_path,
        Script(lambda i: 3, float),
        "--dynamic-sampling-filter-path",
        f"{tmp_path / 'wrong.py'}:f",
    )
    with pytest.raises(ValueError, match=words):
        c.collect(0)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def test_a_stop_string_across_a_cut_ends_the_response() -> None:
    sample = Sample.empty(Prompt(0, "", (65,)), 0)
    sample = replace(sample, tokens=torch.tensor([65, *b"say </an"]), response_length=8)
    output = GenerateOutput(0, tuple(b"s> and on"), (-1.0,) * 9, "length", (3,) * 9)
    cut = truncate_at_stop(Letters(), sample, output, ("</ans>",))
    assert (
        bytes(cut.tokens) == b"s>"
        and cut.finish_reason == "stop"
        and len(cut.log_probs) == len(cut.weight_versions) == 2
    )
    assert truncate_at_stop(Letters(), sample, output, ("</end>",)) is output
    assert (
        truncate_at_stop(
            Letters(), Sample.empty(Prompt(0, "", tuple(b"</an")), 0), output, ("</ans>",)
        )
        is output
    ), "a prompt is no response"


def test_pending_groups() -> None:
    prompt = Prompt(0, "", (1,))
    sample = Sample.empty(prompt, 0)
    group = PendingGroup(prompt, (sample,))
    written = replace(sample, tokens=torch.tensor([1, 5]), response_length=1)
    assert not group.ended and group.response_tokens == 0
    assert group.with_samples([written]).response_tokens == 1


def test_routes_of_a_sample_that_grew_are_those_of_their_first_time() -> None:
    """The engine computes a partial response again under newer weights; the last token had not been
    computed before."""
    before = torch.tensor([1, 2, -1], dtype=torch.int16).reshape(3, 1, 1)
    now = torch.tensor([7, 7, 3, 4, -1], dtype=torch.int16).reshape(5, 1, 1)
    grown = join_routed_experts(before, now, 5)
    assert grown is not None and grown.flatten().tolist() == [1, 2, 3, 4, -1]
    cut = join_routed_experts(None, now, 4)
    assert cut is not None and cut.flatten().tolist() == [7, 7, 3, 4]
    assert join_routed_experts(None, None, 4) is None
    assert join_routed_experts(before, None, 3) is before  # aborted before it was asked for again
    assert join_routed_experts(before, None, 4) is None


def test_keys_of_a_sample_that_grew_are_those_of_their_first_time() -> None:
    """Of tokens after the first two, which have no choice."""
    assert join_indexer_topk(None, None, 4) is None
    short = unknown_keys(2, 1, 2)
    assert short.shape == (0, 1, 2) and join_indexer_topk(None, short, 2) is not None
    before = torch.tensor([[0, 2], [1, 3], [-1, -1]], dtype=torch.int32).unsqueeze(1)
    now = torch.tensor([[5, 5], [5, 5], [3, 4], [0, 5], [-1, -1]], dtype=torch.int32).unsqueeze(1)
    grown = join_indexer_topk(before, now, 7)
    assert grown is not None and grown[:, 0].tolist() == [[0, 2], [1, 3], [3, 4], [0, 5], [-1, -1]]
    first = join_indexer_topk(short, now, 6)
    assert first is not None and first.tolist() == now[:4].tolist()
    assert join_indexer_topk(before, None, 5) is before
    assert join_indexer_topk(before, None, 6) is None
    padded = pad_indexer_topk([before[:1], before[1:]], 8)
    assert padded.shape == (6, 1, 2) and padded[:3].equal(before) and bool((padded[3:] == -1).all())


def test_failures_of_dropped_groups_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rewards of groups 0 and 2 fail; the filter drops these groups, and 4 of 8 samples have
    failed."""
    script = Script(lambda i: 3, lambda i: math.nan if i // 2 in (0, 2) else i % 2)
    flags = ("--dynamic-sampling-filter-path", NONZERO, "--max-failed-samples")
    with pytest.raises(
        RunError,
        match=r"rollout 1: 50.0% of the samples .* more than --max-failed-samples 0.4; the first: "
        r"sample 0: its reward is nan \(of a group that is not trained on\)",
    ):
        collector(tmp_path, script, *flags, "0.4").collect(0)
    with caplog.at_level("WARNING"):
        found = collector(tmp_path, script, *flags, "0.5").collect(0)
    assert ids(found.groups) == [1, 3]
    samples = [sample for group in found.groups for sample in group.samples]
    assert failed_fraction(samples) == 0 and failed_fraction(samples, found.metrics) == 0.5
    assert caplog.text.count("50.0% of the samples have no usable response or reward") == 1


def test_a_reward_that_always_fails_is_named_and_not_the_prompts(tmp_path: Path) -> None:
    script = Script(lambda i: 3, lambda i: math.nan)
    c = collector(tmp_path, script, "--dynamic-sampling-filter-path", NONZERO)
    with pytest.raises(
        RunError, match=r"100.0% .* the first: sample 0: its reward is nan"
    ) as found:
        c.collect(0)
    assert "easier" not in str(found.value)


def test_failures_of_surplus_groups_count(tmp_path: Path) -> None:
    script = Script(lambda i: 3, lambda i: math.nan if i // 2 == 2 else float(i))
    flags = ("--over-sampling-batch-size", "3", "--max-failed-samples")
    with pytest.raises(RunError, match=r"33.3% .* the first: sample 4: its reward is nan"):
        collector(tmp_path, script, *flags, "0.3").collect(0)
    found = collector(tmp_path, script, *flags, "0.4").collect(0)
    assert found.metrics["rollout/left_out_failed_samples"] == 2

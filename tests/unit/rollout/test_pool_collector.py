"""Rollouts of a pool in rounds, against responses whose lengths are written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from arguments.parse import parse_args
from slime_like.data.group_buffer import GroupBuffer
from slime_like.errors import RunError
from slime_like.rollout.collector import Collected
from slime_like.rollout.group_rows import waiting_from_rows, waiting_to_rows
from slime_like.rollout.hooks import group_filters
from slime_like.rollout.pool_collector import PoolCollector
from slime_like.rollout.rollouter import Rollouter, training_sampling
from slime_like.samples.episodes import complete
from slime_like.trainer.sampling_factory import pool_settings
from slime_like.types import Sample
from tests.unit.command_lines import complete as complete_flags
from tests.unit.rollout.test_collector import NONZERO, Prompts, Script

SIZES = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "12")
POOL = ("--async-rollout", "--fully-async", "--rollout-slice-len", "2")
SINGLE = ("--fully-async-single-samples", "--advantage-estimator", "batch_mean")


def pool(folder: Path, script: Script, *flags: str, size: int = 2) -> PoolCollector:
    """Rollouts of 2 groups of 2 samples: group g has the samples 2g and 2g + 1."""
    sizes = (*SIZES[:3], str(size), *SIZES[4:])
    config = parse_args(complete_flags(folder, *sizes, *POOL, *flags, without=SIZES[::2]), 1)
    script.group = None
    return PoolCollector(
        pool_settings(config, 12),
        config.scheduling,
        config.rollout,
        cast(Rollouter, script),
        GroupBuffer(Prompts(), size),
        training_sampling(config.rollout),
        group_filters(config),
        max_failed=config.guards.max_failed_samples,
        streams=False,
    )


def long_at(*slow: int) -> Script:
    """Samples of three tokens, and slow ones of sixteen."""
    return Script(lambda i: 16 if i in slow else 3, float)


def step(c: PoolCollector, script: Script, j: int, ahead: int = 1) -> Collected:
    """Rollout j, sampled while the rollout before it is trained on."""
    clock = max(0, j - ahead)
    script.version = clock + 1
    c.advance(clock, script.version)
    return c.collect(j)


def ids(found: Collected) -> list[int]:
    return [group.group_id for group in found.groups]


def trained_ages(found: Collected, j: int) -> set[int]:
    """Of the tokens that rollout j is trained on with, in versions: its version is j + 1."""
    samples = complete(s for group in found.groups for s in group.samples)
    return {
        j + 1 - version
        for s in samples
        for version, trained in zip(s.weight_versions, s.loss_mask.tolist())
        if trained
    }


def test_a_straggler_holds_up_nobody_until_it_is_due(tmp_path: Path) -> None:
    script = long_at(0)
    c = pool(tmp_path, script, "--max-staleness", "3")
    found = [step(c, script, j) for j in range(5)]
    assert 0 not in ids(found[0]) and 0 not in ids(found[1])
    (taken,) = [j for j in range(5) if 0 in ids(found[j])]
    straggler = next(g for g in found[taken].groups if g.group_id == 0).samples[0]
    assert isinstance(straggler, Sample)
    versions = straggler.weight_versions
    assert len(set(versions)) >= 3 and list(versions) == sorted(versions)
    assert straggler.response_length == 16 and straggler.loss_mask.all()
    assert found[taken].metrics["rollout/group_age_max"] == taken
    for j, each in enumerate(found):
        assert max(trained_ages(each, j)) <= 3


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["wait", "mask"])
def test_no_token_is_trained_on_beyond_the_bound(tmp_path: Path, staleness: int, mode: str) -> None:
    script = Script(lambda i: 60 if i % 7 == 3 else 1 + i % 5, float)
    flags = ("--max-staleness", str(staleness), "--stale-tokens", mode)
    c = pool(tmp_path, script, *flags)
    seen: list[int] = []
    ages = set[int]()
    masked = 0.0
    for j in range(12):
        found = step(c, script, j)
        assert len(found.groups) == 2 and found.metrics["rollout/groups_kept"] == 2
        ages |= trained_ages(found, j)
        seen += ids(found)
        masked += found.metrics["rollout/stale_masked_tokens"]
    assert max(ages) == staleness and len(set(seen)) == len(seen)
    assert (masked > 0) == (mode == "mask" and staleness > 1)


def test_masked_tokens_keep_their_sample_in_the_baseline(tmp_path: Path) -> None:
    script = long_at(0)
    c = pool(tmp_path, script, "--max-staleness", "2", "--stale-tokens", "mask")
    found = [step(c, script, j) for j in range(12)]
    (taken,) = [j for j in range(12) if 0 in ids(found[j])]
    long, short = complete(next(g for g in found[taken].groups if g.group_id == 0).samples)
    assert long.reward == 0 and short.reward == 1
    assert 0 < long.active_tokens < 16 and short.active_tokens == 0
    assert long.rollout_log_probs is not None and len(long.rollout_log_probs) == 16


def test_groups_that_are_too_old_altogether_make_room_for_others(tmp_path: Path) -> None:
    """All tokens of a group whose reward comes late are too old."""
    script = Script(lambda i: 3, float)
    c = pool(tmp_path, script, "--max-staleness", "1", "--stale-tokens", "mask")
    step(c, script, 0)
    step(c, script, 1)
    for group in c.pool.finished.values():
        assert group.started == 0
    left = {group_id for group_id, _ in c.pool.finished}
    found = step(c, script, 2, ahead=0)
    assert found.metrics["rollout/stale_groups"] == len(left - set(ids(found)))
    assert max(trained_ages(found, 2)) <= 1


def test_a_resumed_group_may_be_too_old_altogether(tmp_path: Path) -> None:
    flags = ("--stale-tokens", "mask", "--max-staleness")
    script = long_at()
    first = pool(tmp_path, script, *flags, "6")
    step(first, script, 0)
    before = {group.group_id for group in first.pool.finished.values()}
    data, rows = stored(first)
    resumed = pool(tmp_path, script, *flags, "1")
    resume(resumed, data, rows)
    found = step(resumed, script, 4)
    assert before and not before & set(ids(found)) and found.metrics["rollout/stale_groups"] > 0


def test_dropped_groups_are_replaced_and_too_many_stop_the_run(tmp_path: Path) -> None:
    script = Script(lambda i: 3, lambda i: i % 2 if i // 2 % 2 else 1.0)
    c = pool(tmp_path, script, "--dynamic-sampling-filter-path", NONZERO)
    found = [step(c, script, j) for j in range(3)]
    assert [ids(each) for each in found] == [[1, 3], [5, 7], [9, 11]]
    assert sum(each.metrics["rollout/groups_dropped"] for each in found) >= 6
    script = Script(lambda i: 3, lambda i: 1.0)
    flags = ("--dynamic-sampling-filter-path", NONZERO, "--max-num-gen-batches", "3")
    c = pool(tmp_path, script, *flags)
    with pytest.raises(RunError, match=r"rollout 1: --dynamic-sampling-filter-path .* dropped"):
        step(c, script, 0)


def numbers(found: Collected) -> list[Any]:
    samples = complete(s for group in found.groups for s in group.samples)
    plain = [
        (s.sample_id, s.tokens.tolist(), s.weight_versions, s.reward, s.loss_mask.tolist())
        for s in samples
    ]
    return [plain, {k: v for k, v in found.metrics.items() if not k.startswith("perf/")}]


def stored(c: PoolCollector) -> tuple[Any, list[Any]]:
    """The position of the prompts, and what a checkpoint has of the pool."""
    data, groups = c.position()
    holders = [0] * sum(len(group.samples) for group in groups)
    return data, json.loads(json.dumps(waiting_to_rows(groups, holders), allow_nan=False))


def resume(c: PoolCollector, data: Any, rows: list[Any]) -> None:
    buffer = cast(GroupBuffer, c.buffer)
    cast(Prompts, buffer.source).next_id = data["next"]
    buffer.waiting = waiting_from_rows(rows, rank=0, num_holders=1)


@pytest.mark.parametrize("mode", ["wait", "mask"])
@pytest.mark.parametrize("unit", [(), SINGLE], ids=["groups", "samples"])
@pytest.mark.parametrize("killed", range(1, 11))
def test_a_resumed_pool_is_the_one_that_was_not_stopped(
    tmp_path: Path, killed: int, unit: tuple[str, ...], mode: str
) -> None:
    workers = ("--num-parallel-generation-workers", "5") if unit else ()
    flags = ("--max-staleness", "3", "--stale-tokens", mode, *unit, *workers)

    def script() -> Script:
        return Script(lambda i: 40 if i % 5 == 2 else 1 + i % 4, float)

    def run(c: PoolCollector, s: Script, rollouts: Sequence[int]) -> list[Any]:
        return [numbers(step(c, s, j)) for j in rollouts]

    first = script()
    c = pool(tmp_path, first, *flags)
    run(c, first, range(killed))
    data, rows = stored(c)
    assert sum(len(row["samples"]) for row in rows) >= 4, "the pool is full"
    expected = run(c, first, range(killed, 12))
    second = script()
    resumed = pool(tmp_path, second, *flags)
    resume(resumed, data, rows)
    assert run(resumed, second, range(killed, 12)) == expected


def test_a_narrower_bound_samples_old_groups_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = long_at(*range(0, 40, 3))
    c = pool(tmp_path, script, "--max-staleness", "5")
    seen = [i for j in range(6) for i in ids(step(c, script, j))]
    data, groups = c.position()
    narrow = pool(tmp_path, script, "--max-staleness", "1")
    buffer = cast(GroupBuffer, narrow.buffer)
    cast(Prompts, buffer.source).next_id = cast(int, data["next"])
    buffer.waiting = list(groups)
    for j in range(6, 12):
        found = step(narrow, script, j)
        assert max(trained_ages(found, j)) <= 1
        seen += ids(found)
    assert "too old for --max-staleness 1: they are sampled again" in caplog.text
    assert sorted(seen) == list(range(24)), "no prompt is left out, none is used twice"


def sample_ids(found: Collected) -> list[int]:
    return [sample.sample_id for group in found.groups for sample in group.samples]


def test_a_single_sample_waits_for_no_other_of_its_prompt(tmp_path: Path) -> None:
    c = pool(tmp_path, script := long_at(0), "--max-staleness", "3", *SINGLE)
    found = [step(c, script, j) for j in range(12)]
    assert [group.group_id for group in found[0].groups] == [0, 1, 2]
    assert sample_ids(found[0]) == [1, 2, 3, 4], "sample 1 without 0, and 4 without 5"
    (taken,) = [j for j in range(12) if 0 in sample_ids(found[j])]
    assert taken == 3, "where it is due"
    for j, each in enumerate(found):
        assert len(sample_ids(each)) == 4 and max(trained_ages(each, j)) <= 3
    whole = pool(tmp_path, script, "--max-staleness", "3")
    assert 1 not in sample_ids(step(whole, script, 0)), "where groups are whole it waits"


@pytest.mark.parametrize("mode", ["wait", "mask"])
def test_every_single_sample_is_taken_once(tmp_path: Path, mode: str) -> None:
    script = Script(lambda i: 60 if i % 7 == 3 else 1 + i % 5, float)
    flags = ("--max-staleness", "2", "--stale-tokens", mode)
    c = pool(tmp_path, script, *flags, *SINGLE, size=3)
    seen: list[int] = []
    for j in range(12):
        found = step(c, script, j)
        assert len(found.groups) == len(set(ids(found))), "parts of a prompt are one group again"
        assert len(sample_ids(found)) == 6 and max(trained_ages(found, j)) <= 2
        seen += sample_ids(found)
    assert len(set(seen)) == len(seen)
    if mode == "wait":
        assert sorted(seen) == list(range(72)) and not c.position()[1]


def test_a_sample_that_is_too_old_altogether_makes_room_for_one_other(tmp_path: Path) -> None:
    """A prompt has two samples: the other one begins when there is room for it."""
    c = pool(
        tmp_path, script := long_at(), "--max-staleness", "1", "--stale-tokens", "mask", *SINGLE
    )
    step(c, script, 0)
    for old in list(c.pool.finished.values())[1:]:
        c.pool.drop(old)  # as if one alone had been too old
    c.advance(0, script.version)
    assert len(c.pool) == 1
    for j in range(1, 12):
        assert len(sample_ids(step(c, script, j))) == 4
    _, rows = stored(c)
    assert [row["samples"][0]["response_length"] for row in rows] == [0], "the last one's other"


def test_single_samples_of_one_answer_a_prompt_are_groups(tmp_path: Path) -> None:
    def run(*flags: str) -> list[Any]:
        script = Script(lambda i: 40 if i % 5 == 2 else 1 + i % 4, float)
        flags = ("--advantage-estimator", "batch_mean", "--max-staleness", "3", *flags)
        c = pool(tmp_path, script, *flags, size=1)
        return [numbers(step(c, script, j)) for j in range(12)]

    assert run("--fully-async-single-samples") == run()


@pytest.mark.parametrize("killed", [1, 4, 7])
@pytest.mark.parametrize("before", ["groups", "samples"])
def test_a_resumed_run_may_take_groups_apart_and_together(
    tmp_path: Path, killed: int, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples that are left of a group of which others were trained on are sampled again, with the
    others; nothing is lost."""
    units = [(), SINGLE] if before == "groups" else [SINGLE, ()]
    script = Script(lambda i: 40 if i % 5 == 2 else 1 + i % 4, float)
    first = pool(tmp_path, script, *units[0])
    seen = [i for j in range(killed) for i in sample_ids(step(first, script, j))]
    second = pool(tmp_path, script, *units[1])
    resume(second, *stored(first))
    later = [i for j in range(killed, 12) for i in sample_ids(step(second, script, j))]
    assert len(set(later)) == len(later) == 4 * (12 - killed)
    twice = sorted(set(seen) & set(later))
    if before == "groups":
        assert not twice and sorted(seen + later) == list(range(48))
        return
    broken = {i // 2 for i in seen if i ^ 1 not in seen}
    assert twice == [i for i in sorted(seen) if i // 2 in broken]
    assert f"{len(broken)} groups of the checkpoint are not whole" in caplog.text or not broken
    assert all(i in seen + later for i in range(max(seen)))

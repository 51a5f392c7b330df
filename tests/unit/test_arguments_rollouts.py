"""Rules about drawing, keeping and carrying over groups: each is broken once, alone, and names its flag and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.validate_scheduling import SCHEDULING_RULES
from tests.unit.command_lines import complete, problems_of

NONZERO = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
# name of the rule, flags that are added, the flag that is named, words of the message
CASES = [
    ("scheduling_needs_sampling", "--loss-type sft_loss --partial-rollout", "--partial-rollout", "samples no rollouts"),
    ("over_sampling", "--over-sampling-batch-size 3", "--over-sampling-batch-size", "at least --rollout-batch-size 4"),
    ("idle_scheduling", "--mask-offpolicy-in-partial-rollout", "--mask-offpolicy-in-partial-rollout", "without --partial-rollout"),
    ("idle_scheduling", "--buffer-filter-path json.dumps", "--buffer-filter-path", "without --partial-rollout"),
    ("idle_scheduling", "--rollout-slice-len 4", "--rollout-slice-len", "without --partial-rollout"),
    ("idle_scheduling", "--rollout-slice-len 4 --over-sampling-batch-size 4", "--rollout-slice-len", "above --rollout-batch-size"),
    ("idle_scheduling", "--max-num-gen-batches 4", "--max-num-gen-batches", "without --dynamic-sampling-filter-path"),
    ("scheduling_functions", "--dynamic-sampling-filter-path json.nothing", "--dynamic-sampling-filter-path", "has no 'nothing'"),
    ("scheduling_functions", "--rollout-sample-filter-path nowhere.f", "--rollout-sample-filter-path", "cannot import"),
]


@pytest.mark.parametrize(("rule", "flags", "flag", "said"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_a_broken_rule(tmp_path: Path, rule: str, flags: str, flag: str, said: str) -> None:
    found = problems_of(complete(tmp_path, *flags.split()), 1)
    assert [p.flag for p in found] == [flag], found
    assert said in str(found[0])


def test_every_rule_is_broken_somewhere() -> None:
    assert {rule.__name__ for rule in SCHEDULING_RULES} == {case[0] for case in CASES}


def test_slimes_filters_are_built_in(tmp_path: Path) -> None:
    run = parse_args(complete(tmp_path, "--dynamic-sampling-filter-path", NONZERO), 1)
    assert run.scheduling.dynamic_sampling_filter_path == NONZERO

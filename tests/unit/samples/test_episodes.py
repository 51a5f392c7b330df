"""Episodes of several sequences: one id, one reward, one denominator, wherever they are cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from arguments.parse import parse_args
from arguments.rules.agents import check_branches
from slime_like.advantages import AdvantageSettings, estimate_advantages
from slime_like.batching.outcomes import outcomes_of
from slime_like.batching.step_plan import StepPlan
from slime_like.batching.train_samples import step_weights
from slime_like.compat.slime.requests import merge_episode
from slime_like.losses.reductions import LOSS_REDUCTIONS
from slime_like.rollout.group_rows import groups_from_rows, groups_to_rows
from slime_like.rollout.recording import check_values, load_rollout, save_rollout
from slime_like.samples.episodes import complete, episodes_of
from slime_like.samples.exchange import with_branches
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import remote_samples, rows_of, untrained
from slime_like.samples.payload import pack_payload, pack_texts, unpack_payload, with_texts
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus
from tests.unit.command_lines import complete as complete_flags


def sample(number: int, mask: str, *, group: int = 0, reward: float | None = None) -> Sample:
    """mask: of the response, 1 and 0."""
    count = len(mask)
    return Sample(
        group_id=group,
        sample_id=number,
        tokens=torch.arange(2 + count),
        response_length=count,
        loss_mask=torch.tensor([c == "1" for c in mask]),
        rollout_log_probs=torch.full((count,), -0.5),
        reward=reward,
        weight_versions=(1,) * count,
    )


def tree(number: int, masks: list[str], *, group: int = 0, reward: float = 0.0) -> Sample:
    first, *others = (sample(number, mask, group=group) for mask in masks)
    return dataclasses.replace(first, reward=reward, branches=tuple(others))


CUT = [tree(4, ["1100", "011"], reward=1.0), tree(5, ["1"], reward=0.0)]
WHOLE = [tree(4, ["11011"], reward=1.0), tree(5, ["1"], reward=0.0)]
FINER = [tree(4, ["1", "01", "1", "001"], reward=1.0), tree(5, ["1"], reward=0.0)]


@pytest.mark.parametrize("reduction", [r for r in LOSS_REDUCTIONS if r != "token_mean_legacy"])
def test_token_weights_do_not_depend_on_the_cut(reduction: str) -> None:
    found = []
    for cut in (CUT, WHOLE, FINER):
        step = with_branches(cut)
        weights = step_weights(step, reduction, loss_norm_length=8)
        of_tokens = [w for s, w in zip(complete(step), weights) for m in s.loss_mask if m]
        found.append(of_tokens)
    assert found[0] == found[1] == found[2] and len(found[0]) == 5


def test_an_episode_counts_once_in_its_group() -> None:
    settings = AdvantageSettings("grpo")
    values = []
    for cut in (CUT, WHOLE, FINER):
        step = complete(with_branches(cut))
        outcomes = outcomes_of(step)
        assert outcomes.rewards.tolist() == [1.0, 0.0] and outcomes.lengths.tolist() == [4, 1]
        given = estimate_advantages(
            settings,
            outcomes,
            local_indices=episodes_of(step).of,
            masks=[s.loss_mask for s in step],
        )
        values.append(torch.cat([v[s.loss_mask] for v, s in zip(given.values, step)]).tolist())
    assert values[0] == values[1] == values[2]
    assert values[0][:4] == [pytest.approx(0.7071, abs=1e-3)] * 4


def test_an_optimizer_step_has_whole_episodes() -> None:
    step = with_branches([*CUT, tree(6, ["1", "1", "1"]), tree(7, ["1"])])
    plan = StepPlan(2, 2, 1, equal_counts=False)
    assert [[s.sample_id for s in part] for part in plan.steps(step)] == [[4, 4, 5], [6, 6, 6, 7]]
    shares = plan.assign(step)
    assert sorted(shares.indices_of(0) + shares.indices_of(1)) == list(range(7))
    assert shares.indices_in_step(1) == (2, 3) and shares.local_indices == [1, 2, 5, 6]
    with pytest.raises(ValueError, match="add --use-dynamic-batch-size"):
        StepPlan(2, 2, 1).steps(step)


def test_branches_share_reward_metadata_and_fate() -> None:
    full_one = dataclasses.replace(CUT[0], metadata={"a": 1})
    first, second = complete(with_branches([full_one]))
    assert (second.reward, dict(second.metadata), second.sample_id) == (1.0, {"a": 1}, 4)
    assert not first.branches and second.loss_mask.tolist() == [False, True, True]
    assert not any(s.active_tokens for s in complete(with_branches([untrained(full_one)])))
    (row,) = remote_samples(*rows_of([full_one], 1))
    assert (row.num_branches, dict(row.version_counts)) == (1, {1: 7})
    rewarded = dataclasses.replace(full_one, token_rewards=torch.ones(4, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"sample 4 is an episode of 2 sequences, .* token_rewards"
    ):
        with_branches([rewarded])


def test_recordings_checkpoints_and_messages_keep_branches(tmp_path: Path) -> None:
    group = SampleGroup(0, tuple(CUT))
    save_rollout(str(tmp_path / "r"), 0, [group])
    (recorded,) = load_rollout(str(tmp_path / "r"), 0)
    check_values([recorded], 100)
    (restored,) = groups_from_rows(groups_to_rows([group]))
    moved = with_texts(dataclasses.replace(CUT[0], branches=()), pack_texts(CUT[0]))
    for found in (*complete(recorded.samples)[:1], *complete(restored.samples)[:1], moved):
        (branch,) = found.branches
        assert branch.tokens.tolist() == [0, 1, 2, 3, 4] and branch.sample_id == 4
        assert branch.loss_mask.tolist() == [False, True, True]
        assert branch.weight_versions == (1, 1, 1)
    spoilt = dataclasses.replace(CUT[0].branches[0], tokens=torch.full((5,), 100))
    bad = SampleGroup(0, (dataclasses.replace(CUT[0], branches=(spoilt,)),))
    with pytest.raises(ValueError, match="sample 4: tokens"):
        check_values([bad], 100)


def test_lists_of_a_custom_generate_function_become_one_episode() -> None:
    made = merge_episode([sample(1, "1", reward=2.0), sample(1, "11")], "f: sample 1")
    assert made.reward == 2.0 and [b.response_length for b in made.branches] == [2]
    with pytest.raises(ValueError, match=r"f: sample 1: .* rewards \[1.0, 2.0\]"):
        merge_episode([sample(1, "1", reward=2.0), sample(1, "1", reward=1.0)], "f: sample 1")
    aborted = dataclasses.replace(sample(1, "11"), status=SampleStatus.ABORTED)
    (branch,) = merge_episode([sample(1, "1", reward=2.0), aborted], "f: sample 1").branches
    assert not branch.active_tokens
    with pytest.raises(ValueError, match="empty list"):
        merge_episode([], "f: sample 1")


def test_a_slime_function_may_return_a_list(tmp_path: Path) -> None:
    from tests.unit.rollout.test_custom_generate import Scripted, play

    (tmp_path / "f.py").write_text(
        "import copy\n"
        "from slime_like.compat.slime.api import Sample\n"
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length = [81, 58, 65], 1\n"
        "    sample.rollout_log_probs, sample.status = [-0.1], Sample.Status.COMPLETED\n"
        "    other = copy.deepcopy(sample)\n"
        "    other.tokens, other.response_length = [81, 58, 65, 66, 67], 2\n"
        "    other.rollout_log_probs, other.loss_mask = [-0.1, -0.2], [0, 1]\n"
        "    return [sample, other]\n"
    )
    made = play(tmp_path, f"{tmp_path / 'f.py'}:generate", Scripted())
    assert made.tokens.tolist() == [81, 58, 65]
    (branch,) = made.branches
    assert branch.tokens.tolist() == [81, 58, 65, 66, 67]
    assert branch.loss_mask.tolist() == [False, True] and branch.sample_id == made.sample_id
    assert parse_args(complete_flags(tmp_path), 1)  # the same line without the function


def test_versions_of_a_sample_with_branches_travel() -> None:
    versions = (1, NOT_SAMPLED, NOT_SAMPLED, 1)
    branch = sample(4, "11")
    full_one = dataclasses.replace(sample(4, "1001"), weight_versions=versions, branches=(branch,))
    (row,) = remote_samples(*rows_of([full_one], 1))
    assert unpack_payload(row, pack_payload(full_one)).weight_versions == versions


@pytest.mark.parametrize("flags", ["--policy-loss-type gspo", "--use-opsm"])
def test_lists_do_not_go_with_losses_of_whole_sequences(tmp_path: Path, flags: str) -> None:
    check_branches(parse_args(complete_flags(tmp_path), 1))
    with pytest.raises(
        ValueError, match=f"{flags.split()[0]} cannot be combined with a generate function"
    ):
        check_branches(parse_args(complete_flags(tmp_path, *flags.split()), 1))

"""Estimators that follow tokens, over the trees of agents' episodes: against a loop in float64,
whatever the cut; and what is refused, as no record says what follows what."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from arguments.parse import parse_args
from slime_like.advantages import AdvantageSettings, Outcomes, estimate_advantages
from slime_like.batching.factory import outcome_readers
from slime_like.batching.turn_credit import SUMMED, TURNS, check_trees, credit_fields, record_of
from slime_like.samples.episodes import complete
from slime_like.samples.exchange import with_branches
from tests.agent_trees import Episode, Laid, cuts, expected, laid, random_episode
from tests.unit.command_lines import complete as complete_flags
from tests.unit.samples.test_episodes import CUT, WHOLE

GAMMA, LAMBDA = 0.9, 0.8
CUTS = ("turns", "paths", "pieces")
# a fork after the first of two answers; a chain; two conversations
BY_HAND = Episode([-1, 0, 0], [0.0] * 3, [[0.0] * 2] * 3, [[0.0] * 2] * 3, 1.0)


def forest(seed: int, cut: str, *, empty: bool = False) -> tuple[list[Episode], Laid]:
    generator = torch.Generator().manual_seed(seed)
    episodes = [random_episode(generator, n, empty=empty) for n in (1, 3, 6, 9)]
    return episodes, laid(episodes, [cuts(episode, generator)[cut] for episode in episodes])


def check(found: Laid, values: list[torch.Tensor], wanted: list[list[list[float]]]) -> None:
    for i, mask, answers, value in zip(
        found.local_indices, found.masks, found.answers, values, strict=True
    ):
        tokens = [x for a in answers for x in wanted[i][a]]
        assert value[mask].tolist() == pytest.approx(tokens, abs=1e-5)
        assert not value[~mask].any()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("empty", [False, True])
def test_returns_are_those_of_the_tree(cut: str, empty: bool) -> None:
    for seed in range(5):
        episodes, found = forest(seed, cut, empty=empty)
        batch = dataclasses.replace(found.outcomes, greedy_rewards=torch.full((4,), 0.25))
        for name, baseline in (("reinforce_plus_plus", 0.0), ("remax", 0.25)):
            settings = AdvantageSettings(name, gamma=GAMMA, kl_coef=1.0)
            output = estimate_advantages(
                settings,
                batch,
                local_indices=found.local_indices,
                sequences=found.sequences,
                masks=found.masks,
                kl=found.penalties,
            )
            loops = [expected(e, GAMMA, 1.0, with_values=False)[0] for e in episodes]
            check(found, output.values, [[[x - baseline for x in a] for a in e] for e in loops])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("empty", [False, True])
def test_a_critics_advantages_are_those_of_the_tree(cut: str, empty: bool) -> None:
    for seed in range(5):
        episodes, found = forest(seed, cut, empty=empty)
        settings = AdvantageSettings("ppo", gamma=GAMMA, lambd=LAMBDA, kl_coef=1.0)
        for value_lambd in (None, 1.0):
            output = estimate_advantages(
                dataclasses.replace(settings, value_lambd=value_lambd),
                found.outcomes,
                local_indices=found.local_indices,
                sequences=found.sequences,
                masks=found.masks,
                kl=found.penalties,
                critic_values=found.values,
            )
            assert output.returns is not None
            policy = [expected(e, GAMMA, LAMBDA, with_values=True) for e in episodes]
            critic = [expected(e, GAMMA, value_lambd or LAMBDA, with_values=True) for e in episodes]
            check(found, output.values, [advantages for advantages, _ in policy])
            check(found, output.returns, [returns for _, returns in critic])


def test_a_fork_by_hand() -> None:
    """Two answers after one: 1 at the end of each, gamma 0.5."""
    for cut in ([[0, 1], [2]], [[0], [1], [2]]):
        found = laid([BY_HAND], [cut])
        settings = AdvantageSettings("reinforce_plus_plus", gamma=0.5)
        output = estimate_advantages(
            settings,
            found.outcomes,
            local_indices=found.local_indices,
            sequences=found.sequences,
            masks=found.masks,
        )
        check(found, output.values, [[[0.125, 0.25], [0.5, 1.0], [0.5, 1.0]]])


def test_rewards_of_answers_are_at_their_ends() -> None:
    episode = Episode([-1, 0], [3.0, 0.0], [[0.0], [0.0]], [[0.0], [0.0]], 4.0)
    found = laid([episode], [[[0, 1]]])
    settings = AdvantageSettings("reinforce_plus_plus", gamma=0.5)
    arguments = dict(
        local_indices=found.local_indices, sequences=found.sequences, masks=found.masks
    )
    output = estimate_advantages(settings, found.outcomes, **arguments)  # type: ignore[arg-type]
    check(found, output.values, [[[3.5], [1.0]]])
    processed = dataclasses.replace(found.outcomes, processed=torch.tensor([2.0]))
    output = estimate_advantages(settings, processed, **arguments)  # type: ignore[arg-type]
    check(found, output.values, [[[1.0], [2.0]]])


def test_the_length_of_lambda_is_the_episodes() -> None:
    """--lambd-length-alpha: the tokens of all sequences, whatever the cut."""
    values = []
    for cut in CUTS:
        _, found = forest(3, cut)
        settings = AdvantageSettings("ppo", gamma=GAMMA, lambd_length_alpha=0.2)
        output = estimate_advantages(
            settings,
            found.outcomes,
            local_indices=found.local_indices,
            sequences=found.sequences,
            masks=found.masks,
            critic_values=found.values,
        )
        own = zip(output.values, found.masks, strict=True)
        values.append(torch.cat([value[mask] for value, mask in own]))
    assert values[0].norm() > 0
    torch.testing.assert_close(values[1].sort().values, values[0].sort().values)
    torch.testing.assert_close(values[2].sort().values, values[0].sort().values)


def test_a_chain_is_as_a_sample_without_a_record() -> None:
    generator = torch.Generator().manual_seed(1)
    chain = dataclasses.replace(random_episode(generator, 3), parents=[-1, 0, 1], rewards=[0.0] * 3)
    found = laid([chain], [[[0, 1, 2]]])
    for name, values in (("reinforce_plus_plus", None), ("ppo", found.values)):
        settings = AdvantageSettings(name, gamma=GAMMA, lambd=LAMBDA, kl_coef=0.5)
        output = [
            estimate_advantages(
                settings,
                batch,
                local_indices=[0],
                masks=found.masks,
                kl=found.penalties,
                critic_values=values,
            )
            for batch in (found.outcomes, dataclasses.replace(found.outcomes, turns=None))
        ]
        torch.testing.assert_close(output[0].values, output[1].values)


def test_an_episode_without_a_reward_leaves_the_others_alone() -> None:
    episodes, found = forest(2, "paths")
    rewards = found.outcomes.rewards.clone()
    rewards[1] = math.nan
    batch: Outcomes = dataclasses.replace(found.outcomes, rewards=rewards)
    settings = AdvantageSettings("ppo", gamma=GAMMA, lambd=LAMBDA, kl_coef=1.0)
    output = estimate_advantages(
        settings,
        batch,
        local_indices=found.local_indices,
        sequences=found.sequences,
        masks=found.masks,
        kl=found.penalties,
        critic_values=found.values,
    )
    wanted = [expected(e, GAMMA, LAMBDA, with_values=True)[0] for e in episodes]
    wanted[1] = [[0.0] * len(own) for own in wanted[1]]
    check(found, output.values, wanted)
    assert output.returns is not None
    for i, mask, target in zip(found.local_indices, found.masks, output.returns, strict=True):
        assert target[mask].isnan().all() == (i == 1)


def test_records_say_whose_the_rewards_of_answers_are() -> None:
    """A recording made for one kind of estimator, trained on with the other."""
    record = {"parents": [-1, 0], "rewards": [0.25, 0.5], "spans": [[[0, 1, 0], [2, 1, 1]]]}
    sample = dataclasses.replace(WHOLE[0], metadata={TURNS: record | {SUMMED: True}})
    none = dict(turn_penalty=0.0, token_penalty=0.0)
    followed = credit_fields([sample], by_turn=False, **none)
    assert "penalties" not in followed and followed["turns"][0].rewards == [0.25, 0.5]
    assert credit_fields([sample], by_turn=True, **none)["penalties"].tolist() == [0.75]
    own = dataclasses.replace(sample, metadata={TURNS: record | {SUMMED: False}})
    assert "penalties" not in credit_fields([own], by_turn=True, **none)
    taken = credit_fields([own], by_turn=False, **none)
    assert taken["penalties"].tolist() == [-0.75]
    assert not credit_fields([WHOLE[0]], by_turn=False, **none)
    older = dataclasses.replace(sample, metadata={"answers": record | {SUMMED: False}})
    assert record_of(older) == record_of(own)
    both = dataclasses.replace(own, metadata={**own.metadata, "answers": {"text": ["an answer"]}})
    assert record_of(both) == record_of(own)
    row = dataclasses.replace(sample, metadata={TURNS: {"text": ["an answer"]}})
    assert not credit_fields([row], by_turn=False, **none), "a row's own, under the same key"


def test_rewards_of_answers_in_a_recording_count_with_every_estimator(tmp_path: Path) -> None:
    """Made with grpo_turn, trained on with grpo: the episode's reward is without them."""
    record = {SUMMED: False, "parents": [-1], "rewards": [0.25], "spans": [[[0, 1, 0]]]}
    sample = dataclasses.replace(WHOLE[0], metadata={TURNS: record})
    recording = "--debug-train-only --load-debug-rollout-data {folder}/{rollout_id}"
    agent = "--agent-function-path asyncio.sleep --use-dynamic-batch-size --max-tokens-per-gpu 512"
    for words in (recording, agent):
        words = words.replace("{folder}", str(tmp_path))
        (read,) = outcome_readers(parse_args(complete_flags(tmp_path, *words.split()), 1))
        assert read([sample])["penalties"].tolist() == [-0.25]
    assert not outcome_readers(parse_args(complete_flags(tmp_path), 1))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--advantage-estimator reinforce_plus_plus --gamma 0.9 --normalize-advantages", "--gamma"),
        ("--advantage-estimator ppo", "a critic"),
    ],
)
def test_lists_of_a_generate_function_have_no_tree(tmp_path: Path, flags: str, reason: str) -> None:
    algorithm = parse_args(complete_flags(tmp_path, *flags.split()), 1).algorithm
    check_trees(algorithm, None, complete(with_branches(WHOLE)))
    name = flags.split()[1]
    with pytest.raises(ValueError, match=f"{name} with {reason}: .* sample 4 .* no record"):
        check_trees(algorithm, None, complete(with_branches(CUT)))
    plain = parse_args(complete_flags(tmp_path), 1).algorithm
    check_trees(plain, None, complete(with_branches(CUT)))

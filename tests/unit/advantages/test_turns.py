"""Credit per answer: estimators against loops from their papers, for any split of a tree; rewards
of answers and penalties of episodes."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest
import torch

from slime_like.advantages import AdvantageSettings, Outcomes, estimate_advantages
from slime_like.advantages.episodes import EpisodeTurns
from slime_like.agents.messages import BadRequest
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.batching.turn_credit import TURNS, credit_fields
from slime_like.samples.episodes import complete, episodes_of
from slime_like.samples.exchange import with_branches
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.agents.test_server import END, Engine, model_of

EPS = 1e-6
# two answers in a row, a fork after the first, and one answer: all of one group
PARENTS = ((-1, 0), (-1, 0, 0), (-1,))
REWARDS = ((0.5, 0.0), (0.0, 1.0, -1.0), (1.0,))
WHOLE = (1.0, 0.0, 0.5)


def outcomes(
    cut: str,
) -> tuple[Outcomes, list[int], list[int], list[torch.Tensor], list[list[int]]]:
    """Answers of two tokens with one token between them. cut: "paths" or "turns". Also the episode,
    the place in it, the mask and the answers of each sequence."""
    spans: dict[str, list[list[list[tuple[int, int, int]]]]] = {
        "paths": [[[(0, 2, 0), (3, 2, 1)]], [[(0, 2, 0), (3, 2, 1)], [(0, 2, 2)]], [[(0, 2, 0)]]],
        "turns": [[[(0, 2, a)] for a in range(len(own))] for own in PARENTS],
    }
    answers = [EpisodeTurns(p, r, s) for p, r, s in zip(PARENTS, REWARDS, spans[cut])]
    found = Outcomes(
        rewards=torch.tensor([*WHOLE, math.nan], dtype=torch.float64),
        group_ids=torch.tensor([7, 7, 7, 7]),
        lengths=torch.tensor([4, 6, 2, 2]),
        turns=[*answers, EpisodeTurns((-1,), (5.0,), [[(0, 2, 0)]])],
    )
    local, places, masks, of_tokens = [], [], [], []
    for i, episode in enumerate(found.turns or ()):
        for place, own in enumerate(episode.spans):
            tokens = [-1] * (own[-1][0] + own[-1][1])
            for first, count, a in own:
                tokens[first : first + count] = [a] * count
            local.append(i)
            places.append(place)
            masks.append(torch.tensor([a >= 0 for a in tokens]))
            of_tokens.append(tokens)
    return found, local, places, masks, of_tokens


def relative(value: float, among: list[float]) -> float:
    mean = sum(among) / len(among)
    if len(set(among)) < 2:
        return 0.0
    std = math.sqrt(sum((x - mean) ** 2 for x in among) / (len(among) - 1))
    return (value - mean) / (std + EPS)


def by_turn(i: int, a: int, gamma: float) -> float:
    depth = {(j, b): 0 if p < 0 else 1 for j, own in enumerate(PARENTS) for b, p in enumerate(own)}

    def credit(b: int) -> float:
        peers = [REWARDS[j][c] for (j, c), d in depth.items() if d == depth[i, b]]
        later = [credit(c) for c, parent in enumerate(PARENTS[i]) if parent == b]
        own = relative(REWARDS[i][b], peers)
        return own + gamma * sum(later) / len(later) if later else own

    return relative(WHOLE[i], list(WHOLE)) + credit(a)


def by_branch(i: int, a: int, gamma: float) -> float:
    branches: dict[int, dict[tuple[int, ...], float]] = {
        0: {(0, 1): 1.5},
        1: {(0, 1): 1.0, (0, 2): -1.0},
        2: {(0,): 1.5},
    }
    every = [total for own in branches.values() for total in own.values()]
    local = [
        relative(total, list(branches[i].values())) + relative(total, every)
        for path, total in branches[i].items()
        if a in path
    ]
    return sum(local) / len(local)


@pytest.mark.parametrize("cut", ["paths", "turns"])
@pytest.mark.parametrize(("name", "loop"), [("grpo_turn", by_turn), ("grpo_branch", by_branch)])
def test_an_answer_gets_what_its_paper_says(name: str, loop: object, cut: str) -> None:
    assert callable(loop)
    found, local, places, masks, of_tokens = outcomes(cut)
    settings = AdvantageSettings(name, gamma=0.5)
    full = estimate_advantages(settings, found, local_indices=local, sequences=places, masks=masks)
    for i, tokens, values in zip(local, of_tokens, full.values, strict=True):
        expected = [0.0 if a < 0 or i == 3 else loop(i, a, 0.5) for a in tokens]
        assert values.tolist() == pytest.approx(expected, abs=1e-6), (i, tokens)
    for rank in (slice(0, 2), slice(2, None)):  # none needs what another has
        own = estimate_advantages(
            settings, found, local_indices=local[rank], sequences=places[rank], masks=masks[rank]
        )
        for a, b in zip(own.values, full.values[rank], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["grpo_turn", "grpo_branch"])
def test_without_forks_and_rewards_of_answers_it_is_grpo(name: str) -> None:
    found = outcomes("paths")[0]
    plain = [EpisodeTurns((-1,), (0.0,), [[(0, 2, 0)]])] * 4
    found = dataclasses.replace(found, turns=plain)
    masks = [torch.ones(2, dtype=torch.bool)] * 4
    given, grpo = (
        estimate_advantages(AdvantageSettings(n), found, local_indices=range(4), masks=masks).values
        for n in (name, "grpo")
    )
    for a, b in zip(given, grpo, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


async def play(task: Task) -> float:
    messages = [{"role": "user", "content": "a"}]
    answer = (await task.chat(messages))["choices"][0]["message"]
    task.reward(0.25)
    for text in ("b", "c"):
        await task.chat([*messages, answer, {"role": "user", "content": text}])
    task.reward(0.5, answer=1)
    for value, place in ((math.nan, 0), (10**400, 0), (1.0, 3), (True, 0)):
        with pytest.raises(BadRequest):
            task.reward(value, place)
    return 1.0


def episode(*, by_turn: bool) -> Sample:
    generate = AgentGenerate(
        "test",
        play,
        Gateway("127.0.0.1", 0, max_body=10**6),
        end_ids=frozenset({END}),
        limits=SessionLimits(),
        timeout_s=20,
        episodes=2,
        by_turn=by_turn,
    )
    empty = Sample.empty(Prompt(3, "question", (), metadata={"x": 1}), 5)
    return asyncio.run(generate.respond(empty, model_of(Engine()), evaluation=False))


def test_an_agent_rewards_its_answers() -> None:
    one = episode(by_turn=False)
    assert one.reward == 1.75 and TURNS not in one.metadata
    sample = episode(by_turn=True)
    assert sample.reward == 1.0
    given = sample.metadata[TURNS]
    assert (given["parents"], given["rewards"]) == ([-1, 0, 0], [0.25, 0.5, 0.0])
    sequences = complete(with_branches([sample]))
    for place, sequence in enumerate(sequences):
        spans = given["spans"][place]
        trained = [i for first, count, _ in spans for i in range(first, first + count)]
        assert trained == sequence.loss_mask.nonzero().flatten().tolist()
    assert episodes_of(sequences).first == [0]
    fields = credit_fields([sample], by_turn=True, turn_penalty=0.1, token_penalty=0.01)
    written = sum(s.active_tokens for s in sequences)
    assert fields["penalties"].tolist() == pytest.approx([0.3 + 0.01 * written])
    assert fields["turns"][0].rewards == [0.25, 0.5, 0.0]
    silent = dataclasses.replace(sample, metadata={})
    with pytest.raises(ValueError, match=r"sample 5 .* --advantage-estimator"):
        credit_fields([silent], by_turn=True, turn_penalty=0, token_penalty=0)


def test_an_episode_that_was_lost_before_its_first_answer_has_no_advantage() -> None:
    sample = episode(by_turn=True)
    record = {"summed": False, "parents": [], "rewards": [], "spans": []}
    lost = dataclasses.replace(
        Sample.empty(Prompt(3, "question", ()), 6), metadata={**sample.metadata, TURNS: record}
    )
    played = [sample, dataclasses.replace(sample, sample_id=7), lost]
    fields = credit_fields(played, by_turn=True, turn_penalty=0, token_penalty=0)
    found = Outcomes(
        rewards=torch.tensor([1.0, 0.0, math.nan]),
        group_ids=torch.zeros(3),
        lengths=torch.tensor([1, 1, 0]),
        turns=fields["turns"],
    )
    settings = AdvantageSettings(estimator="grpo_turn")
    output = estimate_advantages(
        settings, found, local_indices=[2], sequences=[0], masks=[torch.zeros(0, dtype=torch.bool)]
    )
    assert output.values[0].numel() == 0


def test_penalties_are_of_the_advantage_alone() -> None:
    found = Outcomes(
        rewards=torch.tensor([1.0, 1.0]),
        group_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([1, 1]),
        penalties=torch.tensor([0.0, 0.5], dtype=torch.float64),
    )
    masks = [torch.ones(1, dtype=torch.bool)] * 2
    first, second = estimate_advantages(
        AdvantageSettings("grpo"), found, local_indices=range(2), masks=masks
    ).values
    assert float(first) == pytest.approx(math.sqrt(0.5), rel=1e-4) and float(second) == -float(
        first
    )


@pytest.mark.parametrize(
    ("returned", "message"), [("much", "returned str"), (10**400, "the reward inf is beyond")]
)
def test_a_wrong_reward_loses_the_sample_alone(returned: Any, message: str) -> None:
    async def play(task: Task) -> Any:
        await task.chat([{"role": "user", "content": "a"}])
        task.reward(1.0)
        return returned

    generate = AgentGenerate(
        "test",
        play,
        Gateway("127.0.0.1", 0, max_body=10**6),
        end_ids=frozenset({END}),
        limits=SessionLimits(),
        timeout_s=20,
        episodes=2,
    )
    sample = asyncio.run(
        generate.respond(
            Sample.empty(Prompt(3, "question", ()), 5), model_of(Engine()), evaluation=False
        )
    )
    assert sample.status == SampleStatus.ABORTED and message in sample.metadata["failure"]

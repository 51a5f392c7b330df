"""--max-abs-reward holds for every reward, whatever way it came."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from slime_like.advantages import RewardParts
from slime_like.advantages.episodes import EpisodeTurns
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.batching import outcomes as reward_parts
from slime_like.batching.factory import outcome_readers
from slime_like.batching.outcomes import check_rewards
from slime_like.compat.slime.function_results import read_eval_output
from slime_like.compat.slime.samples import SlimeArgs, SlimeSample, from_slime
from slime_like.rewards.grader import Grader
from slime_like.rewards.limit import beyond_limit
from slime_like.types import ANSWER_REWARDS, REWARD_DETAILS, Prompt, Sample
from tests.unit.agents.test_server import END, Engine, model_of, post, run, session_of, user
from tests.unit.command_lines import complete
from tests.unit.rollout.test_metrics import make

TOO_LARGE = r"sample 3.*: the reward .* is beyond --max-abs-reward 10; correct the reward"


@pytest.mark.parametrize(
    "value", [10.5, -1e5, 1e300, 10**400, -(10**400)], ids=lambda v: f"{v}"[:9]
)
def test_a_number_beyond_the_limit(value: float) -> None:
    assert "is beyond --max-abs-reward 10;" in str(beyond_limit(value, 10.0))


@pytest.mark.parametrize("value", [10, -10.0, 0.0, None, math.nan, math.inf, -math.inf])
def test_a_number_within_the_limit_or_without_a_magnitude(value: float | None) -> None:
    assert beyond_limit(value, 10.0) is None


@pytest.mark.parametrize("group_rm", [False, True])
def test_one_that_came_with_its_sample(group_rm: bool) -> None:
    """As an agent, or a function that makes responses, brings it."""
    samples = [make(2, 9.0), make(3, 1e5)]
    with Grader(rm_type="exact_match", max_abs_reward=10.0, group_rm=group_rm) as grader:
        with pytest.raises(ValueError, match=TOO_LARGE):
            grader.grade_groups([samples]) if group_rm else grader.grade(samples)
        assert grader.grade(samples[:1]) == samples[:1]


def test_one_of_a_recording_or_of_a_rollout_function() -> None:
    """The last check before training."""
    check_rewards([make(2, 9.0), make(4, None), make(5, math.nan)], 10.0)
    with pytest.raises(ValueError, match=TOO_LARGE):
        check_rewards([make(2, 9.0), make(3, -11.0)], 10.0)
    of_tokens = replace(make(3, 0.0), token_rewards=torch.tensor([50.0, -50.0]))
    with pytest.raises(ValueError, match=TOO_LARGE):
        check_rewards([of_tokens], 10.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"processed": torch.tensor([1.0, 1e9])},
        {"parts": RewardParts(torch.tensor([[1.0, 2.0], [math.nan, -1e9]]), (1.0, 1.0))},
        {"turns": [None, EpisodeTurns((-1, 0), (5.0, 1e9), [[(0, 1, 0)]])]},
    ],
)
def test_one_that_is_made_from_others(fields: Any) -> None:
    """By a post-processing function, as a part, or of a turn."""
    samples = [make(2, 1.0), make(3, 1.0)]
    with pytest.raises(ValueError, match=TOO_LARGE):
        reward_parts.within(lambda samples: fields, 10.0, samples)
    assert reward_parts.within(lambda samples: fields, 1e10, samples) is fields


def test_the_readers_of_a_run_have_the_limit(tmp_path: Path) -> None:
    words = "--advantage-estimator gdpo --gdpo-reward-keys a b --reward-key a --max-abs-reward 10"
    words += f" --custom-rm-path {tmp_path}/r.py:score"
    (tmp_path / "r.py").write_text("def score(args, sample):\n    return {}\n")
    line = complete(tmp_path, *words.split(), without=("--rm-type",))
    (read,) = outcome_readers(parse_args(line, 1))
    samples = [replace(make(i, 1.0), metadata={REWARD_DETAILS: {"b": 4.0 * i}}) for i in (2, 3)]
    with pytest.raises(ValueError, match=TOO_LARGE):
        read(samples)


def test_one_of_an_evaluation_function() -> None:
    args = SlimeArgs({"max_abs_reward": 10.0, "reward_key": None})
    with pytest.raises(ValueError, match="evaluation set 'a': the reward 1e\\+300 is beyond"):
        read_eval_output({"a": {"rewards": [1.0, 1e300]}}, "--f", args, None)


def test_an_integer_that_no_float_can_hold() -> None:
    args = SlimeArgs({"rollout_skip_special_tokens": None, "reward_key": None})
    result = SlimeSample(0, 3, "?", tokens=[1, 2], response="a", response_length=1, reward=10**400)
    result.status = SlimeSample.Status.COMPLETED
    with pytest.raises(
        ValueError, match="sample 3: the reward is an integer that no float can hold"
    ):
        from_slime(result, make(3, None), (), args, None, flag="--f")


def episode(play: Any) -> Sample:
    agent = AgentGenerate(
        "--agent-function-path play",
        play,
        Gateway("127.0.0.1", 0, max_body=10_000),
        end_ids=frozenset({END}),
        limits=SessionLimits(reward=10.0),
        timeout_s=20,
        episodes=4,
    )
    engine = Engine()
    (sample,) = agent.run(
        [Sample.empty(Prompt(0, "q", (1,)), 3)], model_of(engine), evaluation=False
    )
    return sample


@pytest.mark.parametrize("value", [1e5, 1e300, 10**400, -11], ids=lambda v: f"{v}"[:9])
def test_an_agents_reward_costs_its_own_sample(value: float) -> None:
    async def play(task: Task) -> float:
        await task.chat([user(task.prompt)])
        return value

    sample = episode(play)
    assert sample.reward is None
    assert "is beyond --max-abs-reward 10" in sample.metadata["failure"]


def test_the_rewards_of_turns_add_up_within_the_limit() -> None:
    async def play(task: Task) -> float:
        for _ in range(3):
            await task.chat([user(task.prompt)])
            task.reward(4.0)
        return 0.0

    sample = episode(play)
    assert sample.reward is None
    assert "the reward 12 is beyond --max-abs-reward 10" in sample.metadata["failure"]


def test_rewards_of_turns_and_the_functions_reward_add_up_within_the_limit(tmp_path: Path) -> None:
    sample = replace(make(3, None), metadata={ANSWER_REWARDS: 6.0})
    (tmp_path / "r.py").write_text("def score(args, sample):\n    return 5.0\n")
    path = f"{tmp_path}/r.py:score"
    words = "sample 3: the reward 11 is beyond --max-abs-reward"
    with (
        Grader(custom_rm_path=path, max_abs_reward=10.0) as grader,
        pytest.raises(ValueError, match=words),
    ):
        grader.grade([sample])
    with Grader(custom_rm_path=path, max_abs_reward=11.0) as grader:
        assert grader.grade([sample])[0].reward == 11


def test_a_request_with_a_reward_beyond_the_limit_is_refused() -> None:
    session = session_of(Engine(), SessionLimits(reward=10.0))

    async def talk(client: Any) -> None:
        await post(client, "/v1/chat/completions", messages=[user("q")])
        for reward in (11, 1e300, 10**400):
            answer = await post(client, "/v1/rewards", 400, reward=reward)
            assert "beyond --max-abs-reward 10" in str(answer)
        await post(client, "/v1/rewards", reward=6)
        answer = await post(client, "/v1/rewards", 400, reward=6)
        assert "the reward 12 is beyond" in str(answer)
        await post(client, "/v1/rewards", reward=-6)

    run(session, talk)
    assert session.tree.turns[0].reward == 0.0

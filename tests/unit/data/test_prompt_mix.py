"""A mix of prompt sources: exact shares, epochs and their caps, curricula, and its position."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import pytest

from arguments.prompt_mix import MixSource
from arguments.schema.data import DataConfig
from slime_like.data.group_buffer import GroupBuffer
from slime_like.data.prompt_mix import MixedRows, PromptMix
from slime_like.data.prompts import PromptSource
from slime_like.errors import RunError
from slime_like.samples.episodes import complete
from slime_like.types import PROMPT_SOURCE

CHARS = "abcdefghijklmnopqrstuvwxyz0123456789 :-"


class Letters:
    """A tokenizer of one token a character."""

    def __call__(self, texts, **_):
        return {"input_ids": [[CHARS.index(c) for c in text] for text in texts]}


def write(folder, name, count):
    rows = [{"input": f"{name} {i}", "metadata": {"i": i}} for i in range(count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def mix_of(tmp_path):
    """Make a mix: settings of each source by its name; `rows` is its number of rows."""

    def make(batch=4, shuffle=True, seed=42, **sources):
        config = DataConfig(rollout_shuffle=shuffle, rollout_seed=seed)
        rows = []
        for name, values in sources.items():
            values = dict(values)
            path = write(tmp_path, name, values.pop("rows", 10))
            rows.append(MixedRows(MixSource(name, path, **values), config, Letters()))
        return PromptMix("mix.yaml", rows, batch=batch)

    return make


def names(prompts):
    return [prompt.metadata[PROMPT_SOURCE]["name"] for prompt in prompts]


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_two_to_one_is_drawn_in_this_order(mix_of):
    mix = mix_of(a=dict(weight={0: 2}), b={})
    assert names(mix.next_prompts(9)) == ["a", "b", "a"] * 3


@pytest.mark.parametrize(
    "weights",
    [(1, 1), (3, 1), (0.7, 0.2, 0.1), (5, 3, 1, 1), (0.333, 0.667), (1, 1000), (7, 11, 13)],
)
def test_shares_are_exact_and_no_source_is_a_prompt_ahead(mix_of, weights):
    mix = mix_of(**{f"s{i}": dict(weight={0: w}) for i, w in enumerate(weights)})
    exact = [Fraction(str(w)) for w in weights]
    shares = [w / sum(exact) for w in exact]
    period = max(share.denominator for share in shares)
    counts = [0] * len(weights)
    for n in range(1, 2 * period + 1):
        (name,) = names(mix.next_prompts(1))
        counts[int(name[1:])] += 1
        assert all(count - n * share < 1 for count, share in zip(counts, shares))
        if n % period == 0:
            assert counts == [n * share for share in shares]


def test_a_draw_of_many_is_many_draws_of_one(mix_of):
    settings = dict(a=dict(weight={0: 3}), b={}, c=dict(weight={0: 2, 3: 5}))
    one, many = mix_of(**settings), mix_of(**settings)
    singly = list(itertools.chain.from_iterable(one.next_prompts(1) for _ in range(40)))
    assert singly == many.next_prompts(15) + many.next_prompts(25)
    assert [prompt.group_id for prompt in singly] == list(range(40))


def test_every_source_has_all_its_rows_in_an_epoch_in_its_own_order(mix_of):
    mix = mix_of(a={}, b={})
    prompts = mix.next_prompts(40)
    for name in "ab":
        of_source = [p for p in prompts if names([p]) == [name]]
        for epoch in (0, 1):
            part = of_source[10 * epoch : 10 * epoch + 10]
            assert sorted(texts(part)) == [f"{name} {i}" for i in range(10)]
            assert {p.metadata[PROMPT_SOURCE]["epoch"] for p in part} == {epoch}
    orders = [[p.metadata["i"] for p in prompts if names([p]) == [name]] for name in "ab"]
    assert orders[0] != orders[1], "two sources of one length are shuffled differently"
    assert texts(mix_of(seed=1, a={}, b={}).next_prompts(40)) != texts(prompts)


def test_without_a_mix_the_order_is_as_before(tmp_path):
    config = DataConfig(prompt_data=write(tmp_path, "a", 10), rollout_shuffle=True)
    source = PromptSource(config, Letters())
    order = [prompt.metadata["i"] for prompt in source.next_prompts(10)]
    assert order == [5, 0, 6, 4, 2, 7, 3, 1, 8, 9], "of seed 42"
    assert source.metrics() == {} and source.observe(source.next_prompts(1)[0], [1.0]) is None


def test_weights_change_with_the_rollout(mix_of):
    mix = mix_of(batch=6, a=dict(weight={0: 1, 2: 0}), b=dict(weight={0: 0, 1: 2}))
    rollouts = [names(mix.next_prompts(6)) for _ in range(3)]
    assert rollouts[0] == ["a"] * 6
    assert sorted(rollouts[1]) == ["a"] * 2 + ["b"] * 4
    assert rollouts[2] == ["b"] * 6


def test_a_source_leaves_after_its_epochs(mix_of):
    mix = mix_of(a=dict(rows=3, max_epochs=2), b={})
    drawn = names(mix.next_prompts(20))
    assert drawn == ["a", "b"] * 6 + ["b"] * 8


def test_no_source_left_is_one_error(mix_of):
    mix = mix_of(a=dict(rows=3, max_epochs=1), b=dict(rows=2, max_epochs=2))
    mix.check_enough(7)
    with pytest.raises(
        ValueError, match=r"8 of the run's 8 prompts .* and a, b have 7. Raise max_epochs"
    ):
        mix.check_enough(8)
    mix.next_prompts(7)
    with pytest.raises(
        RunError,
        match=r"after 7 prompts, in rollout 2, no source has a prompt.*a has reached max_epochs 1; b has",
    ):
        mix.next_prompts(1)
    mix_of(a=dict(rows=3, max_epochs=1), b={}).check_enough(1000)


def test_a_source_without_a_cap_counts_while_it_has_a_weight(mix_of):
    """From rollout 3 on only `b` is drawn from, of which there are 8 rows."""
    mix = mix_of(a=dict(weight={0: 1, 3: 0}), b=dict(rows=8, max_epochs=1))
    mix.check_enough(3 * 4 + 8)
    with pytest.raises(ValueError, match=r"9 of the run's 21 prompts .* and b have 8"):
        mix.check_enough(3 * 4 + 9)


def grade(mix, prompts, reward):
    """reward: of every sample, from the prompt."""
    for prompt in prompts:
        mix.observe(prompt, [reward(prompt)] * 2)


def test_a_source_begins_after_another_is_passed(mix_of):
    mix = mix_of(a=dict(pass_window=4), b=dict(after={"a": 0.75}))
    first = mix.next_prompts(4)
    assert names(first) == ["a"] * 4
    grade(mix, first[:3], lambda p: 1.0)
    assert names(mix.next_prompts(2)) == ["a"] * 2, "there are only three of four groups"
    grade(mix, first[3:], lambda p: 0.0)
    assert names(mix.next_prompts(4)) == ["a", "b"] * 2
    grade(mix, first, lambda p: 0.0)
    assert set(names(mix.next_prompts(4))) == {"a", "b"}, "and stays"


def test_a_source_begins_when_the_one_it_waits_for_has_ended(mix_of):
    mix = mix_of(a=dict(rows=4, max_epochs=1), b=dict(after={"a": 1.0}), c={})
    assert names(mix.next_prompts(11)) == ["a", "c"] * 3 + ["a"] + ["b", "c"] * 2


def test_a_source_begins_when_the_one_it_waits_for_has_left_by_its_weight(mix_of):
    """Of two prompts a rollout: not in the pause of rollout 1, but from rollout 3 on."""
    weight = {0: 1, 1: 0, 2: 1, 3: 0}
    mix = mix_of(batch=2, a=dict(weight=weight), b=dict(after={"a": 1.0}), c={})
    drawn = names(mix.next_prompts(10))
    assert drawn == ["a", "c", "c", "c", "a", "c", "b", "c", "b", "c"]


def test_max_epochs_may_be_lowered_when_a_run_is_resumed(mix_of):
    before = mix_of(a=dict(rows=4, max_epochs=9), b={})
    before.next_prompts(18)  # a is in its third epoch
    mix = mix_of(a=dict(rows=4, max_epochs=1), b={})
    mix.load_state_dict(before.state_dict())
    drawn = names(mix.next_prompts(20))
    assert drawn.count("a") == 3, "the rest of this epoch"
    assert drawn[-10:] == ["b"] * 10


def test_rows_that_are_too_easy_or_too_hard_rest(mix_of):
    mix = mix_of(
        shuffle=False, a=dict(rows=4, pass_rate=(0.25, 0.75), rest_epochs=2, pass_reward=0.5)
    )
    first = mix.next_prompts(4)
    rates = [[1.0, 1.0], [0.6, 0.0], [0.0, 0.0], [None, float("nan")]]
    for prompt, rewards in zip(first, rates):
        mix.observe(prompt, rewards)
    assert texts(mix.next_prompts(5)) == ["a 1", "a 3"] * 2 + ["a 0"], "they rest for two epochs"
    assert mix.metrics() == {"rollout/a/epoch": 3.25, "rollout/a/resting_rows": 0.0}


def test_an_epoch_in_which_all_rows_would_rest_has_all(mix_of):
    mix = mix_of(shuffle=False, a=dict(rows=3, pass_rate=(0.1, 0.9)))
    grade(mix, mix.next_prompts(3), lambda p: 1.0)
    assert texts(mix.next_prompts(3)) == ["a 0", "a 1", "a 2"]


SETTINGS = dict(
    a=dict(rows=7, weight={0: 3, 3: 1}, max_epochs=3, pass_rate=(0.2, 0.8), pass_window=3),
    b=dict(rows=5, after={"a": 0.3}),
    c=dict(rows=6, weight={0: 0.5}),
)


def reward(prompt):
    return float(prompt.metadata["i"] % 3 == 0)


def stream(mix, draws, positions=None):
    """Draw, and grade two draws later, as an asynchronous run does."""
    drawn, waiting = [], []
    for n in draws:
        if positions is not None:
            positions.append((json.loads(json.dumps(mix.state_dict())), len(drawn), list(waiting)))
        waiting.append(mix.next_prompts(n))
        drawn += waiting[-1]
        if len(waiting) > 2:
            grade(mix, waiting.pop(0), reward)
    return drawn


def test_resumed_anywhere_it_is_the_same_stream(mix_of):
    draws = [4, 1, 4, 3, 4, 4, 2, 4, 4, 4, 4, 4, 5, 4, 4]
    positions = []
    whole = stream(mix_of(**SETTINGS), draws, positions)
    assert {"a", "b", "c"} == set(names(whole))
    for number, (state, done, waiting) in enumerate(positions):
        mix = mix_of(**SETTINGS)
        mix.load_state_dict(state)
        rest = []
        for n in draws[number:]:
            waiting.append(mix.next_prompts(n))
            rest += waiting[-1]
            if len(waiting) > 2:
                grade(mix, waiting.pop(0), reward)
        assert rest == whole[done:]


def test_other_sources_cannot_be_resumed(mix_of, tmp_path):
    state = mix_of(a={}, b={}).state_dict()
    with pytest.raises(ValueError, match="has the sources a, c, and the saved run drew from a, b"):
        mix_of(a={}, c={}).load_state_dict(state)
    with pytest.raises(ValueError, match="differs from the data of the saved run"):
        mix_of(a={}, b=dict(rows=9)).load_state_dict(state)
    source = PromptSource(DataConfig(prompt_data=write(tmp_path, "a", 10)), Letters())
    with pytest.raises(ValueError, match="one data file"):
        mix_of(a={}, b={}).load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="a mix of a, b"):
        source.load_state_dict(state)


def test_the_buffer_hands_rewards_to_the_source(mix_of):
    mix = mix_of(shuffle=False, a=dict(rows=2, pass_rate=(0.1, 0.9)))
    buffer = GroupBuffer(mix, 2)
    groups, _ = buffer.take(2, lambda waiting, count: ([], []))
    done = [replace(s, reward=1.0) for s in complete(groups[0].samples)]
    buffer.observe([groups[0].with_samples(done)])
    assert texts(mix.next_prompts(1)) == ["a 1"]
    assert buffer.metrics()["rollout/a/resting_rows"] == 1.0

"""reasoning-gym tasks as a data source."""

import sys
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from importlib.metadata import version
from typing import Literal

import pytest

from slime_like.data.source import open_source, same_content
from slime_like.data.tasks import TaskSource, convert, parse_options

pytest.importorskip("reasoning_gym")


def make(spec):
    return open_source(spec, check=lambda row: None, columns=[])


def test_rows_are_the_tasks_own():
    from reasoning_gym import create_dataset

    source = make("reasoning_gym:chain_sum?size=5&seed=7&min_terms=2&max_terms=3")
    theirs = create_dataset("chain_sum", size=5, seed=7, min_terms=2, max_terms=3)
    assert len(source) == 5
    for row, entry in zip(source.rows(range(5)), theirs):
        assert row["question"] == entry["question"]
        assert row["answer"] == entry["answer"]
        assert row["metadata"]["entry"] == entry
        assert row["metadata"]["task"] == {
            "name": "chain_sum",
            "options": {"size": 5, "seed": 7, "min_terms": 2, "max_terms": 3},
        }


def test_without_a_seed_the_rows_are_still_the_same_every_time():
    first, second = (
        make("reasoning_gym:leg_counting?size=3"),
        make("reasoning_gym:leg_counting?size=3"),
    )
    assert first.rows(range(3)) == second.rows(range(3))
    assert (
        first.content == second.content != make("reasoning_gym:leg_counting?size=3&seed=1").content
    )


def test_another_version_of_reasoning_gym_is_other_data(monkeypatch):
    spec = "reasoning_gym:leg_counting?size=3"
    installed = make(spec).content
    assert installed.startswith(f"reasoning_gym version={version('reasoning-gym')} leg_counting {{")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.999")
    assert not same_content(installed, make(spec).content)
    assert same_content('reasoning_gym leg_counting {"seed": 0, "size": 3}', installed)


def test_row_range_of_a_task():
    source = make("reasoning_gym:chain_sum?size=5@[3:]")
    assert source.rows([0, 1]) == make("reasoning_gym:chain_sum?size=5").rows([3, 4])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("reasoning_gym:chain_sun", "unknown task 'chain_sun'; nearest: chain_sum"),
        ("reasoning_gym:chain_sum?min_term=2", "no option 'min_term'; nearest: min_terms"),
        ("reasoning_gym:chain_sum?size=many", r"size='many': expected int"),
        ("reasoning_gym:chain_sum?size=0", "size=0: must be >= 1"),
        ("reasoning_gym:chain_sum?size=1&size=2", "'size' is given twice"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "the task rejects these options"),
        ("reasoning_gym:arc_agi?board_format_opts=x", "cannot be given as text"),
    ],
)
def test_errors(spec, words):
    with pytest.raises(ValueError, match=words) as caught:
        make(spec)
    assert str(caught.value).startswith(f"--prompt-data {spec}")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs reasoning-gym: pip install -e '/.*\[tasks\]'"):
        TaskSource("reasoning_gym:chain_sum")


class Colour(StrEnum):
    RED = "red"


@dataclass
class Config:
    size: int = 1
    ratio: float = 0.5
    flag: bool = False
    word: str | None = None
    start: date = date(2020, 1, 1)
    style: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    names: list[str] = ()  # type: ignore[assignment]
    weights: tuple[float, ...] = ()
    ranges: list[tuple[float, float]] = ()  # type: ignore[assignment]


def test_options_take_the_types_of_the_configuration():
    query = "size=3&ratio=0.25&flag=true&word=none&start=2024-02-29&style=b&colour=red&names=x,y&weights=[1,2.5]&ranges=[[0,1],[2,3]]"
    assert parse_options("t", query, Config, "here") == dict(
        size=3,
        ratio=0.25,
        flag=True,
        word=None,
        start=date(2024, 2, 29),
        style="b",
        colour=Colour.RED,
        names=["x", "y"],
        weights=(1, 2.5),
        ranges=[(0, 1), (2, 3)],
    )


@pytest.mark.parametrize(
    ("text", "annotation", "words"),
    [
        ("yes", bool, "legal values: true, false"),
        ("1.5", int, "invalid literal"),
        ("c", Literal["a", "b"], "legal values: a, b"),
        ("blue", Colour, "'blue' is not a valid Colour"),
        ("29.2.24", date, "Invalid isoformat"),
    ],
)
def test_illegal_values(text, annotation, words):
    with pytest.raises(ValueError, match=words):
        convert(text, annotation)

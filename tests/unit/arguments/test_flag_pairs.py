"""Any two features of layout, rows, recompute, head, memory and experts together either make a run,
or are refused by name before anything is built: never by an error from below, nor by a flag that
the user did not type. tests/dist/test_flag_pairs.py trains those that are not refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from arguments.parse import parse_args
from slime_like.config import ConfigError
from tests.unit.arguments.flag_pairs import APART, DENSE, EXPERTS, WORLD_SIZE, flags_of
from tests.unit.arguments.hf.test_moe import QWEN3_MOE
from tests.unit.command_lines import HF_CONFIG, complete

COMMON = "--num-steps-per-rollout 2 --use-kl-loss --kl-loss-coef 0.1 --ref-load {folder}/hf"
NEED_MORE = {
    "fp16",
    "flash attention",
    "grouped GEMM",
    "permute fusion",
    "expert bias",
}  # than there is here, or in this model


def problems_of(folder: Path, flags: str, model: dict[str, object]) -> list[str]:
    words = complete(folder, *COMMON.replace("{folder}", str(folder)).split(), *flags.split())
    (folder / "hf" / "config.json").write_text(json.dumps(model))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parse_args(words, WORLD_SIZE)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def named(text: str, flags: str) -> bool:
    return any(word in text for word in flags.split() if word.startswith("--"))


def pairs_of(features: dict[str, str]) -> Iterator[tuple[str, str]]:
    names = list(features)
    yield from ((a, b) for number, a in enumerate(names) for b in names[number + 1 :])


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        ("dense", {"fp16", "flash attention"}),
        pytest.param(
            "experts", NEED_MORE | {"TP2", "distributed activations"}, marks=pytest.mark.extended
        ),
    ],
)
def test_every_pair_is_parsed_or_refused_by_name(
    tmp_path: Path, kind: str, alone: set[str]
) -> None:
    """Experts that are tensor-parallel need sequence parallelism too. Of two features that are
    accepted alone both are named."""
    model, features = (HF_CONFIG, DENSE) if kind == "dense" else (QWEN3_MOE, EXPERTS)
    refused = {name: problems_of(tmp_path, flags, model) for name, flags in features.items()}
    assert {name for name, problems in refused.items() if problems} == alone
    assert all(
        named(problem, features[name]) for name, problems in refused.items() for problem in problems
    )
    names = (
        list(features) if kind == "experts" else [name for name in features if name not in alone]
    )
    apart, unnamed = set(), {}
    for a, b in pairs_of({name: features[name] for name in names}):
        problems = problems_of(tmp_path, flags_of((a, b), features), model)
        if {a, b} & alone:
            wrong = [p for p in problems if not named(p, flags_of((a, b), features))]
        else:
            wrong = [p for p in problems if not (named(p, features[a]) and named(p, features[b]))]
            apart |= {(a, b)} if problems else set()
        if wrong:
            unnamed[a, b] = wrong
    assert not unnamed
    expected = {frozenset(pair) for pair in APART if set(pair) <= set(names) - alone}
    assert {frozenset(pair) for pair in apart} == expected

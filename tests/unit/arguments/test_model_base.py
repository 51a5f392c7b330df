"""--model-base: which class of megatron-core a network is built of."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments import model_base
from arguments.model_base import known_model_bases, resolve_model_base
from arguments.parse import parse_args
from tests.unit.command_lines import complete, problems_of


@pytest.mark.parametrize(
    ("release", "known", "auto"),
    [
        ((0, 16), ("gpt",), "gpt"),
        ((0, 17), ("gpt",), "gpt"),
        ((0, 18), ("gpt", "hybrid"), "gpt"),
        ((0, 19), ("gpt", "hybrid"), "hybrid"),
        ((0, 20), ("gpt", "hybrid"), "hybrid"),
    ],
)
def test_what_a_release_has(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], known: tuple[str, ...], auto: str
) -> None:
    monkeypatch.setattr(model_base, "release", lambda: release)
    assert known_model_bases() == known
    assert resolve_model_base("auto") == auto
    assert [resolve_model_base(base) for base in ("gpt", "hybrid")] == ["gpt", "hybrid"]


def test_a_release_without_the_class_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = complete(tmp_path, "--model-base", "hybrid")
    monkeypatch.setattr(model_base, "release", lambda: (0, 17))
    (found,) = problems_of(words, 1)
    assert found.flag == "--model-base" and "has no HybridModel: use auto or gpt" in str(found)
    monkeypatch.setattr(model_base, "release", lambda: (0, 18))
    assert parse_args(words, 1).gpt.model_base == "hybrid"


@pytest.mark.parametrize("name", ["cpu_offloading", "overlap_moe_expert_parallel_comm"])
def test_what_the_class_would_ignore_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    words = complete(tmp_path, "--allow-untested", f"{name}:true")
    monkeypatch.setattr(model_base, "release", lambda: (0, 19))
    for more in ([], ["--model-base", "hybrid"]):
        (found,) = (p for p in problems_of([*words, *more]) if "HybridModel" in str(p))
        assert name in str(found) and "use --model-base gpt" in str(found)


def test_the_other_class_takes_it(tmp_path: Path) -> None:
    words = complete(tmp_path, "--allow-untested", "cpu_offloading:true", "--model-base", "gpt")
    assert parse_args(words, 1).megatron.transformer.cpu_offloading

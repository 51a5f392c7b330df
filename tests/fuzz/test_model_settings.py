"""generation_config.json and adapter_config.json that somebody else has written: read, or one
sentence with the file; what is broken is not taken for absent."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given

from arguments.hf.peft_adapter import adapter_config, read_adapter_config
from slime_like.engines.local.engine import end_token_ids
from slime_like.text import printable
from tests.fuzz.test_checkpoint_files import VALUES, mutated

GENERATION: dict[str, Any] = {"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20}
ADAPTER = adapter_config(rank=8, alpha=16.0, modules=["q_proj"], base_model="base")
CONFIG: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=7))
BROKEN = {
    "not JSON": b"{",
    "not UTF-8": b'{"eos_token_id": "\xff"}',
    "nested": b"[" * 100_000,
    "no object": b"[2]",
    "a number too long": b'{"eos_token_id": ' + b"1" * 5000 + b"}",
    "huge": b'{"eos_token_id": 2, "x": "' + b"x" * 70_000_000 + b'"}',
}
WRONG: tuple[Any, ...] = ("2", [[2]], {"a": 1}, 1.5, True, -1, 2**70, [2, None])


def ends_of(folder: Path) -> frozenset[int]:
    return end_token_ids(str(folder), CONFIG, None)


def checked(refusal: ValueError, name: str) -> None:
    words = str(refusal)
    assert name in words and len(words) < 1500 and printable(words) == words


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["generation_config.json", "adapter_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[kind])
    read = ends_of if name.startswith("generation") else lambda path: read_adapter_config(str(path))
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    checked(caught.value, name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["generation_config.json", "adapter_config.json"])
def test_what_is_no_file_blocks_nothing(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    read = ends_of if name.startswith("generation") else lambda path: read_adapter_config(str(path))
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path)


@pytest.mark.parametrize("value", WRONG)
def test_end_tokens_of_another_kind_are_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        ends_of(tmp_path)


def test_a_folder_without_settings_has_the_models_end(tmp_path: Path) -> None:
    assert ends_of(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    assert ends_of(tmp_path) == {2, 5, 7}


@given(settings=mutated(GENERATION) | VALUES)
def test_generation_settings_are_read_or_refused(settings: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "generation_config.json").write_text(json.dumps(settings))
        try:
            found = ends_of(Path(name))
        except ValueError as refusal:
            checked(refusal, "generation_config.json")
        else:
            assert all(type(token) is int and 0 <= token < 2**31 for token in found)


@given(settings=mutated(ADAPTER) | VALUES)
@example(settings={**ADAPTER, "lora_alpha": 10**400})
@example(settings={**ADAPTER, "lora_alpha": float("inf")})
@example(settings={**ADAPTER, "r": 10**400})
@example(settings={**ADAPTER, "bias": "\x1b[2J" + "x" * 5000})
@example(settings={**ADAPTER, "base_model_name_or_path": ["\x1b[2J"]})
def test_adapter_settings_are_read_or_refused(settings: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "adapter_config.json").write_text(json.dumps(settings))
        try:
            found = read_adapter_config(name)
        except ValueError as refusal:
            checked(refusal, "adapter_config.json")
        else:
            assert 0 < found.rank < 2**31 and 0 < found.alpha < 2**31
            assert found.base_model is None or isinstance(found.base_model, str)
